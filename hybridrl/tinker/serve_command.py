"""The command `hybridrl serve --tinker`: clients of Tinker's API train adapters of one base model on this machine.

HYBRIDRL_TINKER_TOKEN=tml-... hybridrl serve --tinker --model Qwen/Qwen2.5-0.5B-Instruct --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.errors import UserError
from hybridrl.utils.http_server import HttpServer, ServingLimits, listening_socket

if TYPE_CHECKING:
    from hybridrl.tinker.backend import AdapterBackend
    from hybridrl.tinker.training_service import ServiceLimits

TOKEN_VARIABLE = "HYBRIDRL_TINKER_TOKEN"
_PREFIX = "tml-"
_PACKAGES = {"tinker": "tinker", "starlette": "server", "peft": "peft"}  # by the extra that brings them
_LOCAL = ("127.0.0.1", "::1", "localhost")


def main(argv: Sequence[str] | None = None, command: str = "hybridrl serve") -> int:
    """Serve until SIGTERM or Ctrl-C.

    Returns:
        The exit status: 0; 1 if the workers ended; 2 if it cannot be served.
    """
    args = _arguments(argv, command)
    try:
        _check_packages()
        token = _token(args)
        args.folder.mkdir(parents=True, exist_ok=True)
        listener = listening_socket(args.host, args.port)
    except (OSError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return _serve_workers(args, token, listener)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check_packages() -> None:
    for package, extra in _PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            raise UserError(f"the package {package} is missing: bash scripts/install.sh auto {extra}")


def _token(args: argparse.Namespace) -> str | None:
    """The token that clients bring; a random one is printed.

    Raises:
        UserError: it is none that clients of Tinker accept.
    """
    if args.no_token:
        return None
    token = os.environ.get(TOKEN_VARIABLE, "") if args.token_file is None else args.token_file.read_text()
    if not token.strip():
        if args.host not in _LOCAL:
            raise UserError(
                f"--host {args.host} can be reached by others, and no token is set: set {TOKEN_VARIABLE}, or give "
                "--token-file FILE, or --no-token in a network that you trust"
            )
        token = f"{_PREFIX}{secrets.token_urlsafe(24)}"
        print(f"TINKER_API_KEY={token}", flush=True)
    token = token.strip()
    if not token.startswith(_PREFIX):
        raise UserError(
            f"the token of {args.token_file or TOKEN_VARIABLE} has to begin with {_PREFIX}: clients check it"
        )
    return token


def _serve_workers(args: argparse.Namespace, token: str | None, listener: socket.socket) -> int:
    """Start the workers, and serve them; they end with the server."""
    from hybridrl.models.info import eos_token_ids, tokenizer_of
    from hybridrl.models.model_config import config_of
    from hybridrl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager
    from hybridrl.single_controller.ray.cluster import init_ray, shutdown_ray
    from hybridrl.tinker.backend import AdapterBackend, BaseFacts
    from hybridrl.tinker.training_service import ServiceLimits
    from hybridrl.workers.adapter_worker import AdapterWorker, settings_of_base

    settings = settings_of_base(
        args.model, args.max_rank, args.dtype, args.max_tokens, args.max_sequences, args.external_lib
    )
    pool = [args.devices] * args.nodes
    settings.check(sum(pool))
    tokenizer, config = tokenizer_of(settings.model), config_of(settings.model)
    facts = BaseFacts(
        name=args.name or args.model,
        path=args.model,
        architecture=str(config.model_type),
        vocabulary=int(config.get_text_config().vocab_size),
        context=int(config.get_text_config().max_position_embeddings),
        pad_token_id=int(tokenizer.pad_token_id),
    )
    use_gpu = {"auto": None, "cpu": False, "cuda": True}[args.device]
    use_gpu = init_ray(pools={"adapters": pool}, use_gpu=use_gpu)
    try:
        manager = ResourcePoolManager({"adapters": pool}, mapping={"adapters": "adapters"}, use_gpu=use_gpu)
        manager.create_resource_pool()
        group = RayWorkerGroup(
            resource_pool=manager.get_resource_pool("adapters"),
            ray_cls_with_init=RayClassWithInitArgs(cls=AdapterWorker, settings=settings),
            role="adapters",
        )
        layers = group.init_model()[0]
        eos = eos_token_ids(args.model, config, tokenizer)
        backend = AdapterBackend(group, facts, layers, args.max_rank, eos)
        limits = ServiceLimits(
            args.max_requests, args.max_sessions, args.max_adapters, args.session_idle_s, args.max_snapshots,
            args.max_samples,
        )  # fmt: skip
        return asyncio.run(serve(backend, args.folder, limits, listener, token, args.max_connections, args.max_body_mb))
    finally:
        shutdown_ray()


async def serve(
    backend: AdapterBackend,
    folder: Path,
    limits: ServiceLimits,
    listener: socket.socket,
    token: str | None,
    max_connections: int,
    max_body_mb: int,
) -> int:
    """Serve until SIGTERM or Ctrl-C, or until the workers have ended.

    Returns:
        The exit status.
    """
    from hybridrl.tinker.training_app import TrainingApp
    from hybridrl.tinker.training_service import TrainingService

    service = TrainingService(backend, folder, limits)
    app = TrainingApp(service, max(1, max_connections // 2)).app(token, max_body_mb)
    server = HttpServer(app, listener, ServingLimits(max_connections))
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    running = asyncio.ensure_future(service.run())
    await server.start()
    host, port = listener.getsockname()[:2]
    print(f"TINKER_BASE_URL=http://{host}:{port}", flush=True)
    stopping, breaking = asyncio.ensure_future(ended.wait()), asyncio.ensure_future(service.queue.broken.wait())
    await asyncio.wait({stopping, breaking, running}, return_when=asyncio.FIRST_COMPLETED)
    await server.stop()
    for task in (stopping, breaking, running):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return 1 if service.queue.broken.is_set() else 0


def _arguments(argv: Sequence[str] | None, command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=command, description="Serve a base model whose adapters clients train.")
    parser.add_argument("--tinker", action="store_true", required=True, help="the API of the package tinker")
    parser.add_argument("--model", required=True, help="base model: a folder, or a hub id")
    parser.add_argument("--name", help="base_model of clients (what --model says)")
    parser.add_argument("--external-lib", help="module or file that registers losses (register_datum_loss)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/tinker"), help="of checkpoints (outputs/tinker)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--devices", type=int, default=1, help="processes per node, each with a device (1)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the Ray cluster (1)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the computation")
    parser.add_argument("--max-rank", type=int, default=32, help="largest rank; memory is taken for it (32)")
    parser.add_argument("--max-adapters", type=int, default=16, help="adapters that are trained at once (16)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens per micro-batch and process (8192)")
    parser.add_argument("--max-sequences", type=int, default=256, help="generated at a time per process (256)")
    parser.add_argument("--max-samples", type=int, default=1024, help="num_samples of a request (1024)")
    parser.add_argument("--max-snapshots", type=int, default=32, help="sampler weights without a name, per run (32)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one, which is printed (8000)")
    parser.add_argument("--token-file", type=Path, help=f"file with the token of clients; else {TOKEN_VARIABLE}")
    parser.add_argument("--no-token", action="store_true", help="serve everybody")
    parser.add_argument("--max-connections", type=int, default=1024, help="of clients at once; more get 503 (1024)")
    parser.add_argument("--max-requests", type=int, default=4096, help="that wait, or their answers; then 429 (4096)")
    parser.add_argument("--max-sessions", type=int, default=256, help="that are open at once (256)")
    parser.add_argument("--session-idle-s", type=float, default=600.0, help="a silent session ends after this (600)")
    parser.add_argument("--max-body-mb", type=int, default=64, help="size of a request (64)")
    args = parser.parse_args(argv)
    positive = [name for name in vars(args) if name.startswith("max_")]
    for name in [*positive, "devices", "nodes", "session_idle_s"]:
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give a number above 0")
    return args
