"""Prompts as token ids: chat template, special tokens, length limits, bad rows."""

from __future__ import annotations

import pytest
from raising import raises_with
from transformers import PreTrainedTokenizerFast

from hybridrl.config import DataConfig
from hybridrl.data import DataError, RLHFDataset, create_rl_dataset, create_train_loader
from hybridrl.data.dataset_rendering import truncate
from hybridrl.data.ground_truth import report_missing
from hybridrl.reward.signature import ground_truth_of

PREFIX, SUFFIX = "<|im_start|>user\nSort: ", "<|im_end|>\n<|im_start|>assistant\n"


def make(path, tokenizer, **settings):
    return create_rl_dataset(path, DataConfig(shuffle=False, **settings), tokenizer)


def test_items_hold_ids_messages_and_the_other_columns(write, rows, tokenizer):
    dataset = make(write("a.parquet", rows), tokenizer)
    item = dataset[2]
    assert tokenizer.decode(item["input_ids"]) == f"{PREFIX}987{SUFFIX}"
    assert item["raw_prompt"] == rows[2]["prompt"] and item["index"] == 2
    assert item["reward_model"] == rows[2]["reward_model"] and item["extra_info"] == rows[2]["extra_info"]
    assert "prompt" not in item


def test_reading_lazily_gives_the_same_ids(write, rows, tokenizer):
    """truncation other than error without a filter tokenises a row when it is drawn."""
    path = write("a.parquet", rows)
    eager, lazy = make(path, tokenizer), make(path, tokenizer, truncation="left")
    assert [eager[i]["input_ids"] for i in range(7)] == [lazy[i]["input_ids"] for i in range(7)]


def test_special_tokens_stand_once(write, rows):
    """A tokenizer that adds BOS by itself, with a template that writes BOS: the prompt begins with one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    inner = Tokenizer(models.WordLevel({"<bos>": 0, "<unk>": 1, "Sort": 2, ":": 3}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", pad_token="<unk>", unk_token="<unk>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert tokenizer("Sort")["input_ids"] == [0, 2]  # it does add one
    assert make(write("a.parquet", rows), tokenizer)[0]["input_ids"][:2] == [0, 2]


def test_template_arguments_reach_the_template(write, rows, tokenizer):
    import copy

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ ending }}"
    dataset = make(write("a.parquet", rows), tokenizer, apply_chat_template_kwargs={"ending": "!?"})
    assert tokenizer.decode(dataset[0]["input_ids"]) == "Sort: 9!?"


def test_tokenizer_without_template_is_refused(write, rows):
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with raises_with(DataError, "custom_chat_template"):
        make(write("a.parquet", rows), tokenizer)


def test_template_that_refuses_a_row_names_it(write, rows, tokenizer):
    import copy

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    rows[4]["prompt"] = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    with pytest.raises(DataError, match=r"row 4.*no system role"):
        make(write("a.parquet", rows), tokenizer)


@pytest.mark.parametrize("workers", [1, 3])
def test_overlong_prompts_are_filtered_and_indices_stay(write, rows, tokenizer, workers, monkeypatch):
    monkeypatch.setattr("hybridrl.data.rl_dataset._CHUNK", 2)  # several chunks out of seven rows
    limit = len(tokenizer(f"{PREFIX}987{SUFFIX}", add_special_tokens=False)["input_ids"])
    dataset = make(
        write("a.parquet", list(reversed(rows))),
        tokenizer,
        max_prompt_length=limit,
        filter_overlong_prompts=True,
        filter_overlong_prompts_workers=workers,
    )
    assert [dataset[i]["index"] for i in range(len(dataset))] == [4, 5, 6]
    assert [tokenizer.decode(dataset[i]["input_ids"]) for i in range(3)] == [
        f"{PREFIX}{digits}{SUFFIX}" for digits in ("987", "98", "9")
    ]
    assert dataset.locate(0).endswith("row 4 (counted from 0)")
    assert dataset.column("extra_info")[0]["index"] == 2


def test_filter_that_leaves_nothing(write, rows, tokenizer):
    with raises_with(DataError, "data.max_prompt_length=3"):
        make(write("a.parquet", rows), tokenizer, max_prompt_length=3, filter_overlong_prompts=True)


def test_overlong_prompt_with_truncation_error_is_named_at_the_start(write, rows, tokenizer):
    lengths = [len(tokenizer(f"{PREFIX}{'9876543'[: n + 1]}{SUFFIX}")["input_ids"]) for n in range(7)]
    with raises_with(DataError, "row 5", f"{lengths[5]} tokens", lengths[4], "2 such", 7):
        make(write("a.parquet", rows), tokenizer, max_prompt_length=lengths[4])


@pytest.mark.parametrize(
    ("side", "expected"), [("left", [3, 4, 5, 6, 7]), ("right", [0, 1, 2, 3, 4]), ("middle", [0, 1, 5, 6, 7])]
)
def test_truncation_sides(side, expected):
    assert truncate(list(range(8)), 5, side) == expected
    assert truncate(list(range(5)), 5, side) == list(range(5))


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_items_are_truncated(write, rows, tokenizer, side):
    path = write("a.parquet", rows)
    whole = make(path, tokenizer)[6]["input_ids"]
    assert make(path, tokenizer, truncation=side, max_prompt_length=9)[6]["input_ids"] == truncate(whole, 9, side)


def test_more_tokens_than_the_cache_keeps(write, rows, tokenizer, monkeypatch):
    path = write("a.parquet", rows)
    kept = [make(path, tokenizer)[i]["input_ids"] for i in range(7)]
    monkeypatch.setattr("hybridrl.data.rl_dataset.TokenCache.__init__.__defaults__", (10,))
    dataset = make(path, tokenizer)
    assert dataset._tokens.get(0) is None
    assert [dataset[i]["input_ids"] for i in range(7)] == kept


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        (" \n", "the text is empty"),
        ("[{'role': 'user', 'content': 'Sort: 1'}]", "a list of messages written as text"),
        (None, "missing"),
        ([], "empty"),
        ([{"content": "x"}], "message 0 has no 'role'"),
        ([{"from": "human", "value": "x"}], "message 0 has no 'role'.*write 'role' for 'from'"),
        ([{"role": "human", "content": "x"}], "message 0 has the role 'human'.*write 'user'"),
        ([{"role": "User", "content": "x"}], "message 0 has the role 'User'.*write 'user'"),
        ([{"role": "user", "content": "x"}, {"role": "gpt", "content": "y"}], "message 1 .*'gpt'.*write 'assistant'"),
        ([{"role": "user", "content": " "}], "no message has any text"),
        ([{"role": "system", "content": ""}, {"role": "user", "content": ""}], "no message has any text"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 1 .user. has no 'content'"),
        ([{"role": "user", "content": 5}], "'content' is int"),
        ([{"role": "user", "content": [{"type": "image"}]}], "part of type 'image'"),
        ([3], "message 0 is int"),
        (7, "it is int"),
    ],
)
def test_prompt_that_is_no_message_list_is_named(write, rows, tokenizer, prompt, fault):
    rows[3]["prompt"] = prompt
    with pytest.raises(DataError, match=rf"a\.jsonl, line 4: column 'prompt' cannot be used as a prompt: .*{fault}"):
        make(write("a.jsonl", rows), tokenizer)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
@pytest.mark.parametrize("settings", [{}, {"truncation": "left"}])
def test_text_is_a_message_of_the_user(write, rows, tokenizer, name, settings):
    path = write(name, [{**row, "prompt": row["prompt"][0]["content"]} for row in rows])
    dataset, expected = make(path, tokenizer, **settings), make(write("b.parquet", rows), tokenizer)
    for item in range(7):
        assert dataset[item]["input_ids"] == expected[item]["input_ids"]
        assert dataset[item]["raw_prompt"] == rows[item]["prompt"]


@pytest.mark.parametrize("settings", [{}, {"truncation": "left"}])
def test_a_system_prompt_begins_conversations_that_have_none(write, rows, tokenizer, settings):
    own = [{"role": "system", "content": "Mine."}, *rows[1]["prompt"]]
    rows[0]["prompt"], rows[1]["prompt"] = rows[0]["prompt"][0]["content"], own
    dataset = make(write("a.jsonl", rows[:3]), tokenizer, system_prompt="Be brief.", **settings)
    brief = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert prompts_of(dataset, tokenizer) == [
        f"{brief}{PREFIX}9{SUFFIX}",
        f"{brief.replace('Be brief', 'Mine')}{PREFIX}98{SUFFIX}",
        f"{brief}{PREFIX}987{SUFFIX}",
    ]
    assert dataset[1]["raw_prompt"] == own


def test_a_system_prompt_reaches_messages_that_a_class_builds(write, tokenizer, tmp_path):
    source = (
        "from hybridrl.data import RLHFDataset\nclass Mine(RLHFDataset):\n"
        "    def build_messages(self, row):\n        return [{'role': 'user', 'content': 'Sort: ' + row['digits']}]\n"
    )
    path = write("a.jsonl", [{"digits": "9"}])
    dataset = custom(path, tokenizer, tmp_path, source, system_prompt="Be brief.")
    assert prompts_of(dataset, tokenizer) == [f"<|im_start|>system\nBe brief.<|im_end|>\n{PREFIX}9{SUFFIX}"]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv"])
def test_question_and_answer_columns(tmp_path, write, tokenizer, name):
    given = [{"question": f"Sort: {n}", "answer": f"0{n}", "level": "easy"} for n in range(3)]
    if name == "a.csv":
        (tmp_path / name).write_text("question,answer,level\n" + "".join(f"{','.join(r.values())}\n" for r in given))
    dataset = make(
        tmp_path / name if name == "a.csv" else write(name, given),
        tokenizer,
        prompt_key="question",
        ground_truth_key="answer",
    )
    assert [tokenizer.decode(dataset[i]["input_ids"]) for i in range(3)] == [f"{PREFIX}{i}{SUFFIX}" for i in range(3)]
    for item in range(3):
        row = dataset[item]
        assert row["reward_model"] == {"style": "rule", "ground_truth": f"0{item}"}
        assert (row["answer"], row["level"], row["question"]) == (f"0{item}", "easy", f"Sort: {item}")
    assert sorted(dataset.columns) == ["answer", "level", "question", "reward_model"]
    assert dataset.column("reward_model") == [dataset[i]["reward_model"] for i in range(3)]


def test_the_ground_truth_key_goes_before_reward_model(write, rows, tokenizer):
    path = write("a.parquet", [{**row, "answer": [number, 2]} for number, row in enumerate(rows)])
    dataset = make(path, tokenizer, ground_truth_key="answer")
    assert [dataset[i]["reward_model"]["ground_truth"] for i in range(7)] == [[number, 2] for number in range(7)]
    with raises_with(DataError, "'solution'", "data.ground_truth_key"):
        make(path, tokenizer, ground_truth_key="solution")


def test_rows_without_a_ground_truth_are_told(write, rows, tokenizer, capsys):
    def told(path, **settings):
        capsys.readouterr()
        report_missing(make(path, tokenizer, **settings), "data.train_files")
        return " ".join(capsys.readouterr().err.split())

    assert told(write("a.parquet", rows)) == ""
    plain = [{"prompt": row["prompt"], "answer": "1"} for row in rows]
    assert "no row has a ground truth" in told(write("b.jsonl", plain))
    assert "data.ground_truth_key (columns: prompt, answer)" in told(write("b.jsonl", plain))
    assert told(write("b.jsonl", plain), ground_truth_key="answer") == ""
    rows[2]["reward_model"]["ground_truth"], rows[5]["reward_model"] = None, None
    for row, path in ((2, write("c.jsonl", rows)), (3, write("d.jsonl", [*rows[:2], {"prompt": "x"}, *rows[2:]]))):
        said = told(path)
        assert f"{row} of {5 + row} rows have no ground truth" in said and "line 3" in said and "warning" in said
    holes = write("e.parquet", [{"prompt": "x", "answer": float("nan") if n == 1 else 1.0} for n in range(3)])
    assert "1 of 3 rows have no ground truth" in told(holes, ground_truth_key="answer")
    two = [{"prompt": "x", "ground_truth": n, "reward_model": {"ground_truth": str(n % 2)}} for n in range(3)]
    said = told(write("f.jsonl", two))
    assert "1 of 3 rows have another value in their column 'ground_truth'" in said and "line 3" in said
    empty = [{"prompt": "x", "answer": "" if n == 1 else "a"} for n in range(3)]
    said = told(write("g.jsonl", empty), ground_truth_key="answer")
    assert "1 of 3 rows have an empty text as ground truth" in said and "line 2" in said


def test_columns_that_a_batch_has_itself_are_told_and_left_out(write, rows, tokenizer, capsys):
    path = write("a.jsonl", [{**row, "index": "mine", "responses": ["x"], "level": 3} for row in rows])
    dataset = make(path, tokenizer)
    assert "index, responses: a batch has columns of these names" in " ".join(capsys.readouterr().err.split())
    (batch,) = create_train_loader(DataConfig(train_batch_size=7, shuffle=False), dataset)
    assert batch.non_tensor_batch["index"].tolist() == list(range(7))
    assert batch.non_tensor_batch["level"].tolist() == [3] * 7 and "responses" not in batch.non_tensor_batch
    assert set(dataset.columns) == set(batch.non_tensor_batch) - {"uid", "index", "raw_prompt"}


def test_missing_prompt_column(write, rows, tokenizer):
    with raises_with(DataError, "'question'", "data.prompt_key"):
        make(write("a.parquet", rows), tokenizer, prompt_key="question")


def test_media_are_refused(write, rows, tokenizer):
    for row in rows:
        row["images"] = ["x.png"]
    with raises_with(DataError, "'images'"):
        make(write("a.parquet", rows), tokenizer)


def test_columns_other_than_the_prompt_may_be_missing(write, rows, tokenizer):
    path = write("a.parquet", [{"prompt": row["prompt"]} for row in rows])
    batch = next(iter(create_train_loader(DataConfig(train_batch_size=7), make(path, tokenizer))))
    assert set(batch.non_tensor_batch) == {"uid", "raw_prompt", "index"}


def test_max_samples(write, rows, tokenizer):
    path = write("a.parquet", rows)
    first = create_rl_dataset(path, DataConfig(shuffle=False), tokenizer, max_samples=3)
    assert [first[i]["index"] for i in range(len(first))] == [0, 1, 2]
    drawn = [create_rl_dataset(path, DataConfig(shuffle=True, seed=s), tokenizer, max_samples=3) for s in (1, 1, 2, 3)]
    chosen = [[d[i]["index"] for i in range(3)] for d in drawn]
    assert chosen[0] == chosen[1] and len({tuple(c) for c in chosen}) > 1
    with raises_with(DataError, "max_samples", 0):
        create_rl_dataset(path, DataConfig(), tokenizer, max_samples=0)


def test_custom_class(write, rows, tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from hybridrl.data import RLHFDataset\n"
        "class Loud(RLHFDataset):\n"
        "    def build_messages(self, row):\n"
        "        return [{**m, 'content': m['content'].upper()} for m in super().build_messages(row)]\n"
        "class Wrong:\n"
        "    def __init__(self, files): pass\n"
    )
    path = write("a.parquet", rows)

    def build(name, file="mine.py"):
        config = DataConfig(shuffle=False)
        config.custom_cls.path, config.custom_cls.name = str(tmp_path / file), name
        return create_rl_dataset(path, config, tokenizer)

    loud = build("Loud")
    assert isinstance(loud, RLHFDataset)
    assert tokenizer.decode(loud[0]["input_ids"]) == f"{PREFIX.replace('Sort', 'SORT')}9{SUFFIX}"
    with raises_with(DataError, "data.custom_cls.name=Quiet", "Loud, Wrong"):
        build("Quiet")
    with pytest.raises(
        DataError, match=r"data.custom_cls: Wrong .* is called as Wrong\(data_files=, tokenizer=, config="
    ):
        build("Wrong")
    with raises_with(DataError, "data.custom_cls.name"):
        build(None)
    with pytest.raises(DataError, match="no such file"):
        build("Loud", "none.py")


def test_custom_class_of_an_importable_module(write, rows, tokenizer):
    config = DataConfig(shuffle=False)
    config.custom_cls.path, config.custom_cls.name = "pkg://hybridrl.data.rl_dataset", "RLHFDataset"
    assert len(create_rl_dataset(write("a.parquet", rows), config, tokenizer)) == 7
    config.custom_cls.path = "no.such.module"
    with raises_with(DataError, "data.custom_cls.path=no.such.module"):
        create_rl_dataset(write("a.parquet", rows), config, tokenizer)


def test_custom_file_that_fails_to_import(write, rows, tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text("import does_not_exist_here\n")
    config = DataConfig()
    config.custom_cls.path, config.custom_cls.name = str(tmp_path / "mine.py"), "Loud"
    with raises_with(DataError, "fails to import", "ModuleNotFoundError"):
        create_rl_dataset(write("a.parquet", rows), config, tokenizer)


def custom(path, tokenizer, tmp_path, source, **settings):
    """A data set of the class `Mine`, as a user's file defines it."""
    (tmp_path / "mine.py").write_text(source)
    config = DataConfig(shuffle=False, **settings)
    config.custom_cls.path, config.custom_cls.name = str(tmp_path / "mine.py"), "Mine"
    return create_rl_dataset(path, config, tokenizer)


def prompts_of(dataset, tokenizer):
    return [tokenizer.decode(dataset[i]["input_ids"]) for i in range(len(dataset))]


#: the beginning of a user's class with hooks of verl's
VERLS = "from verl.utils.dataset.rl_dataset import RLHFDataset\nclass Mine(RLHFDataset):\n"
READS = {
    "datasets": "datasets.load_dataset('parquet', data_files=self.data_files)['train'].filter(keep).map(shout)",
    "pandas": "pandas.DataFrame([shout(row) for row in pandas.read_parquet(self.data_files[0]).to_dict('records')"
    " if keep(row)])",
    "list": "[shout(row) for row in self.read_all() if keep(row)]",
    "super": "super()._read_files_and_tokenize() or self.dataframe.filter(keep).map(shout)",
}


@pytest.mark.parametrize("kind", READS)
def test_verls_hook_that_reads_the_files_acts(write, rows, tokenizer, tmp_path, kind):
    """Four ways in which classes written for verl set `self.dataframe`."""
    source = f"""
import datasets, pandas, pyarrow.parquet
from verl.utils.dataset.rl_dataset import RLHFDataset

def keep(row): return row["extra_info"]["index"] in (1, 3)
def shout(row): return {{**row, "prompt": [{{"role": "user", "content": "SORT" + row["prompt"][0]["content"][4:]}}]}}

class Mine(RLHFDataset):
    def read_all(self): return pyarrow.parquet.read_table(self.data_files[0]).to_pylist()
    def _read_files_and_tokenize(self):
        self.dataframe = {READS[kind]}
"""
    dataset = custom(write("a.parquet", rows), tokenizer, tmp_path, source)
    loud = PREFIX.replace("Sort", "SORT")
    assert prompts_of(dataset, tokenizer) == [f"{loud}98{SUFFIX}", f"{loud}9876{SUFFIX}"]
    assert [dataset[i]["reward_model"]["ground_truth"] for i in range(2)] == ["89", "6789"]


def test_hooks_find_the_attributes_of_verls_class(write, rows, tokenizer, tmp_path):
    """What `__init__` of verl 0.9.1 sets before it reads the files, and the rows as one table that is made once."""
    names = (
        "data_files original_data_files tokenizer processor max_samples config prompt_key image_key video_key audio_key"
    )
    names += " max_prompt_length return_raw_chat return_full_prompt truncation filter_overlong_prompts"
    names += " apply_chat_template_kwargs tool_config_path function_tool_path tool_schemas num_workers use_shm"
    names += " need_tools_kwargs serialize_dataset return_multi_modal_inputs shuffle seed"
    source = f"""
from verl.utils.dataset.rl_dataset import RLHFDataset

class Mine(RLHFDataset):
    def _read_files_and_tokenize(self):
        self.seen = {{name: getattr(self, name) for name in {names.split()!r}}}
        super()._read_files_and_tokenize()
        assert self.dataframe is self.dataframe
        self.dataframe = self.dataframe.select(range(len(self.dataframe) - 1))
        assert len(self.dataframe) == {len(rows) - 1}

    def _build_messages(self, example, key):
        return super()._build_messages(example, key)

    def __getitem__(self, item):
        assert self.dataframe[item]["extra_info"] == super().__getitem__(item)["extra_info"]
        return super().__getitem__(item)
"""
    config = {"filter_overlong_prompts": True, "max_prompt_length": 17, "seed": 5, "filter_overlong_prompts_workers": 2}
    dataset = custom(write("a.parquet", rows), tokenizer, tmp_path, source, **config)
    assert dataset.seen["seed"] == 5 and dataset.seen["max_samples"] == -1 and dataset.seen["num_workers"] == 2
    assert 1 < len(dataset) < len(rows) - 1 and len(dataset.dataframe) == len(dataset), "overlong rows are left out"
    assert [dataset[i]["raw_prompt"] for i in range(len(dataset))] == [row["prompt"] for row in rows][: len(dataset)]
    assert dataset.dataframe is dataset.dataframe
    with raises_with(DataError, "data.custom_cls", "self.dataframe", "_read_files_and_tokenize"):
        dataset.dataframe = dataset.dataframe


def test_prompts_that_are_text_in_some_rows_keep_their_form(write, rows, tokenizer):
    """Whatever the first row is: reward functions get each prompt as the data have it."""
    text = {**rows[1], "prompt": "Sort: 4"}
    for mixed in ([rows[0], text], [text, rows[0]], [text, text], [rows[0], rows[0]]):
        dataset = make(write("a.jsonl", mixed), tokenizer)
        has_text = text in mixed
        assert ("prompt" in dataset.columns) == has_text
        assert [item.get("prompt") for item in (dataset[0], dataset[1])] == [
            row["prompt"] if has_text else None for row in mixed
        ]
        batch = next(iter(create_train_loader(DataConfig(shuffle=False, train_batch_size=2), dataset)))
        assert ("prompt" in batch.non_tensor_batch) == has_text


def test_hook_that_reads_nothing_or_something_else_is_named(write, rows, tokenizer, tmp_path):
    head = f"{VERLS}    def _read_files_and_tokenize(self):\n"
    for body, said in (("pass", r"Mine\._read_files.*self\.dataframe"), ("self.dataframe = 3", "DataFrame.*int")):
        with pytest.raises(DataError, match=said):
            custom(write("a.parquet", rows), tokenizer, tmp_path, f"{head}        {body}\n")


def test_verls_filter_hook_acts(write, rows, tokenizer, tmp_path):
    source = (
        f"{VERLS}"
        "    def maybe_filter_out_long_prompts(self, dataframe=None):\n"
        "        return dataframe.filter(lambda row: row['extra_info']['index'] > 4)\n"
    )
    dataset = custom(write("a.parquet", rows), tokenizer, tmp_path, source)
    assert prompts_of(dataset, tokenizer) == [f"{PREFIX}987654{SUFFIX}", f"{PREFIX}9876543{SUFFIX}"]


@pytest.mark.parametrize("hook", ["build_messages", "_build_messages"])
@pytest.mark.parametrize("settings", [{}, {"truncation": "left"}])
def test_hook_makes_messages_of_the_whole_row(write, rows, tokenizer, tmp_path, hook, settings):
    """The prompt column may hold text, or be missing, where a subclass makes the messages."""
    plain = [{"question": "123", "hint": str(number), "data_source": "mine"} for number in range(3)]
    source = (
        f"{VERLS}"
        f"    def {hook}(self, row):\n"
        "        return [{'role': 'user', 'content': f\"Sort: {row['question']}{row.pop('hint')}\"}]\n"
    )
    dataset = custom(write("a.jsonl", plain), tokenizer, tmp_path, source, **settings)
    assert prompts_of(dataset, tokenizer) == [f"{PREFIX}123{number}{SUFFIX}" for number in range(3)]
    assert "hint" not in dataset[0] and dataset[0]["question"] == "123"


def test_hook_that_fails_or_returns_text_names_the_row(write, rows, tokenizer, tmp_path):
    head = f"{VERLS}    def _build_messages(self, row):\n"
    bodies = {
        "return 'Sort' if row['extra_info']['index'] == 2 else row['prompt']": r"row 2 .*build_messages of Mine.*text",
        "return row['prompt'] if row['extra_info']['index'] else row['nothing']": r"row 0 .*of Mine.*KeyError.*nothing",
    }
    for body, said in bodies.items():
        for settings in ({}, {"truncation": "left"}):
            with pytest.raises(DataError, match=said):
                custom(write("a.parquet", rows), tokenizer, tmp_path, f"{head}        {body}\n", **settings)


@pytest.mark.parametrize(
    "hook", ["_download", "resume_dataset_state", "process_vision_info", "process_multi_modal_info"]
)
def test_hook_of_verls_that_would_not_be_called_is_refused(write, rows, tokenizer, tmp_path, hook):
    source = f"{VERLS}    def {hook}(self): pass\n"
    with raises_with(DataError, "data.custom_cls", f"defines {hook}"):
        custom(write("a.parquet", rows), tokenizer, tmp_path, source)


@pytest.mark.parametrize("hook", ["_build_messages", "_read_files_and_tokenize", "maybe_filter_out_long_prompts"])
def test_verls_hooks_belong_to_verls_class(write, rows, tokenizer, tmp_path, hook):
    source = f"from hybridrl.data import RLHFDataset\nclass Mine(RLHFDataset):\n    def {hook}(self): pass\n"
    with raises_with(DataError, "data.custom_cls", hook, "verl.utils.dataset.rl_dataset.RLHFDataset"):
        custom(write("a.parquet", rows), tokenizer, tmp_path, source)


@pytest.mark.parametrize("value", ["5", '{"style": "rule", "ground_truth": "5"}', 5, ["5"]])
def test_a_ground_truth_that_nothing_would_read_is_refused(write, rows, tokenizer, value):
    """Reward functions got None for each row."""
    file = write("rows.jsonl", [{**row, "reward_model": value} for row in rows])
    with raises_with(DataError, "line 1", "'reward_model'", "data.ground_truth_key"):
        RLHFDataset(file, tokenizer, DataConfig(max_prompt_length=100))
    file = write("answers.jsonl", [{**row, "reward_model": value, "answer": "5"} for row in rows])
    settings = DataConfig(max_prompt_length=100, ground_truth_key="answer")
    assert RLHFDataset(file, tokenizer, settings)[0]["reward_model"]["ground_truth"] == "5"


@pytest.mark.parametrize("name", ["image_key", "video_key"])
def test_a_column_of_images_for_a_model_that_reads_text_is_refused(write, rows, tokenizer, name):
    with raises_with(DataError, f"data.{name}=pictures"):
        create_rl_dataset(write("a.parquet", rows), DataConfig(**{name: "pictures"}), tokenizer)


def test_a_missing_number_is_no_ground_truth(write, tokenizer):
    """JSON written by Python says NaN; rewards got it, while the notice said that they get None."""
    path = write("a.jsonl", [{"prompt": "x", "answer": float("nan")}, {"prompt": "y", "answer": 2.5}])
    dataset = make(path, tokenizer, ground_truth_key="answer")
    assert [ground_truth_of(dataset[item]) for item in (0, 1)] == [None, 2.5]
    assert ground_truth_of({"ground_truth": float("nan")}) is None


@pytest.mark.parametrize("place", ["column", "extra_info"])
def test_keyword_arguments_have_no_nulls_of_other_rows(place, write, tokenizer):
    """Parquet gives each row the fields of all others; a tool would get arguments that nobody wrote."""
    own = [
        {"tools_kwargs": {"calc": {"create_kwargs": {"a": 1, "none": None}}}, "env_kwargs": {"name": "A", "size": 4}},
        {"tools_kwargs": {"search": {"create_kwargs": {"b": [{"x": 1}, {"y": 2}]}}}, "env_kwargs": {"name": "B"}},
    ]
    rows = [{"prompt": "p", **kwargs} if place == "column" else {"prompt": "p", "extra_info": kwargs} for kwargs in own]
    for name in ("a.parquet", "a.jsonl"):
        dataset = create_rl_dataset(str(write(name, rows)), DataConfig(shuffle=False), tokenizer)
        items = [dataset[number] for number in range(2)]
        assert [item if place == "column" else item["extra_info"] for item in items] == [
            {**(item if place == "column" else {}), **kwargs} for item, kwargs in zip(items, own, strict=True)
        ]


@pytest.mark.parametrize("value", ["null", "NA", "#N/A", b"12"])
def test_a_ground_truth_that_no_response_equals_is_named(write, tokenizer, value, capsys):
    path = write("a.parquet", [{"prompt": "x", "answer": value}, {"prompt": "y", "answer": type(value)(value)}])
    report_missing(make(path, tokenizer, ground_truth_key="answer"), "data.train_files")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if repr(value) in line]
    assert "2 of 2 rows" in line and "row 0" in line
