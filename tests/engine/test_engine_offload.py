"""State that is in main memory between uses, by the code that runs with a GPU; here the device is main memory, too."""

from __future__ import annotations

import importlib.util
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import TEMPERATURE, make_batch, make_engine, make_fields, policy_loss, weights
from late_transfer import LateTransfer
from ranks import spawn
from torch.distributed.tensor import DTensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp import checkpoint
from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.engine.fsdp.offload import HostCopies, plain_parts, rebuilt_tensor
from hybridrl.engine.fsdp.sharding import ShardedModule
from hybridrl.utils import device, distributed
from hybridrl.workers.model_worker import ModelWorker

FIELDS = make_fields()
OFFLOAD = {"param_offload": True, "optimizer_offload": True}
EIGHT_BIT = {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"}
OPTIMIZERS = [{}, *([EIGHT_BIT] if importlib.util.find_spec("torchao") else [])]


def step(engine: Any) -> dict[str, float]:
    with engine.loaded(optimizer=True):
        metrics = engine.train_batch(make_batch(FIELDS), MicroBatching(size=4), policy_loss, TEMPERATURE)
    return {name: float(metric.value) for name, metric in metrics.items()}


def infer(engine: Any) -> torch.Tensor:
    with engine.loaded(optimizer=False):
        return engine.infer(make_batch(FIELDS), MicroBatching(size=4), TEMPERATURE)["log_probs"]


def places(engine: Any) -> list[int]:
    """Where the module's parameters and the optimizer's state are in memory."""
    states = [value for state in engine.model_state.optimizer.state.values() for value in state.values() if value.ndim]
    tensors = [*engine.module.parameters(), *states]
    locals_ = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return [tensor.data_ptr() for tensor in locals_ if type(tensor) in (torch.Tensor, torch.nn.Parameter)]


def check_same_as_resident(model: Path, folder: Path, optim: dict[str, Any], **settings: Any) -> None:
    """Training, saving, loading and exporting do the same bit for bit, wherever the state is between uses.

    However late it arrives on the device.
    """
    resident, offloaded = (
        make_engine(model, optim=optim, **settings),
        make_engine(model, optim=optim, **settings, **OFFLOAD),
    )
    offloaded.model_state.offload.transfer = LateTransfer  # type: ignore[attr-defined]
    for _ in range(2):
        assert step(offloaded) == step(resident)
        assert torch.equal(infer(offloaded), infer(resident))
    between = places(offloaded)
    with offloaded.loaded(optimizer=True):
        assert not set(places(offloaded)) & set(between) - {0}
    assert places(offloaded) == between
    offloaded.save(folder, ["model", "optimizer", "extra"])
    step(offloaded)
    offloaded.load(folder, ["model", "optimizer", "extra"])
    assert step(offloaded) == step(resident)
    for dtype in (None, torch.bfloat16):
        with offloaded.loaded():
            found = {name: tensor.clone() for name, tensor in offloaded.export_weights(dtype)}
        expected = dict(resident.export_weights(dtype))
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of each copy to main memory that was not a copy onto itself."""
    sizes: list[int] = []
    copy_ = torch.Tensor.copy_
    store = HostCopies.store

    def counted(self: HostCopies, *given: Any) -> None:
        def copied(target: torch.Tensor, source: torch.Tensor, **options: Any) -> torch.Tensor:
            sizes.append(source.nbytes)
            return copy_(target, source, **options)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", copied)
            store(self, *given)

    monkeypatch.setattr(HostCopies, "store", counted)
    yield sizes


def test_frozen_weights_are_copied_to_main_memory_once(micro_model: Path, stored: list[int]) -> None:
    """With an adapter, an update copies the adapter and its moments."""
    engine: Any = make_engine(micro_model, model={"lora_rank": 2}, **OFFLOAD)
    assert sum(stored) > 10 * sum(parameter.nbytes for parameter in engine.model_state.trainable.values())
    step(engine)  # makes the optimizer's state
    stored.clear()
    step(engine)
    steps = 4 * len(engine.model_state.trainable)
    assert sum(stored) == 3 * sum(parameter.nbytes for parameter in engine.model_state.trainable.values()) + steps


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: optim.get("optimizer", "AdamW"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_changes_nothing(micro_model: Path, tmp_path: Path, dtype: str, optim: dict[str, Any]) -> None:
    check_same_as_resident(micro_model, tmp_path, optim, dtype=dtype)


def test_only_what_changed_is_copied_back(micro_model: Path, stored: list[int]) -> None:
    engine: Any = make_engine(micro_model, dtype="bfloat16", **OFFLOAD)
    stored.clear()
    infer(engine)
    with engine.loaded():
        sent = dict(engine.export_weights(torch.bfloat16))
    assert not stored
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    step(engine)
    count = sum(parameter.numel() for parameter in engine.module.parameters())
    # bfloat16 weights, and float32 master weights and moments; the step counters are small
    assert 14 * count <= sum(stored) <= 14 * count + 8 * len(list(engine.module.parameters()))


def test_memory_is_as_large_as_needed(micro_model: Path) -> None:
    tensors = [torch.randn(7, 5), torch.randn(3, 4).t(), torch.randn(2).bfloat16(), torch.empty(0, 9)]
    host = HostCopies(tensors)
    host.store(tensors)
    assert {dtype: memory.numel() for dtype, memory in host._buffers.items()} == {torch.float32: 47, torch.bfloat16: 2}
    back, copies = host.on_device(tensors, torch.device("cpu"))
    device.Transfer(copies).wait()
    for tensor, copy, held in zip(tensors, back, host.on_host(tensors), strict=True):
        assert torch.equal(copy, tensor) and torch.equal(held, tensor) and copy.stride() == held.stride()
    assert back[1].stride() == tensors[1].stride()


def test_a_checkpoint_is_written_without_the_device(micro_model: Path, tmp_path: Path) -> None:
    """Beside an engine that is awake there may be no memory for the optimizer's state."""
    worker = object.__new__(ModelWorker)
    worker.engine = make_engine(micro_model, **OFFLOAD)
    step(worker.engine)
    expected = weights(worker.engine)
    between = places(worker.engine)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a checkpoint moved the state to the device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopies, "on_device", refuse)
        worker.save_checkpoint(str(tmp_path), ["model", "optimizer", "extra", "hf_model"])
        worker.load_checkpoint(str(tmp_path), ["model", "optimizer", "extra"])
    assert places(worker.engine)[: len(expected)] == between[: len(expected)]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(worker.engine).items())


KINDS = [pytest.param(lambda _: False, id="one rank"), pytest.param(lambda _: True, id="FSDP2")]


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of this process alone, under which FSDP2 runs, too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed.init_process_group(0, 1, "127.0.0.1", port, timeout_seconds=60)
    yield
    distributed.destroy_process_group()


def state_places(engine: Any) -> dict[tuple[str, str], int]:
    """Where each of the optimizer's tensors is in memory, by parameter and name."""
    return {
        (name, key): value.data_ptr()
        for name, parameter in engine.model_state.trainable.items()
        for key, value in engine.model_state.optimizer.state[parameter].items()
    }


@pytest.mark.parametrize("fused", [False, True])
def test_a_loaded_state_takes_the_memory_of_the_one_before(micro_model: Path, tmp_path: Path, fused: bool) -> None:
    """A fused optimizer, as on a GPU, creates its step counter first, and a checkpoint is read in order of names."""
    optim = {"override_optimizer_config": {"fused": fused}}
    engine: Any = make_engine(micro_model, optim=optim, **OFFLOAD)
    step(engine)
    engine.save(tmp_path, ["model", "optimizer"])
    between = state_places(engine)
    engine.load(tmp_path, ["model", "optimizer"])
    after = state_places(engine)
    kept = {place: key for place, key in between.items() if fused or place[1] != "step"}
    assert len(kept) >= 2 * len(engine.model_state.trainable)
    assert {place: after[place] for place in kept} == kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: optim.get("optimizer", "AdamW"))
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"param_offload": True}, "meta"), ({}, "meta"), ({"optimizer_offload": True}, "cpu")],
    ids=["parameters", "nothing", "state"],
)
def test_a_loaded_state_is_where_it_rests(
    world_of_one: None,
    micro_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings,
    expected,
    optim,
    kind,
) -> None:
    """With parameters offloaded and the state not, nothing would move a state from main memory to the device later."""
    monkeypatch.setattr(FSDPEngine, "_is_sharded", kind)
    engine: Any = make_engine(micro_model, optim=optim, **settings)
    step(engine)
    engine.save(tmp_path, ["model", "optimizer"])
    monkeypatch.setattr(checkpoint, "_read", lambda *_: None)  # only the device that is asked for exists here
    monkeypatch.setattr(device, "current_device", lambda: torch.device("meta"))
    engine.load(tmp_path, ["optimizer"])
    moments = [value for state in engine.model_state.optimizer.state.values() for value in state.values() if value.ndim]
    assert len(moments) == 2 * len(engine.model_state.trainable)
    assert {part.device.type for moment in moments for part in plain_parts(moment)} == {expected}


@pytest.fixture
def wide_rows(tmp_path: Path) -> Path:
    """A model with matrices that are kept in 8 bits, and others that are not."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=263, hidden_size=64, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "wide_rows")
    return tmp_path / "wide_rows"


def moments(engine: Any) -> dict[tuple[str, str, int], torch.Tensor]:
    """The plain tensors of the optimizer's state, by parameter, name and number."""
    return {
        (name, key, number): part.clone()
        for name, parameter in engine.model_state.trainable.items()
        for key, value in engine.model_state.optimizer.state[parameter].items()
        for number, part in enumerate(plain_parts(value))
    }


@pytest.mark.skipif(len(OPTIMIZERS) == 1, reason="the extra torchao is not installed")
@pytest.mark.parametrize("settings", [{"optimizer_offload": True}, {"offload_policy": True}], ids=str)
def test_a_state_in_8_bits_is_read_into_main_memory(
    world_of_one: None, wide_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """With a GPU, FSDP2's mesh is on it: `DTensor.from_local` copies a shard that is in main memory."""
    monkeypatch.setattr(FSDPEngine, "_is_sharded", lambda _: True)
    engine, resumed = (make_engine(wide_rows, optim=EIGHT_BIT, **settings) for _ in range(2))
    for _ in range(2):
        step(engine)
    engine.save(tmp_path, ["model", "optimizer", "extra"])
    wrapped = DTensor.from_local

    def on_another_device(local: torch.Tensor, *others: Any, **named: Any) -> DTensor:
        return wrapped(rebuilt_tensor(local, lambda part: part.clone()), *others, **named)

    with monkeypatch.context() as patch:
        patch.setattr(DTensor, "from_local", on_another_device)
        resumed.load(tmp_path, ["model", "optimizer", "extra"])
    expected, found = moments(engine), moments(resumed)
    assert found.keys() == expected.keys()
    assert sum(tensor.dtype == torch.uint8 and bool(tensor.any()) for tensor in expected.values()) > 10
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert step(resumed) == step(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_error_in_the_middle_of_an_update(
    world_of_one: None, micro_model: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, dtype: str
) -> None:
    """Gradients of the first micro-batches would be in the way when parameters leave the device."""
    monkeypatch.setattr(FSDPEngine, "_is_sharded", kind)
    plain, engine = (make_engine(micro_model, dtype=dtype, **settings) for settings in ({}, {"param_offload": True}))
    calls = itertools.count()

    def failing(outputs: dict[str, torch.Tensor], micro: Any) -> Any:
        if next(calls) == 1:
            raise ZeroDivisionError("in the loss")
        return policy_loss(outputs, micro)

    trained: Any = engine
    with pytest.raises(ZeroDivisionError, match="in the loss"), engine.loaded(optimizer=True):
        engine.train_batch(make_batch(FIELDS), MicroBatching(size=4), failing, TEMPERATURE)
    parameters = [*trained.model_state.exported.parameters.values(), *trained.module.parameters()]
    assert all(parameter.grad is None for parameter in parameters)
    for _ in range(2):
        assert step(engine) == step(plain)


def body(rank: int, model: Path, folder: Path) -> None:
    check_same_as_resident(model, folder / "whole", {})
    check_same_as_resident(model, folder / "bf16", {}, dtype="bfloat16")


@pytest.mark.slow
def test_offloading_changes_nothing_on_two_ranks(micro_model: Path, tmp_path: Path) -> None:
    spawn(body, 2, micro_model, tmp_path)


def test_offloading_by_fsdp2_has_no_effect_on_one_rank(micro_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP2 does not run there, and what the other settings move is still moved."""
    plain, engine = (make_engine(micro_model, **OFFLOAD, offload_policy=policy) for policy in (False, True))
    assert capsys.readouterr().err.count("offload_policy=True has no effect") == 1
    assert step(engine) == step(plain)
    between = set(places(engine))
    with engine.loaded(optimizer=True):
        assert not set(places(engine)) & between


def test_buffers_are_on_the_device_that_computes(
    world_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 keeps parameters in main memory and brings them; nothing brings a router's bias."""
    monkeypatch.setattr(FSDPEngine, "_is_sharded", lambda _: True)
    monkeypatch.setattr(ShardedModule, "_receive", lambda *_: None)  # only the device that is asked for exists here
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=263, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    with device.computing_on(torch.device("meta")):
        engine: Any = make_engine(tmp_path, offload_policy=True)
    assert {parameter.to_local().device.type for parameter in engine.module.parameters()} == {"cpu"}
    buffers = dict(engine.module.named_buffers())
    assert any("e_score_correction_bias" in name for name in buffers)
    assert {buffer.device.type for buffer in buffers.values()} == {"meta"}


def test_memory_is_returned_after_each_use(micro_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine for generation claims its memory next, whether this use was an update or not."""
    engine = make_engine(micro_model)
    returned: list[bool] = []
    monkeypatch.setattr(device, "empty_cache", lambda: returned.append(True))
    infer(engine)
    assert returned == [True]
    step(engine)
    assert returned == [True, True]
