"""GSM8K and MATH become parquet in the trainers' schema."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pyarrow.parquet
import pytest
from PIL import Image
from raising import raises_with
from vision_tools import picture, png

from hybridrl.agents.tools.builtin import evaluate
from hybridrl.agents.tools.load_tools import load_tools
from hybridrl.data import DataError
from hybridrl.data.preprocess.calculator import write_calculator
from hybridrl.data.preprocess.collab import write_collab
from hybridrl.data.preprocess.colours import COLOURS, write_colours
from hybridrl.data.preprocess.geo3k import write_geo3k
from hybridrl.data.preprocess.gsm8k import write_gsm8k
from hybridrl.data.preprocess.math import write_math
from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.data.preprocess.search_r1 import write_search_r1
from hybridrl.data.preprocess.sort import write_sort_data
from hybridrl.errors import UserError
from hybridrl.models.tiny import build_tokenizer
from hybridrl.reward import default_compute_score


@pytest.fixture
def gsm8k(repository):
    return repository / "tests" / "fixtures" / "gsm8k"


def run(module: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"hybridrl.data.preprocess.{module}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_gsm8k_command(gsm8k, tmp_path):
    result = run("gsm8k", "--local_dir", gsm8k, "--out", tmp_path / "out")
    assert result.returncode == 0 and "160 train, 40 test" in result.stdout
    sources = [json.loads(line) for line in (gsm8k / "train.jsonl").read_text().splitlines()]
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert rows[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": sources[0]["question"]
                + ' Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "answer": sources[0]["answer"],
            "question": sources[0]["question"],
        },
    }
    assert [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")] == []


def test_every_gsm8k_reference_solution_earns_the_reward(gsm8k, tmp_path):
    write_gsm8k(tmp_path, gsm8k)
    for split in ("train", "test"):
        for row in pyarrow.parquet.read_table(tmp_path / f"{split}.parquet").to_pylist():
            truth = row["reward_model"]["ground_truth"]
            assert default_compute_score(row["data_source"], row["extra_info"]["answer"], truth) == 1.0
            assert default_compute_score(row["data_source"], "#### 123454321", truth) == 0.0


def test_a_bad_source_is_one_line_and_exit_code_2(gsm8k, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n')
    result = run("gsm8k", "--local_dir", tmp_path, "--out", tmp_path / "out")
    assert result.returncode == 2 and "train.jsonl, line 1" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
    assert "no train.parquet" in run("gsm8k", "--local_dir", tmp_path / "none", "--out", tmp_path / "out").stderr


def test_without_a_hub_the_message_says_what_to_do(tmp_path):
    with raises_with(DataError, "--local_dir"):
        write_gsm8k(tmp_path)


def test_math(tmp_path):
    for split in ("train", "test"):
        rows = [{"problem": "Half?", "solution": "It is $\\boxed{\\frac{1}{2}}$."}]
        (tmp_path / f"{split}.json").write_text(json.dumps(rows))
    assert write_math(tmp_path / "out", tmp_path) == {"train": 1, "test": 1}
    (row,) = pyarrow.parquet.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert row["reward_model"] == {"style": "rule", "ground_truth": "\\frac{1}{2}"}
    assert default_compute_score(row["data_source"], "so \\boxed{0.5}", row["reward_model"]["ground_truth"]) == 1.0
    (tmp_path / "test.json").write_text(json.dumps([{"problem": "x", "solution": "none"}]))
    with pytest.raises(DataError, match=r"item 0.*no answer in \\boxed"):
        write_math(tmp_path / "out", tmp_path)


def test_geo3k(tmp_path):
    figure = png(picture((16, 16), 0))
    for split in ("train", "test"):
        rows = [{"images": [{"bytes": figure, "path": None}], "problem": "<image>Find x.", "answer": "3"}]
        write_rows(tmp_path / f"{split}.parquet", rows)
    assert write_geo3k(tmp_path / "out", tmp_path) == {"train": 1, "test": 1}
    (row,) = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert row["images"] == [{"bytes": figure, "path": None}] and row["prompt"][0]["content"].startswith("<image>Find")
    answer = "<think>so</think> \\boxed{3}"
    assert default_compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"]) == 1.0
    write_rows(tmp_path / "test.parquet", [{"images": [], "problem": "<image>Find x.", "answer": "3"}])
    with pytest.raises(DataError, match=r"row 0.*each of the 1 <image>.*found 0"):
        write_geo3k(tmp_path / "out", tmp_path)


def test_colours(tmp_path):
    folders = [write_colours(tmp_path / name, seed=int(name == "c"), train_size=12, test_size=4) for name in "abc"]
    first, again, other = (pyarrow.parquet.read_table(folder / "train.parquet") for folder in folders)
    assert first.equals(again) and not first.equals(other)
    for row in first.to_pylist():
        image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        centre = image.getpixel((image.width // 2, image.height // 2))
        truth, wanted = row["reward_model"]["ground_truth"], COLOURS[row["extra_info"]["colour"]]
        assert max(abs(one - two) for one, two in zip(centre, wanted, strict=True)) <= 25
        scores = [default_compute_score(row["data_source"], text, truth)["score"] for text in (truth, "gr", "x", "")]
        assert scores == [1.0, 1.0 if truth == "g" else 0.1, 0.0, 0.0]
    assert len({row["reward_model"]["ground_truth"] for row in first.to_pylist()}) == 4


def test_colours_of_videos(tmp_path):
    """The tile has one colour in the first half, and the one that is asked for in the second; frames have one size."""
    folder = write_colours(tmp_path, videos=True, train_size=12, test_size=4)
    for row in pyarrow.parquet.read_table(folder / "train.parquet").to_pylist():
        assert row["prompt"][0]["content"].count("<video>") == 1 and "images" not in row
        (video,) = row["videos"]
        frames = [Image.open(io.BytesIO(frame["bytes"])) for frame in video["frames"]]
        assert video["fps"] == 2 and len({frame.size for frame in frames}) == 1
        shown = []
        for frame in frames:
            centre = frame.getpixel((frame.width // 2, frame.height // 2))
            shown.append([name for name in COLOURS if max(map(abs, map(int.__sub__, centre, COLOURS[name]))) <= 25])
        before, _, _, after = shown
        assert shown == [before, before, after, after] and before != after
        assert after == [row["extra_info"]["colour"]] and row["reward_model"]["ground_truth"] == after[0][0]


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "a.parquet"
    write_rows(file, [{"x": 1}])

    def full_disk(table, where):
        where.write_bytes(b"PAR1 half")
        raise OSError("No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_rows(file, [{"x": 2}])
    assert pyarrow.parquet.read_table(file).to_pylist() == [{"x": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
    with pytest.raises(OSError, match="No space"):  # so does every script, the sorting task's too
        write_sort_data(tmp_path, train_size=4, test_size=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("operations", [1, 3])
def test_calculator_examples_solve_their_prompts_by_calls(operations, tmp_path):
    folder = write_calculator(tmp_path, train_size=40, test_size=10, operations=operations, calls=0.5)
    (tool,) = load_tools(str(folder / "tools.yaml"), None)
    tokenizer = build_tokenizer(json.loads((folder / "words.json").read_text()))
    prompts, called = set(), 0
    for rl, sft in (("train", "sft_train"), ("test", "sft_val")):
        rows, solved = (pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist() for name in (rl, sft))
        for row, example in zip(rows, solved, strict=True):
            expression, truth = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
            assert evaluate(expression) == int(truth) and example["messages"][0]["content"] == expression
            calls = [one for message in example["messages"] for one in message["tool_calls"] or ()]
            answers = [message["content"] for message in example["messages"] if message["role"] == "tool"]
            for call, answer in zip(calls, answers, strict=True):
                assert str(evaluate(call["function"]["arguments"]["expression"])) == answer
            score = default_compute_score(row["data_source"], example["messages"][-1]["content"], truth)
            assert (len(calls), score) in ((0, 0.0), (operations, 1.0))  # it gives up, or solves the prompt
            prompts.add(expression)
            called += bool(calls)
    assert len(prompts) == 50 and 10 < called < 40
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1*2"}], tools=[tool.tool_schema], tokenize=False
    )
    ids = tokenizer(shown)["input_ids"]
    assert len(ids) < 40 and tokenizer.decode(ids) == shown  # the description of the tool is a few tokens


def test_calculator_refuses_what_it_cannot_draw(tmp_path):
    with raises_with(UserError, 8100, "1 operations"):
        write_calculator(tmp_path, operations=1, train_size=8100, test_size=1)
    with pytest.raises(UserError, match="--calls 2 must be between 0 and 1"):
        write_calculator(tmp_path, calls=2)


def test_search_questions_of_the_recipe(repository, tmp_path):
    assert write_search_r1(tmp_path, repository / "recipes" / "search_r1" / "smoke") == {"train": 8, "test": 4}
    rows = pyarrow.parquet.read_table(tmp_path / "test.parquet").to_pylist()
    assert rows[0]["data_source"] == "searchR1_invented" and rows[0]["prompt"][0]["content"].endswith("of Pellan?")
    truth = rows[0]["reward_model"]["ground_truth"]
    assert default_compute_score(rows[0]["data_source"], "<answer>tumbra</answer>", truth) == 1.0
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text('{"question": "Where?", "golden_answers": []}\n')
    with raises_with(DataError, "train.jsonl", "line 1", "golden_answers"):
        write_search_r1(tmp_path / "out", source)


def test_conversations_hide_the_problem_and_the_answer_from_the_model(tmp_path, repository):
    assert write_collab(tmp_path, repository / "recipes" / "collabllm" / "smoke") == {"train": 32, "test": 4}
    for row in pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist():
        shown, task = row["prompt"][-1]["content"], row["interaction_kwargs"]["task"]
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        problem, answer = row["extra_info"]["question"], row["reward_model"]["ground_truth"]
        assert problem in task and problem not in shown and "stuck on a problem in" in shown
        assert default_compute_score(row["data_source"], rf"so \boxed{{{answer}}}", answer, row["extra_info"]) == 1.0
