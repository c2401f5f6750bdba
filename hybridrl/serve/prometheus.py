"""Prometheus: the metrics of the replicas as text, and the scrape configuration that names this run's servers."""

import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from hybridrl.config import PrometheusConfig
from hybridrl.errors import RolloutError
from hybridrl.notify import notify
from hybridrl.utils.files import write_text

CONTENT_TYPE = CONTENT_TYPE_LATEST

#: name of a statistic -> (metric, description); Prometheus appends _total to the name of a counter
COUNTERS: Mapping[str, tuple[str, str]] = {
    "generated_tokens": ("hybridrl_generated_tokens", "tokens generated"),
    "prompt_tokens": ("hybridrl_prompt_tokens", "prompt tokens processed"),
    "prefix_cache_queries": ("hybridrl_prefix_cache_queries", "prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("hybridrl_prefix_cache_hits", "prompt tokens found in the prefix cache"),
    "restarts": ("hybridrl_replica_restarts", "restarts of the replica"),
}
GAUGES: Mapping[str, tuple[str, str]] = {
    "running": ("hybridrl_requests_running", "requests being generated"),
    "waiting": ("hybridrl_requests_waiting", "requests waiting in the engine"),
    "in_flight": ("hybridrl_requests_in_flight", "requests sent to the replica and not completed"),
    "queued": ("hybridrl_requests_queued", "requests that no replica has room for yet"),
    "kv_cache_usage": ("hybridrl_kv_cache_usage_ratio", "share of the KV cache in use, 0 to 1"),
    "weights_version": ("hybridrl_weights_version", "training steps in the weights that generate"),
    "weight_update_seconds": ("hybridrl_weight_update_seconds", "seconds that the last weight update took"),
}


def metrics_text(stats: Mapping[str, Mapping[str, float]]) -> bytes:
    """The text exposition format.

    Args:
        stats: replica -> name of a statistic -> value; names that a replica does not report are left out for it, and
            names in neither table are ignored.
    """
    registry = CollectorRegistry()
    registry.register(_StatsCollector(stats))
    return generate_latest(registry)


class _StatsCollector:
    """Collects the counts that the replicas report; counters of `prometheus_client` would count again."""

    def __init__(self, stats: Mapping[str, Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for table, family in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
            for name, (metric, meaning) in table.items():
                metric_family = family(metric, meaning, labels=["replica"])
                for replica, values in self._stats.items():
                    if name in values:
                        metric_family.add_metric([replica], values[name])
                yield metric_family


SCRAPE_JOB = "hybridrl"
_KEY = "actor_rollout_ref.rollout.prometheus"


def write_scrape_config(config: PrometheusConfig, targets: Sequence[str]) -> Path | None:
    """Write the servers into Prometheus' configuration, and have Prometheus reload it.

    An existing file keeps everything except the job `hybridrl`, which is replaced. It is not an error if Prometheus is
    not running: it reads the file when it starts.

    Args:
        config: `rollout.prometheus`.
        targets: `host:port` of each server.

    Returns:
        The file; None where `enable` is false.

    Raises:
        RolloutError: an existing file is not a Prometheus configuration, or the file cannot be written.
    """
    if not config.enable:
        return None
    path = Path(config.file).expanduser()
    whole = _existing(path)
    job: dict[str, Any] = {"job_name": SCRAPE_JOB, "static_configs": [{"targets": list(targets)}]}
    if config.served_model_name:
        job["static_configs"][0]["labels"] = {"model_name": config.served_model_name}
    others = [other for other in whole.get("scrape_configs") or [] if other.get("job_name") != SCRAPE_JOB]
    whole.setdefault("global", {"scrape_interval": "10s"})
    whole["scrape_configs"] = [*others, job]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, yaml.safe_dump(whole, sort_keys=False))
    except OSError as error:
        raise RolloutError(f"{_KEY}.file={path}: cannot be written ({error}); name another file") from error
    _reload(config.port, path)
    return path


def _existing(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RolloutError(f"{_KEY}.file={path}: cannot be read as YAML ({error}); name another file") from error
    jobs = content.get("scrape_configs") or [] if isinstance(content, dict) else None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise RolloutError(f"{_KEY}.file={path}: is not a Prometheus configuration; name another file")
    return content


def _reload(port: int, path: Path) -> None:
    url = f"http://127.0.0.1:{port}/-/reload"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=5).close()
    except urllib.error.HTTPError as error:
        hint = "; start it with --web.enable-lifecycle" if error.code == 403 else ""
        notify(f"Prometheus at {url} did not reload {path} ({error}){hint}")
    except OSError as error:
        notify(f"Prometheus does not answer at {url} ({error}); start it with {path}")
