"""Data that a reward would only trip over in mid-run, or never: refused by file and row when it is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from raising import raises_with

from hybridrl.config import DataConfig
from hybridrl.data import DataError, create_rl_dataset
from hybridrl.observe.dump import dump_generations
from hybridrl.observe.jsonl import encode
from hybridrl.reward import RewardError, check_dataset, create_reward_manager, default_compute_score

PROMPT = [{"role": "user", "content": "2 + 2"}]


def row(**changed: object) -> dict:
    truth = {"style": "rule", "ground_truth": "4"}
    return {"prompt": PROMPT, "data_source": "openai/gsm8k", "reward_model": truth, "extra_info": {"a": 1}} | changed


@pytest.fixture
def read(tmp_path: Path, tokenizer):
    """A dataset of one good row and one with changed columns; `line` is its line as it stands in the file."""

    def make(line: str | None = None, **changed: object):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row()) + "\n" + (line or json.dumps(row(**changed))) + "\n")
        return create_rl_dataset(path, DataConfig(), tokenizer)

    return make


@pytest.mark.parametrize("truth", [float("nan"), [4], {"value": 4}, True, None, "", " \n"])
def test_a_ground_truth_that_no_answer_could_equal_is_refused_by_row(read, config, truth):
    dataset = read(reward_model={"style": "rule", "ground_truth": truth})
    with raises_with(RewardError, "rows.jsonl", "line 2", "ground truth"):
        check_dataset(config, dataset)


def test_an_infinite_ground_truth_is_refused_when_it_is_read(read):
    with raises_with(DataError, "rows.jsonl", "line 2", "reward_model.ground_truth", "Infinity"):
        read(reward_model={"style": "rule", "ground_truth": float("inf")})


@pytest.mark.parametrize(("truth", "answer"), [(72, "72"), (72.0, "72"), (0.5, "0.5")])
@pytest.mark.parametrize("source", ["openai/gsm8k", "hybridrl/sort", "numina_olympiads"])
def test_a_number_is_a_ground_truth(read, config, truth, answer, source):
    check_dataset(config, read(data_source=source, reward_model={"ground_truth": truth}))
    score = default_compute_score(
        source, rf"#### {answer}" if "numina" not in source else rf"\boxed{{{answer}}}", truth
    )
    assert (score["score"] if isinstance(score, dict) else score) == 1.0


@pytest.mark.parametrize("info", ["text", 3, [1]])
def test_extra_information_that_is_no_object_is_refused_by_row(read, info):
    with raises_with(DataError, "rows.jsonl", "line 2", "extra_info"):
        read(extra_info=info)


@pytest.mark.parametrize(
    "prompt",
    [
        "cut \ud800 off",
        [{"role": "user", "content": "cut \ud800"}],
        [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}],
    ],
)
def test_a_prompt_with_half_a_character_is_refused_by_row(read, prompt):
    with raises_with(DataError, "rows.jsonl", "line 2", "'\\ud800'"):
        read(prompt=prompt)


@pytest.mark.parametrize(
    ("value", "message"), [("[" * 100_000 + "]" * 100_000, "nested too deeply"), ("9" * 5000, "number cannot be read")]
)
@pytest.mark.parametrize("as_list", [False, True])
def test_json_that_python_cannot_read_is_named(tmp_path, tokenizer, value, message, as_list):
    good = json.dumps(row())
    bad = good[:-1] + f', "more": {value}}}'
    path = tmp_path / "rows.json"
    path.write_text(f"[{good}, {bad}]" if as_list else f"{good}\n{bad}\n")
    with raises_with(DataError, f"rows.json{'' if as_list else ', line 2'}", message):
        create_rl_dataset(path, DataConfig(), tokenizer)


def test_a_dump_holds_text_that_utf8_does_not_have(tmp_path):
    path = dump_generations(
        tmp_path, 3, ["in\udc80"], ["out"], [1.0], ["\ud800"], {"pred": ["\ud83d"], "parts": [{"\udfff": ["\ude00"]}]}
    )
    (line,) = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    assert line["input"] == "in\\udc80" and line["gts"] == "\\ud800" and line["pred"] == "\\ud83d"
    assert line["parts"] == {"\\udfff": ["\\ude00"]}
    assert json.loads(encode({"whole": "\N{GRINNING FACE} ü"})) == {"whole": "\N{GRINNING FACE} ü"}


def test_completions_have_the_form_of_the_prompts_in_the_data(read, config, tokenizer, make_batch, user_file):
    """Text in the data is what TRL's functions for text expect, although the model is asked with messages."""
    path = user_file(
        """
        def f(prompts, completions, **columns):
            return [{"score": 1, "types": [type(p).__name__, type(c).__name__]} for p, c in zip(prompts, completions)]
        """
    )
    config.reward.custom_reward_function.path = path
    for data, expected in [(PROMPT, ["list", "list"]), ("2 + 2", ["str", "str"])]:
        both = json.dumps(row(prompt=data))
        dataset = read(both)
        path_of = dataset.data_files[0]
        Path(path_of).write_text(both + "\n")
        dataset = create_rl_dataset(path_of, DataConfig(), tokenizer)
        manager = create_reward_manager(config, tokenizer)
        try:
            manager.check(dataset)
            columns = {name: [dataset[0][name]] for name in ("raw_prompt", "prompt") if name in dataset[0]}
            batch = make_batch(["4"], **columns)
            assert manager(batch, return_dict=True)["reward_extra_info"]["types"] == [expected]
        finally:
            manager.close()
