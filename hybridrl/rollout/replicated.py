"""Generation by engines with weights of their own: `rollout.name=vllm` or `sglang` as a trainer sees it."""

import time
from collections.abc import Callable, Sequence

from hybridrl.protocol import DataProto
from hybridrl.rollout.base import Rollout
from hybridrl.rollout.batch import batch_of, requests_of
from hybridrl.rollout.engine import MEMORY_TAGS
from hybridrl.rollout.pool import ReplicaPool, request_number

_COUNTERS = ("generated_tokens", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")


class ReplicatedRollout(Rollout):
    """Batches through a pool of replicas.

    Args:
        pool: started.
    """

    def __init__(self, pool: ReplicaPool) -> None:
        self.pool = pool
        self._config = pool.settings.spec.config
        self.gives_memory_back = self._config.free_cache_engine and bool(pool.places[0].devices)
        self._generating_s = 0.0
        self._before: dict[str, dict[str, float]] = {}
        self._restarts = self._rerun = 0
        #: called before the pool is closed
        self.on_close: list[Callable[[], None]] = []

    def generate(self, prompts: DataProto) -> DataProto:
        self.resume()  # the KV cache sleeps until there is something to generate
        started = time.perf_counter()
        requests = requests_of(prompts, self._config, request_number)
        completions = self.pool.generate(requests)
        self._generating_s += time.perf_counter() - started
        return batch_of(prompts, completions, self._config.response_length, self.pool.settings.spec.pad_token_id)

    def update_weights(self, version: int) -> dict[str, float]:
        self.resume(["weights"])
        report = self.pool.update_weights(version)
        self.version = version
        if not report:
            return {}
        sent = max(part.bytes for part in report)
        seconds = max(part.seconds for part in report)
        return {
            "rollout/update_weights_s": seconds,
            "rollout/update_weights_gb_per_s": sent / 1e9 / max(seconds, 1e-9),
            "rollout/update_weights_buckets": float(max(part.buckets for part in report)),
        }

    def release(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        if self._config.free_cache_engine:
            self.pool.release(tags)

    def resume(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        self.pool.resume(tags)

    def pause(self) -> None:
        self.pool.pause()

    def unpause(self) -> None:
        self.pool.unpause()

    def abort(self) -> None:
        self.pool.abort()

    def health(self) -> list[str]:
        return self.pool.health()

    def metrics(self) -> dict[str, float]:
        now = {index: part for index, part in self.pool.statistics().items() if "generated_tokens" in part}
        since = dict.fromkeys(_COUNTERS, 0.0)
        for index, part in now.items():
            before = self._before.get(index, {})
            for name in _COUNTERS:  # a replica that was started again counts from zero
                count, known = part.get(name, 0.0), before.get(name, 0.0)
                since[name] += count - known if count >= known else count
        found = {
            "rollout/replicas": float(len(now)),
            "rollout/restarts": float(self.pool.restarts - self._restarts),
            "rollout/requests_rerun": float(self.pool.rerun - self._rerun),
            "rollout/in_flight/max": float(self.pool.peak),
            "rollout/prompt_tokens": since["prompt_tokens"],
            "rollout/prefix_cache_hit_rate": since["prefix_cache_hits"] / max(since["prefix_cache_queries"], 1.0),
        }
        if self._generating_s:
            found["rollout/tokens_per_s"] = since["generated_tokens"] / self._generating_s
        self._before, self._restarts, self._rerun = now, self.pool.restarts, self.pool.rerun
        self._generating_s, self.pool.peak = 0.0, 0
        return found

    def close(self) -> None:
        for call in self.on_close:
            call()
        self.pool.close()
