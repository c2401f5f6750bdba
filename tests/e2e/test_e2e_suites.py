"""`hybridrl eval --suite` against an HTTP server that answers by a script: the table, its files, what reads them."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import load_config
from hybridrl.data.data_files import read_table
from hybridrl.models.tiny import build_tiny_model
from hybridrl.observe.compare import compare, read_validation
from hybridrl.programs import main
from hybridrl.registry import SUITES, import_external_lib
from hybridrl.trainer.evaluation import run_evaluation

#: by a word of the prompt: texts of its responses, and how they end
ANSWERS = {
    "apples": (("4 #### 4", "stop"), ("#### 5", "stop"), ("It is #### 4", "stop")),
    "pears": (("#### 9", "stop"), ("#### 9", "stop"), ("and so on", "length")),
    "remainder": (("\\boxed{25}", "stop"), ("\\boxed{025}", "stop"), ("\\boxed{25}", "stop")),
}


@pytest.fixture
def answering() -> Iterator[str]:
    """The address of a server that gives each prompt its responses in turn."""
    counts: dict[str, int] = defaultdict(int)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send({"object": "list", "data": [{"id": "m", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][-1]["content"]
            word = next(word for word in ANSWERS if word in prompt)
            with lock:
                text, ending = ANSWERS[word][counts[word] % 3]
                counts[word] += 1
            message = {"role": "assistant", "content": text}
            usage = {"prompt_tokens": 3, "completion_tokens": len(text), "total_tokens": 3 + len(text)}
            choice = {"index": 0, "message": message, "finish_reason": ending}
            self.send(
                {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "m",
                    "choices": [choice],
                    "usage": usage,
                }
            )

        def send(self, reply: Any) -> None:
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A folder with three problems of two suites."""
    folder = tmp_path / "copies"
    folder.mkdir()
    questions = [("How many apples?", 4), ("How many pears?", 8)]
    rows = [{"question": text, "answer": f"#### {number}"} for text, number in questions]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "aime24.jsonl").write_text(json.dumps({"problem": "Find the remainder.", "answer": "025"}) + "\n")
    return folder


def test_suites_are_generated_scored_and_reported(
    answering: str, copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "responses.parquet"
    words = [
        "--suite=gsm8k,aime24",
        *("--suite-folder", str(copies)),
        f"data.output_path={output}",
        "data.n_samples=3",
        "actor_rollout_ref.rollout.name=openai",
        f"actor_rollout_ref.rollout.openai.base_url={answering}",
    ]
    main(["eval", *words])
    printed = capsys.readouterr()
    results = {result["suite"]: result for result in json.loads(output.with_suffix(".suites.json").read_text())}
    gsm8k, aime24 = results["gsm8k"], results["aime24"]
    assert (gsm8k["rows"], gsm8k["responses"], gsm8k["unscored"], gsm8k["k"]) == (2, 6, 0, 3)
    values = [gsm8k[name]["value"] for name in ("pass_1", "pass_k", "maj_k")]
    assert values == pytest.approx([1 / 3, 1 / 2, 1 / 2])  # apples: 2 of 3 and the majority; pears: none
    assert gsm8k["cut_share"] == pytest.approx(1 / 6)
    lengths = [len(text) for word in ("apples", "pears") for text, _ in ANSWERS[word]]
    assert gsm8k["mean_tokens"] == pytest.approx(sum(lengths) / 6)
    assert [aime24[name]["value"] for name in ("pass_1", "pass_k", "maj_k")] == [1.0, 1.0, 1.0]
    row = next(line for line in printed.out.splitlines() if "gsm8k" in line)
    assert all(part in row for part in ("0.3333", "0.5000", "0 of 6", "16.7%"))
    assert "greedy" in printed.err  # the sampling that the suite is reported with

    evaluated = run_evaluation(load_config("evaluation", [f"data.path={output}"]))
    assert evaluated["val-core/gsm8k/acc/mean@3"] == pytest.approx(1 / 3)
    validation = read_validation(output.with_suffix(".suites"))
    both = {each.source: each for each in compare(validation, validation)}
    assert both["gsm8k"].first == pytest.approx(1 / 3) and both["aime24"].prompts == 1


def test_responses_that_no_scorer_could_score_are_counted_and_never_wrong(
    answering: str, copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "graded.py").write_text(
        "from hybridrl.scored import Unscored\n"
        "def compute_score(data_source, solution_str, ground_truth):\n"
        "    if 'It is' in solution_str:\n"
        "        return Unscored('infra', 'the sandbox is gone')\n"
        "    return float(solution_str.endswith(f'#### {ground_truth}'))\n"
    )
    output = tmp_path / "responses.parquet"
    words = [
        *("--suite", f"gsm8k@{copies}"),
        f"data.output_path={output}",
        "data.n_samples=3",
        "actor_rollout_ref.rollout.name=openai",
        f"actor_rollout_ref.rollout.openai.base_url={answering}",
        f"reward.custom_reward_function.path={tmp_path / 'graded.py'}",
    ]
    main(["eval", *words])
    (result,) = json.loads(output.with_suffix(".suites.json").read_text())
    assert result["unscored"] == 1 and result["pass_1"]["value"] == pytest.approx(1 / 4)  # 1 of 2, and 0 of 3
    assert result["pass_k"]["value"] == 0.0 and result["maj_k"] is None
    rows = [json.loads(line) for line in (tmp_path / "responses.suites/validation/0.jsonl").read_text().splitlines()]
    assert [row["acc"] for row in rows if row["unscored"]] == [None]
    assert "1 of 6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--suite"], "--suite"),
        (["--suite", "--suite-folder"], "--suite"),
        (["--suite-folder", "x"], "--suite-folder"),
        (["--suite", "gsm9k", "actor_rollout_ref.model.path=."], "gsm9k"),
        (["--suite", "gsm8k", "--suite-folder=nowhere/at/all", "actor_rollout_ref.model.path=."], "nowhere/at/all"),
        (["--suite", "gsm8k", "data.paths=x"], "data.paths"),
        (["--suite", "gsm8k@FOLDER", "--suite", "gsm8k@FOLDER", "actor_rollout_ref.model.path=."], "twice"),
    ],
)
def test_faulty_words_end_with_one_message(
    words: list[str], says: str, copies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *(word.replace("FOLDER", str(copies)) for word in words)])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_the_commands_of_the_page_run_as_they_stand(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    page = (repository / "docs" / "evaluation.md").read_text()
    monkeypatch.chdir(tmp_path)
    build_tiny_model("demo/model", hidden=32, heads=2, kv_heads=1)
    (program,) = re.findall(r"```python run\n(.*?)```", page, re.DOTALL)
    exec(program, {})
    (command,) = re.findall(r"```bash run\n(.*?)```", page, re.DOTALL)
    _, *words = shlex.split(command.replace("\\\n", " ").replace("=demo/", f"={tmp_path}/demo/"))  # Ray began elsewhere
    main(words)
    (result,) = json.loads((tmp_path / "outputs" / "suites" / "responses.suites.json").read_text())
    assert (result["suite"], result["rows"], result["responses"], result["unscored"]) == ("gsm8k", 4, 8, 0)
    assert 0 < result["mean_tokens"] <= 16


def test_the_suite_of_the_page_is_read_through_external_lib(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs" / "evaluation.md").read_text()
    (program,) = re.findall(r"```python\n(# my_suite.py.*?)```", page, re.DOTALL)
    (tmp_path / "my_suite.py").write_text(program)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "Find it.", "answer": "7"}) + "\n")
    try:
        import_external_lib(str(tmp_path / "my_suite.py"))
        row = read_table(f"suite:olympiad@{tmp_path / 'rows.jsonl'}")[0]
    finally:
        SUITES.remove("olympiad")
    assert row["data_source"] == "math_dapo" and row["extra_info"]["suite"] == "olympiad"
