"""Start of rollouts with an HTTP server. The server's packages are imported only if the configuration has a server."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config import ActorRolloutRefConfig
from hybridrl.notify import notify
from hybridrl.rollout import start_replicas
from hybridrl.rollout.rollout import InPlaceRollout, ReplicatedRollout, Rollout
from hybridrl.rollout.select import is_served
from hybridrl.single_controller.ray import RayResourcePool, RayWorkerGroup

if TYPE_CHECKING:
    from hybridrl.serve import Access, ServerProcess


@dataclass(frozen=True)
class RunServer:
    """The server of a run, and how clients reach it."""

    process: "ServerProcess"
    access: "Access"


def start_rollout(
    config: ActorRolloutRefConfig,
    policy: RayWorkerGroup | None,
    own_pool: RayResourcePool | None = None,
    *,
    threads: int | None = None,
    log_folder: Path | None = None,
    before_start: Callable[[str], None] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    image_kwargs: Mapping[str, Any] | None = None,
) -> Rollout:
    """Start the rollout for `policy`, with a server where the configuration has one, for as long as the rollout lives.

    Args:
        config, policy, own_pool, threads, log_folder, before_start: see
            `hybridrl.rollout.start_replicas.start_rollout`.
        template_kwargs: further variables of the chat template, for chats that the server renders.
        image_kwargs: settings of the model's image processor, for images of the server's clients.

    Raises:
        RolloutError: see `hybridrl.rollout.start_replicas.start_rollout` and `make_server`.
    """

    def serve(rollout: InPlaceRollout | ReplicatedRollout, heeds_seeds: bool) -> Callable[[], None]:
        kwargs = {"template_kwargs": template_kwargs, "image_kwargs": image_kwargs}
        server = _start_server(config, rollout, log_folder, heeds_seeds, kwargs)
        return functools.partial(_announce, config, rollout, server, log_folder)

    return start_replicas.start_rollout(
        config,
        policy,
        own_pool,
        threads=threads,
        log_folder=log_folder,
        before_start=before_start,
        serve=serve if is_served(config.rollout) else None,
    )


def _start_server(
    config: ActorRolloutRefConfig,
    rollout: InPlaceRollout | ReplicatedRollout,
    log_folder: Path | None,
    heeds_seeds: bool,
    kwargs: Mapping[str, Any],
) -> RunServer:
    """A server over all replicas that has its port, and starts while they do."""
    from hybridrl.serve import make_server

    log_file = None if log_folder is None else log_folder / "openai_server.log"
    server, access = make_server(
        config.rollout,
        config.model,
        rollout.client(),
        heeds_seeds=heeds_seeds,
        log_file=log_file,
        records_routing=config.actor.router_replay.records_in_generation,
        **kwargs,
    )
    rollout.on_close.append(server.stop)
    if log_folder is not None:
        log_folder.mkdir(parents=True, exist_ok=True)
    server.start()
    rollout.server = RunServer(server, access)
    return rollout.server


def _announce(
    config: ActorRolloutRefConfig,
    rollout: InPlaceRollout | ReplicatedRollout,
    run_server: RunServer,
    log_folder: Path | None,
) -> None:
    """Write address and key into the run's folder once clients are served."""
    from hybridrl.serve import write_scrape_config

    server, access = run_server.process, run_server.access
    server.wait_ready()
    where = ""
    if log_folder is not None:
        folder = log_folder.parent
        where = f"; address and key in {access.write(folder)}"
        rollout.on_close.append(lambda: access.remove(folder))
    notify(f"{access.model} is served at {access.url}{where}")
    write_scrape_config(config.rollout.prometheus, [server.listener.address])
