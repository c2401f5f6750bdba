"""Weights from this process into another one on the same GPU, by the transport that training uses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
from gpu_helpers import free_gib
from ray.exceptions import RayActorError

from hybridrl.hybrid_engine import transports
from hybridrl.hybrid_engine.receive import WeightReceiver
from hybridrl.hybrid_engine.stream import stream
from hybridrl.hybrid_engine.transports import CudaIpcTransport, SharedMemoryTransport, UpdateTarget, transports_to
from hybridrl.utils import device
from hybridrl.utils.distributed import StandaloneGroup

pytestmark = pytest.mark.timeout(240)
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
MIB = 2**20


class Taker:
    """A process on the same GPU that sums up what it receives."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.receiver = WeightReceiver(torch.device("cuda", 0), copies=False)
        self.sums: dict[str, float] = {}
        self.dies_at, self.count = dies_at, 0

    def load_bucket(self, bucket) -> None:
        self.count += 1
        if self.count == self.dies_at:
            os._exit(1)
        for name, value in self.receiver.tensors(bucket):
            self.sums[name] = float(value.double().sum())
        torch.cuda.synchronize()

    def take(self) -> dict[str, float]:
        sums, self.sums = self.sums, {}
        return sums


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def taker(**options) -> UpdateTarget:
    actor = ray.remote(Taker).options(num_cpus=0, runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": "0"}})
    return UpdateTarget(actor.remote(**options), f"taker {time.monotonic()}", "node", (0,), 1)


def weights(count: int, mib: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator(device="cuda").manual_seed(count)
    size = mib * MIB // 2
    return [
        (f"layer.{i}", torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator))
        for i in range(count)
    ]


def send(sent: list[tuple[str, torch.Tensor]], target: UpdateTarget, bucket: int = 256 * MIB) -> float:
    (transport,) = transports_to([target], "node")
    assert isinstance(transport, CudaIpcTransport)
    return stream(iter(sent), [transport], sum(t.nbytes for _, t in sent), bucket).seconds


def test_everything_arrives(figures) -> None:
    target, sent = taker(), weights(16, 128)
    send(sent, target)
    found = ray.get(target.replica.take.remote())
    assert found == {name: float(value.double().sum()) for name, value in sent}
    taken = min(send(sent, target) for _ in range(3))
    figures(ipc_gb_per_s=sum(value.nbytes for _, value in sent) / taken / 1e9)
    ray.kill(target.replica)


def test_a_gpu_that_cannot_be_shared_sends_through_main_memory(monkeypatch, figures) -> None:
    """As in sandboxes without CUDA IPC; this machine has it."""
    assert device.memory_sharing_unsupported_reason() is None
    assert "ended with status 1" in str(device.opened_by_child(b"no handle", 0))
    monkeypatch.setattr(transports, "ipc_unsupported_reason", lambda: "not supported")
    target, sent = taker(), weights(4, 128)
    (transport,) = transports_to([target], "node")
    assert isinstance(transport, SharedMemoryTransport)
    size = sum(t.nbytes for _, t in sent)
    taken = min(
        stream(iter(sent), [transport], size, 256 * MIB).seconds for _ in range(3)
    )  # the first starts a process
    assert ray.get(target.replica.take.remote()) == {name: float(value.double().sum()) for name, value in sent}
    figures(main_memory_gb_per_s=size / taken / 1e9)
    ray.kill(target.replica)


@pytest.mark.parametrize("buckets", [1, 4], ids=["one bucket", "several buckets"])
def test_updates_leak_nothing(buckets: int) -> None:
    target = taker()
    sent = weights(buckets, 64)
    send(sent, target, 64 * MIB)
    before = free_gib()
    for _ in range(20):
        send(sent, target, 64 * MIB)
    assert free_gib() > before - 0.06  # 20 lost buckets would be 1.25 GiB
    ray.kill(target.replica)


def test_an_engine_that_dies_leaves_nothing_behind() -> None:
    send(weights(4, 64), taker(), 64 * MIB)
    sent = weights(4, 64)
    before = free_gib()
    for dies_at in (1, 2, 3, 4):
        target = taker(dies_at=dies_at)
        send(sent, target, 64 * MIB)
        with pytest.raises(RayActorError):
            ray.get(target.replica.take.remote())
    time.sleep(1)
    assert free_gib() > before - 0.06


@pytest.mark.skipif("expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""), reason="runs itself")
def test_with_expandable_segments(finish) -> None:
    """Such segments travel as file descriptors, which containers do not let other processes take."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(Path(__file__)), "-k", "arrives or leak"]
    ended: subprocess.CompletedProcess[str] = finish(command, limit=200, env=environment)
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_nccl_with_one_process() -> None:
    """Constructor, options and time limit of the group that broadcasts to engines on other devices."""
    here = device.current_device()
    group = StandaloneGroup("127.0.0.1", 0, 0, 1, here, timeout_seconds=60)
    group.connect()
    tensor = torch.arange(1000, device=here)
    group.broadcast(tensor, root=0)
    assert torch.equal(tensor, torch.arange(1000, device=here))
