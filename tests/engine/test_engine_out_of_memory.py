"""An allocation that fails within a call: smaller micro-batches, and the results of a run without it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import (
    TEMPERATURE,
    make_batch,
    make_engine,
    make_fields,
    policy_loss,
    related,
    value_loss,
    weights,
)
from raising import raises_with
from ranks import spawn

from hybridrl.engine import MicroBatching
from hybridrl.engine.microbatch import BatchPlan
from hybridrl.engine.prefix_plan import PrefixPlan
from hybridrl.errors import MicroBatchError, ModelError
from hybridrl.utils import distributed

FIELDS = make_fields()
MICRO = MicroBatching(max_tokens=100)
PLAIN = {"optimizer": "SGD", "lr": 1.0, "lr_warmup_steps": 0, "lr_scheduler_type": "constant", "clip_grad": 1e9}


def no_memory(kind: str) -> None:
    if kind == "cuda":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    torch.empty(1 << 58, dtype=torch.uint8)  # what PyTorch's allocator of main memory raises


@contextlib.contextmanager
def failing(engine: Any, place: str, call: int, kind: str = "cpu") -> Iterator[list[int]]:
    """Within the context, the last layer's forward or backward pass fails the `call`-th time."""
    calls: list[int] = []
    layer = next(part for name, part in engine.module.named_modules() if name.endswith("layers.1"))

    def count(*_: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            no_memory(kind)

    register = layer.register_forward_pre_hook if place == "forward" else layer.register_full_backward_hook
    handle = register(count)
    try:
        yield calls
    finally:
        handle.remove()


def step(engine: Any, micro: MicroBatching) -> dict[str, float]:
    metrics = engine.train_batch(make_batch(FIELDS), micro, policy_loss, TEMPERATURE, entropy=True)
    return {name: float(metric.value) for name, metric in metrics.items()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("place", "kind"), [("forward", "cuda"), ("backward", "cpu")])
def test_a_step_that_runs_out_of_memory_equals_one_that_does_not(
    micro_model: Path, capsys: pytest.CaptureFixture[str], place: str, kind: str, checkpointing: bool
) -> None:
    model = {"enable_gradient_checkpointing": checkpointing}
    engines = [make_engine(micro_model, optim=PLAIN, model=model) for _ in range(3)]
    failed, smaller, larger = engines
    limit = BatchPlan(FIELDS, MICRO, packed=False).halved_budget()
    assert limit is not None and limit < MICRO.max_tokens  # type: ignore[operator]
    with failing(failed, place, call=2, kind=kind) as calls:
        got = step(failed, MICRO)
    groups = len(BatchPlan(FIELDS, MicroBatching(max_tokens=limit), packed=False).groups)
    assert len(calls) >= 2 + groups  # two micro-batches, then all of them again
    notice = capsys.readouterr().err
    assert "train_batch" in notice and f"{limit} tokens" in notice and "ppo_max_token_len_per_gpu" in notice
    assert got == step(smaller, MicroBatching(max_tokens=limit))
    expected, other = weights(smaller), weights(failed)
    assert all(torch.equal(other[name], tensor) for name, tensor in expected.items())
    step(larger, MICRO)
    for name, tensor in weights(larger).items():
        torch.testing.assert_close(other[name], tensor, atol=1e-6, rtol=1e-6)
    # Later steps begin with the smaller micro-batches, and passes without gradients keep theirs.
    with failing(failed, "forward", call=10**6) as calls:
        step(failed, MICRO)
    assert len(calls) == groups * (2 if checkpointing else 1)
    with failing(failed, "forward", call=10**6) as calls:
        failed.infer(make_batch(FIELDS), MICRO, TEMPERATURE)
    assert len(calls) == len(BatchPlan(FIELDS, MICRO, packed=False).groups)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize(
    ("model_type", "model"),
    [
        ("language_model", {"override_config": {"attn_implementation": "hybridrl_varlen"}}),  # packed rows
        ("language_model", {"share_prefixes": True}),
        ("value_model", {"share_prefixes": True}),
        ("value_model", {"share_prefixes": False}),
    ],
)
def test_so_do_those_of_packed_rows_of_trees_and_of_a_critic(
    micro_model: Path, capsys: pytest.CaptureFixture[str], model_type: str, model: dict[str, Any], place: str
) -> None:
    fields, micro = related(FIELDS), MicroBatching(max_tokens=60, key="group.max_tokens")
    loss = policy_loss if model_type == "language_model" else value_loss
    engines: list[Any] = [make_engine(micro_model, model_type, PLAIN, model) for _ in range(3)]
    failed, smaller, larger = engines
    shares = bool(model.get("share_prefixes"))
    assert failed.packed == ("override_config" in model) and (failed.shares_prefixes is True) == shares
    plan = failed.plan_batch(make_batch(fields), micro)
    assert isinstance(plan, PrefixPlan) == shares and len(plan.groups) > 1
    limit = plan.halved_budget()
    with failing(failed, place, call=2):
        got = failed.train_batch(make_batch(fields), micro, loss, TEMPERATURE)
    told = capsys.readouterr().err
    assert f"at most {limit} tokens" in told and f"set group.max_tokens={limit}" in told
    expected = smaller.train_batch(make_batch(fields), MicroBatching(max_tokens=limit), loss, TEMPERATURE)
    assert got == expected
    assert all(torch.equal(weights(failed)[name], tensor) for name, tensor in weights(smaller).items())
    larger.train_batch(make_batch(fields), micro, loss, TEMPERATURE)
    for name, tensor in weights(larger).items():
        torch.testing.assert_close(weights(failed)[name], tensor, atol=2e-6, rtol=2e-5)
    output = "log_probs" if model_type == "language_model" else "values"
    with failing(failed, "forward", call=2):
        found = failed.infer(make_batch(fields), micro, TEMPERATURE, (output,))[output]
    apart = smaller.infer(make_batch(fields), MicroBatching(max_tokens=limit), TEMPERATURE, (output,))[output]
    assert torch.equal(found, apart)


def on_two_ranks(rank: int, model: Path, shared: int) -> None:
    engine: Any = make_engine(model, optim=PLAIN, ulysses_sequence_parallel_size=shared)
    rows = slice(None) if shared == 2 else slice(6 * rank, 6 * rank + 6)
    micro = MicroBatching(max_tokens=100 // shared, key="group.max_tokens")
    plan = engine.plan_batch(make_batch(FIELDS, rows), micro)
    if rank == 0:  # its collective ends with the other process
        with pytest.raises(RuntimeError):
            engine.train_batch(make_batch(FIELDS, rows), micro, policy_loss, TEMPERATURE)
        return
    half = plan.halved_budget()
    message = (
        rf"rank 1 .*train_batch.*{max(map(plan.tokens, plan.groups))} tokens.*group\.max_tokens={half // shared}\b"
    )
    with failing(engine, "backward", call=1), pytest.raises(MicroBatchError, match=message) as raised:
        engine.train_batch(make_batch(FIELDS, rows), micro, policy_loss, TEMPERATURE)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.key, copy.half) == (str(raised.value), "group.max_tokens", half // shared)
    assert copy.by_tokens and copy.ranks == shared
    distributed.destroy_process_group()


@pytest.mark.parametrize("shared", [1, 2])
def test_on_several_ranks_the_error_says_what_to_set_and_no_rank_hangs(micro_model: Path, shared: int) -> None:
    spawn(on_two_ranks, 2, micro_model, shared)


def test_a_pass_that_runs_out_of_memory_several_times(micro_model: Path) -> None:
    engine = make_engine(micro_model)
    expected = engine.infer(make_batch(FIELDS), MICRO, TEMPERATURE, ("log_probs", "entropy"))
    with failing(engine, "forward", call=1), failing(engine, "forward", call=2):
        got = engine.infer(make_batch(FIELDS), MICRO, TEMPERATURE, ("log_probs", "entropy"))
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_sequence_that_does_not_fit_ends_the_run(micro_model: Path) -> None:
    engine, before = make_engine(micro_model), None
    before = weights(engine)
    longest = int(FIELDS["attention_mask"].sum(1).max())
    with (
        contextlib.ExitStack() as stack,
        raises_with(ModelError, f"{longest} tokens", "data.max_response_length", "enable_gradient_checkpointing"),
    ):
        for call in range(1, 12):
            stack.enter_context(failing(engine, "forward", call))
        step(engine, MICRO)
    assert all(torch.equal(weights(engine)[name], tensor) for name, tensor in before.items())


def test_other_errors_are_not_repeated(micro_model: Path) -> None:
    engine = make_engine(micro_model)

    def wrong(*_: Any) -> Any:
        raise ValueError("no such column")

    with pytest.raises(ValueError, match="no such column"):
        engine.train_batch(make_batch(FIELDS), MICRO, wrong, TEMPERATURE)
