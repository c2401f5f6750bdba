"""LoRA in whole runs: the policy is its own reference, the probe, resuming, what checkpoints hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from raising import raises_with
from test_trainer_sft import configured, conversations, records  # noqa: F401 (a fixture)
from trainer_tools import trained
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.checkpoint.merge import main as merge
from hybridrl.config import load_config
from hybridrl.config.checks.check_run import check
from hybridrl.errors import ConfigError, ModelError, RolloutError
from hybridrl.models.work import training_flops
from hybridrl.rollout import resolve_rollout
from hybridrl.trainer.ppo.adapter_probe import AdapterProbe, measure
from hybridrl.trainer.ppo.prepare_ppo import prepare
from hybridrl.trainer.ppo.run_ppo import started_trainer
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.supervised.run_supervised import run_supervised

TESTS = Path(__file__).parents[1]
MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def grpo(micro_model: Path, sort_data: Path) -> list[str]:
    return [
        f"{MODEL}.path={micro_model}",
        f"{MODEL}.lora_rank=4",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={TESTS.parent / 'recipes' / 'smoke_reward.py'}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=7",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.optim.lr=3e-2",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.threads_per_worker=1",
        "trainer.logger=[]",
        "trainer.report=False",
        "trainer.total_training_steps=3",
    ]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from hybridrl.engine.saved_slices import SavedSlices

    with SavedSlices(folder) as saved:
        return dict(saved.whole_tensors())


def check_that_flops_are_those_of_frozen_weights(trainer: RayPPOTrainer, path: Path) -> None:
    """As if an update of two sequences had taken each of the two ranks a second."""
    config = AutoConfig.from_pretrained(path)
    for role, name, is_value in (("actor_rollout", "actor", False), ("critic", "critic", True)):
        measured = trainer.utilization[role]
        measured.measure([20, 30], 14)
        measured._group.method_seconds[measured._method] += 1.0
        frozen, whole = (training_flops(config, [20, 30], 14, is_value, frozen=frozen) for frozen in (True, False))
        assert frozen is not None and whole is not None and frozen < 0.8 * whole
        assert measured.measure([20, 30], 14)[f"perf/tflops/{name}"] == pytest.approx(frozen / 2e12)


@pytest.mark.slow
def test_a_run_of_ppo_is_its_own_reference_resumes_bitwise_and_exports(
    ray_session: None, grpo: list[str], micro_model: Path, tmp_path: Path
) -> None:
    """Policy and critic with adapters on two ranks; no model of a reference is loaded."""
    words = [
        *grpo,
        "algorithm.adv_estimator=gae",
        f"critic.model.path={micro_model}",
        "critic.model.lora_rank=2",
        "critic.optim.lr=1e-2",
        "trainer.n_gpus_per_node=2",
        "trainer.save_freq=2",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with trained(*words, f"trainer.default_local_dir={whole}") as (trainer, result):
        assert set(trainer.groups) == {"actor_rollout", "critic"}
        check_that_flops_are_those_of_frozen_weights(trainer, micro_model)
        fields = result.batch.batch
        mask = fields["response_mask"].bool()
        base = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32)
        with torch.no_grad():
            logits = base(
                fields["input_ids"], attention_mask=fields["attention_mask"], position_ids=fields["position_ids"]
            ).logits[:, -mask.shape[1] - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, fields["responses"][..., None])[..., 0]
        torch.testing.assert_close(fields["ref_log_prob"][mask], expected[mask], atol=1e-5, rtol=1e-5)
        assert (fields["old_log_probs"] - fields["ref_log_prob"])[mask].abs().max() > 1e-2
        assert trainer.learner.adapter_probe.done
        assert result.metrics["actor/kl_loss"] > 0
    with trained(
        *words,
        f"trainer.default_local_dir={parts}",
        "trainer.total_training_steps=2",
        f"{ACTOR}.optim.total_training_steps=3",
        "critic.optim.total_training_steps=3",
    ):
        pass
    with trained(*words, f"trainer.default_local_dir={parts}"):
        pass
    for role in ("actor", "critic"):
        for part in ("model", "optimizer"):
            one, other = (tensors(run / "global_step_3" / role / part) for run in (whole, parts))
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
            assert all("lora_" in name or "score." in name for name in one)
    saved = whole / "global_step_3" / "actor"
    assert merge([str(saved), "--out", str(tmp_path / "merged")]) == 0
    assert merge([str(whole / "global_step_3" / "critic"), "--out", str(tmp_path / "values")]) == 0
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (saved / "hf_model", tmp_path / "merged")]
    for folder in (saved / "hf_model", tmp_path / "merged"):
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(micro_model), folder / "lora_adapter")
        models.append(loaded.merge_and_unload())
    ids = torch.arange(60, 70)[None]
    with torch.no_grad():
        found = [model(ids).logits for model in models]
    assert all(torch.allclose(one, found[0], atol=1e-5) for one in found)
    assert not torch.allclose(base(ids).logits, found[0], atol=1e-3)
    told = json.loads((tmp_path / "merged" / "lora_adapter" / "adapter_config.json").read_text())
    assert (told["r"], told["peft_type"], told["base_model_name_or_path"]) == (4, "LORA", str(micro_model))
    assert merge([str(saved), "--out", str(tmp_path / "no"), "--model", str(tmp_path / "merged")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("last", [1, 0], ids=["new", "loaded"])
def test_an_engine_that_ignores_the_adapter_is_caught(
    ray_session: None, grpo: list[str], micro_model: Path, tmp_path: Path, last: int
) -> None:
    """A new adapter is 0 in step 1, which shows nothing, and step 2 stops the run; a loaded one shows at once."""
    words = [
        f"actor_rollout_ref.rollout.name={TESTS / 'trainer' / 'deaf_engine.py'}:DeafEngine",
        "algorithm.rollout_correction.probe_threshold=null",
    ]
    if last == 0:
        words += [f"{MODEL}.lora_rank=0", f"{MODEL}.lora_adapter_path={_adapter(micro_model, tmp_path / 'adapter')}"]
    config = load_config("ppo_trainer", [*grpo, *words, f"trainer.default_local_dir={tmp_path}"])
    with pytest.raises(RolloutError, match="does not use the adapter"), started_trainer(config) as trainer:
        trainer.fit()
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    assert max((json.loads(line)["step"] for line in lines), default=0) == last


def _adapter(model: Path, folder: Path) -> Path:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(plain, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    adapted.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_an_engine_that_gets_merged_weights_passes(ray_session: None, grpo: list[str], tmp_path: Path) -> None:
    """The samples of step 2 follow the adapter, by log-probabilities that agree with the trainer's."""
    words = [
        f"actor_rollout_ref.rollout.name={TESTS / 'rollout' / 'plain_engine.py'}:PlainEngine",
        "trainer.total_training_steps=2",
        "trainer.save_last=False",
        f"{ACTOR}.kl_loss_type=full",  # the reference over the vocabulary, by the worker itself
    ]
    with trained(*grpo, *words, f"trainer.default_local_dir={tmp_path}") as (trainer, result):
        assert trainer.learner.adapter_probe.done
        assert result.metrics["rollout_corr/adapter_share"] == pytest.approx(1, abs=1e-3)
        assert result.metrics["actor/kl_loss"] > 0
        fields = result.batch.batch
        mask = fields["response_mask"].bool()
        torch.testing.assert_close(fields["old_log_probs"][mask], fields["rollout_log_probs"][mask], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_fine_tuning_trains_the_adapter_alone(
    ray_session: None,
    micro_model: Path,
    conversations: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = ["model.lora_rank=4", "trainer.save_freq=3", "optim.lr_scheduler_type=constant"]
    run_supervised(configured(micro_model, conversations, tmp_path, 1, *words, "trainer.total_training_steps=6"))
    losses = [record["train/loss"] for record in records(tmp_path) if "train/loss" in record]
    assert len(losses) == 6 and losses[-1] < losses[0]
    saved = tmp_path / "global_step_6" / "model"
    assert all("lora_" in name for name in tensors(saved / "model"))
    base, merged = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (micro_model, saved / "hf_model")
    )
    changed = {name.split(".")[-2] for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    assert changed == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def _samples(share: float, noise: float, effect: float, tokens: int = 400) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    base = -torch.rand(1, tokens, generator=generator)
    adapted = base + effect * torch.randn(1, tokens, generator=generator)
    sampler = base + share * (adapted - base) + 0.03 + noise * torch.randn(1, tokens, generator=generator)
    return adapted, base, sampler, torch.ones(1, tokens)


def test_the_probe_decides_by_more_than_chance() -> None:
    for share in (0.0, 1.0):
        found = measure(*_samples(share, noise=0.02, effect=0.02))
        assert found is not None and found.decides and found.share == pytest.approx(share, abs=3 * found.error)
    unclear = measure(*_samples(0.0, noise=0.02, effect=1e-3))
    assert unclear is not None and not unclear.decides  # the noise is 20 times the effect
    assert measure(*_samples(0.0, noise=0.02, effect=0.0)) is None
    probe = AdapterProbe()
    assert probe.check(*_samples(0.0, noise=0.02, effect=0.0)) == {} and not probe.done
    assert probe.check(*_samples(1.0, 0.02, 0.02))["rollout_corr/adapter_share"] == pytest.approx(1, abs=0.2)
    assert probe.done
    with pytest.raises(RolloutError, match="model without it"):
        AdapterProbe().check(*_samples(0.0, 0.02, 0.02))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{MODEL}.target_modules=[q_proj,w_pack]"], r"no linear layer w_pack; there are q_proj, .*down_proj"),
        ([f"{MODEL}.lora.target_modules=[linear_qkv]"], r"no linear layer linear_qkv; there are q_proj"),
        ([f"{MODEL}.target_modules='.*nothing'"], r"matches the whole name of no linear layer, such as model\.layers"),
        ([f"{MODEL}.exclude_modules=[lm_head]"], r"exclude_modules: this model has no linear layer lm_head"),
        ([f"{MODEL}.exclude_modules='.*'"], r"leave no layer for the adapter"),
        ([f"{MODEL}.lora_adapter_path=HERE"], r"holds no adapter of PEFT \(adapter_config\.json is missing\)"),
        ([f"{ACTOR}.optim.optimizer=Muon"], r"lora_rank=4 with optim\.optimizer=Muon"),
        ([f"{ACTOR}.use_torch_compile=True"], r"use_torch_compile=True with model\.lora_rank"),
        ([f"{ACTOR}.strategy=megatron"], r"strategy=megatron with model\.lora_rank.*HasAdapters.*fsdp2"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    grpo: list[str], tmp_path: Path, words: list[str], message: str
) -> None:
    given = [word.replace("HERE", str(tmp_path)) for word in words]
    config = load_config("ppo_trainer", [*grpo, *given, f"trainer.default_local_dir={tmp_path}"])
    with pytest.raises(ModelError, match=message):
        prepare(config)


def test_settings_that_exclude_each_other(grpo: list[str]) -> None:
    transfer = "actor_rollout_ref.rollout.checkpoint_engine"
    for word in (f"{transfer}.method=planned", f"{transfer}.check_weights=True"):
        with raises_with(ConfigError, "lora_rank"):
            check(load_config("ppo_trainer", [*grpo, "actor_rollout_ref.rollout.name=vllm", word]))
    assert not any("with an adapter" in notice for notice in check(load_config("ppo_trainer", grpo)))
    for word in ("fsdp_config.param_offload=True", "fsdp_config.seed=5", "strategy=megatron"):
        notices = check(load_config("ppo_trainer", [*grpo, f"actor_rollout_ref.ref.{word}"]))
        assert any(f"actor_rollout_ref.ref.{word} has no effect" in notice for notice in notices)
    with raises_with(ConfigError, "lora.dropout"):
        load_config("ppo_trainer", [*grpo, f"{MODEL}.lora.dropout=0.1"])


def test_settings_of_verls_script_for_lora_pass(grpo: list[str]) -> None:
    model = ["use_shm=True", "lora_rank=64", "lora_alpha=32", "target_modules=all-linear", "exclude_modules=null"]
    more = ["rollout.load_format=safetensors", "rollout.layered_summon=True", "ref.fsdp_config.param_offload=True"]
    words = [*(f"{MODEL}.{word}" for word in model), *(f"actor_rollout_ref.{word}" for word in more)]
    config = load_config("ppo_trainer", [*grpo, *words])
    check(config)
    assert config.actor_rollout_ref.model.lora_rank == 64 and config.actor_rollout_ref.rollout.load_format == "auto"


def test_an_adapter_alone_is_sent_to_engines_that_take_one(grpo: list[str]) -> None:
    rollout = "actor_rollout_ref.rollout"

    def resolved(*words: str) -> str:
        return resolve_rollout(load_config("ppo_trainer", [*grpo, *words]).actor_rollout_ref)

    engine = f"{rollout}.name={TESTS / 'rollout' / 'plain_engine.py'}:PlainEngine"
    alone = f"{rollout}.lora_transfer=adapter"
    with raises_with(RolloutError, "lora_transfer=adapter", "plain_engine", "lora_transfer=merged"):
        resolved(engine, alone)
    with raises_with(RolloutError, "lora_transfer=adapter"):
        resolved(engine, alone, f"{MODEL}.lora_rank=0")
    assert resolved(alone) == "hf"


def test_verls_group_of_an_adapter_means_the_same(micro_model: Path) -> None:
    words: list[Any] = ["rank=8", "alpha=32", "target_modules=[q_proj]", "exclude_modules=[v_proj]", "merge=True"]
    model = load_config("ppo_trainer", [f"{MODEL}.lora.{word}" for word in words]).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 32, ["q_proj"])
    assert model.exclude_modules == ["v_proj"] and model.adapted
    flat = load_config("sft_trainer", ["model.lora_rank=4", "model.lora.rank=8"]).model
    assert flat.lora_rank == 4 and flat.target_modules == "all-linear"
