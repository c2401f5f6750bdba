"""`hybridrl explain KEY`: meaning, default, value, origin, whether it acts, what follows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.config.compose import compose_config
from hybridrl.config.explain_setting import explain_setting
from hybridrl.config.schema.node import declared
from hybridrl.config.schema.root import ROOTS
from hybridrl.programs import main

POLICY = "actor_rollout_ref"


def explained(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *words])
    printed = capsys.readouterr()
    assert ended.value.code == status, printed
    return printed.err if status else printed.out


def test_a_value_is_shown_with_its_place(capsys, tmp_path: Path) -> None:
    text = explained(capsys, "lr", "grpo", "lr=1e-5")
    assert f"{POLICY}.actor.optim.lr: " in text and "default: 1e-06" in text and "here: 1e-05 (command line)" in text
    file = tmp_path / "own.yaml"
    file.write_text("optim:\n  lr: 0.25\n")
    text = explained(capsys, "optim.lr", "sft", "--config", str(file))
    assert f"here: 0.25 ({file}, line 2)" in text
    assert "here: 1e-05 (default)" in explained(capsys, "optim.lr", "sft")


def test_a_setting_that_cannot_act_says_why(capsys) -> None:
    name = f"{POLICY}.actor.kl_loss_coef"
    assert f"without effect: {POLICY}.actor.use_kl_loss is False" in explained(capsys, name)
    assert "without effect" not in explained(capsys, name, "grpo", f"{POLICY}.actor.use_kl_loss=True")
    assert "without a critic" in explained(capsys, "critic.optim.lr")
    of_megatron = f"{POLICY}.actor.megatron.tensor_model_parallel_size"
    assert f"{POLICY}.actor.strategy=fsdp2 does not read it" in explained(capsys, of_megatron)
    assert "does not read it" not in explained(capsys, of_megatron, "grpo", "model_engine=megatron")
    assert "without effect" not in explained(capsys, "critic.optim.lr", "ppo")


def test_names_of_other_versions_and_followers(capsys) -> None:
    text = explained(capsys, f"{POLICY}.actor.grad_clip")
    assert f"is now {POLICY}.actor.optim.clip_grad" in text and "default: 1.0" in text
    assert f"old names: {POLICY}.actor.lr" in explained(capsys, f"{POLICY}.actor.optim.lr")
    assert "followed by: " in (text := explained(capsys, f"{POLICY}.actor.strategy")) and "critic.strategy" in text


def test_unknown_names_and_wrong_settings_are_named(capsys) -> None:
    assert "trainer.save_freq" in explained(capsys, "trainer.save_frequ", status=2)
    assert "learning_rate" in explained(capsys, "learning_rat", status=2)
    assert f"{POLICY}.actor.optim.lr" in explained(capsys, "lr", "grpo", "lr=much", status=2)


def test_every_key_of_every_program_can_be_explained() -> None:
    for tree in ROOTS:
        composed = compose_config(tree, [])
        for name in declared(ROOTS[tree]):
            text = explain_setting(tree, name, composed, {})
            assert text is not None and text.startswith(f"{name}: ") and "\n  here: " in text, name
