"""What README.md and the pages for beginners show works; snippets.py says how each snippet is checked."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snippets import CHECKS, PAGES, run_snippets, snippets

from hybridrl.config import load_config
from hybridrl.config.compose import compose_config
from hybridrl.programs import PROGRAMS

ROOTS = {
    "hybridrl.trainer.main_ppo": "ppo_trainer",
    "hybridrl.trainer.main_sft": "sft_trainer",
    "hybridrl.trainer.main_dpo": "dpo_trainer",
    "hybridrl.trainer.main_kto": "kto_trainer",
    "hybridrl.trainer.main_rm": "rm_trainer",
    "hybridrl.trainer.main_generation": "generation",
    "hybridrl.trainer.main_eval": "evaluation",
}


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_says_how_it_is_checked(page: str) -> None:
    for snippet in snippets(page):
        if snippet.language != "text":  # output, not code
            assert snippet.check in CHECKS, snippet.text


def test_settings_of_commands_for_other_machines_compose() -> None:
    programs = []
    pages = (*PAGES, "docs/lora.md", "docs/reward_models.md", "docs/distillation.md")
    for snippet in [one for page in pages for one in snippets(page, "compose")]:
        for python, flag, module, *words in snippet.commands:
            if python == "hybridrl":
                program = PROGRAMS[flag]
                assert compose_config(program.tree, [module, *words], defaults=program.defaults).notices == []
                programs.append(flag)
                continue
            assert (python, flag) == ("python", "-m")
            assert importlib.util.find_spec(module) is not None, module
            if module in ROOTS:
                load_config(ROOTS[module], words)
                programs.append(module)
    assert {"grpo", "ppo", "hybridrl.trainer.main_ppo"} <= set(programs)


def test_settings_after_the_quickstart_compose() -> None:
    for page in PAGES:
        for snippet in snippets(page, "quickstart"):
            for bash, script, *words in snippet.commands:
                assert (bash, script) == ("bash", "scripts/quickstart.sh")
                load_config("ppo_trainer", words)


def test_extras_of_the_installation_exist(repository: Path) -> None:
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for snippet in snippets("README.md", "install"):
        for bash, script, *words in snippet.commands:
            assert (bash, script) == ("bash", "scripts/install.sh")
            assert set(words) <= {"cpu", "cuda", "auto", *extras}


@pytest.mark.slow
def test_snippets_of_the_readme_run(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    outputs = run_snippets("README.md", tmp_path, finish, "run", python=joined)
    assert (tmp_path / "demo/sft/global_step_4/model").is_dir()
    assert "step 4/4" in outputs[0]
    first, last = map(float, re.search(r"mean reward ([\d.]+) -> ([\d.]+), model in", outputs[-2]).groups())  # type: ignore[union-attr]
    assert first < 0.1 and last > 0.7, "the page promises 0.04 to about 0.9"
    assert outputs[-1].strip().endswith("[1.0, 1.0, 2.0, 2.0]")


@pytest.mark.slow
def test_the_first_reward_is_learnt_and_hacked(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    run_snippets("docs/first_reward.md", tmp_path, finish, "run", python=joined)
    run = records(tmp_path / "first/run")
    scores = [record["critic/score/mean"] for record in run if "critic/score/mean" in record]
    assert len(scores) == 15
    assert scores[0] < 0.1 and scores[-1] > 0.7, "the page promises 0.04 to about 0.9"
    exact = [record.get("val-aux/hybridrl/sort/exact/mean@1") for record in run]
    assert max(value for value in exact if value is not None) == 0


@pytest.mark.slow
def test_the_first_data_are_learnt(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    run_snippets("docs/first_data.md", tmp_path, finish, "run", python=joined)
    run = records(tmp_path / "letters/grpo")
    accuracy = [record["val-core/my/last_letter/acc/mean@1"] for record in run if "training/epoch" not in record]
    assert len(accuracy) == 3, "before the first step, and after steps 10 and 20"
    assert min(accuracy) > 0.5
    scores = [record["critic/score/mean"] for record in run if "critic/score/mean" in record]
    assert sum(scores[-5:]) > sum(scores[:5]), "the page promises 0.75 to 0.87"


@pytest.mark.slow
def test_the_experiment_is_compared(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    outputs = run_snippets("docs/experiment.md", tmp_path, finish, "run", python=joined)
    for name in ("fixed", "mixed_groups"):
        run = records(tmp_path / "week" / name)
        validations = [record for record in run if "val-core/gsm8k/acc/mean@1" in record]
        assert len(validations) == 3 and all("val-core/math500/acc/mean@1" in record for record in validations)
        best = json.loads((tmp_path / "week" / name / "best_checkpoint.json").read_text())
        values = {record["step"]: record["val-core/math500/acc/mean@1"] for record in validations}
        assert best["value"] == max(value for step, value in values.items() if step)
        assert (tmp_path / "week" / name / f"global_step_{best['step']}").is_dir()
        shares = [record["data/mixture/math500/share"] for record in run if "data/mixture/math500/share" in record]
        assert len(shares) == 20
        sorting = [record["val-core/gsm8k/acc/mean@1"] for record in validations]
        assert max(sorting[1:]) > sorting[0], "the page has 0.75, and then 0.84 and 0.88"
        assert (set(shares) == {0.5}) == (name == "fixed")
    *_, compared, scored = outputs
    assert compared.count("gsm8k") >= 2 and compared.count("math500") >= 2 and "curriculum" in compared
    assert "gsm8k" in scored and "pass@4" in scored


@pytest.mark.parametrize("page", ["docs/dpo.md", "docs/kto.md", "docs/reward_models.md"])
def test_training_on_preferences_runs(page: str, tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    run_snippets(page, tmp_path, finish, "run", python=joined)
    folder = tmp_path / "demo" / next((name for name in ("dpo", "kto") if name in page), "rm")
    validations = [record for record in records(folder) if "val/margin" in record]
    assert len(validations) == 2 and validations[-1]["val/margin"] > 0
