"""Two real gloo processes under FSDP2 against one process; one start of the processes serves many checks."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import random
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distillation_helpers import distilled, taught
from engine_helpers import (
    TEMPERATURE,
    check_shards,
    close,
    full_kl_loss,
    make_batch,
    make_engine,
    make_fields,
    policy_loss,
    value_loss,
    weights,
)
from raising import raises_with
from ranks import spawn
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybridrl.config import load_config
from hybridrl.engine import MicroBatching, NonFiniteError
from hybridrl.errors import ModelError
from hybridrl.models.tiny import build_tiny_model
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.batching import spread_over_ranks
from hybridrl.utils import distributed
from hybridrl.utils.metrics import merge_metrics
from hybridrl.utils.rng import seed_rng
from hybridrl.workers.loss_prepass import ROW_IDS, LossPrepass
from hybridrl.workers.losses import GROUP_IDS, LossCounts, PolicyLoss, policy_loss_fn

FIELDS = make_fields()
# Each token uses the given 2 of 4 experts in 2 layers.
CHOICES = torch.rand(*FIELDS["input_ids"].shape, 2, 4, generator=torch.Generator().manual_seed(6)).topk(2).indices
ROUTED = {**FIELDS, "routed_experts": CHOICES}
STEPS = 2
SPLIT = 9  # rank 0 works on 9 rows, rank 1 on 3: their numbers of micro-batches differ
SETTINGS = {"lr_warmup_steps": 0, "override_optimizer_config": {"eps": 1e-5}}
# Its fused kernel does not know shards; its state is empty or holds no step counter.
SGD = {"optimizer": "SGD", "lr_warmup_steps": 0, "override_optimizer_config": {"momentum": 0.9}}

SESSION_SGD = {**SGD, "lr": 0.3}
MUON = {"optimizer": "Muon", "lr_warmup_steps": 0, "override_optimizer_config": {"adamw_eps": 1e-5}}
EIGHT_BIT = {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim", **SETTINGS}
OPTIMIZERS = {"muon": MUON, **({"eight_bit": EIGHT_BIT} if importlib.util.find_spec("torchao") else {})}


def own_rows(rank: int) -> slice:
    return slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)


def train(engine, batch, steps, loss=policy_loss):  # type: ignore[no-untyped-def]
    """Metrics of each step, merged over the ranks; the micro-batches of a rank hold at most 3 rows."""
    language = loss is not value_loss
    results = []
    for _ in range(steps):
        own = engine.train_batch(
            batch, MicroBatching(size=3), loss, TEMPERATURE, entropy=language, ref_kl=loss is full_kl_loss
        )
        merged = merge_metrics(distributed.all_gather_object(own))
        results.append({name: float(metric.value) for name, metric in merged.items()})
    return results


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory, micro_model: Path) -> Path:
    """A model whose head is its embedding, and whose sizes do not divide by the number of ranks."""
    folder = tmp_path_factory.mktemp("tied_model")
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=263,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory, micro_model: Path) -> Path:
    """Matrices of an odd number of rows (75), some large enough and of the right width to be kept in 8 bits."""
    folder = tmp_path_factory.mktemp("odd_model")
    torch.manual_seed(4)
    config = Qwen2Config(
        vocab_size=263,
        hidden_size=64,
        intermediate_size=75,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def routed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    folder = tmp_path_factory.mktemp("routed_model")
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=263,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def check_language_model(rank: int, model: Path, work: Path) -> None:
    expected = torch.load(work / "language.pt", weights_only=True)
    engine = make_engine(model, optim=SETTINGS)
    batch = make_batch(FIELDS, own_rows(rank))
    got = engine.infer(batch, MicroBatching(size=2), TEMPERATURE, ("log_probs", "entropy"))
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name][own_rows(rank)], atol=2e-6, rtol=1e-5)
    close(weights(engine), expected["before"], 0)
    metrics = train(engine, batch, STEPS)
    for step, values in zip(metrics, expected["metrics"], strict=True):
        assert step == pytest.approx(values, rel=1e-4, abs=1e-6)
    close(weights(engine), expected["after"])

    # In-place generation: whole weights, and ranks that call the model different numbers of times.
    ids = FIELDS["input_ids"][:3]
    with engine.whole_weights() as module, torch.no_grad():
        for _ in range(1 + 4 * rank):
            logits = module(input_ids=ids).logits
    torch.testing.assert_close(logits, expected["logits"], atol=5e-5, rtol=1e-4)

    # Two more steps, straight and after a save and a load, are the same bit for bit.
    engine.save(work / "two_ranks", ["model", "optimizer", "extra", "hf_model"])
    straight = train(engine, batch, 2)
    final = weights(engine)
    resumed = make_engine(model, optim=SETTINGS)
    resumed.load(work / "two_ranks", ["model", "optimizer", "extra"])
    assert train(resumed, batch, 2) == straight
    close(weights(resumed), final, 0)
    for parameter, other in zip(
        resumed.model_state.trainable.values(), engine.model_state.trainable.values(), strict=True
    ):  # type: ignore[attr-defined]
        for key, state in engine.model_state.optimizer.state[other].items():  # type: ignore[attr-defined]
            again = resumed.model_state.optimizer.state[parameter][key]  # type: ignore[attr-defined]
            assert torch.equal(*(t.to_local() if hasattr(t, "to_local") else t for t in (again, state)))

    # A checkpoint of one rank continues on two.
    moved = make_engine(model, optim=SETTINGS)
    moved.load(work / "one_rank", ["model", "optimizer", "extra"])
    train(moved, batch, 2)
    close(weights(moved), expected["final"])


def moved_alike(got, expected, before):  # type: ignore[no-untyped-def]
    """Both moved by the same, but for rounding: Newton-Schulz computes in bfloat16 (0.4 % of an element) and lifts the
    smallest singular values. Shards that are orthogonalised each by itself are off by 40 % and more."""
    for name, start in before.items():
        assert (got[name] - expected[name]).norm() < 0.2 * (expected[name] - start).norm(), name


def check_optimizers(rank: int, odd: Path, work: Path) -> None:
    """Optimizers with a state or an update of their own: two ranks against one, and resuming, here and from one."""
    recorded = torch.load(work / "optimizers.pt", weights_only=True)
    batch = make_batch(FIELDS, own_rows(rank))
    for name, optim in OPTIMIZERS.items():
        expected = recorded[name]
        for layout in ({"offload_policy": True}, {"fsdp_size": 1}) if name == "muon" else ():
            engine = make_engine(odd, optim=optim, **layout)
            before = weights(engine)
            train(engine, batch, STEPS)
            moved_alike(weights(engine), expected["after"], before)
        engine = make_engine(odd, optim=optim)
        before = weights(engine)
        train(engine, batch, STEPS)
        moved_alike(weights(engine), expected["after"], before)
        engine.save(work / f"two_{name}", ["model", "optimizer", "extra"])
        straight = train(engine, batch, 2)
        resumed = make_engine(odd, optim=optim)
        resumed.load(work / f"two_{name}", ["model", "optimizer", "extra"])
        assert train(resumed, batch, 2) == straight
        close(weights(resumed), weights(engine), 0)
        moved = make_engine(odd, optim=optim)
        moved.load(work / f"one_{name}", ["model", "optimizer", "extra"])
        train(moved, batch, 2)
        moved_alike(weights(moved), expected["final"], expected["after"])


def check_full_kl(rank: int, model: Path, work: Path) -> None:
    """Ranks with different numbers of micro-batches, beside a reference that is sharded too."""
    expected = torch.load(work / "full_kl.pt", weights_only=True)
    for fused in (False, True):
        engine = make_engine(model, optim={**SGD, "lr": 0.3}, model={"use_fused_kernels": fused})
        engine.compare_with(make_engine(model, forward_only=True))
        metrics = train(engine, make_batch(FIELDS, own_rows(rank)), STEPS, full_kl_loss)
        for step, values in zip(metrics, expected["metrics"], strict=True):
            assert step == pytest.approx(values, rel=1e-4, abs=1e-6)
        assert metrics[0]["ref_kl"] == pytest.approx(0, abs=1e-6) and metrics[-1]["ref_kl"] > 1e-5
        close(weights(engine), expected["after"])


def check_distillation(rank: int, model: Path, work: Path) -> None:
    """A teacher that is sharded too, and ranks with different numbers of micro-batches."""
    record = torch.load(work / "distillation.pt", weights_only=True)
    teacher, fields, rows = make_engine(work / "teacher"), record["fields"], own_rows(rank)
    said = taught(teacher, {name: fields[name][rows] for name in FIELDS})
    for name, tensor in said.items():
        torch.testing.assert_close(tensor, fields[name][rows], atol=1e-5, rtol=1e-5)
    for name, expected in record["metrics"].items():
        engine = make_engine(model)
        found = distilled(
            engine, teacher, fields, MicroBatching(size=2), own=rows, loss_mode=name, use_task_rewards=False
        )
        shares = distributed.all_gather_object(found["distillation/loss"])
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3), name
        assert sum(shares) == pytest.approx(expected["distillation/loss"], rel=1e-4), name


@cache
def session_loss(mode: str) -> tuple[PolicyLoss, Any]:
    """A loss with a value per sequence."""
    words = ["clip_ratio_low=0.5", "clip_ratio_high=0.5", f"policy_loss.loss_mode={mode}"]
    words = [f"actor_rollout_ref.actor.{word}" for word in [*words, "loss_agg_mode=seq-mean-token-mean"]]
    actor = load_config("ppo_trainer", [*words, "actor_rollout_ref.model.path=unused"]).actor_rollout_ref.actor
    return PolicyLoss.of(actor, None), policy_loss_fn(actor)


def sessions(cut: bool) -> DataProto:
    """Four sessions of two turns; cut, each turn is a row that has what came before as its prompt."""
    generator = torch.Generator().manual_seed(8)
    rows = []
    for number in range(4):
        ids = torch.randint(10, 200, (14 + number,), generator=generator)
        turns, advantage = (slice(4, 7 + number), slice(9 + number, len(ids))), number - 1.5
        old = -4 * torch.rand(len(ids), generator=generator)
        parts = [(turn.start, turn.stop, [turn]) for turn in turns] if cut else [(4, len(ids), turns)]
        rows += [(number, advantage, ids, old, *part) for part in parts]
    prompt, response = max(start for *_, start, _, _ in rows), max(stop - start for *_, start, stop, _ in rows)
    names = ("input_ids", "attention_mask", "response_mask", "old_log_probs", "advantages")
    fields: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for _, advantage, ids, old, start, stop, turns in rows:
        left, right = prompt - start, response - (stop - start)
        mask = torch.zeros(len(ids), dtype=torch.int64)
        for turn in turns:
            mask[turn] = 1
        values = (ids[:stop], torch.ones(stop).long(), mask[start:stop], old[start:stop], mask[start:stop] * advantage)
        for name, value in zip(names, values, strict=True):
            fields[name].append(torch.nn.functional.pad(value, (left if len(value) == stop else 0, right)))
    tensors = {name: torch.stack(values) for name, values in fields.items()}
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    tensors["prompts"], tensors["responses"] = tensors["input_ids"].split([prompt, response], 1)
    tensors[ROW_IDS] = torch.arange(len(rows))
    tensors[GROUP_IDS] = torch.tensor([number % 2 for number, *_ in rows])
    batch = DataProto.from_dict(tensors)
    ids = np.array([number for number, *_ in rows]) if cut else None
    shards = 2 if cut else 1
    order = [np.array([0, 3, 4, 7, 1, 2, 5, 6])] if cut else [np.arange(len(rows))]
    spread, (planned,) = spread_over_ranks(batch, order, shards, sessions=ids)
    spread.meta_info["counts"] = LossCounts(planned.tokens, planned.sequences)
    return spread


def trained_on_sessions(engine, mode: str, batch: DataProto) -> None:  # type: ignore[no-untyped-def]
    (loss, loss_fn), micro = session_loss(mode), MicroBatching(size=1)
    counts = batch.meta_info["counts"]
    for _ in range(2):
        prepass = LossPrepass.of(loss, micro, batch)
        if prepass is not None:
            prepass.add_to(batch, engine, 0, TEMPERATURE)
        engine.train_batch(batch, micro, partial(loss_fn, counts=counts), TEMPERATURE)


def check_sessions(rank: int, model: Path, work: Path) -> None:
    """The rows of each session are on both ranks, and the update is that of whole sessions on one."""
    expected = torch.load(work / "sessions.pt", weights_only=True)
    batch = sessions(cut=True)
    own = batch.chunk(2)[rank]
    assert len(own) == 4
    for mode, after in expected.items():
        engine = make_engine(model, optim=SESSION_SGD)
        trained_on_sessions(engine, mode, own.select())
        close(weights(engine), after)


def check_new_rank_is_seeded(rank: int, model: Path, work: Path) -> None:
    """A checkpoint of one rank has no random state for rank 1: it gets one that only the run decides."""
    draws, said = [], []
    for before in (1, 2):
        engine = make_engine(model, optim=SETTINGS)
        seed_rng(before + rank)
        with contextlib.redirect_stderr(io.StringIO()) as output:
            engine.load(work / "one_rank", ["model", "extra"])
        said.append(output.getvalue())
        draws.append([torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()])
    assert draws[0] == draws[1]
    of_all = distributed.all_gather_object(draws[0])
    assert of_all[0] != of_all[1]
    assert [("warning" in text and "rank 1" in text) for text in said] == [rank == 1] * 2


def check_nonfinite(rank: int, model: Path) -> None:
    engine = make_engine(model)
    batch = make_batch(FIELDS, own_rows(rank))
    before = weights(engine)

    def broken(outputs, micro):  # type: ignore[no-untyped-def]
        loss, metrics = policy_loss(outputs, micro)
        return (loss * float("nan") if rank == 1 else loss), metrics

    with pytest.raises(NonFiniteError, match=r"the loss of this step is not finite.*rank 1: sequences") as caught:
        engine.train_batch(batch, MicroBatching(size=2), broken, TEMPERATURE)
    assert not caught.value.rows[0] and caught.value.rows[1]
    assert engine.train_batch(batch, MicroBatching(size=2), broken, on_nonfinite="skip")["skipped_steps"].value == 1
    close(weights(engine), before, 0)
    assert not engine.model_state.optimizer.state  # type: ignore[attr-defined]


def check_memory_error(rank: int, model: Path) -> None:
    """A micro-batch of several ranks cannot be repeated, and the error says what to lower."""
    engine = make_engine(model)

    def large(outputs, micro):  # type: ignore[no-untyped-def]
        torch.empty(1 << 58, dtype=torch.uint8)

    for _ in range(2):
        with raises_with(ModelError, f"rank {rank}", "ppo_max_token_len_per_gpu"):
            engine.train_batch(make_batch(FIELDS, own_rows(rank)), MicroBatching(size=2), large, TEMPERATURE)


def check_variants(rank: int, model: Path, tied: Path, work: Path) -> None:
    expected = torch.load(work / "variants.pt", weights_only=True)
    batch = make_batch(FIELDS, own_rows(rank))
    variants = {
        "bf16": (model, {"dtype": "bfloat16"}),
        "tied": (tied, {}),
        "replicas": (model, {"fsdp_size": 1}),
        "offload": (model, {"offload_policy": True, "reshard_after_forward": False, "forward_prefetch": True}),
        "sgd": (model, {}),
        "by_size": (model, {"wrap_policy": {"min_num_params": 3000}}),
    }
    for name, (path, settings) in variants.items():
        engine = make_engine(path, optim=SGD if name == "sgd" else SETTINGS, **_config(settings))
        metrics = train(engine, batch, 2)
        loose = name == "bf16"
        for step, values in zip(metrics, expected[name]["metrics"], strict=True):
            assert step == pytest.approx(values, rel=2e-2 if loose else 1e-4, abs=2e-3 if loose else 1e-6), name
        if not loose:
            close(weights(engine), expected[name]["after"])
        engine.save(
            work / f"saved_{name}", ["model", "optimizer", "hf_model"] if name != "tied" else ["model", "optimizer"]
        )
        after = weights(engine)
        copies = check_shards(engine, after)
        assert copies == ([0, 1] if name == "replicas" else [0, 0])
        train(engine, batch, 1)
        engine.load(work / f"saved_{name}", ["model", "optimizer"])
        close(weights(engine), after, 0)
        with engine.whole_weights() as module, torch.no_grad():
            logits = module(input_ids=FIELDS["input_ids"][:2]).logits
        if name == "tied":
            assert "lm_head.weight" not in after
            torch.testing.assert_close(logits, expected["tied"]["logits"], atol=1e-4, rtol=1e-3)
    if rank == 0:
        opened = AutoModelForCausalLM.from_pretrained(work / "saved_offload" / "hf_model")
        close({name: p.detach() for name, p in opened.named_parameters()}, expected["offload"]["after"])


def _config(settings):  # type: ignore[no-untyped-def]
    from hybridrl.config.schema.engine import WrapPolicyConfig

    return {name: WrapPolicyConfig(**v) if name == "wrap_policy" else v for name, v in settings.items()}


def check_value_model(rank: int, model: Path, work: Path) -> None:
    expected = torch.load(work / "value.pt", weights_only=True)
    batch = make_batch(FIELDS, own_rows(rank))
    for name in ("float32", "bfloat16"):
        engine = make_engine(model, "value_model", optim=SETTINGS, dtype=name)
        metrics = train(engine, batch, STEPS, value_loss)
        loose = name == "bfloat16"
        for step, values in zip(metrics, expected["metrics"], strict=True):
            assert step == pytest.approx(values, rel=3e-2 if loose else 1e-4, abs=1e-6), name
        if loose:
            continue
        close(weights(engine), expected["after"])
        values = engine.infer(batch, MicroBatching(size=2), outputs=("values",))["values"]
        torch.testing.assert_close(values, expected["values"][own_rows(rank)], atol=1e-4, rtol=1e-3)
        engine.save(work / "value_two_ranks", ["model", "optimizer", "extra"])
        # The head's one row lies on rank 0 alone.
        again = make_engine(model, "value_model", optim=SETTINGS)
        again.load(work / "value_two_ranks", ["model", "optimizer", "extra"])
        close(weights(again), weights(engine), 0)


def check_faults(rank: int, model: Path, work: Path) -> None:
    """What rank 0 finds while it loads reaches every rank, instead of a wait without end."""
    with raises_with(ModelError, "model.norm.weight"):
        make_engine(work / "broken_weights")
    with pytest.raises(ModelError, match="does not divide the 2 ranks"):
        from hybridrl.engine.fsdp import sharding

        world = distributed.get_world_size
        distributed.get_world_size = lambda: 3  # type: ignore[assignment]
        try:
            sharding.build_mesh(2)
        except ModelError as error:
            raise ModelError(str(error).replace("3 ranks", "2 ranks")) from error
        finally:
            distributed.get_world_size = world


def train_routers(engine, batch):  # type: ignore[no-untyped-def]
    """Metrics of two steps, merged over the ranks, in micro-batches that are the same on any number of ranks."""
    found = []
    for _ in range(2):
        own = engine.train_batch(batch, MicroBatching(size=1), policy_loss, TEMPERATURE)
        merged = merge_metrics(distributed.all_gather_object(own))
        found.append({name: float(metric.value) for name, metric in merged.items()})
    return found


def check_router_loss(rank: int, routed: Path, work: Path) -> None:
    """One rank has more micro-batches than the other, which adds dummies."""
    expected = torch.load(work / "routers.pt", weights_only=True)
    engine = make_engine(routed, optim=SETTINGS, router_aux_loss_coef=0.1)
    found = engine.infer(make_batch(FIELDS, own_rows(rank)), MicroBatching(size=2), outputs=("routed_experts",))
    assert torch.equal(found["routed_experts"], expected["experts"][own_rows(rank)])
    metrics = train_routers(engine, make_batch(ROUTED, own_rows(rank)))
    for step, values in zip(metrics, expected["metrics"], strict=True):
        assert step == pytest.approx(values, rel=1e-4, abs=1e-6)
    close(weights(engine), expected["after"])


def body(rank: int, model: Path, tied: Path, odd: Path, routed: Path, work: Path) -> None:
    check_language_model(rank, model, work)
    check_optimizers(rank, odd, work)
    check_full_kl(rank, model, work)
    check_distillation(rank, model, work)
    check_sessions(rank, model, work)
    check_new_rank_is_seeded(rank, model, work)
    check_nonfinite(rank, model)
    check_memory_error(rank, model)
    check_variants(rank, model, tied, work)
    check_value_model(rank, model, work)
    check_router_loss(rank, routed, work)
    check_faults(rank, model, work)
    dist.barrier()


def saved_in_between(model: Path, optim: Any, folder: Path) -> dict[str, Any]:
    """The weights after two updates, where they are saved, and after two more, which a resumed engine repeats."""
    batch, engine = make_batch(FIELDS), make_engine(model, optim=optim)
    train(engine, batch, STEPS)
    found = {"after": weights(engine)}
    engine.save(folder, ["model", "optimizer", "extra"])
    resumed = make_engine(model, optim=optim)
    resumed.load(folder, ["model", "optimizer", "extra"])
    assert train(resumed, batch, 2) == train(engine, batch, 2)
    close(weights(resumed), weights(engine), 0)
    return found | {"final": weights(engine)}


def save_variants(model: Path, tied: Path, work: Path) -> None:
    """What one rank trains with other settings and models."""
    batch = make_batch(FIELDS)
    variants = {}
    for name, path in {"bf16": model, "tied": tied, "plain": model, "sgd": model}.items():
        engine = make_engine(
            path, optim=SGD if name == "sgd" else SETTINGS, **({"dtype": "bfloat16"} if name == "bf16" else {})
        )
        variants[name] = {"metrics": train(engine, batch, 2), "after": weights(engine)}
        with engine.whole_weights() as module, torch.no_grad():
            variants[name]["logits"] = module(input_ids=FIELDS["input_ids"][:2]).logits
    for name in ("replicas", "offload", "by_size"):
        variants[name] = variants["plain"]
    torch.save(variants, work / "variants.pt")


@pytest.mark.slow
def test_two_ranks_do_what_one_does(
    micro_model: Path, tied_model: Path, odd_model: Path, routed_model: Path, tmp_path: Path
) -> None:
    batch = make_batch(FIELDS)
    one = make_engine(micro_model, optim=SETTINGS)
    outputs = one.infer(batch, MicroBatching(), TEMPERATURE, ("log_probs", "entropy"))
    record = {**outputs, "before": weights(one), "metrics": train(one, batch, STEPS), "after": weights(one)}
    with one.whole_weights() as module, torch.no_grad():
        record["logits"] = module(input_ids=FIELDS["input_ids"][:3]).logits
    one.save(tmp_path / "one_rank", ["model", "optimizer", "extra"])
    train(one, batch, 2)
    torch.save({**record, "final": weights(one)}, tmp_path / "language.pt")

    save_variants(micro_model, tied_model, tmp_path)

    critic = make_engine(micro_model, "value_model", optim=SETTINGS)
    record = {"metrics": train(critic, batch, STEPS, value_loss), "after": weights(critic)}
    record["values"] = critic.infer(batch, MicroBatching(), outputs=("values",))["values"]
    torch.save(record, tmp_path / "value.pt")

    shutil.copytree(micro_model, tmp_path / "broken_weights")
    incomplete = load_file(micro_model / "model.safetensors")
    del incomplete["model.norm.weight"]
    save_file(incomplete, tmp_path / "broken_weights" / "model.safetensors", metadata={"format": "pt"})

    kept = {name: saved_in_between(odd_model, optim, tmp_path / f"one_{name}") for name, optim in OPTIMIZERS.items()}
    torch.save(kept, tmp_path / "optimizers.pt")

    engine = make_engine(micro_model, optim={**SGD, "lr": 0.3})
    engine.compare_with(make_engine(micro_model, forward_only=True))
    record = {"metrics": train(engine, batch, STEPS, full_kl_loss), "after": weights(engine)}
    torch.save(record, tmp_path / "full_kl.pt")

    engine = make_engine(routed_model, optim=SETTINGS, router_aux_loss_coef=0.1)
    record = engine.infer(batch, MicroBatching(), outputs=("routed_experts",))
    record = {"experts": record["routed_experts"], "metrics": train_routers(engine, make_batch(ROUTED))}
    torch.save({**record, "after": weights(engine)}, tmp_path / "routers.pt")

    whole = {}
    for mode in ("gspo", "geo_mean", "sppo", "gvpo"):
        engine = make_engine(micro_model, optim=SESSION_SGD)
        before = weights(engine)
        trained_on_sessions(engine, mode, sessions(cut=False))
        whole[mode] = weights(engine)
        assert max(float((whole[mode][name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3
    torch.save(whole, tmp_path / "sessions.pt")

    # Of a vocabulary of the policy's size, and with sizes of its own.
    teacher = make_engine(build_tiny_model(tmp_path / "teacher", hidden=36, heads=3, kv_heads=1, seed=3))
    fields = taught(teacher, FIELDS)
    modes = ("k3", "forward_kl_topk", "reverse_kl")
    found = {
        name: distilled(
            make_engine(micro_model), teacher, fields, MicroBatching(4), loss_mode=name, use_task_rewards=False
        )
        for name in modes
    }
    torch.save({"fields": fields, "metrics": found}, tmp_path / "distillation.pt")
    spawn(body, 2, micro_model, tied_model, odd_model, routed_model, tmp_path)
    for name, optim in OPTIMIZERS.items():  # and what two ranks saved goes on on one
        engine = make_engine(odd_model, optim=optim)
        engine.load(tmp_path / f"two_{name}", ["model", "optimizer", "extra"])
        train(engine, batch, 2)
        moved_alike(weights(engine), kept[name]["final"], kept[name]["after"])

    # What two ranks saved opens on one, and as a Hugging Face model.
    back = make_engine(micro_model, optim=SETTINGS)
    back.load(tmp_path / "two_ranks", ["model", "optimizer", "extra"])
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "two_ranks" / "hf_model", dtype=torch.float32)
    close({name: p.detach() for name, p in opened.named_parameters()}, weights(back), 0)
    train(back, batch, 2)
    close(weights(back), torch.load(tmp_path / "language.pt", weights_only=True)["final"])
    critic.load(tmp_path / "value_two_ranks", ["model", "optimizer"])
