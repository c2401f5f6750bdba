"""A training server in the test's process, over workers of the shared Ray, and clients of the public package."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from hybridrl.tinker.backend import AdapterBackend, BaseFacts
from hybridrl.tinker.training_app import TrainingApp
from hybridrl.tinker.training_service import ServiceLimits, TrainingService
from hybridrl.utils.http_server import HttpServer, ServingLimits, listening_socket
from hybridrl.workers.adapter_worker import AdapterWorker, settings_of_base

TOKEN = "tml-of-a-test"
MAX_RANK = 8


class Server:
    """A server of its own thread.

    Attributes:
        url: the base URL of clients.
        model: the name of the base.
        folder: of checkpoints.
    """

    def __init__(self, backend: AdapterBackend, folder: Path) -> None:
        self.model, self.folder = backend.facts.name, folder
        self._backend, self._loop = backend, asyncio.new_event_loop()
        self._listener = listening_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ready = threading.Event()
        self._ended: asyncio.Event
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        service = TrainingService(self._backend, self.folder, ServiceLimits(adapters=12, unnamed=2))
        server = HttpServer(TrainingApp(service, 64).app(TOKEN, 16), self._listener, ServingLimits())
        running = asyncio.ensure_future(service.run())
        await server.start()
        self._ready.set()
        await self._ended.wait()
        await server.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)


@pytest.fixture(scope="module")
def server(ray_session: None, micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = settings_of_base(str(micro_model), MAX_RANK, "auto", 4096, 64)
    pool = RayResourcePool(process_on_nodes=[1], use_gpu=False)
    workers = RayClassWithInitArgs(cls=AdapterWorker, settings=settings)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=workers, role="adapters")
    layers = group.init_model()[0]
    tokenizer, config = tokenizer_of(settings.model), config_of(settings.model)
    path = str(micro_model)
    facts = BaseFacts(path, path, "qwen2", int(config.vocab_size), 256, int(tokenizer.pad_token_id))
    backend = AdapterBackend(group, facts, layers, MAX_RANK, eos_token_ids(path, config, tokenizer))
    own = Server(backend, tmp_path_factory.mktemp("adapters"))
    yield own
    own.close()
    group.kill()
    pool.release()


@pytest.fixture
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key=TOKEN)
    yield client
    client.close("success").result()
