"""Short names of settings: what each means in each tree, on the command line and in Python, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.checks.branches import value_at
from hybridrl.config.command import cli
from hybridrl.config.compose import Composed, compose_config
from hybridrl.config.schema.node import declared
from hybridrl.config.schema.root import ROOTS
from hybridrl.config.short_names import TREES, ShortSettings, accepted, explain, nearest_names, placed, rows
from hybridrl.config.short_table import OTHER_WORDS, TABLE
from hybridrl.errors import ConfigError

POLICY = "actor_rollout_ref"
ACTOR, ROLLOUT, MODEL = f"{POLICY}.actor", f"{POLICY}.rollout", f"{POLICY}.model"
WIDTHS = {"data.max_response_length": 99, f"{ROLLOUT}.response_length": 99}
EIGHT_BITS = {"optim.optimizer": "AdamW8bit", "optim.optimizer_impl": "torchao.optim"}


def composed(tree: str, *words: str) -> Composed:
    return compose_config(tree, words)


def values(tree: str, *words: str) -> Any:
    config = composed(tree, *words).config
    return lambda key: value_at(config, key)


def test_each_row_names_keys_of_the_schema() -> None:
    for row in TABLE:
        keys = row.key.values() if isinstance(row.key, dict) else [row.key]
        for tree in TREES:
            key = row.key_in(tree)
            assert key is None or key == "" or key in declared(ROOTS[tree]), row.names
        assert sum(map(bool, (row.idle, row.refused, any(keys)))) == 1, row.names
        assert row.idle or row.refused or any(row.key_in(tree) for tree in TREES), f"{row.names} exist nowhere"


def test_a_name_means_one_thing_in_a_tree() -> None:
    for tree in TREES:
        seen: dict[str, Any] = {}
        for row in TABLE:
            for name in row.names if row.key_in(tree) is not None else ():
                assert name not in seen, f"{tree}: {name} stands in two rows"
                seen[name] = row
        for name, row in rows(tree).items():  # a row may not take a key away from its own name
            own = [key for key in declared(ROOTS[tree]) if key.rsplit(".", 1)[-1] == name]
            if len(own) == 1 and name not in ("loss_type", "reward", "delta"):
                assert row.key_in(tree) == own[0], f"{tree}: {name}"


@pytest.mark.parametrize(
    ("tree", "words", "expected"),
    [
        ("ppo_trainer", ["lr=1e-5"], {f"{ACTOR}.optim.lr": 1e-5, "critic.optim.lr": 1e-5}),
        ("ppo_trainer", ["learning_rate=2e-5"], {f"{ACTOR}.optim.lr": 2e-5}),
        ("sft_trainer", ["learning_rate=2e-5"], {"optim.lr": 2e-5}),
        ("dpo_trainer", ["beta=0.3"], {"dpo.beta": 0.3}),
        ("ppo_trainer", ["beta=0.04"], {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.04}),
        ("ppo_trainer", ["beta=0"], {f"{ACTOR}.use_kl_loss": False}),
        ("ppo_trainer", ["num_generations=4"], {f"{ROLLOUT}.n": 4, f"{ACTOR}.rollout_n": 4}),
        ("ppo_trainer", ["max_steps=9"], {"trainer.total_training_steps": 9}),
        ("ppo_trainer", ["max_steps=-1"], {"trainer.total_training_steps": None}),
        ("sft_trainer", ["max_steps=9"], {"trainer.total_training_steps": 9}),
        ("ppo_trainer", ["num_train_epochs=2.0"], {"trainer.total_epochs": 2}),
        ("ppo_trainer", ["output_dir=here"], {"trainer.default_local_dir": "here"}),
        ("ppo_trainer", ["run_name=mine"], {"trainer.default_local_dir": "checkpoints/hybridrl/mine"}),
        ("ppo_trainer", ["report_to=wandb"], {"trainer.logger": ["console", "wandb"]}),
        ("ppo_trainer", ["report_to=none"], {"trainer.logger": ["console"]}),
        ("ppo_trainer", ["model=M", "data=d.jsonl"], {f"{POLICY}.model.path": "M", "data.train_files": ["d.jsonl"]}),
        ("sft_trainer", ["model=M", "train_dataset=[a,b]"], {"model.path": "M", "data.train_files": ["a", "b"]}),
        ("ppo_trainer", ["eval_data=v.jsonl"], {"data.val_files": ["v.jsonl"]}),
        ("ppo_trainer", ["reward=r.py"], {"reward.custom_reward_function.path": "r.py"}),
        ("ppo_trainer", ["reward_funcs=r.py:f"], {"reward.custom_reward_function.name": "f"}),
        (
            "ppo_trainer",
            ["reward=[r.py:f,g.py]"],
            {"reward.functions": {"f": {"path": "r.py", "name": "f"}, "g": {"path": "g.py"}}},
        ),
        ("ppo_trainer", ["lora_rank=8", "lora_alpha=4"], {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora_alpha": 4}),
        ("rm_trainer", ["lora_rank=8"], {"model.lora_rank": 8}),
        ("ppo_trainer", ["max_completion_length=99"], WIDTHS),
        ("ppo_trainer", ["loss_type=dr_grpo"], {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}),
        ("ppo_trainer", ["loss_type=cispo"], {f"{ACTOR}.policy_loss.loss_mode": "cispo"}),
        ("dpo_trainer", ["loss_type=[ipo]"], {"dpo.loss_type": "ipo"}),
        ("ppo_trainer", ["importance_sampling_level=sequence"], {f"{ACTOR}.policy_loss.loss_mode": "gspo"}),
        ("ppo_trainer", ["scale_rewards=none"], {"algorithm.norm_adv_by_std_in_grpo": False}),
        ("ppo_trainer", ["epsilon=0.1"], {f"{ACTOR}.clip_ratio_low": 0.1, f"{ACTOR}.clip_ratio_high": 0.1}),
        ("ppo_trainer", ["epsilon=0.1", "epsilon_high=0.3"], {f"{ACTOR}.clip_ratio_high": 0.3}),
        ("ppo_trainer", ["warmup_steps=0.1"], {f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1}),
        ("ppo_trainer", ["warmup_steps=7"], {f"{ACTOR}.optim.lr_warmup_steps": 7}),
        ("sft_trainer", ["adam_beta2=0.95"], {"optim.betas": [0.9, 0.95]}),
        ("sft_trainer", ["optim=adamw_8bit"], EIGHT_BITS),
        ("sft_trainer", ["save_strategy=epoch"], {"trainer.save_freq": "after_each_epoch"}),
        ("ppo_trainer", ["save_steps=5", "eval_steps=3"], {"trainer.save_freq": 5, "trainer.test_freq": 3}),
        ("ppo_trainer", ["total_epochs=3"], {"trainer.total_epochs": 3}),
        ("ppo_trainer", ["adv_estimator=rloo"], {"algorithm.adv_estimator": "rloo"}),
        ("dpo_trainer", ["precompute_ref_log_probs=true"], {"dpo.reference": "cache"}),
        ("kto_trainer", ["beta=0.2", "desirable_weight=2"], {"kto.beta": 0.2, "kto.desirable_weight": 2.0}),
        ("kto_trainer", ["train_sampling_strategy=sequential"], {"data.shuffle": False}),
        ("rm_trainer", ["center_rewards_coefficient=0.01"], {"rm.centering_coef": 0.01}),
        ("ppo_trainer", ["use_vllm=true"], {f"{ROLLOUT}.name": "vllm"}),
        ("ppo_trainer", ["bf16=false"], {f"{ACTOR}.fsdp_config.dtype": "float32"}),
    ],
)  # fmt: skip
def test_names_mean_what_they_say(tree: str, words: list[str], expected: dict[str, Any]) -> None:
    expected = {key: value for key, value in expected.items() if key != "critic.optim.lr"}
    found = values(tree, *words)
    assert {key: found(key) for key in expected} == expected


def test_one_seed_is_every_seed_that_acts_and_no_other() -> None:
    found = values("ppo_trainer", "seed=7")
    assert [found(key) for key in ("data.seed", f"{ROLLOUT}.seed", f"{ACTOR}.fsdp_config.seed")] == [7, 7, 7]
    assert (found(f"{ACTOR}.megatron.seed"), found(f"{ACTOR}.data_loader_seed")) == (42, 42)
    found = values("ppo_trainer", "seed=7", f"{ACTOR}.shuffle=true", f"{ROLLOUT}.seed=1")
    assert (found(f"{ACTOR}.data_loader_seed"), found(f"{ROLLOUT}.seed")) == (7, 1)
    found = values("ppo_trainer", "seed=7", "model_engine=megatron")
    assert (found(f"{ACTOR}.megatron.seed"), found(f"{ACTOR}.fsdp_config.seed")) == (7, 42)
    found = values("sft_trainer", "seed=7", "shuffle=false")
    assert (found("data.seed"), found("engine.seed")) == (None, 7)
    with pytest.raises(ConfigError) as caught:
        composed("sft_trainer", "seed=-1")
    assert any(fault.startswith("data.seed=-1") for fault in caught.value.faults)


@given(
    per_device=st.integers(1, 16),
    accumulation=st.integers(1, 6),
    generations=st.integers(1, 5),
    n=st.integers(1, 8),
    processes=st.integers(1, 4),
)
def test_batches_are_those_of_trl(per_device: int, accumulation: int, generations: int, n: int, processes: int) -> None:
    """Independent of the code: TRL's sizes in responses, counted over all processes."""
    per_update = per_device * accumulation * processes
    per_generation = per_device * accumulation * generations * processes
    words = [f"per_device_train_batch_size={per_device}", f"gradient_accumulation_steps={accumulation}"]
    words += [f"steps_per_generation={accumulation * generations}", f"num_generations={n}"]
    words += [f"n_gpus_per_node={processes}", "max_steps=100", "save_steps=10"]
    if per_update % n:
        with pytest.raises(ConfigError) as caught:
            composed("ppo_trainer", *words)
        assert f"num_generations={n}" in caught.value.faults[0]
        return
    found = values("ppo_trainer", *words)
    assert found("data.train_batch_size") * n == per_generation
    assert found(f"{ACTOR}.ppo_mini_batch_size") * n == per_update
    assert found(f"{ACTOR}.ppo_micro_batch_size_per_gpu") == per_device
    updates = found("trainer.total_training_steps") * per_generation // per_update
    assert 100 <= updates < 100 + generations, "TRL counts updates"


def test_batches_of_rows() -> None:
    found = values("sft_trainer", "per_device_train_batch_size=4", "gradient_accumulation_steps=3", "n_gpus_per_node=2")
    assert (found("data.train_batch_size"), found("data.micro_batch_size_per_gpu")) == (24, 4)
    found = values("sft_trainer", "per_device_train_batch_size=4", "train_batch_size=64")
    assert (found("data.train_batch_size"), found("data.micro_batch_size_per_gpu")) == (64, 4)
    found = values("ppo_trainer", "per_device_train_batch_size=4", "train_batch_size=64", "ppo_mini_batch_size=64")
    assert (found("data.train_batch_size"), found(f"{ACTOR}.ppo_micro_batch_size_per_gpu")) == (64, 4)
    with pytest.raises(ConfigError) as caught:
        composed("sft_trainer", "gradient_accumulation_steps=3", "train_batch_size=64")
    assert caught.value.faults[0].startswith("data.train_batch_size=64")


def test_names_without_effect_are_told_and_others_refused() -> None:
    notices = composed("ppo_trainer", "logging_steps=3", "remove_unused_columns=false").notices
    assert [notice.split("=")[0] for notice in notices] == ["logging_steps", "remove_unused_columns"]
    for word in (
        "fp16=true",
        "push_to_hub=true",
        "min_p=0.1",
        "loss_type=bnpo",
        "num_train_epochs=0.5",
        "optim=lion_32bit",
    ):
        with pytest.raises(ConfigError) as caught:
            composed("ppo_trainer", word)
        assert caught.value.faults[0].startswith(f"{word.split('=')[0]}=")
    assert composed("ppo_trainer", "fp16=false", "min_p=0").notices == []


NEAREST = {
    "lerning_rate": "learning_rate", "learningrate": "learning_rate", "num_generation": "num_generations",
    "generations": "num_generations", "n_samples": "num_generations", "max_step": "max_steps",
    "num_steps": "max_steps", "epochs": "num_train_epochs",  "output": "output_dir",
    "ouput_dir": "output_dir", "out_dir": "output_dir", "reportto": "report_to", "wandb": "report_to",
    "eval_datas": "eval_data", "evaldata": "eval_data", "validation_data": "val_data", "lora_rnk": "lora_rank",
    "batch_size": "train_batch_size", "batchsize": "train_batch_size", "totl_epochs": "total_epochs",
    "device_batch_size": "per_device_train_batch_size", "grad_accumulation_steps": "gradient_accumulation_steps",
    "completion_length": "max_completion_length",  "clip_range": "epsilon",
    "reward_fn": "reward", "random_seed": "seed", "num_gpus": "n_gpus_per_node", "temprature": "temperature",
    "warmup": "warmup_steps", "grad_clip": "max_grad_norm", "init_kl_coef": "beta", "save_step": "save_steps",
}  # fmt: skip


@pytest.mark.parametrize("written", NEAREST)
def test_the_nearest_name_is_the_one_that_was_meant(written: str) -> None:
    text = nearest_names("ppo_trainer", written)
    assert (
        text.startswith("; nearest: ")
        and NEAREST[written] in text.removeprefix("; nearest: ").replace(",", " ").split()
    )
    with pytest.raises(ConfigError) as caught:
        composed("ppo_trainer", f"{written}=1")
    assert caught.value.faults == [f"{written}=: no setting is called so{text}"]


def test_trls_names_are_understood_where_they_were_unknown() -> None:
    """The nearest keys of these were of something else."""
    known = accepted("ppo_trainer")
    names = (
        "learning_rate",
        "num_generations",
        "max_steps",
        "beta",
        "output_dir",
        "report_to",
        "eval_data",
        "lora_rank",
    )
    assert not [name for name in names if name not in known]
    assert {other for names in OTHER_WORDS.values() for other in names} - {"callbacks"} <= {
        name for tree in TREES for name in accepted(tree)
    }


def test_names_and_keys_may_not_differ() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config("ppo_trainer", ["gradient_accumulation_steps=2"], settings={"data.train_batch_size": 5})
    assert any(fault.startswith("data.train_batch_size=5") for fault in caught.value.faults)
    names = ShortSettings()
    names.read("ppo_trainer", "max_steps", 3)
    names.read("ppo_trainer", "total_training_steps", 4)
    assert names.faults[0].startswith("total_training_steps=4")


def test_groups_and_whole_keys_keep_their_meaning(tmp_path: Path) -> None:
    assert values("ppo_trainer", "model_engine=megatron")("critic.strategy") == "megatron"
    assert composed("ppo_trainer", "model@actor_rollout_ref.model=hf_model").config is not None
    (tmp_path / "mine.yaml").write_text("algorithm: {adv_estimator: rloo}\n")
    config = compose_config("ppo_trainer", ["lr=3e-6"], tmp_path, "mine").config
    assert value_at(config, "algorithm.adv_estimator") == "rloo" and value_at(config, f"{ACTOR}.optim.lr") == 3e-6


def test_help_lists_names_and_explains_one(capsys: pytest.CaptureFixture[str]) -> None:
    cli("ppo_trainer", lambda config: None, ["--help"], command="hybridrl grpo", defaults={f"{ROLLOUT}.n": 8})
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "num_generations, n: samples per prompt [8]" in text and "lr, learning_rate: peak learning rate [1e-06]" in text
    )
    for name, row in rows("ppo_trainer").items():
        listed = f"{name}:" in text or f"{name}, " in text
        assert listed == (not row.idle and not row.refused), name
    cli("ppo_trainer", lambda config: None, ["--help", "learning_rate"])
    out = capsys.readouterr().out
    assert f"{ACTOR}.optim.lr" in out and "1e-06" in out and "at least 0" in out
    cli("ppo_trainer", lambda config: None, ["--help", "algorithm.adv_estimator"])
    assert "grpo" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli("ppo_trainer", lambda config: None, ["--help", "lerning_rate"])
    assert ended.value.code == 2 and "learning_rate" in capsys.readouterr().err
    assert explain("ppo_trainer", "fp16", {}) and placed("sft_trainer", "{rollout}.n") is None
