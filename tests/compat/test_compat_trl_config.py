"""TRL's configs and trainers: their fields, and the run that each composes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hybridrl.compat import trl
from hybridrl.compat.trl.metric_names import METRICS, with_trl_names
from hybridrl.config.short_names import rows
from hybridrl.errors import ConfigError
from hybridrl.notify import listening

TREES = {
    trl.GRPOConfig: "ppo_trainer",
    trl.RLOOConfig: "ppo_trainer",
    trl.SFTConfig: "sft_trainer",
    trl.DPOConfig: "dpo_trainer",
    trl.KTOConfig: "kto_trainer",
    trl.RewardConfig: "rm_trainer",
}
CHATS = [{"messages": [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]}] * 8
PROMPTS = [{"prompt": f"Sort: {number}", "answer": str(number)} for number in range(31, 47)]
PAIRS = [{"prompt": "2+3", "chosen": "5", "rejected": "6"}] * 8


def share_of_digits(completions: list[str], **columns: Any) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def join(*words: str) -> str:
    """Join words."""
    return " ".join(words)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    return tmp_path


def test_every_field_is_mapped_without_effect_or_refused() -> None:
    for config, tree in TREES.items():
        names = {item.name for item in dataclasses.fields(config)}
        assert not names - rows(tree).keys()


def test_the_fields_of_transformers_are_there_with_its_defaults() -> None:
    """TRL itself changes five of them."""
    transformers = pytest.importorskip("transformers")
    ours = {item.name: item.default for item in dataclasses.fields(trl.SFTConfig)}
    changed = set()
    for item in dataclasses.fields(transformers.TrainingArguments):
        default = getattr(item.default, "value", item.default)
        if default is not dataclasses.MISSING and ours[item.name] != default:
            changed.add(item.name)
    assert changed <= {"learning_rate", "bf16", "gradient_checkpointing", "logging_steps"}


def test_a_misspelt_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        trl.GRPOConfig(learning_rat=1e-5, num_generation=3)
    assert [fault.rsplit("nearest: ")[1].split(",")[0] for fault in caught.value.faults] == [
        "learning_rate",
        "num_generations",
    ]


def test_defaults_are_those_of_trl(here: Path) -> None:
    run = trl.GRPOTrainer("model", share_of_digits, train_dataset=PROMPTS).run
    actor, rollout = run.config.actor_rollout_ref.actor, run.config.actor_rollout_ref.rollout
    assert (run.config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n) == (1, 1, 8)
    assert (actor.optim.lr, actor.optim.lr_scheduler_type, actor.optim.weight_decay) == (1e-6, "linear", 0.0)
    assert (actor.use_kl_loss, actor.loss_agg_mode, actor.clip_ratio_low) == (False, "token-mean", 0.2)
    assert (run.config.trainer.total_epochs, run.config.trainer.save_freq, run.config.trainer.test_freq) == (3, 500, -1)
    assert (run.config.data.seed, actor.fsdp_config.seed, run.config.data.max_response_length) == (42, 42, 512)
    assert (str(run.folder), run.config.trainer.resume_mode) == ("model-GRPO", "disable")


def test_fields_reach_their_settings(here: Path) -> None:
    args = trl.GRPOConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=16,
        max_steps=6,
        num_iterations=2,
        beta=0.04,
        loss_type="dr_grpo",
        scale_rewards=False,
        reward_weights=[1.0, 0.5],
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        report_to=["tensorboard"],
        seed=3,
        use_cpu=True,
    )
    functions = [share_of_digits, lambda completions, answer, **columns: [0.0] * len(completions)]
    trainer = trl.GRPOTrainer(
        model="model", reward_funcs=functions, args=args, train_dataset=PROMPTS, eval_dataset=PROMPTS[:2]
    )
    config = trainer.run.config
    actor = config.actor_rollout_ref.actor
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu) == (4, 4, 4)
    assert (config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.save_freq) == (3, 2, -1)
    assert (actor.ppo_epochs, actor.use_kl_loss, actor.kl_loss_coef) == (2, True, 0.04)
    assert (actor.loss_agg_mode, config.algorithm.norm_adv_by_std_in_grpo) == ("seq-mean-token-sum-norm", False)
    assert [entry["weight"] for entry in config.reward.functions.values()] == [1.0, 0.5]
    assert (config.trainer.logger, config.trainer.device) == (["console", "tensorboard"], "cpu")
    assert (str(trainer.folder), actor.fsdp_config.seed, len(config.data.val_files)) == ("out", 3, 1)


def test_each_trainer_composes_its_program(here: Path) -> None:
    small = {"per_device_train_batch_size": 4, "output_dir": "out"}
    sft = trl.SFTTrainer("model", trl.SFTConfig(max_length=64, **small), train_dataset=CHATS).run.config
    assert (sft.data.max_length, sft.data.train_batch_size, sft.optim.lr) == (64, 4, 2e-5)
    rows_ = [{"prompt": "2+3", "completion": "5"}] * 8
    sft = trl.SFTTrainer("model", trl.SFTConfig(**small), train_dataset=rows_).run.config
    assert (sft.data.prompt_key, sft.data.response_key) == ("prompt", "completion")
    dpo = trl.DPOTrainer(
        "model", args=trl.DPOConfig(beta=0.3, loss_type="ipo", **small), train_dataset=PAIRS
    ).run.config
    assert (dpo.dpo.beta, dpo.dpo.loss_type, dpo.optim.lr) == (0.3, "ipo", 1e-6)
    labelled = [{"prompt": "2+3", "completion": "5", "label": True}] * 8
    args = trl.KTOConfig(desirable_weight=1.3, beta=0.2, **small)
    kto = trl.KTOTrainer("model", args=args, train_dataset=labelled).run.config
    assert (kto.kto.desirable_weight, kto.kto.beta, kto.kto.loss_type, kto.optim.lr) == (1.3, 0.2, "kto", 1e-6)
    assert (kto.data.shuffle, kto.data.truncation, kto.data.train_batch_size) == (False, "right", 4)
    reward = trl.RewardTrainer("model", trl.RewardConfig(**small), train_dataset=PAIRS).run.config
    assert (reward.optim.lr, reward.data.train_batch_size) == (1e-4, 4)
    rloo = trl.RLOOTrainer("model", share_of_digits, trl.RLOOConfig(**small), PROMPTS).run.config
    assert (rloo.algorithm.adv_estimator, rloo.actor_rollout_ref.rollout.n) == ("rloo", 2)
    actor = rloo.actor_rollout_ref.actor
    assert (rloo.algorithm.use_kl_in_reward, rloo.algorithm.kl_ctrl.kl_coef, actor.use_kl_loss) == (True, 0.05, False)
    assert actor.loss_agg_mode == "seq-mean-token-sum"
    without = trl.RLOOTrainer("model", share_of_digits, trl.RLOOConfig(beta=0.0, **small), PROMPTS).run.config
    assert not without.use_reference


def test_an_adapter(here: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = trl.GRPOTrainer(
        "model", share_of_digits, train_dataset=PROMPTS, peft_config=peft.LoraConfig(r=4, target_modules="all-linear")
    )
    assert trainer.run.config.actor_rollout_ref.model.lora_rank == 4


@pytest.mark.parametrize(
    ("config", "arguments", "name"),
    [
        ({"fp16": True}, {}, "fp16="),
        ({"push_to_hub": True}, {}, "push_to_hub="),
        ({"push_to_hub": True, "hub_model_id": "sorter"}, {}, "trainer.hub.model_id=sorter"),
        ({"loss_type": "bnpo"}, {}, "loss_type="),
        ({"num_generations": 3}, {}, "per_device_train_batch_size=8"),
        ({}, {"tools": [join]}, "tools: function tool join"),
        ({}, {"callbacks": [object()]}, "GRPOTrainer(callbacks=)"),
        ({}, {"reward_funcs": "organisation/reward-model"}, "reward_funcs"),
        ({}, {"model": object()}, "model is object"),
    ],
)
def test_what_is_not_here_is_refused_by_name(here: Path, config: dict[str, Any], arguments: Any, name: str) -> None:
    before = sorted(here.rglob("*"))
    given = {"model": "model", "reward_funcs": share_of_digits, "train_dataset": PROMPTS, **arguments}
    with pytest.raises(ConfigError) as caught:
        trl.GRPOTrainer(args=trl.GRPOConfig(**config), **given)
    assert any(fault.startswith(name) for fault in caught.value.faults)
    assert sorted(here.rglob("*")) == before


def test_fields_without_effect_are_told_once_each(here: Path) -> None:
    told: list[str] = []
    with listening(lambda text, level: told.append(text)):
        args = trl.GRPOConfig(logging_steps=1, ddp_timeout=7)
        trl.GRPOTrainer("model", share_of_digits, args=args, train_dataset=PROMPTS)
    names = [text.split("=")[0] for text in told if "has no effect" in text]
    assert sorted(names) == ["ddp_timeout", "logging_steps"]


def test_metrics_have_trls_names_too() -> None:
    assert with_trl_names({"critic/score/mean": 0.5, "x": 1.0}) == {"critic/score/mean": 0.5, "x": 1.0, "reward": 0.5}
    assert METRICS["actor/pg_loss"] == "loss"


SCRIPT = """
from hybridrl.compat.trl import {config}, {trainer}
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

def reward_len(prompts, completions, answer, **kwargs):
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [-abs(8 - len(completion[0]["content"])) / 8 + len(a) * 0 for completion, a in zip(completions, answer)]

rows = {rows}
args = {config}(output_dir="out", max_steps=2, per_device_train_batch_size=4, use_cpu=True, bf16=False{more})
class Seen(TrainerCallback):
    steps, saves, logs = [], 0, []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)

    def on_save(self, args, state, control, **kwargs):
        Seen.saves += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)


trainer = {trainer}({first}callbacks=[Seen()], args=args, train_dataset=rows{arguments})
output = trainer.train()
assert output.global_step == 2 and len(trainer.state.log_history) == 2, output
assert output.training_loss == output.training_loss and "{metric}" in trainer.state.log_history[0]
assert Seen.steps == [1, 2] and Seen.saves == 1 and "{metric}" in Seen.logs[0], (Seen.steps, Seen.saves)
trainer.save_model("saved")
AutoModelForCausalLM.from_pretrained("saved"); AutoTokenizer.from_pretrained("saved")
print("ran")
"""


@pytest.mark.slow
def test_scripts_run_after_one_changed_import(micro_model: Path, tmp_path: Path, finish: Any, forked: str) -> None:
    chats = "[{'prompt': [{'role': 'user', 'content': 'Sort: 31'}], 'answer': '13'}] * 8"
    memory = f"model=AutoModelForCausalLM.from_pretrained({str(micro_model)!r}), "
    grpo = SCRIPT.format(
        config="GRPOConfig", trainer="GRPOTrainer", rows=chats, metric="reward", first=memory,
        more=", num_generations=4, max_completion_length=8, learning_rate=1e-3",
        arguments=f", reward_funcs=reward_len, processing_class=AutoTokenizer.from_pretrained({str(micro_model)!r})",
    )  # fmt: skip
    sft = SCRIPT.format(
        config="SFTConfig", trainer="SFTTrainer", metric="loss", first=f"model={str(micro_model)!r}, ",
        rows="[{'messages': [{'role': 'user', 'content': '31'}, {'role': 'assistant', 'content': '13'}]}] * 16",
        more=", max_length=64", arguments="",
    )  # fmt: skip
    for name, text in (("grpo", grpo), ("sft", sft)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "script.py").write_text(text)
        ended = finish([forked, "script.py"], cwd=folder)
        assert ended.returncode == 0 and "ran" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-3000:]
