"""Seconds to put new weights into a running vLLM engine, compared with the engine loading tensors that it already
holds.

    python benchmarks/weight_update.py            # 1 GB in float32

Ours: a process that holds the weights sends them as a trainer does (`hybridrl.hybrid_engine.stream`: buckets in shared
memory on a CPU, CUDA IPC on a GPU) to the engine's process. The other side: the same tensors are already in the
engine's process and are loaded by the same calls of vLLM, so the difference is the transfer between the processes.
Both have the same threads and alternate. The time of one memcpy of the same bytes is printed too. The last line is
the ratio of the best rounds, ours over resident: at most 1.5.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch

from hybridrl.hybrid_engine.stream import stream
from hybridrl.hybrid_engine.transports import UpdateTarget, transports_to
from hybridrl.rollout.vllm import compat
from hybridrl.rollout.vllm.worker_extension import WeightReceiverExtension

LIMIT = 1.5


class ResidentWeights(WeightReceiverExtension):
    """Mixed into vLLM's worker: weights that are there already."""

    _resident: list[tuple[str, torch.Tensor]]

    def bench_prepare(self, path: str) -> int:
        """Read the checkpoint into this process; its bytes."""
        self._resident = [(name, tensor.to(self.device)) for name, tensor in tensors_of(path)]
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self._resident)

    def bench_load(self) -> float:
        """Seconds to load them."""
        started = time.perf_counter()
        model = self.model_runner.get_model()
        with torch.device(self.device), torch.no_grad():
            compat.begin_loading(model)
            model.load_weights(iter(self._resident))
            compat.end_loading(model, self.model_runner.model_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    def bench_copy(self) -> float:
        """Seconds of one memcpy of as many bytes, into memory that is there."""
        goals = [torch.empty_like(tensor) for _, tensor in self._resident]
        for goal in goals:
            goal.zero_()
        started = time.perf_counter()
        for goal, (_, tensor) in zip(goals, self._resident, strict=True):
            goal.copy_(tensor)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started


def tensors_of(path: str) -> list[tuple[str, torch.Tensor]]:
    """Name and value of each tensor of a checkpoint."""
    from safetensors.torch import load_file

    return [item for file in sorted(Path(path).glob("*.safetensors")) for item in load_file(file).items()]


class Sender:
    """A process that holds the weights."""

    def __init__(self, path: str, threads: int) -> None:
        from hybridrl.utils import device

        torch.set_num_threads(threads)
        self.weights = [(name, tensor.to(device.current_device())) for name, tensor in tensors_of(path)]

    def send(self, target: UpdateTarget, bucket_mb: int) -> Any:
        """Send them all."""
        total = sum(tensor.numel() * tensor.element_size() for _, tensor in self.weights)
        transports = transports_to([target], ray.get_runtime_context().get_node_id())
        return stream(iter(self.weights), transports, total, bucket_mb * 2**20)


def start_pool(path: str, threads: int, use_gpu: bool, logs: Path) -> Any:
    """A pool of one replica whose workers also hold resident weights."""
    from hybridrl.config import load_config
    from hybridrl.rollout.inference_engine import EngineSpec
    from hybridrl.rollout.replicas.replica_handle import PoolSettings
    from hybridrl.rollout.replicas.replica_supervisor import Supervisor
    from hybridrl.rollout.start_replicas import replica_placements
    from hybridrl.single_controller import RayResourcePool

    words = [
        f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.prompt_length=64",
        "actor_rollout_ref.rollout.response_length=64",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=weight_update.ResidentWeights",
    ]
    config = load_config("ppo_trainer", overrides=words).actor_rollout_ref
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    placements = replica_placements(RayResourcePool([1], use_gpu=use_gpu), 1, shared=True)
    spec = EngineSpec(config.rollout, config.model, (1,), 0, threads=threads)
    pool = Supervisor(PoolSettings("vllm", spec, log_folder=logs), placements)
    pool.start()
    return pool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="of 63 MB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=2048)
    arguments = parser.parse_args()
    from hybridrl.models.tiny import build_tiny_model
    from hybridrl.utils import device

    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = build_tiny_model(
            Path(folder) / "model", hidden=1024, layers=arguments.layers, heads=16, kv_heads=8, intermediate=4096
        )
        pool = start_pool(str(path), arguments.threads, device.is_gpu(), Path(folder) / "logs")
        replica = pool.replicas[0]
        options = {"num_cpus": 0, "num_gpus": 0}
        sender = ray.remote(Sender).options(**options, runtime_env={"env_vars": replica.placement.environment})
        holder = sender.remote(str(path), arguments.threads)
        target = replica.process().target(1)
        size = ray.get(replica.actor.call.remote("bench_prepare", str(path)))[0]
        best = {"ours": float("inf"), "resident": float("inf"), "memcpy": float("inf")}
        for number in range(arguments.rounds + 1):  # the first allocates
            pool.pause()
            started = time.perf_counter()
            ray.get(replica.actor.begin_update.remote())
            ray.get(holder.send.remote(target, arguments.bucket_mb))
            ray.get(replica.actor.end_update.remote(number))
            found = {"ours": time.perf_counter() - started}
            pool.unpause()
            found["resident"] = ray.get(replica.actor.call.remote("bench_load"))[0]
            found["memcpy"] = ray.get(replica.actor.call.remote("bench_copy"))[0]
            if number:
                best = {name: min(found[name], best[name]) for name in best}
                print("  ".join(f"{name} {seconds:6.3f} s" for name, seconds in found.items()), flush=True)
        pool.close()
    ratio = best["ours"] / best["resident"]
    print(f"\n{size / 1e9:.2f} GB: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in best.items()))
    print(f"ours: {size / 1e9 / best['ours']:.2f} GB/s; memcpy {size / 1e9 / best['memcpy']:.2f} GB/s")
    print(f"ours / resident: {ratio:.2f} (at most {LIMIT})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
