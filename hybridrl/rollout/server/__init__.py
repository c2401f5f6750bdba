"""The OpenAI chat and completion API over a `GenerationClient`, in a process of its own.

The names below are imported on first use, because they need the packages of the extra `server`.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from hybridrl.errors import RolloutError

if TYPE_CHECKING:
    from hybridrl.rollout.server.app import Served, create_app
    from hybridrl.rollout.server.http import Listener, OpenAIServer, new_token, node_address
    from hybridrl.rollout.server.process import ServerProcess
    from hybridrl.rollout.server.prometheus import metrics_text, write_scrape_config
    from hybridrl.rollout.server.start import Access, make_server

_HOMES = {
    "Access": "start",
    "Listener": "http",
    "OpenAIServer": "http",
    "Served": "app",
    "ServerProcess": "process",
    "create_app": "app",
    "metrics_text": "prometheus",
    "new_token": "http",
    "node_address": "http",
    "make_server": "start",
    "write_scrape_config": "prometheus",
}
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")

__all__ = [
    "Access",
    "Listener",
    "OpenAIServer",
    "Served",
    "ServerProcess",
    "check_installed",
    "create_app",
    "make_server",
    "metrics_text",
    "new_token",
    "node_address",
    "write_scrape_config",
]


def check_installed() -> None:
    """Refuse to serve where the packages for it are missing.

    Raises:
        RolloutError: names them and the extra.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise RolloutError(
            f"actor_rollout_ref.rollout.server and .prometheus need {', '.join(missing)}, which the engines bring and "
            "this environment lacks: bash scripts/install.sh auto server"
        )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
