"""LoRA on the FSDP2 engine: against PEFT's own loop, the base, the merged model, and one rank against two."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import (
    TEMPERATURE,
    full_kl_loss,
    make_batch,
    make_engine,
    make_fields,
    plain_outputs,
    policy_loss,
    value_loss,
    weights,
)
from peft import LoraConfig, PeftModel, get_peft_model
from raising import raises_with
from ranks import spawn
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2MoeConfig

from hybridrl.config import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.adapted import BASE_FILE
from hybridrl.errors import ModelError
from hybridrl.models import lora
from hybridrl.models.tiny import build_tokenizer
from hybridrl.utils import distributed
from hybridrl.utils.metrics import merge_metrics

FIELDS = make_fields()
MODEL = {"lora_rank": 4, "lora_alpha": 8}
EPS = {"override_optimizer_config": {"eps": 1e-5}}
PARTS = ("model", "optimizer", "extra")
SPLIT = 9  # rank 0 works on 9 rows, rank 1 on 3


def train(
    engine: Any, steps: int, batch: Any = None, loss: Any = policy_loss, **options: Any
) -> list[dict[str, float]]:
    batch = make_batch(FIELDS) if batch is None else batch
    results = []
    for _ in range(steps):
        with engine.loaded(optimizer=True):
            own = engine.train_batch(batch, MicroBatching(size=4), loss, TEMPERATURE, **options)
        merged = merge_metrics(distributed.all_gather_object(own))
        results.append({name: float(metric.value) for name, metric in merged.items()})
    return results


def log_probs(engine: Any) -> torch.Tensor:
    with engine.loaded():
        return engine.infer(make_batch(FIELDS), MicroBatching(size=5), TEMPERATURE)["log_probs"]


def adapter(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_adapter()}


def close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=atol, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


def test_a_new_adapter_changes_nothing_and_starts_as_pefts_does(micro_model: Path) -> None:
    engine = make_engine(micro_model, model=MODEL)
    assert torch.equal(log_probs(engine), log_probs(make_engine(micro_model)))
    for name, tensor in adapter(engine).items():
        if "lora_B" in name:
            assert not tensor.any()
        else:  # uniform: its deviation is the bound by the root of 3
            bound = 1 / math.sqrt(tensor.shape[1])
            assert tensor.abs().max() <= bound and tensor.std() == pytest.approx(bound / math.sqrt(3), rel=0.3)
    again = make_engine(micro_model, model=MODEL)
    assert all(torch.equal(tensor, adapter(engine)[name]) for name, tensor in adapter(again).items())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_three_steps_equal_a_plain_loop_of_peft(micro_model: Path, checkpointing: bool) -> None:
    engine = make_engine(
        micro_model,
        optim=EPS,
        model={**MODEL, "enable_gradient_checkpointing": checkpointing, "use_fused_kernels": True},
    )
    base = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32)
    plain = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    first = {name.replace(".weight", ".default.weight"): tensor for name, tensor in adapter(engine).items()}
    assert not plain.load_state_dict(first, strict=False).unexpected_keys
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.01, eps=1e-5)
    mask = FIELDS["response_mask"]
    for step, got in enumerate(train(engine, 3, entropy=True)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step / 2 if step < 2 else 1 - (step - 2) / 6)
        found, entropies = plain_outputs(plain, FIELDS)
        loss = -((found * FIELDS["advantages"] + 0.01 * entropies) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.step()
        assert got["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
        assert got["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    close(adapter(engine), {name.replace(".default.", "."): p.detach() for name, p in trained.items()})
    close(weights(engine), {name: p.detach() for name, p in plain.merge_and_unload().named_parameters()})


def test_merged_adapted_and_exported_models_agree_and_without_it_is_the_base(micro_model: Path, tmp_path: Path) -> None:
    engine = make_engine(micro_model, model={**MODEL, "target_modules": ["q_proj", "down_proj"]})
    base = make_engine(micro_model)
    train(engine, 4)
    ours = log_probs(engine)
    assert (ours - log_probs(base)).abs().max() > 1e-2
    with engine.without_adapter():
        assert torch.equal(log_probs(engine), log_probs(base))
        with engine.without_adapter():
            pass
        assert torch.equal(log_probs(engine), log_probs(base))
    assert torch.equal(log_probs(engine), ours)
    frozen = dict(base.export_weights())
    changed = {name for name, tensor in engine.export_weights() if not torch.equal(tensor, frozen[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
    half = dict(engine.export_weights(torch.bfloat16))
    for name, tensor in engine.export_weights():  # rounded by chance where the adapter is merged
        assert (half[name].float() - tensor).abs().le(tensor.abs() * 2**-7).all()
        assert name in changed or torch.equal(half[name], tensor.bfloat16())
    assert engine.weight_bytes() == sum(tensor.nbytes for _, tensor in engine.export_weights())
    engine.save(tmp_path, ["hf_model"])
    merged = make_engine(tmp_path / "hf_model")
    torch.testing.assert_close(log_probs(merged), ours, atol=1e-5, rtol=1e-5)
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32), tmp_path / "hf_model" / lora.FOLDER
    )
    with torch.no_grad():
        torch.testing.assert_close(plain_outputs(loaded, FIELDS)[0], ours, atol=1e-5, rtol=1e-5)
    further = make_engine(micro_model, model={"lora_adapter_path": str(tmp_path / "hf_model" / lora.FOLDER)})
    assert torch.equal(log_probs(further), ours)
    close(adapter(further), adapter(engine), atol=0)


@pytest.mark.parametrize("kind", ["experts", "transposed"])
def test_experts_and_routers_stay_frozen_and_transposed_weights_are_merged(kind: str, tmp_path: Path) -> None:
    """Qwen2-MoE keeps all experts of a layer in one tensor; GPT-2's layers have W transposed."""
    sizes: dict[str, Any] = {"vocab_size": 263, "bos_token_id": None, "eos_token_id": 3}
    if kind == "transposed":
        config: Any = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **sizes)
    else:
        config = Qwen2MoeConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            **sizes,
        )
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    engine = make_engine(tmp_path, model=MODEL)
    assert not any(".experts." in name or ".mlp.gate." in name for name in engine.model_state.trainable)
    train(engine, 3)
    ours, base = log_probs(engine), make_engine(tmp_path)
    assert (ours - log_probs(base)).abs().max() > 1e-2
    assert {name for name, _ in engine.export_weights()} == {name for name, _ in base.export_weights()}
    engine.save(tmp_path / "saved", ["hf_model"])
    torch.testing.assert_close(log_probs(make_engine(tmp_path / "saved" / "hf_model")), ours, atol=1e-5, rtol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "saved" / "hf_model" / lora.FOLDER)
    with torch.no_grad():
        torch.testing.assert_close(plain_outputs(loaded, FIELDS)[0], ours, atol=1e-5, rtol=1e-5)


def test_lower_precision_keeps_the_base_and_merges_in_float32(micro_model: Path) -> None:
    engine = make_engine(micro_model, model=MODEL, dtype="bfloat16")
    for name, parameter in engine.module.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
    train(engine, 3)
    assert {tensor.dtype for tensor in adapter(engine).values()} == {torch.float32}
    own, base = adapter(engine), dict(make_engine(micro_model, dtype="bfloat16").export_weights(torch.bfloat16))
    name = "model.layers.1.mlp.up_proj"
    a, b = (own[f"base_model.model.{name}.lora_{part}.weight"].float() for part in "AB")
    expected = base[f"{name}.weight"].float() + 2.0 * b @ a
    sent = dict(engine.export_weights(torch.bfloat16))
    assert torch.equal(dict(engine.export_weights())[f"{name}.weight"], expected)
    torch.testing.assert_close(sent[f"{name}.weight"].float(), expected, atol=1e-2, rtol=1e-2)
    assert engine.weight_bytes(torch.bfloat16) == sum(tensor.nbytes for tensor in sent.values())


def test_a_small_change_of_a_half_precision_base_reaches_a_sampler(micro_model: Path, tmp_path: Path) -> None:
    """To the nearest number of bfloat16, nearly nothing of an adapter after its first updates would be left."""
    path = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.bfloat16).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    engine, base = make_engine(path, model=MODEL), make_engine(path)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(1e-5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).sign())
    whole, frozen = dict(engine.export_weights()), dict(base.export_weights())
    sent = dict(engine.export_weights(torch.bfloat16))
    assert all(torch.equal(tensor, sent[name]) for name, tensor in engine.export_weights(torch.bfloat16))
    wanted = {name: tensor - frozen[name] for name, tensor in whole.items() if not torch.equal(tensor, frozen[name])}

    def share(rounded: Mapping[str, torch.Tensor]) -> float:
        product = sum(((rounded[name].float() - frozen[name]) * change).sum() for name, change in wanted.items())
        return float(product / sum(change.square().sum() for change in wanted.values()))

    assert share({name: tensor.bfloat16() for name, tensor in whole.items()}) < 0.2
    assert share(sent) == pytest.approx(1, abs=0.2)


def test_the_optimizer_holds_the_adapter_alone(micro_model: Path) -> None:
    whole, small = make_engine(micro_model), make_engine(micro_model, model=MODEL)
    for engine in (whole, small):
        train(engine, 1)
    held = [
        sum(tensor.nbytes for state in engine.model_state.optimizer.state.values() for tensor in state.values())
        for engine in (whole, small)
    ]
    assert held[1] <= held[0] / 2 and small.first_step_bytes() <= whole.first_step_bytes() / 2
    frozen = [p for name, p in small.module.named_parameters() if not lora.is_own(name)]
    assert frozen and not any(p.requires_grad or p.grad is not None for p in frozen)


def test_the_reference_over_the_vocabulary_is_the_model_without_the_adapter(micro_model: Path) -> None:
    own, other = (make_engine(micro_model, optim=EPS, model=MODEL) for _ in range(2))
    own.compare_with(own)
    other.compare_with(make_engine(micro_model))
    assert train(own, 3, loss=full_kl_loss, ref_kl=True) == train(other, 3, loss=full_kl_loss, ref_kl=True)
    close(adapter(own), adapter(other), atol=0)
    assert own.infer(make_batch(FIELDS), MicroBatching(), TEMPERATURE, ("ref_kl",))["ref_kl"].abs().max() > 1e-4


def test_a_critic_trains_its_head_as_a_whole(micro_model: Path, tmp_path: Path) -> None:
    engine = make_engine(micro_model, "value_model", model=MODEL)
    assert {name for name in engine.model_state.trainable if not lora.is_own(name)} == {"score.weight", "score.bias"}
    first = train(engine, 8, loss=value_loss)
    assert first[-1]["loss"] < first[0]["loss"]
    values = engine.infer(make_batch(FIELDS), MicroBatching(), outputs=("values",))["values"]
    engine.save(tmp_path, [*PARTS, "hf_model"])
    resumed = make_engine(micro_model, "value_model", model=MODEL)
    resumed.load(tmp_path, PARTS)
    path = str(tmp_path / "hf_model" / lora.FOLDER)
    merged = make_engine(tmp_path / "hf_model", "value_model")
    loaded = make_engine(micro_model, "value_model", model={"lora_adapter_path": path})
    for other in (resumed, loaded):  # the weights are the same; sums of one kernel may differ with where they lie
        for name, weight in engine.model_state.trainable.items():
            assert torch.equal(weight, other.model_state.trainable[name]), name
    for other, tolerance in ((resumed, 1e-6), (loaded, 1e-6), (merged, 1e-5)):
        found = other.infer(make_batch(FIELDS), MicroBatching(), outputs=("values",))["values"]
        torch.testing.assert_close(found, values, atol=tolerance, rtol=tolerance)
    told = json.loads((tmp_path / "hf_model" / lora.FOLDER / lora.CONFIG_FILE).read_text())
    assert told["task_type"] == "TOKEN_CLS" and told["modules_to_save"] == ["score"]


@pytest.mark.parametrize("how", [{}, {"dtype": "bfloat16", "param_offload": True, "optimizer_offload": True}])
@pytest.mark.parametrize("optim", [EPS, {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"}])
def test_resuming_is_bitwise(micro_model: Path, tmp_path: Path, how: dict[str, Any], optim: dict[str, Any]) -> None:
    engine, resumed = (make_engine(micro_model, optim=optim, model=MODEL, **how) for _ in range(2))
    train(engine, 3)
    engine.save(tmp_path, PARTS)
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert size < sum(tensor.nbytes for tensor in weights(engine).values()) / 2
    in_background = engine.copy_state([*PARTS, "hf_model"])
    train(resumed, 1)
    resumed.load(tmp_path, PARTS)
    assert train(engine, 2) == train(resumed, 2)
    assert torch.equal(log_probs(engine), log_probs(resumed))
    close(adapter(resumed), adapter(engine), atol=0)
    in_background.write(tmp_path / "copy")  # what it was before the last two steps
    resumed.load(tmp_path / "copy", PARTS)
    train(resumed, 2)
    close(adapter(resumed), adapter(engine), atol=0)
    assert (tmp_path / "copy" / "hf_model" / lora.FOLDER / lora.WEIGHTS_FILE).is_file()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),  # B A of its start is taken from the base
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens=[5, 6]"),
        ({"rank_pattern": {"q_proj": 6}, "use_rslora": True}, None),
    ],
)
def test_adapters_that_are_no_plain_lora_are_refused(
    micro_model: Path, tmp_path: Path, words: dict[str, Any], named: str | None
) -> None:
    make_engine(micro_model, model=MODEL).save(tmp_path, ["hf_model"])
    path = tmp_path / "hf_model" / lora.FOLDER
    file = path / lora.CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | words))
    model = ModelConfig(path=str(micro_model), lora_adapter_path=str(path))
    if named is None:
        lora.check(model)
        assert lora.rank_of(model) == 6
        return
    with raises_with(ModelError, named, "LoRA"):
        lora.check(model)


def test_a_quantized_base_is_refused(micro_model: Path, tmp_path: Path) -> None:
    for file in micro_model.iterdir():
        shutil.copy(file, tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with raises_with(ModelError, "lora_rank=4", "quantized", "load_in_4bit=True", "4 bits"):
        lora.check(ModelConfig(path=str(tmp_path), **MODEL))


def test_a_checkpoint_of_another_base_or_of_whole_weights_is_refused(micro_model: Path, tmp_path: Path) -> None:
    engine = make_engine(micro_model, model=MODEL)
    engine.save(tmp_path / "adapter", PARTS)
    whole = make_engine(micro_model)
    whole.save(tmp_path / "whole", PARTS)
    with pytest.raises(ModelError, match="another model"):
        engine.load(tmp_path / "whole", ["model"])
    with pytest.raises(ModelError, match="another model"):
        whole.load(tmp_path / "adapter", ["model"])
    train(whole, 2)
    whole.save(tmp_path, ["hf_model"])
    other = make_engine(tmp_path / "hf_model", model=MODEL)
    with pytest.raises(ModelError, match="other weights"):
        other.load(tmp_path / "adapter", ["model"])
    scaled = make_engine(micro_model, model={**MODEL, "lora_alpha": 16})
    with raises_with(ModelError, "lora_alpha=8", 16, "model.lora_alpha"):
        scaled.load(tmp_path / "adapter", ["model"])
    assert (tmp_path / "adapter" / "model" / BASE_FILE).read_text().startswith("sha256:")


def _check_two_ranks(rank: int, model: Path, folder: Path, expected: Path) -> None:
    rows = slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)
    alone = torch.load(expected)
    for name, how in (("plain", {}), ("bfloat16", {"dtype": "bfloat16"})):
        engine = make_engine(model, optim=EPS, model=MODEL, **how)
        metrics = train(engine, 3, make_batch(FIELDS, rows))
        tolerance = 1e-5 if name == "plain" else 3e-2
        assert [one["loss"] for one in metrics] == pytest.approx(alone[name]["losses"], abs=tolerance)
        close(adapter(engine), alone[name]["adapter"], atol=tolerance)
        if name == "plain":
            close(weights(engine), alone[name]["weights"])
            with engine.without_adapter():
                base = engine.infer(make_batch(FIELDS, rows), MicroBatching(), TEMPERATURE)["log_probs"]
            torch.testing.assert_close(base, alone["base"][rows], atol=2e-6, rtol=1e-5)
            engine.save(folder, [*PARTS, "hf_model"])
            train(engine, 1, make_batch(FIELDS, rows))
    resumed = make_engine(model, optim=EPS, model=MODEL)
    with resumed.without_adapter():  # the first forward pass is without: the adapter must still learn after it
        resumed.infer(make_batch(FIELDS, rows), MicroBatching(), TEMPERATURE)
    resumed.load(folder, PARTS)
    again = train(resumed, 1, make_batch(FIELDS, rows))
    assert again[0]["grad_norm"] > 0 and again[0]["loss"] == pytest.approx(alone["next"], abs=1e-5)
    shared = make_engine(model, optim=EPS, model=MODEL, ulysses_sequence_parallel_size=2)
    losses = [one["loss"] for one in train(shared, 3, make_batch(FIELDS))]
    assert losses == pytest.approx([2 * one for one in alone["plain"]["losses"]], abs=2e-5)  # both tell of all rows
    close(adapter(shared), alone["plain"]["adapter"], atol=2e-5)


def test_two_ranks_are_one(micro_model: Path, tmp_path: Path) -> None:
    alone: dict[str, Any] = {"base": log_probs(make_engine(micro_model))}
    for name, how in (("plain", {}), ("bfloat16", {"dtype": "bfloat16"})):
        engine = make_engine(micro_model, optim=EPS, model=MODEL, **how)
        losses = [one["loss"] for one in train(engine, 3)]
        alone[name] = {"losses": losses, "adapter": adapter(engine), "weights": weights(engine)}
        if name == "plain":
            alone["next"] = train(engine, 1)[0]["loss"]
    torch.save(alone, tmp_path / "alone.pt")
    spawn(_check_two_ranks, 2, micro_model, tmp_path / "saved", tmp_path / "alone.pt")
    one = make_engine(micro_model, optim=EPS, model=MODEL)  # what two ranks saved
    one.load(tmp_path / "saved", PARTS)
    assert train(one, 1)[0]["loss"] == pytest.approx(alone["next"], abs=1e-5)
