"""`hybridrl import trl SCRIPT`: what it reads, what it reports, and that nothing runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hybridrl.compat.import_command import main
from hybridrl.config.checks.branches import value_at
from hybridrl.config.compose import compose_config
from hybridrl.programs import PROGRAMS

SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("the script was run")
MODEL = "organisation/model"


def reward_len(completions, **kwargs):
    return [-abs(20 - len(text)) for text in completions]


args = GRPOConfig(
    output_dir="out", learning_rate=2e-5, logging_steps=5, num_generations=4, per_device_train_batch_size=8,
    gradient_accumulation_steps=2, max_steps=STEPS, bf16=True, save_strategy="no", beta=0.04, MORE
)
trainer = GRPOTrainer(
    model=MODEL, reward_funcs=reward_len, args=args, train_dataset=load_dataset("organisation/data", split="train"),
    peft_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"),
)
trainer.train()
"""


def reported(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], list[str]]:
    """The exit status, the lines of the report and the words of the command."""
    (folder / "script.py").write_text(text)
    status = main(["trl", str(folder / "script.py")])
    report, _, command = capsys.readouterr().out.partition("\n\n")
    return status, report.splitlines(), shlex.split(command.replace("\\\n", " "))


def test_the_command_is_the_run_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, words = reported(tmp_path, SCRIPT.replace("STEPS", "100").replace("MORE", "seed=7"), capsys)
    assert status == 0 and words[:2] == ["hybridrl", "grpo"]
    config = compose_config("ppo_trainer", words[2:], defaults=PROGRAMS["grpo"].defaults).config
    actor = "actor_rollout_ref.actor"
    expected = {
        "actor_rollout_ref.model.path": "organisation/model",
        "actor_rollout_ref.model.lora_rank": 8,
        "data.train_files": ["organisation/data:train"],
        "reward.custom_reward_function.path": "reward.py",
        "reward.custom_reward_function.name": "reward_len",
        f"{actor}.optim.lr": 2e-5,
        f"{actor}.optim.lr_scheduler_type": "linear",
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.kl_loss_coef": 0.04,
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.fsdp_config.dtype": "bfloat16",
        f"{actor}.fsdp_config.seed": 7,
        "data.train_batch_size": 4,
        "actor_rollout_ref.rollout.n": 4,
        "trainer.total_training_steps": 100,
        "trainer.save_freq": -1,
        "trainer.default_local_dir": "out",
    }
    assert {key: value_at(config, key) for key in expected} == expected
    states = {line.split()[-1] if line.startswith("  no effect") else line.split()[0] for line in lines[1:]}
    assert "mapped" in states and any(line.startswith("  no effect here  logging_steps=5") for line in lines)


def test_what_is_refused_and_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, words = reported(tmp_path, SCRIPT.replace("MORE", "fp16=True, loss_type='bnpo'"), capsys)
    refused = [line.split()[1].split("=")[0] for line in lines if line.startswith("  refused")]
    assert status == 2 and sorted(refused) == ["fp16", "loss_type"]
    assert any(line.startswith("  not read: max_steps=STEPS") for line in lines)
    assert not any(word.startswith(("fp16", "loss_type", "max_steps")) for word in words)


def test_other_trainers_and_guarded_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "from trl import DPOConfig, DPOTrainer\nfrom datasets import load_dataset\n\n\ndef main():\n    " + (
        "DPOTrainer('M', args=DPOConfig(beta=0.3, per_device_train_batch_size=2),"
        " train_dataset=load_dataset('json', data_files='pairs.jsonl', split='train'))\n"
    )
    status, _, words = reported(tmp_path, text, capsys)
    config = compose_config("dpo_trainer", words[2:]).config
    assert status == 0 and words[1] == "dpo"
    keys = ("dpo.beta", "data.train_batch_size", "data.train_files", "model.path")
    assert [value_at(config, key) for key in keys] == [0.3, 2, ["pairs.jsonl"], "M"]
    labelled = "from trl import KTOConfig, KTOTrainer\nKTOTrainer('M', args=KTOConfig(undesirable_weight=0.5))\n"
    _, _, words = reported(tmp_path, labelled, capsys)
    assert words[1] == "kto"
    assert value_at(compose_config("kto_trainer", words[2:]).config, "kto.undesirable_weight") == 0.5
    guarded = "from trl import GRPOTrainer\ndef f(completions): return [1.0]\n"
    guarded += 'if __name__ == "__main__":\n    GRPOTrainer("M", f)\n'
    _, _, words = reported(tmp_path, guarded, capsys)
    assert f"reward={tmp_path / 'script.py'}:f" in words


@pytest.mark.parametrize("text", ["import trl\n", "def broken(:\n"])
def test_a_script_without_trl_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(text)
    assert main(["trl", str(tmp_path / "script.py")]) == 2
    assert str(tmp_path / "script.py") in capsys.readouterr().err
    assert main(["trl", str(tmp_path / "none.py")]) == 2
    assert main(["other", "x"]) == 2
