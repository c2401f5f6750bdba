"""Generating for a file and scoring it, as a user does it: whole, killed and resumed, with more processes, wrongly."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from e2e_tools import Job
from raising import raises_with
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import load_config, validate
from hybridrl.data.preprocess.sort import write_sort_data
from hybridrl.errors import UserError
from hybridrl.models.tiny import build_tiny_model
from hybridrl.serve import Listener, OpenAIServer, Served, create_app
from hybridrl.trainer.evaluation import run_evaluation
from hybridrl.trainer.generation.run_generation import run_generation

GENERATION, EVALUATION = "hybridrl.trainer.main_generation", "hybridrl.trainer.main_eval"


@pytest.fixture
def words(micro_model: Path, sort_data: Path, tmp_path: Path) -> list[str]:
    """16 rows with 2 responses each, in 4 parts."""
    return [
        f"data.path={sort_data / 'test.parquet'}",
        f"data.output_path={tmp_path / 'out' / 'answers.parquet'}",
        "data.n_samples=2",
        "data.batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={micro_model}",
    ]


def generate(words: list[str]) -> pd.DataFrame:
    config = load_config("generation", words)
    validate(config)
    run_generation(config)
    return pd.read_parquet(config.data.output_path)


def evaluate(words: list[str]) -> dict[str, float]:
    config = load_config("evaluation", words)
    validate(config)
    return run_evaluation(config)


def same(first: pd.DataFrame, second: pd.DataFrame) -> None:
    assert first.to_json() == second.to_json()


# ------------------------------------------------------------------ hf


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_result(
    words: list[str],
    tmp_path: Path,
    start: Callable[..., Job],
    ray_session: None,
    sort_data: Path,
    micro_model: Path,
) -> None:
    """Killed after its first parts, resumed here, and compared with a run that was never killed."""
    many = [*words, "data.batch_size=1", "data.log_probs=True", "data.max_response_length=48"]
    output = tmp_path / "out" / "answers.parquet"
    parts = output.with_name("answers.parquet.parts")
    job = start(*many, module=GENERATION)
    job.wait_for(lambda: (parts / "part_000001.parquet").exists())
    job.kill()
    left = {path.name: path.stat().st_mtime_ns for path in parts.glob("part_*.parquet")}
    assert 2 <= len(left) < 16 and not output.exists()

    resumed = generate(many)
    figures = json.loads((tmp_path / "out" / "answers.metrics.json").read_text())
    assert figures["parts_of_earlier_runs"] == len(left)
    assert not parts.exists()
    whole = generate([*many, f"data.output_path={tmp_path / 'whole.parquet'}"])
    same(resumed, whole)

    given = pd.read_parquet(sort_data / "test.parquet")
    same(whole[list(given.columns)], given)
    tokenizer = AutoTokenizer.from_pretrained(micro_model)
    model = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32).eval()
    for row in whole.itertuples():
        text = tokenizer.apply_chat_template(list(row.prompt), tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row.responses_prompt_tokens == len(prompt)
        assert list(row.responses) == [
            tokenizer.decode(ids, skip_special_tokens=True) for ids in row.responses_token_ids
        ]
        assert list(row.responses_tokens) == [len(ids) for ids in row.responses_token_ids]
        ids = row.responses_token_ids[0].tolist()
        expected = "stop" if ids[-1] == tokenizer.eos_token_id else "length"
        assert row.responses_finish_reasons[0] == expected
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        found = torch.log_softmax(logits, dim=-1)[torch.arange(len(ids)), torch.tensor(ids)]
        assert row.responses_log_probs[0] == pytest.approx(found.numpy(), abs=1e-4)
    assert whole.responses.map(lambda pair: pair[0] != pair[1]).any(), "samples of a prompt differ"
    lengths = np.concatenate(whole.responses_tokens.to_list())
    assert figures["response_tokens"] == lengths.sum() and figures["responses"] == 32
    assert sum(figures["finish_reasons"].values()) == 32


def test_parts_and_processes_have_no_influence_and_done_is_done(
    words: list[str], tmp_path: Path, ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = generate([*words, "data.max_samples=5"])
    assert "2 of 2 parts done" in capsys.readouterr().out
    output = tmp_path / "out" / "answers.parquet"
    before = output.stat().st_mtime_ns
    generate([*words, "data.max_samples=5"])
    assert output.stat().st_mtime_ns == before
    assert "nothing to do" in capsys.readouterr().err
    differently = ["data.batch_size=128", "trainer.n_gpus_per_node=2", f"data.output_path={tmp_path / 'other.parquet'}"]
    other = generate([*words, "data.max_samples=5", *differently])
    same(first, other)
    with raises_with(UserError, "answers.parquet", "rollout.temperature", "1.0", "0.5"):
        generate([*words, "data.max_samples=5", "actor_rollout_ref.rollout.temperature=0.5"])
    greedy = ["data.max_samples=5", "data.n_samples=1", "actor_rollout_ref.rollout.do_sample=False"]
    again = generate([*words, *greedy, "data.overwrite=True", "data.response_key=greedy"])
    assert list(again.greedy.map(len)) == [1] * 5 and "responses" not in again

    with raises_with(UserError, "'greedy'", "data.response_key"):
        generate(
            [*words, f"data.path={output}", f"data.output_path={tmp_path / 'x.parquet'}", "data.response_key=greedy"]
        )


def test_a_response_that_ends_by_itself_with_its_last_token_was_not_cut_off(
    words: list[str], ray_session: None, micro_model: Path
) -> None:
    strings = list("0123456789abcdefghij")
    stop = f"actor_rollout_ref.rollout.stop=[{','.join(map(repr, strings))}]"
    found = generate([*words, stop, "data.max_response_length=3", "data.log_probs=True"])
    tokenizer = AutoTokenizer.from_pretrained(micro_model)
    at_limit = []
    for row in found.itertuples():
        for ids, reason in zip(row.responses_token_ids, row.responses_finish_reasons, strict=True):
            ended = ids[-1] == tokenizer.eos_token_id or any(string in tokenizer.decode(ids) for string in strings)
            assert reason == ("stop" if ended else "length") and (ended or len(ids) == 3)
            at_limit += [reason] * (len(ids) == 3)
    assert set(at_limit) == {"stop", "length"}


def test_rows_of_json_keep_their_columns(words: list[str], tmp_path: Path, ray_session: None) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"Sort: {n}1"}], "level": n, "tags": ["a"] * n, "note": None}
        for n in range(3)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = generate([*words, f"data.path={file}"])
    assert json.loads(found[["prompt", "level", "tags", "note"]].to_json(orient="records")) == rows
    long = {"prompt": [{"role": "user", "content": "1" * 100}], "level": 9, "tags": [], "note": None}
    file.write_text("\n".join(map(json.dumps, [rows[0], long, rows[2]])))
    other = f"data.output_path={tmp_path / 'other.parquet'}"
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: the prompt has \d+ tokens"):
        generate([*words, f"data.path={file}", other])
    kept = generate([*words, f"data.path={file}", other, "data.filter_overlong_prompts=True"])
    assert list(kept.level) == [0, 2] and list(kept.responses.map(len)) == [2, 2]


# ------------------------------------------------------------------ through an endpoint


@pytest.fixture
def endpoint(micro_model: Path) -> Iterator[list[str]]:
    """Words that generate through a served engine."""
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rollout"))
    from plain_engine import PlainEngine

    engine = PlainEngine.of(micro_model, max_model_len=128)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def do(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(60)

    do(engine.start())
    tokenizer = engine.tokenizer
    listener = Listener("127.0.0.1")
    server = OpenAIServer(create_app(engine, Served("tiny", tokenizer, 128, len(tokenizer)), "key"), listener.socket)
    do(server.start())
    yield [
        "actor_rollout_ref.rollout.name=openai",
        f"actor_rollout_ref.rollout.openai.base_url={listener.url}",
        "actor_rollout_ref.rollout.openai.api_key_env=HYBRIDRL_TEST_KEY",
        "actor_rollout_ref.rollout.openai.max_concurrency=24",
        "~actor_rollout_ref.model.path",
    ]
    do(server.stop())
    do(engine.close())
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.slow
def test_an_endpoint_answers_a_file_and_a_killed_run_goes_on(
    words: list[str],
    endpoint: list[str],
    tmp_path: Path,
    start: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
    sort_data: Path,
) -> None:
    """The engine draws by the seeds that are sent, so both ways give the same."""
    monkeypatch.setenv("HYBRIDRL_TEST_KEY", "key")
    output = tmp_path / "out" / "answers.parquet"
    parts = output.with_name("answers.parquet.parts")
    many = [*words, *endpoint, "data.max_response_length=48", "actor_rollout_ref.rollout.ignore_eos=True"]
    slow = [*many, "data.batch_size=1", "actor_rollout_ref.rollout.openai.max_concurrency=2"]
    job = start(*slow, module=GENERATION)
    job.wait_for(lambda: len(list(parts.glob("part_*.parquet"))) >= 2)
    job.kill()
    assert not output.exists()
    torn = parts / ".part_000003.parquet.1.x.tmp"
    torn.write_bytes(b"torn")
    job = start(*slow, "actor_rollout_ref.rollout.openai.max_concurrency=24", module=GENERATION)
    assert job.wait() == 0, job.output
    assert "parts are there, going on" in job.output
    whole = generate([*many, f"data.output_path={tmp_path / 'whole.parquet'}"])
    resumed = pd.read_parquet(output)
    same(resumed, whole)
    assert list(whole.responses_tokens.map(list)) == [[48, 48]] * 16
    same(whole[["prompt"]], pd.read_parquet(sort_data / "test.parquet")[["prompt"]])
    assert "hybridrl.generation" in str(pq.read_schema(output).metadata)

    with pytest.raises(UserError, match=r"test\.parquet, row \d+ .*: http://.*refuses a request: .*the limit is 128"):
        generate([*many, "data.max_response_length=127", "data.overwrite=True"])
    monkeypatch.setenv("HYBRIDRL_TEST_KEY", "wrong")
    with pytest.raises(UserError, match="models cannot be listed"):
        generate([*many, "data.overwrite=True"])


# ------------------------------------------------------------------ scores


def test_scores_are_those_of_an_independent_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    answers = {"12": ["#### 12", "x #### 12", "#### 21"], "34": ["#### 34", "12", ""], "56": ["no", "no", "#### 6"]}
    for number, (truth, responses) in enumerate(answers.items()):
        for source in ("hybridrl/sort", "openai/gsm8k"):
            rows.append(
                {
                    "data_source": source,
                    "prompt": [{"role": "user", "content": str(number)}],
                    "reward_model": {"style": "rule", "ground_truth": truth},
                    "responses": responses,
                }
            )
    file = tmp_path / "answers.parquet"
    pd.DataFrame(rows).to_parquet(file)
    metrics = evaluate([f"data.path={file}"])
    right = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    for source in ("hybridrl/sort", "openai/gsm8k"):
        assert metrics[f"test_score/{source}"] == pytest.approx(right.mean())
        assert metrics[f"val-core/{source}/acc/mean@3"] == pytest.approx(right.mean())
        # drawing 3 of 3 with replacement misses k right ones with probability ((3 - k) / 3) ** 3
        best = np.mean([1 - ((3 - k) / 3) ** 3 for k in right.sum(axis=1)])
        assert metrics[f"val-core/{source}/acc/best@3/mean"] == pytest.approx(best, abs=0.03)
        assert metrics[f"val-aux/{source}/acc/pass@2"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    report = json.loads((tmp_path / "answers.eval.json").read_text())
    assert report["metrics"] == metrics and report["rows"] == 6 and report["responses"] == 18
    low, high = report["intervals"]["test_score/hybridrl/sort"]
    assert 0.0 <= low < right.mean() < high < 2 / 3 + 1e-9
    printed = capsys.readouterr().out
    assert "hybridrl/sort" in printed and f"{low:.4f} to {high:.4f}" in printed and "pass@2" in printed

    limited = evaluate([f"data.path={file}", "data.max_samples=2", f"data.output_path={tmp_path / 'few.json'}"])
    assert limited["test_score/hybridrl/sort"] == pytest.approx(2 / 3)
    assert (tmp_path / "few.json").exists()


def test_a_function_of_ones_own_votes_and_needs_no_reference(tmp_path: Path) -> None:
    """Rows of JSON lines with different numbers of responses; `pred` is what maj@N votes with."""
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, bonus):\n"
        "    right = solution_str == extra_info['truth']\n"
        "    return {'score': bonus * right, 'acc': right, 'pred': solution_str}\n"
    )
    rows = [
        {"answers": ["a", "a", "b", "a"], "extra_info": {"truth": "a"}},
        {"answers": ["a", "b", "b", "b"], "extra_info": {"truth": "a"}},
        {"answers": "a", "extra_info": {"truth": "a"}},
    ]
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    metrics = evaluate(
        [
            f"data.path={file}",
            "data.response_key=answers",
            f"custom_reward_function.path={tmp_path / 'own.py'}",
            "custom_reward_function.reward_kwargs.bonus=2",
        ]
    )
    assert metrics["test_score/unknown"] == pytest.approx(np.mean([1.5, 0.5, 2.0]))
    assert metrics["val-core/unknown/acc/mean@4"] == pytest.approx(0.5)
    assert metrics["val-aux/unknown/acc/mean@1"] == 1.0
    # of 4 draws from (a, a, a, b) an a wins unless there are 3 or more b, or 2 that come first
    generator = np.random.default_rng(0)
    draws = generator.integers(0, 4, size=(20000, 4))

    def majority(values: list[str]) -> float:
        texts = np.array(values)[draws]
        counts = (texts == "a").sum(axis=1)
        first = np.array([row[0] for row in texts]) == "a"
        return float(np.mean((counts > 2) | ((counts == 2) & first)))

    expected = np.mean([majority(["a", "a", "b", "a"]), majority(["a", "b", "b", "b"])])
    assert metrics["val-core/unknown/acc/maj@4/mean"] == pytest.approx(expected, abs=0.03)


def test_a_function_gets_columns_and_prompts_as_in_training(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def compute_score(completions, prompts, level, **columns):\n"
        "    assert all(one[0]['content'] == 'Add' for one in prompts)\n"
        "    return [len(one[0]['content']) * level for one, level in zip(completions, level)]\n"
    )
    prompt = [{"role": "user", "content": "Add"}]
    rows = [{"prompt": prompt, "responses": ["a", "abc"], "level": level} for level in (1, 10)]
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    words = [f"data.path={file}", f"custom_reward_function.path={tmp_path / 'own.py'}"]
    assert evaluate(words)["test_score/unknown"] == pytest.approx(np.mean([2, 20]))
    (tmp_path / "own.py").write_text("def compute_score(solution_str, difficulty): return difficulty")
    with raises_with(UserError, "'difficulty'", "columns", "level"):
        evaluate(words)


def test_answers_of_another_column_in_several_files(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def compute_score(solution_str, ground_truth): return solution_str == ground_truth"
    )
    for number in range(3):
        row = {"answer": str(number), "responses": ["0", "1"]}
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps(row) + "\n")
    words = [f"data.path={tmp_path}/part?.jsonl", f"custom_reward_function.path={tmp_path / 'own.py'}"]
    assert evaluate([*words, "data.ground_truth_key=answer"])["test_score/unknown"] == pytest.approx(1 / 3)
    assert (tmp_path / "part0.eval.json").exists()
    assert evaluate(words)["test_score/unknown"] == 0
    with raises_with(UserError, "data.path=org/name:test", "data.output_path"):
        evaluate(["data.path=org/name:test"])


@pytest.mark.parametrize("is_uneven", [True, False])
def test_rows_with_different_numbers_of_responses_are_told(tmp_path: Path, is_uneven: bool, capsys: Any) -> None:
    """mean@3 is then that of some rows, next to a test_score of all."""
    (tmp_path / "own.py").write_text("def compute_score(solution_str): return float(solution_str)")
    counts = {"a": (3, 1) if is_uneven else (3, 3), "b": (1, 1)}
    rows = [{"data_source": name, "responses": ["1"] * n} for name, both in counts.items() for n in both]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    evaluate([f"data.path={tmp_path / 'r.jsonl'}", f"custom_reward_function.path={tmp_path / 'own.py'}"])
    notices = " ".join(capsys.readouterr().err.split())
    assert ("rows of a have 1 to 3 responses" in notices) is is_uneven and "rows of b" not in notices


@pytest.mark.parametrize(
    ("responses", "is_told"), [('["a", "b"]', True), ("[1]", False), ("a", False), (["[1]"], False)]
)
def test_lists_of_responses_that_were_written_as_text_are_told(
    tmp_path: Path, responses: Any, is_told: bool, capsys: Any
) -> None:
    (tmp_path / "own.py").write_text("def compute_score(solution_str): return 1.0")
    (tmp_path / "r.jsonl").write_text(json.dumps({"responses": responses}))
    evaluate([f"data.path={tmp_path / 'r.jsonl'}", f"custom_reward_function.path={tmp_path / 'own.py'}"])
    assert ("is a JSON list of texts" in " ".join(capsys.readouterr().err.split())) is is_told


def test_bad_rows_are_named(tmp_path: Path, start: Callable[..., Job]) -> None:
    good = {"data_source": "hybridrl/sort", "reward_model": {"ground_truth": "1"}, "responses": ["#### 1"]}
    rows = [
        good,
        good | {"responses": []},
        good | {"responses": [1]},
        good | {"responses": None},
        good | {"responses": ["#### 1", None]},
        good | {"data_source": "hybridrl/srot"},
        good | {"reward_model": {}},
        good | {"reward_model": None},
    ]
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    job = start(f"data.path={file}", module=EVALUATION)
    assert job.wait() == 2
    assert "7 of 8 rows cannot be scored" in job.output and "Traceback" not in job.output
    for line, words in (
        (2, "must hold a list of texts, and is empty"),
        (3, "holds int '1' among its texts"),
        (4, "is NoneType"),
        (5, "holds NoneType 'None' among its texts"),
        (6, "unknown data source 'hybridrl/srot'"),
    ):
        assert any(f"line {line}: " in text and words in text for text in job.output.splitlines()), job.output
    assert "and 2 more" in job.output

    for words, message in (
        (["data.response_key=answer"], r"no column 'answer' \(columns found: .*data\.response_key"),
        (["data.reward_model_key=rm"], r"no column 'rm'"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate([f"data.path={file}", *words])


# ------------------------------------------------------------------ the page


def test_commands_of_the_page_run_as_they_stand(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    """`run` is run, with the model and data of the README's first commands; `compose` needs an endpoint."""
    page = (repository / "docs" / "generation.md").read_text()
    monkeypatch.chdir(tmp_path)
    build_tiny_model("demo/model", hidden=32, heads=2, kv_heads=1)
    write_sort_data(tmp_path / "demo" / "data", train_size=8, test_size=4)
    done = []
    for check, text in re.findall(r"```bash (\w+)\n(.*?)```", page, re.DOTALL):
        for line in text.replace("\\\n", " ").splitlines():
            if not line.startswith("python"):
                continue
            _, _, module, *words = shlex.split(line.replace("=demo/", f"={tmp_path}/demo/"))  # Ray began elsewhere
            program = {"main_generation": generate, "main_eval": evaluate}[module.rsplit(".", 1)[1]]
            if check == "run":
                program(words)
                done.append(module)
            else:
                load_config("generation", words)
    assert done == [GENERATION, EVALUATION]
    assert (tmp_path / "demo" / "answers.eval.json").exists()
