"""The HTTP server of an application: address, port, token, start and stop."""

import errno
import os
import secrets
import socket
from typing import Any

from hybridrl.errors import RolloutError
from hybridrl.serve.limits import body_of_refusal
from hybridrl.utils.http_server import HttpServer, ServingLimits, listening_socket

_SERVER = "actor_rollout_ref.rollout.server"
STOP_S = 5.0  # for calls in progress
DEFAULT_CONNECTIONS = 1024


def new_token(variable: str | None = None) -> str:
    """The bearer token of a run: what the environment variable holds, or a random one.

    Args:
        variable: `rollout.server.api_key_env`.

    Raises:
        RolloutError: the variable is named and not set.
    """
    if variable is None:
        return secrets.token_urlsafe(32)
    token = os.environ.get(variable, "").strip()
    if not token:
        raise RolloutError(
            f"{_SERVER}.api_key_env={variable}: the environment variable {variable} is not set; set it to the token "
            "that clients will send, or leave the key null for a random token per run"
        )
    return token


def node_address() -> str:
    """The address at which other machines reach this one."""
    import ray

    if ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class Listener:
    """A listening socket, and the address at which clients reach it.

    Args:
        host: an address of this machine; None: the one at which other machines reach it.
        port: 0 takes a free one.

    Raises:
        RolloutError: the port is taken or not allowed, or the host is not an address of this machine.
    """

    def __init__(self, host: str | None = None, port: int = 0) -> None:
        self.host = host or node_address()
        self.socket = _bind(self.host, port)
        self.port = int(self.socket.getsockname()[1])

    @property
    def address(self) -> str:
        """`host:port`."""
        host = self.host
        if host in ("0.0.0.0", "::"):  # listens on all addresses, is reached at one
            host = node_address()
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The `base_url` for clients."""
        return f"http://{self.address}/v1"

    def close(self) -> None:
        """Free the port."""
        self.socket.close()


def _bind(host: str, port: int) -> socket.socket:
    try:
        return listening_socket(host, port)
    except OSError as error:
        where = f"{_SERVER}.port={port} on {host}"
        if error.errno == errno.EADDRINUSE:
            raise RolloutError(
                f"{where} is taken by another process; set {_SERVER}.port to another, or to 0 for a free one"
            ) from error
        if error.errno == errno.EACCES:
            raise RolloutError(f"{where}: this user may not listen there; take a port above 1023, or 0") from error
        raise RolloutError(
            f"{_SERVER}.host={host}: cannot listen there ({error}); leave it null for this node's address"
        ) from error


class OpenAIServer(HttpServer):
    """The HTTP server of a run.

    Args:
        app: see `create_app`.
        listening: a socket that listens; it is closed with the server.
        max_connections: clients beyond that are refused.
    """

    def __init__(self, app: Any, listening: socket.socket, max_connections: int = DEFAULT_CONNECTIONS) -> None:
        limits = ServingLimits(max_connections, stop_s=STOP_S, error_body=body_of_refusal)
        super().__init__(app, listening, limits)
