"""Ulysses sequence parallelism: ranks that share sequences train as one rank does; four real processes on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from distillation_helpers import distilled, taught
from engine_helpers import (
    EXPERTS,
    FAMILIES,
    HEADS,
    TEMPERATURE,
    full_kl_loss,
    make_batch,
    make_engine,
    make_fields,
    policy_loss,
    related,
    save_model,
    value_loss,
    weights,
)
from raising import raises_with
from ranks import spawn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hybridrl.config.schema.engine import FSDPConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.errors import ModelError
from hybridrl.models import attention
from hybridrl.utils import distributed
from hybridrl.utils.metrics import merge_metrics

FIELDS = make_fields()
ROWS = len(FIELDS["input_ids"])
STEPS = 2
#: first row of each shard, so that ranks have different numbers of micro-batches
CUTS = {1: (0,), 2: (0, 9), 4: (0, 5, 6, 10)}
MODELS: dict[str, dict[str, Any]] = {
    **FAMILIES,
    # A softmax scale of its own, a window and normalised queries.
    "Gemma3Text": {**HEADS, "head_dim": 8, "query_pre_attn_scalar": 20, "sliding_window": 6},
    # A window that only the mask has.
    "Qwen2Moe": {
        **{**HEADS, **EXPERTS, "shared_expert_intermediate_size": 24},
        **{"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    },
}
#: ranks that share
SHARING: dict[str, tuple[int, ...]] = dict.fromkeys(MODELS, (2, 4))
SHARING |= {"Qwen2": (1, 2, 4), "Gemma3Text": (2,), "Qwen2Moe": (2,)}
OPTIM = {"lr_warmup_steps": 0, "override_optimizer_config": {"eps": 1e-4}}


def own_batch(engine: Any) -> Any:
    """The rows of this rank's shard; ranks that share sequences have the same."""
    geometry = engine.geometry
    cuts = (*CUTS[geometry.dp_size], ROWS)
    return make_batch(FIELDS, slice(cuts[geometry.dp_rank], cuts[geometry.dp_rank + 1]))


def collected(engine: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of all shards, from the ranks that are collected, in order."""
    found = distributed.all_gather_object((engine.geometry.collects, values))
    parts = [part for collects, part in found if collects]
    return {name: torch.cat([part[name] for part in parts]) for name in values}


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(engine: Any, loss: Any = policy_loss, micro: MicroBatching | None = None) -> dict[str, Any]:
    """Outputs before, the metrics and gradients of each step, and the weights after the last one."""
    batch, language = own_batch(engine), loss is not value_loss
    micro = micro or MicroBatching(size=4)
    outputs = ("log_probs", "entropy", "sum_pi_squared") if language else ("values",)
    record: dict[str, Any] = {"outputs": collected(engine, engine.infer(batch, micro, TEMPERATURE, outputs))}
    record["metrics"], record["gradients"] = [], []
    apply = engine.apply_gradients

    def recorded(norm: torch.Tensor) -> None:
        grads = {name: p.grad for name, p in engine.model_state.trainable.items()}
        record["gradients"].append(
            {n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in grads.items()}
        )
        apply(norm)

    engine.apply_gradients = recorded
    for _ in range(STEPS):
        own = engine.train_batch(batch, micro, loss, TEMPERATURE, entropy=language, ref_kl=loss is full_kl_loss)
        gathered = distributed.all_gather_object((engine.geometry.collects, own))
        merged = merge_metrics([metrics for collects, metrics in gathered if collects])
        record["metrics"].append({name: float(metric.value) for name, metric in merged.items()})
    engine.apply_gradients = apply
    record["after"] = weights(engine)
    return record


def alike(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Equal in float32: log-probabilities to 2e-5, gradients to 1e-4 of their size, weights at the end to 1e-4."""
    for name, tensor in expected["outputs"].items():
        torch.testing.assert_close(found["outputs"][name], tensor, atol=2e-5, rtol=1e-4, msg=f"{where}: {name}")
    for step, (own, other) in enumerate(zip(found["metrics"], expected["metrics"], strict=True)):
        assert own == pytest.approx(other, rel=2e-4, abs=2e-6), f"{where}, step {step}"
    for step, (own, other) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
        for name, tensor in other.items():
            off = float((own[name] - tensor).norm())
            assert off <= (1e-4 if step == 0 else 1e-2) * float(tensor.norm()) + 1e-7, f"{where}, step {step}: {name}"
    for name, tensor in expected["after"].items():
        torch.testing.assert_close(found["after"][name], tensor, atol=1e-4, rtol=1e-3, msg=f"{where}: {name}")


def check_models(models: dict[str, Path], expected: dict[str, Any]) -> None:
    for name, path in models.items():
        for size in SHARING[name]:
            engine = make_engine(path, optim=OPTIM, ulysses_sequence_parallel_size=size)
            geometry = engine.geometry
            assert (geometry.dp_size, geometry.cp_size) == (4 // size, size)
            assert geometry.dp_rank == dist.get_rank() // size
            alike(trained(engine), expected[name], f"{name}, {size} ranks")


#: sharing of prefixes, ranks that share sequences, rows of a micro-batch: all of one shard, or one each
ROUTED_STEPS = {"tree": (True, 4, 6), "packed": (False, 4, 6), "two shards": (False, 2, 1)}


def routed_step(model: Path, share: bool, ranks: int, size: int) -> dict[str, Any]:
    """Metrics and gradients of a step whose loss is nearly that of the routers, on packed rows also on one rank."""
    engine: Any = make_engine(
        model,
        optim=OPTIM,
        model={"share_prefixes": True} if share else {"override_config": {"attn_implementation": attention.VARLEN}},
        router_aux_loss_coef=10.0,
        ulysses_sequence_parallel_size=ranks,
    )
    gradients: dict[str, torch.Tensor] = {}
    engine.apply_gradients = lambda norm: gradients.update(
        {name: whole(p.grad).clone() for name, p in engine.model_state.trainable.items() if p.grad is not None}
    )
    geometry, cuts = engine.geometry, (*CUTS[engine.geometry.dp_size], ROWS)
    batch = make_batch(related(FIELDS), slice(cuts[geometry.dp_rank], cuts[geometry.dp_rank + 1]))
    own = engine.train_batch(batch, MicroBatching(size=size), policy_loss, TEMPERATURE)
    parts = distributed.all_gather_object((geometry.collects, own))
    merged = merge_metrics([part for collects, part in parts if collects])
    return {"gradients": gradients, "metrics": {name: float(metric.value) for name, metric in merged.items()}}


def check_router_loss(model: Path, record: dict[str, Any]) -> None:
    """The load-balancing loss of ranks that hold parts of the tokens, of separate rows and of a prefix tree."""
    for name, (share, ranks, size) in ROUTED_STEPS.items():
        found, expected = routed_step(model, share, ranks, size), record[name]
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6), name
        for weight, tensor in expected["gradients"].items():
            off = float((found["gradients"][weight] - tensor).norm())
            assert off <= 1e-5 * float(tensor.norm()) + 1e-7, f"{name}: {weight}"


def check_settings(model: Path, expected: dict[str, Any]) -> None:
    """What the engine offers otherwise, with shared sequences."""
    variants: dict[str, dict[str, Any]] = {
        "fused": {"model": {"use_fused_kernels": True}},
        "kept": {"model": {"enable_gradient_checkpointing": False}},
        "recomputed in part": {"model": {"recompute_granularity": "selective"}},
        "replicas": {"fsdp_size": 2},
        "offload": {"offload_policy": True, "reshard_after_forward": False},
    }
    for name, settings in variants.items():
        engine = make_engine(model, optim=OPTIM, ulysses_sequence_parallel_size=2, **settings)
        assert name != "fused" or engine.forward_pass.fuses([])  # type: ignore[attr-defined]
        # A budget of tokens is per rank: the plans of two ranks that share have twice as many.
        micro = MicroBatching(max_tokens=30) if name == "fused" else None
        found = trained(engine, micro=micro)
        alike(found, expected["Qwen2"], name)
        if name == "fused":
            assert engine.forward_pass.fusing.supported  # type: ignore[attr-defined]


def check_value_model(model: Path, expected: dict[str, Any]) -> None:
    for size in (2, 4):
        engine = make_engine(model, "value_model", optim=OPTIM, ulysses_sequence_parallel_size=size)
        alike(trained(engine, value_loss), expected["value"], f"values, {size} ranks")


def check_full_kl(model: Path, expected: dict[str, Any]) -> None:
    engine = make_engine(model, optim=OPTIM, ulysses_sequence_parallel_size=2)
    with raises_with(ModelError, "ulysses_sequence_parallel_size", "ref.fsdp_config", 4, "actor", 2):
        engine.compare_with(make_engine(model, forward_only=True, ulysses_sequence_parallel_size=4))  # type: ignore[attr-defined]
    engine.compare_with(make_engine(model, forward_only=True, ulysses_sequence_parallel_size=2))  # type: ignore[attr-defined]
    alike(trained(engine, full_kl_loss), expected["full_kl"], "full KL")


def check_distillation(model: Path, work: Path) -> None:
    """Several numbers for each token, and another model's logits, of ranks that share sequences."""
    record = torch.load(work / "distillation.pt", weights_only=True)
    engine, fields = make_engine(model, optim=OPTIM, ulysses_sequence_parallel_size=2), record["fields"]
    teacher = make_engine(work / "teacher", ulysses_sequence_parallel_size=2)
    cuts = (*CUTS[engine.geometry.dp_size], ROWS)
    rows = slice(cuts[engine.geometry.dp_rank], cuts[engine.geometry.dp_rank + 1])
    said = taught(teacher, {name: FIELDS[name][rows] for name in FIELDS})
    for name, tensor in said.items():
        torch.testing.assert_close(tensor, fields[name][rows], atol=2e-5, rtol=1e-4)
    for name, expected in record["norms"].items():
        engine = make_engine(model, optim=OPTIM, ulysses_sequence_parallel_size=2)
        found = distilled(engine, teacher, fields, MicroBatching(size=3), own=rows, loss_mode=name)
        assert found["grad_norm"] == pytest.approx(expected, rel=1e-3), name


def check_half_precision(model: Path, expected: dict[str, Any]) -> None:
    engine = make_engine(model, optim=OPTIM, dtype="bfloat16", ulysses_sequence_parallel_size=4)
    found = trained(engine)
    for step, (own, other) in enumerate(zip(found["metrics"], expected["Qwen2"]["metrics"], strict=True)):
        assert own == pytest.approx(other, rel=5e-2, abs=5e-3), f"bfloat16, step {step}"


def check_checkpoints(model: Path, expected: dict[str, Any], work: Path) -> None:
    """A checkpoint of ranks that share sequences continues on others, bit for bit on the same."""
    engine = make_engine(model, optim=OPTIM, ulysses_sequence_parallel_size=2)
    trained(engine)
    engine.save(work / "shared", ["model", "optimizer", "extra"])
    straight = trained(engine)
    for size in (2, 4, 1):
        resumed = make_engine(model, optim=OPTIM, ulysses_sequence_parallel_size=size)
        resumed.load(work / "shared", ["model", "optimizer", "extra"])
        found = trained(resumed)
        alike(found, straight, f"resumed with {size}")
        alike(found, expected["resumed"], f"resumed with {size}")
        if size == 2:
            assert found["metrics"] == straight["metrics"]
            assert all(torch.equal(found["after"][name], tensor) for name, tensor in straight["after"].items())


def check_weights(model: Path) -> None:
    """Every rank generates by itself with whole weights, and the shards lie on all ranks, whoever shares sequences."""
    engine: Any = make_engine(model, optim=OPTIM, ulysses_sequence_parallel_size=2)
    opened = AutoModelForCausalLM.from_pretrained(model)
    ids, mask = FIELDS["input_ids"][:3], FIELDS["attention_mask"][:3]
    with engine.whole_weights() as module, torch.no_grad():
        for _ in range(1 + dist.get_rank()):
            found = module(input_ids=ids, attention_mask=mask).logits
        expected = opened(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=5e-5, rtol=1e-4)
    assert (engine.training_layout.shard, engine.training_layout.replicate, engine.copy_of_model) == (4, 1, 0)
    sizes = distributed.all_gather_object(sum(shard.tensor.numel() for shard in engine.export_shards()))
    assert sum(sizes) == sum(tensor.numel() for tensor in weights(engine).values())


def check_other_attention(model: Path) -> None:
    """Attention that would see a rank's own tokens only is refused while it computes."""
    engine: Any = make_engine(model, optim=OPTIM, ulysses_sequence_parallel_size=2)
    layer = engine.module.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *arguments, sequence_group=None, **options: forward(*arguments, **options)
    with raises_with(ModelError, "Qwen2Attention", "ulysses_sequence_parallel_size=1"):
        engine.infer(own_batch(engine), MicroBatching(), TEMPERATURE)
    layer.forward = lambda hidden_states, **options: (hidden_states, None)  # attention that transformers does not call
    with raises_with(ModelError, "ulysses_sequence_parallel_size", 1, "2 layers", "qwen2"):
        engine.infer(own_batch(engine), MicroBatching(), TEMPERATURE)


def body(rank: int, models: dict[str, Path], work: Path) -> None:
    expected = torch.load(work / "expected.pt", weights_only=True)
    qwen = models["Qwen2"]
    check_models(models, expected)
    check_settings(qwen, expected)
    check_value_model(qwen, expected)
    check_full_kl(qwen, expected)
    check_distillation(qwen, work)
    check_half_precision(qwen, expected)
    check_checkpoints(qwen, expected, work)
    check_weights(qwen)
    check_router_loss(models["Qwen3Moe"], expected["routed"])
    check_other_attention(qwen)
    dist.barrier()


@pytest.mark.slow(140)
def test_ranks_that_share_sequences_train_as_one(tmp_path: Path) -> None:
    models = {name: save_model(name, tmp_path, settings) for name, settings in MODELS.items()}
    expected = {name: trained(make_engine(path, optim=OPTIM)) for name, path in models.items()}
    qwen = models["Qwen2"]
    expected["value"] = trained(make_engine(qwen, "value_model", optim=OPTIM), value_loss)
    compared = make_engine(qwen, optim=OPTIM)
    compared.compare_with(make_engine(qwen, forward_only=True))  # type: ignore[attr-defined]
    expected["full_kl"] = trained(compared, full_kl_loss)
    longer = make_engine(qwen, optim=OPTIM)
    trained(longer)
    expected["resumed"] = trained(longer)
    expected["routed"] = {
        name: routed_step(models["Qwen3Moe"], share, 1, size) for name, (share, _, size) in ROUTED_STEPS.items()
    }
    torch.save(expected, tmp_path / "expected.pt")
    (tmp_path / "other").mkdir()
    save_model("Qwen2", tmp_path / "other", {**MODELS["Qwen2"], "num_hidden_layers": 1}).rename(tmp_path / "teacher")
    teacher = make_engine(tmp_path / "teacher")
    fields = taught(teacher, FIELDS)
    norms = {
        name: distilled(make_engine(qwen, optim=OPTIM), teacher, fields, MicroBatching(4), loss_mode=name)["grad_norm"]
        for name in ("forward_kl_topk", "reverse_kl")
    }
    torch.save({"fields": fields, "norms": norms}, tmp_path / "distillation.pt")
    spawn(body, 4, models, tmp_path)


def check(model: Path, size: int, ranks: int = 4, **settings: Any) -> None:
    FSDPEngine.check(
        ModelConfig(path=str(model), **settings), FSDPConfig(ulysses_sequence_parallel_size=size), ranks=ranks
    )


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    model = save_model(
        "Qwen2", tmp_path, {**MODELS["Qwen2"], "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    )
    for size in (1, 3, 6):
        check(model, size, ranks=12)
    # Six heads divide by two, three heads of keys do not.
    for size in (2, 4, 12):
        with pytest.raises(ModelError, match=rf"ulysses_sequence_parallel_size={size}.*6.*3.*fit: 1, 3, 6$"):
            check(model, size, ranks=12)
    with raises_with(ModelError, "ulysses_sequence_parallel_size=3", "4 ranks", "1, 2, 4"):
        check(model, 3)
    with raises_with(ModelError, "ulysses_sequence_parallel_size=3", "use_remove_padding=True"):
        check(model, 3, ranks=3, use_remove_padding=False)
    with raises_with(ModelError, attention.VARLEN, "override_config.attn_implementation"):
        check(model, 3, ranks=3, override_config={"attn_implementation": "eager"})
    check(model, 3, ranks=3, override_config={"attn_implementation": attention.VARLEN})
    for kind in ("dynamic", "longrope"):
        rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
        with raises_with(ModelError, "ulysses_sequence_parallel_size=3", kind, "override_config"):
            check(model, 3, ranks=3, override_config={"rope_parameters": rope})
    check(model, 3, ranks=3, override_config={"rope_parameters": {"rope_type": "linear", "factor": 2.0}})


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Qwen3Next", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("Rwkv", {}, "recurrent layers"),
        ("Gemma2", {}, "attn_logit_softcapping"),
    ],
)
def test_models_with_a_state_along_the_sequence_are_refused(
    name: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=2, **settings)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"ulysses_sequence_parallel_size=2.*({reason}).*set it to 1"):
        check(tmp_path, 2)
