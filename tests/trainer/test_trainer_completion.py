"""`hybridrl completion`: what a shell completes, asked of the shell."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from hybridrl.programs import COMMANDS, PROGRAMS
from hybridrl.trainer.completion import main, script, words_of


def completed(*words: str) -> list[str]:
    """Return what bash offers for the last word of a command."""
    words_of_line = " ".join(map(shlex.quote, ("hybridrl", *words)))
    asked = f"COMP_WORDS=({words_of_line}); COMP_CWORD={len(words)}; _hybridrl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script('bash')}\n{asked}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


def test_commands_are_completed() -> None:
    assert set(completed("g")) == {"grpo", "generate"}
    assert set(completed("")) == {name for name in (*PROGRAMS, *COMMANDS) if " " not in name}


@pytest.mark.parametrize(
    ("program", "prefix", "expected"),
    [
        ("grpo", "trainer.total_", ["trainer.total_epochs=", "trainer.total_training_steps="]),
        ("ppo", "critic.optim.l", None),
        ("sft", "learning_", ["learning_rate="]),
        ("eval", "data.pa", ["data.path="]),
        ("grpo", "--con", ["--config", "--config-path", "--config-name"]),
        ("sft", "critic.", []),
    ],
)
def test_settings_are_those_of_the_program(program: str, prefix: str, expected: list[str] | None) -> None:
    offered = completed(program, prefix)
    assert offered == [word for word in words_of(program) if word.startswith(prefix)]
    assert offered == expected if expected is not None else "critic.optim.lr=" in offered


def test_names_without_effect_are_not_offered() -> None:
    words = set(words_of("grpo"))
    assert {"hub_model_id=", "lr="} <= words and not {"hub_token=", "hub_strategy=", "logging_steps="} & words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_is_printed_and_is_code_of_its_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shell]) == 0
    text = capsys.readouterr().out
    assert text == script(shell) and text.startswith(f"# hybridrl completion {shell} >")
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
