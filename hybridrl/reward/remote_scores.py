"""Scores of a service: `POST {"samples": [...]}` -> `{"scores": [...]}`.

A sample has `data_source`, `solution_str`, `ground_truth`, `extra_info` and `prompt`. A score is a number, a dict with
`score`, or `{"unscored": "infra" | "timeout" | "grading" | "dropped", "detail": ...}`.

Imported by the pool's processes, so it must stay light: no torch, no numpy.
"""

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridrl.scored import Reason, Unscored
from hybridrl.utils import clock
from hybridrl.utils.json_client import JsonClient, ServiceError

_GATHER_S = 0.005  # samples that arrive within this time share a request


@dataclass(frozen=True)
class _Waiting:
    """A sample to ask for.

    Attributes:
        sample: what the service gets.
        sent: is done when its request begins.
        score: the answer.
    """

    sample: dict[str, Any]
    sent: "asyncio.Future[None]"
    score: "asyncio.Future[Any]"


class Service:
    """Asks for the scores of samples; those that arrive together, or wait for a thread together, share a request.

    The time of a sample begins with its request.

    Args:
        client: asks.
        timeout: seconds that an answer may take.
        max_concurrent: requests at once.
        batch_size: samples of a request.
    """

    def __init__(self, client: JsonClient, timeout: float, max_concurrent: int, batch_size: int) -> None:
        self._client, self._timeout, self._most = client, timeout, batch_size
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="remote-scores")
        self._free = max_concurrent
        self._waiting: list[_Waiting] = []

    async def score(self, sample: dict[str, Any]) -> Any:
        """A number, a dict with `score`, or an `Unscored`."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(sample, loop.create_future(), loop.create_future())
        self._waiting.append(waiting)
        if len(self._waiting) >= self._most:
            self._send()
        elif len(self._waiting) == 1:
            loop.call_later(_GATHER_S, self._send)
        with clock.stopped():
            await waiting.sent
        return await waiting.score

    def _send(self) -> None:
        """Send what waits, as far as threads are free; `_receive` goes on with the rest."""
        while self._waiting and self._free:
            part, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            self._free -= 1
            samples = [waiting.sample for waiting in part]
            answers = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, samples)
            answers.add_done_callback(partial(self._receive, part))
            _set_results([None] * len(part), [waiting.sent for waiting in part])

    def _receive(self, part: "list[_Waiting]", answers: "asyncio.Future[list[Any]]") -> None:
        self._free += 1
        self._send()
        _set_results(answers.result(), [waiting.score for waiting in part])

    def _ask(self, samples: list[dict[str, Any]]) -> list[Any]:
        def fault(answer: Mapping[str, Any]) -> str | None:
            scores = answer.get("scores")
            if not isinstance(scores, list) or len(scores) != len(samples):
                return f"an answer without {len(samples)} 'scores': {str(answer)[:200]}"
            return None

        try:
            answer = self._client.post({"samples": samples}, self._timeout, fault)
        except ServiceError as error:
            return [Unscored(error.reason, str(error))] * len(samples)
        except Exception as error:  # for example a sample that JSON has no form for
            return [Unscored(Reason.GRADING, f"{type(error).__name__}: {error}")] * len(samples)
        return [_score(score) for score in answer["scores"]]


_services: dict[tuple[Any, ...], Service] = {}


async def compute_score(
    data_source: Any,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    prompt: Any,
    url: str,
    timeout: float,
    max_concurrent: int,
    batch_size: int,
    attempts: int,
    token_env: str | None,
) -> Any:
    """The score that the service gives a sample; see `Service`."""
    settings = (url, timeout, max_concurrent, batch_size, attempts, token_env)
    if settings not in _services:
        client = JsonClient(url, os.environ.get(token_env) if token_env else None, attempts, patience_s=timeout)
        _services[settings] = Service(client, timeout, max_concurrent, batch_size)
    sample = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": plain(ground_truth),
        "extra_info": plain(extra_info),
        "prompt": plain(prompt),
    }
    return await _services[settings].score(sample)


def plain(value: Any) -> Any:
    """A value as JSON has it: arrays as lists, keys as text."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return plain(getattr(value, method)())
    return value


def _score(answer: Any) -> Any:
    if isinstance(answer, Mapping) and answer.get("unscored") is None:  # null, as typed services write it
        return {name: value for name, value in answer.items() if name != "unscored"}
    if isinstance(answer, Mapping):
        reason = str(answer["unscored"])
        is_reason = reason in list(Reason)
        return Unscored(Reason(reason) if is_reason else Reason.GRADING, str(answer.get("detail") or answer))
    return answer


def _set_results(results: list[Any], futures: list["asyncio.Future[Any]"]) -> None:
    for result, future in zip(results, futures, strict=True):
        if not future.done():
            future.set_result(result)
