"""An engine on Megatron-core: several layouts in one process, offloaded state, precision."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_helpers import (
    TEMPERATURE,
    make_batch,
    make_engine,
    make_fields,
    policy_loss,
    value_loss,
    weights,
)
from late_transfer import LateTransfer
from megatron_helpers import make_megatron, save_model
from megatron_models import LAYERS, Built, tiny_config
from raising import raises_with
from ranks import spawn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.algorithms import linear_statistics, token_statistics
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching, NonFiniteError
from hybridrl.engine.chunked_function import Hidden, chunked_function
from hybridrl.engine.logits_functions import FullKL, LogProbsAt, TopTokens, VocabularyLoss
from hybridrl.engine.megatron import build
from hybridrl.engine.megatron.build import mark_latents_replicated
from hybridrl.engine.megatron.forward import fusing_unsupported_reason
from hybridrl.engine.megatron.parallel import ParallelSizes
from hybridrl.engine.megatron.vocabulary import VocabularyShard, parallel_linear_statistics, parallel_statistics
from hybridrl.engine.megatron.whole_vocabulary import SharedVocabulary
from hybridrl.errors import ModelError
from hybridrl.forecast.meta_tensors import peak_of
from hybridrl.utils import distributed

FIELDS = make_fields()
OPTIM = {"override_optimizer_config": {"eps": 1e-5}}
OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
STATISTICS = ("log_probs", "entropy", "sum_pi_squared")


def own_rows(engine: Any) -> slice:
    return slice(engine.geometry.dp_rank, None, engine.geometry.dp_size)


def step(engine: Any, loss: Any = policy_loss) -> dict[str, float]:
    with engine.loaded(optimizer=True):
        metrics = engine.train_batch(
            make_batch(FIELDS, own_rows(engine)), MicroBatching(size=4), loss, TEMPERATURE, on_nonfinite="skip"
        )
    return {name: float(metrics[name].value) for name in ("grad_norm", "lr", "skipped_steps")}


def infer(engine: Any) -> torch.Tensor | None:
    with engine.loaded():
        found = engine.infer(make_batch(FIELDS, own_rows(engine)), MicroBatching(size=4), TEMPERATURE)
    return found.get("log_probs")


def exported(engine: Any) -> dict[str, torch.Tensor]:
    with engine.loaded():
        return weights(engine)


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def check_layouts(model: Path) -> None:
    """A policy, its reference and a critic of different layouts take turns; each computes as it does alone."""
    alone = make_megatron(model, tp=2, optim=OPTIM)
    expected = [step(alone) for _ in range(2)]
    actor = make_megatron(model, tp=2, optim=OPTIM)
    reference = make_megatron(model, pp=2, forward_only=True)
    critic = make_megatron(model, "value_model", optim=OPTIM)
    before = infer(reference)
    got = []
    for _ in range(2):
        got.append(step(actor))
        step(critic, value_loss)
        after = infer(reference)
        assert (after is None) == (reference.state.pp_rank == 0)
        assert after is None or torch.equal(after, before)
    assert got == expected
    same(exported(actor), exported(alone))
    assert reference.optimizer is None and reference.learning_rate() is None
    world, own = distributed.collective_timeout(), actor.state.tp_group._get_backend(torch.device("cpu"))
    assert own.options._timeout == world


def check_offload(model: Path) -> None:
    """Training and exporting do the same bit for bit, wherever the state is and however late it arrives."""
    for dtype in ("float32", "bfloat16"):
        resident = make_megatron(model, optim=OPTIM, dtype=dtype)
        offloaded = make_megatron(model, optim=OPTIM, dtype=dtype, **OFFLOAD)
        offloaded.model_state.offload.transfer = LateTransfer
        losses = [(policy_loss, policy_loss), (broken, broken), (watching(offloaded), policy_loss)]
        for own, loss in (losses[0], *losses):
            assert step(offloaded, own) == pytest.approx(step(resident, loss), abs=0, rel=0, nan_ok=True)
            assert torch.equal(infer(offloaded), infer(resident))
        tensors = [*(p.detach() for p in offloaded.chunks[0].parameters()), *offloaded.optimizer.state_tensors()]
        tensors += offloaded.optimizer.separate_masters()
        gradients = offloaded.optimizer.gradient_buffers()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*tensors, *gradients))
        assert bool(offloaded.optimizer.separate_masters()) == (dtype == "bfloat16")
        copies = [offloaded.model_state.readable(tensor).clone() for tensor in tensors]
        with offloaded.loaded(optimizer=True):
            assert all(tensor.isnan().all() for tensor in offloaded.optimizer.state_tensors())
            found = [offloaded.model_state.readable(tensor) for tensor in tensors]
            assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, found, strict=True))
        with offloaded.loaded(optimizer=True), resident.loaded(optimizer=True):
            got, expected = (
                [
                    tensor_slice.values
                    for slices in engine.copy_state(["model", "optimizer"]).slices.values()
                    for tensor_slice in slices
                ]
                for engine in (offloaded, resident)
            )
            assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        same(exported(offloaded), weights(resident))


def broken(outputs: Any, micro: Any) -> Any:
    """A loss of steps that are skipped."""
    loss, metrics = policy_loss(outputs, micro)
    return loss * float("nan"), metrics


def watching(offloaded: Any) -> Any:
    """A loss that finds no state yet where it is offloaded."""

    def loss(outputs: Any, micro: Any) -> Any:
        assert all(tensor.isnan().all() for tensor in offloaded.optimizer.state_tensors())
        return policy_loss(outputs, micro)

    return loss


def check_attention_backends(model: Path) -> None:
    """Megatron-core keeps the choice of kernels in the environment, and one engine's choice is not another's."""
    before = dict(os.environ)
    chosen = {"flash": ("1", "0", "0"), "unfused": ("0", "0", "1"), None: ("1", "1", "1")}
    engines = [
        make_megatron(model, tp=2, optim=OPTIM, override_transformer_config={"attention_backend": name})
        for name in chosen
    ]
    assert engines[2].chunks[0].config.attention_backend.name == "auto"
    for _ in range(2):
        assert len({tuple(step(engine).values()) for engine in engines}) == 1
        for engine, values in zip(engines, chosen.values(), strict=True):
            with engine.activate():
                assert tuple(os.environ[f"NVTE_{name}_ATTN"] for name in ("FLASH", "FUSED", "UNFUSED")) == values
            assert dict(os.environ) == before


def check_buffers(model: Path) -> None:
    """What Megatron-core gathers activations into is freed with them."""
    engine = make_megatron(model, tp=2, optim=OPTIM)

    def buffers() -> list[torch.Tensor]:
        from megatron.core import parallel_state

        with engine.activate():
            return list(parallel_state.get_global_memory_buffer().buffer.values())

    with engine.loaded(optimizer=True):
        engine.train_batch(make_batch(FIELDS, own_rows(engine)), MicroBatching(size=4), policy_loss, TEMPERATURE)
        assert buffers()
    assert not buffers()


def check_loss_that_is_a_view(model: Path) -> None:
    """Stages free their outputs, as on a GPU."""

    def viewed(outputs: Any, micro: Any) -> Any:
        loss, metrics = policy_loss(outputs, micro)
        return loss.view(1)[0], metrics

    plain, freeing = make_megatron(model, pp=2, optim=OPTIM), make_megatron(model, pp=2, optim=OPTIM)
    freeing.chunks[0].config.deallocate_pipeline_outputs = True
    assert step(freeing, viewed) == step(plain)


def check_replicated_latents() -> None:
    """Every rank has the projections to latents of Transformer Engine, so they count once in the gradient's norm."""
    for case in ("deepseek-v2", "deepseek-v3"):
        (chunk,) = Built(tiny_config(case), tp=2).chunks
        down = [p for name, p in chunk.named_parameters() if "_down_proj.weight" in name]
        assert len(down) == LAYERS * (2 if case == "deepseek-v3" else 1)
        for parameter in down:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        mark_latents_replicated(chunk)
        assert not any(parameter.tensor_model_parallel for parameter in down)  # type: ignore[attr-defined]


def check_nonfinite(rank: int, model: Path) -> None:
    """All ranks agree on a step that is not finite on one of them, and nothing changes."""
    engine = make_megatron(model, optim=OPTIM)
    before = weights(engine)

    def broken(outputs: Any, micro: Any) -> Any:
        loss, metrics = policy_loss(outputs, micro)
        return (loss * float("nan") if rank == 1 else loss), metrics

    batch = make_batch(FIELDS, own_rows(engine))
    with pytest.raises(NonFiniteError, match="rank 1: sequences"):
        engine.train_batch(batch, MicroBatching(size=4), broken, TEMPERATURE)
    metrics = engine.train_batch(batch, MicroBatching(size=4), broken, TEMPERATURE, on_nonfinite="skip")
    assert float(metrics["skipped_steps"].value) == 1
    same(weights(engine), before)
    assert step(engine) == step(make_megatron(model, optim=OPTIM))


def check_refusals(model: Path) -> None:
    for settings, pattern in (
        ({"override_transformer_config": {"no_such_field": 1}}, r"override_transformer_config\.no_such_field"),
        (
            {"override_transformer_config": {"context_parallel_size": 2}},
            r"context_parallel_size=2.*context_parallel_size",
        ),
        ({"override_transformer_config": {"moe_aux_loss_coeff": 0.1}}, r"moe_aux_loss_coeff=0\.1"),
        ({"override_transformer_config": {"qk_clip": True}}, r"override_transformer_config\.qk_clip=True"),
        ({"override_transformer_config": {"hybrid_context_parallel": True}}, r"hybrid_context_parallel=True"),
        (
            {"override_transformer_config": {"moe_router_load_balancing_type": "aux_loss"}},
            r"moe_router_load_balancing_type='aux_loss'",
        ),
        ({"override_transformer_config": {"moe_router_bias_update_rate": 1e-3}}, r"moe_router_bias_update_rate=0\.001"),
        ({"override_transformer_config": {"fp8": "hybrid"}}, r"override_transformer_config\.fp8='hybrid'"),
        (
            {"override_transformer_config": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}},
            r"recompute_modules: layernorm",
        ),
        ({"override_ddp_config": {"average_in_collective": True}}, r"override_ddp_config\.average_in_collective"),
        ({"optim": {"optimizer": "Muon"}}, r"optim\.optimizer=Muon.*AdamW"),
        ({"tp": 3}, r"takes 3 ranks.*2 ranks"),
    ):
        with pytest.raises(ModelError, match=pattern):
            make_megatron(model, **settings)
    over_ranks = build.plan_of(ModelConfig(path=str(model)), MegatronConfig(), "language_model", trains=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "has_transformer_engine", lambda: True)
        build.transformer_config(over_ranks, ParallelSizes(cp=2), True, torch.bfloat16)
        with raises_with(ModelError, "context_parallel_size=2", "dtype=float32", "bfloat16"):
            build.transformer_config(over_ranks, ParallelSizes(cp=2), True, torch.float32)
    unset = {"qk_clip": None, "moe_router_load_balancing_type": None, "num_moe_experts": None}
    engine = make_megatron(model, override_transformer_config={"recompute_granularity": "selective", **unset})
    config = engine.chunks[0].config
    assert config.recompute_granularity == "selective" and config.num_moe_experts is None
    assert config.qk_clip is False and config.moe_router_load_balancing_type == "none"
    for other, named in (
        (make_megatron(model, forward_only=True), r"same tensor_model_parallel_size.*ref.megatron has 1 .* 2"),
        (make_engine(model), "strategy=megatron"),
        (make_megatron(model, tp=2, model={"use_remove_padding": False}), "use_remove_padding"),
    ):
        with pytest.raises(ModelError, match=named):
            make_megatron(model, tp=2).compare_with(other)
    with raises_with(ModelError, "KL", "strategy=megatron"):
        make_megatron(model, "value_model").compare_with(engine)
    wrong = {**FIELDS, "position_ids": FIELDS["position_ids"] + 1}
    with raises_with(ValueError, "position_ids", "strategy=megatron"):
        engine.infer(make_batch(wrong), MicroBatching(size=4), TEMPERATURE)


def check_split_vocabulary(rank: int) -> None:
    """Statistics of a vocabulary that two ranks share, and their gradients, are those of one process.

    The ranks have 16 and 15 words, 16 and 15 of which the second's are unlikely, and 3 and none; the rest is padding.
    """
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for words, share, apart in ((31, 16, 0.0), (31, 16, 80.0), (3, 4, 0.0)):
            generator = torch.Generator().manual_seed(0)
            hidden = torch.randn(13, 8, generator=generator, dtype=torch.float64).to(dtype)
            table = torch.randn(2 * share, 8, generator=generator, dtype=torch.float64).to(dtype)
            hidden[:, 0], table[share:, 0] = 1.0, table[share:, 0] - apart
            table[words:] += 10.0
            labels = torch.randint(0, words, (13,), generator=generator)
            of_log_probs, of_entropy = torch.randn(2, 13, generator=generator, dtype=torch.float64).to(dtype)

            def pulled(found: dict[str, torch.Tensor], *leaves: torch.Tensor) -> list[torch.Tensor]:
                loss = (of_log_probs * found["log_probs"] + of_entropy * found["entropy"]).sum()  # noqa: B023
                return [*(found[name].detach() for name in STATISTICS), *torch.autograd.grad(loss, leaves)]

            whole = hidden.clone().requires_grad_(), table[:words].clone().requires_grad_()
            options = {"labels": labels, "temperature": TEMPERATURE, "entropy": True, "sum_pi_squared": True}
            *values, d_hidden, d_table = pulled(token_statistics(linear(*whole), **options), *whole)
            d_own = torch.zeros_like(table)
            d_own[:words] = d_table
            expected = [*values, d_hidden, d_own[rank * share : (rank + 1) * share]]
            part = VocabularyShard.of(words, 2 * share, dist.group.WORLD)
            own = hidden.clone().requires_grad_(), table[rank * share : (rank + 1) * share].clone().requires_grad_()
            arguments = labels, TEMPERATURE, STATISTICS, part
            found = [pulled(parallel_linear_statistics(*own, *arguments, chunk), *own) for chunk in (1, 5, 13, 100)]
            for most in (None, 4):
                found.append(pulled(parallel_statistics(linear(*own), *arguments, most_tokens=most), *own))
                dist.all_reduce(found[-1][3])  # the output layer's part
            for got in found:
                torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
            none = parallel_linear_statistics(own[0][:0], own[1], labels[:0], *arguments[1:])
            assert all(tensor.shape == (0,) for tensor in none.values())
            none["log_probs"].sum().backward()


def check_memory_of_split_vocabulary(rank: int) -> None:
    """Both passes hold a chunk of a rank's logits, not those of all tokens."""
    tokens, share, size = 512, 640, 8
    part = VocabularyShard.of(2 * share, 2 * share, dist.group.WORLD)
    hidden, table = (torch.randn(rows, size, requires_grad=True) for rows in (tokens, share))
    labels = torch.randint(0, 2 * share, (tokens,), generator=torch.Generator().manual_seed(0))

    def peak(compute: Callable[..., dict[str, torch.Tensor]], *last: int) -> int:
        def both() -> None:
            first = hidden if last else linear(hidden, table)
            weight = (table,) if last else ()
            found = compute(first, *weight, labels, TEMPERATURE, STATISTICS, part, *last)
            torch.autograd.grad(found["log_probs"].sum() + found["entropy"].sum(), (hidden, table))

        return peak_of(both, hidden, table, labels)

    logits = tokens * share * 4
    assert peak(parallel_statistics) > 2 * logits
    assert peak(parallel_linear_statistics, 16) < logits / 2


def check_functions_of_split_vocabulary(rank: int) -> None:
    """Functions of whole logits, where two ranks share the words, are those of one process, and so are gradients."""
    functions = (
        FullKL(None),
        VocabularyLoss("jsd", None, 0.8, None),
        VocabularyLoss("forward_kl", None, None, -5.0),
        LogProbsAt("ids"),
        TopTokens(2),
    )
    for words, share in ((31, 16), (3, 4)):
        generator = torch.Generator().manual_seed(0)
        hidden, other = torch.randn(2, 13, 8, generator=generator, dtype=torch.float64)
        table, others = torch.randn(2, 2 * share, 8, generator=generator, dtype=torch.float64)
        table[words:] += 10.0
        inputs = {"ids": torch.randint(0, words, (13, 2), generator=generator)}
        part = VocabularyShard.of(words, 2 * share, dist.group.WORLD)
        rows = slice(rank * share, (rank + 1) * share)
        for function in functions:
            whole = hidden.clone().requires_grad_(), table[:words].clone().requires_grad_()
            compared = isinstance(function, (FullKL, VocabularyLoss))
            expected = function(
                linear(*whole), inputs, TEMPERATURE, linear(other, others[:words]) if compared else None
            )
            values = expected[function.outputs[0]]
            pulled = torch.randn(values.shape, generator=generator, dtype=torch.float64)
            d_hidden, d_table = torch.autograd.grad((values * pulled).sum(), whole)
            d_table = torch.nn.functional.pad(d_table, (0, 0, 0, 2 * share - words))[rows]
            for chunk in (1, 5, 13, None):
                own = hidden.clone().requires_grad_(), table[rows].clone().requires_grad_()
                second = Hidden(other, others[rows]) if compared else None
                found = chunked_function(
                    function, Hidden(*own), inputs, TEMPERATURE, second, SharedVocabulary(part), chunk
                )
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
                got = torch.autograd.grad((found[function.outputs[0]] * pulled).sum(), own)
                torch.testing.assert_close(got, (d_hidden, d_table), rtol=1e-10, atol=1e-12)
            none = {name: tensor[:0] for name, tensor in inputs.items()}
            second = Hidden(other[:0], others[rows]) if compared else None
            empty = chunked_function(
                function, Hidden(own[0][:0], own[1]), none, TEMPERATURE, second, SharedVocabulary(part)
            )
            assert all(empty[name].shape == (0, *expected[name].shape[1:]) for name in function.outputs)
            empty[function.outputs[0]].sum().backward()


def check_memory_of_functions(rank: int) -> None:
    """Both passes hold chunks of a rank's part of both models' logits, not those of all tokens."""
    tokens, share, size = 2048, 640, 8
    part = VocabularyShard.of(2 * share, 2 * share, dist.group.WORLD)
    states, table = (torch.randn(rows, size, requires_grad=True) for rows in (tokens, share))
    other = Hidden(states.detach() + 1, table.detach() + 1)

    def both() -> None:
        found = chunked_function(
            FullKL(None), Hidden(states, table), {}, TEMPERATURE, other, SharedVocabulary(part), 32
        )
        torch.autograd.grad(found["ref_kl"].sum(), (states, table))

    assert peak_of(both, states, table, other.states, other.weight) < tokens * share * 4 / 2


class Logits(TorchDispatchMode):
    """The most rows of logits that a product of matrices makes."""

    def __init__(self, *words: int) -> None:
        super().__init__()
        self.words, self.most = words, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith(("mm.", "addmm.")) and result.shape[-1] in self.words:
            self.most = max(self.most, result.numel() // result.shape[-1])
        return result


def check_fused(model: Path, tied: Path) -> None:
    """Updates that compute a chunk of logits at a time are those with whole logits, in all that they change."""
    for path, settings in (
        (model, {"tp": 2}),
        (model, {"pp": 2, "model": {"use_remove_padding": False}}),
        (tied, {"tp": 2, "sequence_parallel": False}),
    ):
        metrics, outputs, after, most = [], [], [], []
        for fused in (False, True):
            options = {**settings.get("model", {}), "use_fused_kernels": fused}
            engine = make_megatron(path, optim=OPTIM, **{**settings, "model": options})
            batch, micro = make_batch(FIELDS, own_rows(engine)), MicroBatching(size=4)
            last = engine.schedule.outputs
            with Logits(*(() if last is None else (256, 384, last.part.size))) as logits:
                found = [engine.train_batch(batch, micro, policy_loss, TEMPERATURE, entropy=True) for _ in range(2)]
                outputs.append(engine.infer(batch, micro, TEMPERATURE, STATISTICS))
            metrics.append([float(one[name].value) for one in found for name in ("loss", "grad_norm") if name in one])
            after.append(weights(engine))
            most.append(logits.most)
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-7)
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[1], after[0], rtol=0, atol=1e-5)
        # A vocabulary that is not split is computed by tiles, which are narrower; test_algorithms_linear_statistics.py
        # holds their size.
        tiled = "tp" not in settings
        assert most == [0, 0] if last is None else most[0] > 20 and (most[1] == 0 if tiled else 0 < most[1] <= 7), most


def check_not_fused(rank: int, model: Path) -> None:
    """What has no logits, or does something with them, computes as without the setting."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        critic = make_megatron(model, "value_model", optim=OPTIM, model={"use_fused_kernels": True})
    assert ("use_fused_kernels has no effect, because a value model has no logits" in said.getvalue()) == (rank == 0)
    step(critic, value_loss)
    (chunk,) = make_megatron(model, forward_only=True).chunks
    del chunk.output_layer.forward  # the engine's own
    assert fusing_unsupported_reason(chunk) is None
    chunk.output_layer.register_forward_hook(lambda *_: None)
    assert "changes its logits" in (fusing_unsupported_reason(chunk) or "")
    assert "output layer" in (fusing_unsupported_reason(critic.chunks[0]) or "")


def check_all(rank: int, model: Path) -> None:
    assert distributed.get_world_size() == 2
    check_layouts(model)
    check_offload(model)
    check_nonfinite(rank, model)
    check_refusals(model)
    check_attention_backends(model)
    check_buffers(model)
    check_loss_that_is_a_view(model)
    check_replicated_latents()
    check_split_vocabulary(rank)
    check_memory_of_split_vocabulary(rank)
    check_functions_of_split_vocabulary(rank)
    check_memory_of_functions(rank)
    check_not_fused(rank, model)
    linear_statistics.CHUNK_ELEMENTS["cpu"] = 7 * 256
    check_fused(model, model / "tied")


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    save_model(tmp_path, "untied")
    save_model(tmp_path / "tied", "tied")
    spawn(check_all, 2, tmp_path, preload="megatron_preload")


@pytest.mark.slow
def test_bfloat16_trains_like_the_same_precision_of_fsdp(tmp_path: Path) -> None:
    """Float32 master weights under a bfloat16 model: the same steps but for rounding."""
    save_model(tmp_path / "model", "untied")
    engine = make_engine(tmp_path / "model", optim=OPTIM, dtype="bfloat16")
    before = weights(engine)
    for _ in range(3):
        engine.train_batch(make_batch(FIELDS), MicroBatching(size=4), policy_loss, TEMPERATURE)
    torch.save((before, weights(engine)), tmp_path / "expected.pt")
    spawn(check_bfloat16, 2, tmp_path / "model", tmp_path, preload="megatron_preload")


def check_bfloat16(rank: int, model: Path, work: Path) -> None:
    before, after = torch.load(work / "expected.pt", weights_only=True)
    engine = make_megatron(model, tp=2, optim=OPTIM, dtype="bfloat16")
    norm = next(shard for shard in engine.optimizer.shards if shard.name.endswith("final_layernorm.weight"))
    assert torch.equal(norm.master, before["model.norm.weight"])  # the checkpoint's digits, not the model's
    assert not torch.equal(norm.values.float(), norm.master)
    for _ in range(3):
        step(engine)
    for name, tensor in weights(engine).items():
        assert tensor.dtype == torch.bfloat16
        moved, expected = tensor.float() - before[name], after[name] - before[name]
        assert torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), 0) > 0.9, name
