"""Inputs of layers in main memory: the same gradients however late copies are, and little that stays on the device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import TEMPERATURE, make_batch, make_engine, make_fields, policy_loss, weights
from late_transfer import LateTransfer
from raising import raises_with
from torch import nn

from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.activation_offload import ActivationOffload
from hybridrl.engine.fsdp.activations import recomputed
from hybridrl.errors import ModelError
from hybridrl.utils import device

LAYERS = 6
FIELDS = make_fields()
PLAIN = {"optimizer": "SGD", "lr": 1.0, "lr_warmup_steps": 0, "lr_scheduler_type": "constant", "clip_grad": 1e9}


class Watched(LateTransfer):
    """Copies as late as possible, and notes which way each goes, and when it is awaited."""

    events: list[tuple[str, int]]  # "out" or "back", and the number of the tensor
    hosts: list[torch.Tensor]
    back: list[weakref.ref[torch.Tensor]]

    def __init__(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        ((target, source),) = copies
        known = [number for number, host in enumerate(self.hosts) if host is source]
        self.name = ("back", known[0]) if known else ("out", len(self.hosts))
        self.events.append(self.name)
        if known:
            self.back.append(weakref.ref(target))
        else:
            self.hosts.append(target)
        super().__init__([(target, source)])

    def wait(self) -> None:
        super().wait()
        self.events.append((f"{self.name[0]} is there", self.name[1]))


@pytest.fixture
def watched() -> type[Watched]:
    return type("Fresh", (Watched,), {"events": [], "hosts": [], "back": []})


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS))


def forward(offload: ActivationOffload | None, stack: Iterable[nn.Module], start: torch.Tensor) -> torch.Tensor:
    hidden = start * 2
    for layer in stack:
        hidden = recomputed(layer, hidden) if offload is None else offload(recomputed, layer, hidden)
    return hidden.square().sum()


def gradients(stack: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in stack.parameters() if parameter.grad is not None]
    stack.zero_grad()
    return found


def test_layers_go_out_in_order_and_come_back_one_ahead(watched: type[Watched]) -> None:
    start, stack = torch.randn(5, 8, requires_grad=True), layers()
    forward(None, stack, start).backward()
    expected = gradients(stack)
    assert len(expected) == 2 * LAYERS
    loss = forward(ActivationOffload(watched), stack, start)
    there = [number for event, number in watched.events if event == "out is there"]
    assert there == [0, 1, 2, 3]  # all but those of the last two layers
    # A layer's copy is awaited when the second layer after it is called.
    assert watched.events[:7] == [
        ("out", 0), ("out", 1), ("out is there", 0), ("out", 2), ("out is there", 1), ("out", 3), ("out is there", 2),
    ]  # fmt: skip
    watched.events.clear()
    loss.backward()
    assert all(torch.equal(one, other) for one, other in zip(gradients(stack), expected, strict=True))
    assert watched.events == [
        ("back", 3), ("back", 2), ("back is there", 3), ("back", 1), ("back is there", 2), ("back", 0),
        ("back is there", 1), ("back is there", 0),
    ]  # fmt: skip


def test_two_inputs_stay_on_the_device(watched: type[Watched]) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    stack = layers()
    for layer in stack:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(weakref.ref(inputs[0])))
    loss = forward(ActivationOffload(watched), stack, torch.randn(5, 8, requires_grad=True))
    assert [one() is not None for one in seen] == [False] * 4 + [True] * 2
    loss.backward(retain_graph=True)
    gc.collect()
    assert len(watched.back) == 4 and not any(one() is not None for one in watched.back)
    del loss
    gc.collect()
    assert not any(one() is not None for one in seen)  # a graph that nobody needs keeps nothing


def test_passes_in_any_order(watched: type[Watched]) -> None:
    """Two passes before a backward pass, the first one's gradients first, and each twice."""
    stack, offload = layers(), ActivationOffload(watched)
    starts = [torch.randn(rows, 8, requires_grad=True) for rows in (5, 3)]
    expected = []
    for start in starts:
        forward(None, stack, start).backward()
        expected.append(gradients(stack))
    losses = [forward(offload, stack, start) for start in starts]
    for keep in (True, False):
        for loss, grads in zip(losses, expected, strict=True):
            loss.backward(retain_graph=keep)
            assert all(torch.equal(one, other) for one, other in zip(gradients(stack), grads, strict=True))


@pytest.mark.parametrize("changed", [0, LAYERS - 1])
def test_an_input_that_is_changed_in_place_is_named(changed: int) -> None:
    """Whether it has left the device by then or not."""
    offload, stack = ActivationOffload(LateTransfer), layers()

    def run() -> None:
        hidden = torch.randn(5, 8, requires_grad=True) * 2
        for number, layer in enumerate(stack):
            before, hidden = hidden, offload(recomputed, layer, hidden)
            if number == changed:
                before.add_(1)
        hidden.sum().backward()

    with raises_with(ModelError, "enable_activation_offload=True"):
        run()


def test_layers_with_several_inputs(watched: type[Watched]) -> None:
    """Both of a layer leave and come back together; what all layers get stays where it is."""
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
    start, shared = torch.randn(5, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def run(offload: Any) -> list[torch.Tensor]:
        hidden, every = start * 2, shared * 1
        for number, weight in enumerate(weights):
            own = start * number
            hidden = offload(
                recomputed, lambda x, y, z, weight=weight: torch.tanh(x @ weight) * y + z, hidden, own, every
            )
        return list(torch.autograd.grad(hidden.sum(), [*weights, start, shared]))

    expected = run(lambda compute_again, function, *inputs: compute_again(function, *inputs))
    assert all(torch.equal(one, other) for one, other in zip(run(ActivationOffload(watched)), expected, strict=True))
    assert sorted(number for event, number in watched.events if event == "out") == list(range(9))
    back = [number for event, number in watched.events if event in ("back", "back is there")]
    assert sorted(set(back)) == [0, 1, 2, 3, 4] and len(back) == 2 * 5
    order = [event for event in watched.events if event[0].startswith("back")]
    assert {number for event, number in order[:4] if event == "back"} >= {3, 4}  # before either is needed


def test_what_needs_no_gradient_stays(watched: type[Watched]) -> None:
    weight, mask = torch.randn(8, 8, requires_grad=True), torch.ones(8)
    out = ActivationOffload(watched)(recomputed, lambda one, other: (one @ weight) * other, torch.randn(5, 8), mask)
    out.sum().backward()
    assert not watched.events and weight.grad is not None


def test_a_transfer_that_is_given_up_is_awaited() -> None:
    """Its memory would be used for something else while a stream still copies to it."""
    awaited: list[str] = []

    class Event:
        def synchronize(self) -> None:
            awaited.append("event")

    transfer = device.Transfer(())
    transfer._end = Event()
    del transfer
    assert awaited == ["event"]


def after_a_step(path: Path, transfer: type[device.Transfer] | None = None, **model: Any) -> dict[str, torch.Tensor]:
    engine: Any = make_engine(path, optim=PLAIN, model=model)
    calls = {getattr(part, "_gradient_checkpointing_func", None) for part in engine.module.modules()} - {None}
    if transfer is not None:
        (call,) = calls
        call.func.transfer = transfer
    engine.train_batch(make_batch(FIELDS), MicroBatching(size=5), policy_loss, TEMPERATURE, entropy=True)
    return weights(engine)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_an_update_stays_the_same(micro_model: Path, watched: type[Watched], granularity: str) -> None:
    """With several micro-batches, of the model's two layers and of five."""
    for extra in ({}, {"override_config": {"num_hidden_layers": 1}}):
        model: dict[str, Any] = {"recompute_granularity": granularity, **extra}
        expected = after_a_step(micro_model, **model)
        got = after_a_step(micro_model, watched, enable_activation_offload=True, **model)
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        assert watched.events
