"""What replicas count, as Prometheus reads it."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST

#: name of a statistic -> (metric, what it is); Prometheus ends the name of a counter with _total
COUNTERS: Mapping[str, tuple[str, str]] = {
    "generated_tokens": ("hybridrl_generated_tokens", "tokens generated"),
    "prompt_tokens": ("hybridrl_prompt_tokens", "prompt tokens taken in"),
    "prefix_cache_queries": ("hybridrl_prefix_cache_queries", "prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("hybridrl_prefix_cache_hits", "prompt tokens found in the prefix cache"),
    "restarts": ("hybridrl_replica_restarts", "times the replica was started again"),
}
GAUGES: Mapping[str, tuple[str, str]] = {
    "running": ("hybridrl_requests_running", "requests that are generated for now"),
    "waiting": ("hybridrl_requests_waiting", "requests that wait for room"),
    "in_flight": ("hybridrl_requests_in_flight", "requests that the replica was given and has not answered"),
    "queued": ("hybridrl_requests_queued", "requests that no replica has room for yet"),
    "kv_cache_usage": ("hybridrl_kv_cache_usage_ratio", "share of the KV cache in use, 0 to 1"),
    "weights_version": ("hybridrl_weights_version", "training steps in the weights that generate"),
    "weight_update_seconds": ("hybridrl_weight_update_seconds", "seconds that the last weight update took"),
}


def metrics_text(stats: Mapping[str, Mapping[str, float]]) -> bytes:
    """The text exposition format.

    Args:
        stats: replica -> name of a statistic -> value; a name that a replica does not tell is left out for it, one that
            is in neither table is passed over.
    """
    registry = CollectorRegistry()
    registry.register(_Collected(stats))
    return generate_latest(registry)


class _Collected:
    """Counters keep the values of the replicas; `prometheus_client` would count for itself."""

    def __init__(self, stats: Mapping[str, Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for table, family in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
            for name, (metric, meaning) in table.items():
                found = family(metric, meaning, labels=["replica"])
                for replica, values in self._stats.items():
                    if name in values:
                        found.add_metric([replica], values[name])
                yield found
