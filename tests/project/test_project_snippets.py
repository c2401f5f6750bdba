"""Snippets of pages for users, run as shown: gateway, python, trl, config, dpo and distillation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from snippets import REPOSITORY, run_snippets, snippets

from hybridrl.trainer.ppo.ledger import AdmissionSchedule, Ledger
from hybridrl.trainer.ppo.ledger_journal import LedgerJournal

#: pages whose unmarked Python is no program: a line of a coroutine, a class without its body
FRAGMENTS = {"docs/rollout.md", "docs/programming_model.md"}


def test_every_page_with_programs_is_named_in_a_test() -> None:
    tests = [path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py")]
    tests.append((REPOSITORY / "tests" / "config" / "reference_tables.py").read_text())
    untested = []
    for path in sorted((REPOSITORY / "docs").glob("*.md")):
        page = f"docs/{path.name}"
        programs = [one for one in snippets(page) if one.language == "python" or one.check in ("run", "file")]
        named = re.compile(rf'["/]{re.escape(path.name)}"')
        if programs and page not in FRAGMENTS and not any(named.search(text) for text in tests):
            untested.append(page)
    assert not untested


def python_of(page: str, containing: str) -> str:
    (found,) = [one.text for one in snippets(page) if one.language == "python" and containing in one.text]
    return found


@pytest.mark.slow
def test_the_run_of_an_agent_through_the_gateway(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    run_snippets("docs/gateway.md", tmp_path, finish, "run", python=joined)
    rows = [json.loads(line) for line in (tmp_path / "gateway" / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if "num_turns/mean" in row]
    assert step["agent_loop/sessions_failed"] == 0 and step["rollout_corr/kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_training_from_python(tmp_path: Path, finish: Callable[..., Any], joined: str, micro_model: Path) -> None:
    """Both snippets in one program, with a tiny model, 4 rows and one epoch."""
    data = "datasets.Dataset.from_list([{'prompt': 'What is 2 + 3?', 'answer': '5'}] * 4)"
    text = f"import datasets\n{data}.to_parquet('train.parquet')\n"
    text += python_of("docs/python.md", "hybridrl.grpo(") + python_of("docs/python.md", "hybridrl.Trainer(")
    small = 'config={"trainer.val_before_train": False, "data.max_response_length": 4, "data.max_prompt_length": 32}'
    for old, new in (
        ('"Qwen/Qwen2.5-0.5B-Instruct"', repr(str(micro_model))),
        ('"answer": "5"}, ...]', '"answer": "5"}] * 4'),
        ("=64", "=4"),
        ("total_epochs=3", f"total_epochs=1, {small}"),
        ('data="train.parquet")', f'data="train.parquet", ground_truth_key="answer", train_batch_size=4,\n{small},\n'
         "ppo_mini_batch_size=4, total_epochs=1)"),
    ):  # fmt: skip
        assert old in text, old
        text = text.replace(old, new)
    text += "assert len(result.curve('critic/score/mean')) == 1 and (result.model_path / 'config.json').is_file()\n"
    (tmp_path / "page.py").write_text(text)
    ended = finish([joined, "page.py"], cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


@pytest.mark.slow
def test_a_script_for_trl(tmp_path: Path, finish: Callable[..., Any], joined: str, micro_model: Path) -> None:
    """The page's script with a tiny model, 16 rows and two steps."""
    text = python_of("docs/trl.md", "GRPOTrainer(")
    for old, new in (
        ('"Qwen/Qwen2.5-0.5B-Instruct"', repr(str(micro_model))),
        ('load_dataset("trl-lib/tldr", split="train")', "datasets.Dataset.from_list([{'prompt': 'Sort: 31'}] * 16)"),
        ("from datasets import load_dataset", "import datasets"),
        ("max_steps=100", "max_steps=2, max_completion_length=8, use_cpu=True, bf16=False"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    (tmp_path / "page.py").write_text(text)
    ended = finish([joined, "page.py"], cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert (tmp_path / "trained" / "config.json").is_file()
    assert len((tmp_path / "short-answers" / "metrics.jsonl").read_text().splitlines()) >= 2


def test_a_configuration_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_model: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.parquet").touch()
    text = python_of("docs/config.md", "load_config").replace("=MODEL", f"={micro_model}")
    text = text.replace("validate(config)", "config.data.train_batch_size = 256\nvalidate(config)")
    names: dict[str, Any] = {}
    exec(text, names)  # the page's own code
    assert names["config"].actor_rollout_ref.actor.optim.lr == 1e-6


def test_a_journal_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One group is trained on, one is void, and one is in flight."""
    ledger = Ledger(AdmissionSchedule(1, 2.0, 1), LedgerJournal(tmp_path / "outputs" / "run" / "ledger.jsonl"))
    first, second, _ = [group for uid in ("a", "b", "c") for group in ledger.admit([uid])]
    ledger.void(second, "reward_error")
    ledger.ready(first)
    ledger.release(ledger.take())
    monkeypatch.chdir(tmp_path)
    exec(python_of("docs/async.md", "read_journal"), {})
    assert capsys.readouterr().out.split() == ["3", "{'reward_error':", "1}", "0"]


def test_a_loss_of_pairs() -> None:
    """(h_w - h_l - 1)^2, where h is beta times the logarithm of the ratio to the reference."""
    from hybridrl.config.schema.objective import DPOConfig
    from hybridrl.workers.objectives import OBJECTIVES, Pairs

    try:
        exec(python_of("docs/dpo.md", "register_objective"), {"__name__": "page"})
        assert OBJECTIVES.metadata("squared").reference
        one = torch.ones(2)
        pairs = Pairs(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.5]), one, one, -2 * one, -4 * one)
        found = OBJECTIVES.get("squared")(pairs, DPOConfig(loss_type="squared", beta=0.5))
        chosen, rejected = torch.tensor([0.5, -0.5]), torch.tensor([1.0, 0.75])
        torch.testing.assert_close(found.losses, (chosen - rejected - 1) ** 2)
    finally:
        OBJECTIVES.remove("squared")


def test_a_loss_of_labelled_answers() -> None:
    """abs(beta h - 1) for desirable answers and abs(beta h + 1) for others, where h is the log-ratio."""
    from hybridrl.config.schema.objective import KTOConfig
    from hybridrl.workers.objectives import OBJECTIVES, LabelledAnswers

    try:
        exec(python_of("docs/kto.md", "register_objective"), {"__name__": "page"})
        assert OBJECTIVES.metadata("absolute").reference and not OBJECTIVES.metadata("absolute").kl_baseline
        answers = LabelledAnswers(
            torch.tensor([-1.0, -3.0]), torch.ones(2), torch.tensor([True, False]), torch.tensor([-2.0, -4.0])
        )
        computed = OBJECTIVES.get("absolute")(answers, KTOConfig(loss_type="absolute", beta=0.5))
        torch.testing.assert_close(computed.losses, torch.tensor([0.5, 1.5]))
    finally:
        OBJECTIVES.remove("absolute")


def test_a_loss_of_distillation() -> None:
    """The mean of squared differences over the K words that both compare."""
    from hybridrl.algorithms.distillation import DISTILLATION_LOSSES, distillation_losses

    try:
        exec(python_of("docs/distillation.md", "register_distillation_loss"), {"__name__": "page"})
        p, q = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
        torch.testing.assert_close(distillation_losses("squares", p, q), ((p - q) ** 2).sum(-1) / 5)
    finally:
        DISTILLATION_LOSSES.remove("squares")


@pytest.mark.slow(20)
def test_a_check(tmp_path: Path, finish: Callable[..., Any]) -> None:
    *_, printed = run_snippets("docs/check.md", tmp_path, finish, "run")
    assert printed.splitlines()[-1] == "no problem"
