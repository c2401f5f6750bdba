"""The OpenAI chat and completion API over a `GenerationClient`, in a process of its own.

The names below are imported on first use, because they need the packages of the extra `server`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.serve.app import Served, create_app
    from hybridrl.serve.http import Listener, OpenAIServer, new_token, node_address
    from hybridrl.serve.process import ServerProcess
    from hybridrl.serve.prometheus import metrics_text, write_scrape_config
    from hybridrl.serve.run_server import RunServer, start_rollout
    from hybridrl.serve.start_servers import Access, make_server

_HOMES = {
    "Access": "start_servers",
    "Listener": "http",
    "OpenAIServer": "http",
    "RunServer": "run_server",
    "Served": "app",
    "ServerProcess": "process",
    "create_app": "app",
    "metrics_text": "prometheus",
    "new_token": "http",
    "node_address": "http",
    "make_server": "start_servers",
    "start_rollout": "run_server",
    "write_scrape_config": "prometheus",
}

__all__ = [
    "Access",
    "Listener",
    "OpenAIServer",
    "RunServer",
    "Served",
    "ServerProcess",
    "create_app",
    "make_server",
    "metrics_text",
    "new_token",
    "node_address",
    "start_rollout",
    "write_scrape_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
