"""Telling Prometheus of this run's servers: `rollout.prometheus`."""

import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config import PrometheusConfig
from hybridrl.rollout.engine import RolloutError
from hybridrl.utils.files import write_text

JOB = "hybridrl"
_KEY = "actor_rollout_ref.rollout.prometheus"


def write_scrape_config(config: PrometheusConfig, targets: Sequence[str]) -> Path | None:
    """Write the servers into Prometheus' configuration and ask it to read that again.

    A file that is there keeps everything but the job `hybridrl`, which is replaced. A Prometheus that is not running
    (yet) is no error: it reads the file when it starts.

    Args:
        config: `rollout.prometheus`.
        targets: `host:port` of each server.

    Returns:
        The file; None where `enable` is false.

    Raises:
        RolloutError: the file that is there is no Prometheus configuration, or cannot be written.
    """
    if not config.enable:
        return None
    path = Path(config.file).expanduser()
    whole = _existing(path)
    job: dict[str, Any] = {"job_name": JOB, "static_configs": [{"targets": list(targets)}]}
    if config.served_model_name:
        job["static_configs"][0]["labels"] = {"model_name": config.served_model_name}
    others = [other for other in whole.get("scrape_configs") or [] if other.get("job_name") != JOB]
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
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RolloutError(f"{_KEY}.file={path}: cannot be read as YAML ({error}); name another file") from error
    jobs = found.get("scrape_configs") or [] if isinstance(found, dict) else None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise RolloutError(f"{_KEY}.file={path}: holds something else than a Prometheus configuration; name another")
    return found


def _reload(port: int, path: Path) -> None:
    url = f"http://127.0.0.1:{port}/-/reload"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=5).close()
    except urllib.error.HTTPError as error:
        hint = "; start it with --web.enable-lifecycle" if error.code == 403 else ""
        print(f"notice: Prometheus at {url} did not read {path} again ({error}){hint}", file=sys.stderr)
    except OSError as error:
        print(f"notice: no Prometheus answers at {url} ({error}); started with {path} it will", file=sys.stderr)
