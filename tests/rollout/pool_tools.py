"""What the tests of a pool of replicas share: requests, waiting, and what a plain forward pass expects."""

import time
from collections.abc import Sequence

import numpy as np
import psutil
import torch

from hybridrl.rollout.replicas.replica_supervisor import Supervisor
from hybridrl.rollout.request import Request
from hybridrl.rollout.sampling import SamplingParams

ENGINE = "plain_engine:PlainEngine"
SAMPLED = SamplingParams(True, 1.0, 1.0, -1, 12, ignore_eos=True)


def requests(count: int, prefix: str, first: int = 6, sampling: SamplingParams = SAMPLED) -> list[Request]:
    """Requests of different prompts; two of each session."""
    return [
        Request(f"{prefix}{i}", [first, 7 + i % 40, 8], sampling, session=f"{prefix}{i // 2}") for i in range(count)
    ]


def until_ready(pool: Supervisor) -> None:
    """Wait until all replicas have weights."""
    until(pool, ["ready"] * len(pool.replicas))


def until(pool: Supervisor, states: list[str]) -> None:
    """Wait until the replicas are in these states."""
    deadline = time.monotonic() + 180
    while pool.health() != states:
        assert time.monotonic() < deadline, pool.health()
        time.sleep(0.1)


def until_restarted(pool: Supervisor, number: int, before: int) -> None:
    """Wait until a replica has another process; it may be without weights for a moment only."""
    deadline = time.monotonic() + 180
    while pool.replicas[number].info.pid == before:
        assert time.monotonic() < deadline, pool.health()
        time.sleep(0.02)


def until_each_generates(pool: Supervisor) -> None:
    """Wait until every replica is in the midst of a request; `SLOW` ones stay there for a while."""
    before, deadline = generated(pool), time.monotonic() + 60
    while any(now == then for now, then in zip(generated(pool), before, strict=True)):
        assert time.monotonic() < deadline, pool.statistics()
        time.sleep(0.02)


def generated(pool: Supervisor) -> list[float]:
    """Tokens of each replica so far."""
    return [part["generated_tokens"] for part in pool.statistics().values()]


def log_probs_of(model, request: Request, token_ids: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Of each token, by one plain forward pass."""
    tokens = [int(token) for token in token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt_ids + tokens])).logits[0]
    every = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    return every.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def wait_until_gone(pid: int) -> None:
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    assert not psutil.pid_exists(pid)
