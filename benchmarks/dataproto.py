"""Speed of batches: scatter to two Ray workers, echo, collect and concatenate, compared with plain Ray and NumPy.

    python benchmarks/dataproto.py [--megabytes 256] [--rounds 15] [--json FILE]

Four ways of doing the same, alternating within one run; medians over the rounds:

    bare Ray          np.split, ray.put of each half, actor echo, ray.get, np.concatenate
    DataProto         chunk, ray.put of each shard, actor echo, ray.get, DataProto.concat
    worker group      one call of a method registered with DP_COMPUTE_PROTO
    through a future  the same method called without blocking, and its future echoed by the group again (two echoes)

Limit: (worker group) / (bare Ray) at 256 MB is at most 1.3. A second table has the time of each operation on a batch
as small as the quickstart's (256 rows, 10 tensors, 6 columns of Python objects).
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from hybridrl.protocol import DataProto
from hybridrl.single_controller import Dispatch, Worker, register
from hybridrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, init_ray, shutdown_ray

WORKERS = 2
LIMIT = 1.3


class EchoWorker(Worker):
    """Returns what it gets."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo_later(self, data: DataProto) -> DataProto:
        return data


@ray.remote(num_cpus=0)
class EchoActor:
    """Returns what it gets."""

    def echo(self, data: Any) -> Any:
        return data


def large_arrays(megabytes: int, fields: int) -> dict[str, np.ndarray]:
    """Fields `[B, width]` of float32 and int64 in turn, `megabytes` together."""
    generator = np.random.default_rng(0)
    rows, size = 4096, megabytes * 2**20 // fields
    arrays = {}
    for index in range(fields):
        if index % 2:
            arrays[f"field{index}"] = generator.integers(0, 2**40, size=(rows, size // rows // 8))
        else:
            arrays[f"field{index}"] = generator.random((rows, size // rows // 4), dtype=np.float32)
    return arrays


def small_batch(rows: int = 256, prompt: int = 16, response: int = 8) -> DataProto:
    """A batch like one step of the quickstart: 6 integer and 4 float tensors, 6 columns of objects."""
    both = prompt + response
    widths = {"prompts": prompt, "responses": response, "input_ids": both, "attention_mask": both}
    widths |= {"position_ids": both, "response_mask": response}
    tensors = {name: torch.randint(0, 128, (rows, width)) for name, width in widths.items()}
    for name in ("rollout_log_probs", "old_log_probs", "advantages", "returns"):
        tensors[name] = torch.randn(rows, response)
    objects = {
        "uid": [uid for _ in range(rows // 8) for uid in [str(uuid.uuid4())] * 8],
        "raw_prompt": [[{"role": "user", "content": f"Sort: {row}"}] for row in range(rows)],
        "data_source": ["sort"] * rows,
        "reward_model": [{"style": "rule", "ground_truth": str(row)} for row in range(rows)],
        "extra_info": [{"split": "train", "index": row} for row in range(rows)],
        "index": list(range(rows)),
    }
    return DataProto.from_dict(tensors, objects, {"temperature": 1.0, "global_steps": 3})


def timed(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each way. The ways take turns, and begin with another one each round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = itertools.cycle(ways)
    for round_number in range(rounds + 1):
        for _ in ways:
            name = next(names)
            start = time.perf_counter()
            result = ways[name]()
            elapsed = time.perf_counter() - start
            del result
            if round_number:  # the first round warms up
                seconds[name].append(elapsed)
        next(names)
    return {name: statistics.median(values) for name, values in seconds.items()}


def travel(arrays: dict[str, np.ndarray], actors: list[Any], group: Any, rounds: int) -> dict[str, float]:
    """Measure the four ways with one batch, after checking that each gives the batch back."""
    data = DataProto.from_dict({name: torch.from_numpy(array) for name, array in arrays.items()})

    def bare() -> dict[str, np.ndarray]:
        halves = {name: np.split(array, WORKERS) for name, array in arrays.items()}
        shards = [ray.put({name: parts[rank] for name, parts in halves.items()}) for rank in range(WORKERS)]
        parts = ray.get([actor.echo.remote(shard) for actor, shard in zip(actors, shards, strict=True)])
        return {name: np.concatenate([part[name] for part in parts]) for name in arrays}

    def by_hand() -> dict[str, np.ndarray]:
        shards = [ray.put(shard) for shard in data.chunk(WORKERS)]
        parts = ray.get([actor.echo.remote(shard) for actor, shard in zip(actors, shards, strict=True)])
        return as_arrays(DataProto.concat(parts))

    def as_arrays(batch: DataProto) -> dict[str, np.ndarray]:
        return {name: batch.batch[name].numpy() for name in arrays}

    ways = {
        "bare Ray": bare,
        "DataProto": by_hand,
        "worker group": lambda: as_arrays(group.echo(data)),
        "through a future": lambda: as_arrays(group.echo_later(group.echo_later(data)).get()),
    }
    for name, way in ways.items():
        result = way()
        if not all(np.array_equal(result[key], arrays[key]) for key in arrays):
            raise AssertionError(f"{name}: the batch came back changed")
    return timed(ways, rounds)


def operations(rounds: int, group: Any) -> dict[str, float]:
    """Median seconds of each operation on a small batch."""
    data = small_batch()
    parts = data.chunk(WORKERS)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    order = torch.randperm(len(data))
    ways = {
        "pickle": lambda: pickle.dumps(data, protocol=5, buffer_callback=[].append),
        "unpickle": lambda: pickle.loads(stream, buffers=buffers),
        "chunk(2)": lambda: data.chunk(WORKERS),
        "concat of 2": lambda: DataProto.concat(parts),
        "select_idxs": lambda: data.select_idxs(order),
        "repeat(8)": lambda: data.repeat(8),
        "union": lambda: data.select(["prompts"]).union(data),
        "ray.put and ray.get": lambda: ray.get(ray.put(data)),
        "worker group echo": lambda: group.echo(data),
    }
    return timed(ways, rounds)


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = max(10 * options.megabytes, 256) * 2**20
    init_ray({"object_store_memory": store, "include_dashboard": False}, {"pool": [WORKERS]})
    try:
        pool = RayResourcePool([WORKERS], use_gpu=False)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(EchoWorker))
        actors = [EchoActor.remote() for _ in range(WORKERS)]
        results = {
            f"{options.megabytes} MB in {fields} field{'s' if fields > 1 else ''}": travel(
                large_arrays(options.megabytes, fields), actors, group, options.rounds
            )
            for fields in (1, 10)
        }
        small = operations(20 * options.rounds, group)
    finally:
        shutdown_ray()
    lines = [
        [batch, way, f"{1000 * seconds:.0f}", f"{seconds / ways['bare Ray']:.2f}"]
        for batch, ways in results.items()
        for way, seconds in ways.items()
    ]
    print(table(["batch", "way", "milliseconds", "ratio to bare Ray"], lines), end="\n\n")
    print(table(["small batch", "milliseconds"], [[name, f"{1000 * s:.2f}"] for name, s in small.items()]), end="\n\n")
    first = next(iter(results.values()))
    ratio = first["worker group"] / first["bare Ray"]
    print(f"ratio {ratio:.2f} (at most {LIMIT}): {'held' if ratio <= LIMIT else 'MISSED'}")
    if options.json is not None:
        options.json.write_text(json.dumps({"ratio": ratio, "travel": results, "small": small}, indent=2))


if __name__ == "__main__":
    main()
