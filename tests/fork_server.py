"""Forks Ray workers, engines and programs of the tests from a process that has imported what they import.

A process that starts by itself spends five seconds of processor time on importing torch and transformers, ten on vLLM
or SGLang, and most tests that use Ray need a few. Everything else about a worker stays Ray's: command line,
environment, log files.

`tests/forked_processes.py` starts this and asks it for servers. `fork_client.py` asks for a process and stands for it.
A server ends with the process that started it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any, NoReturn

ADDRESS = "HYBRIDRL_TEST_FORK_SERVER"
WITHOUT_RAY = "HYBRIDRL_TEST_FORK_SERVER_WITHOUT_RAY"  # the server for other settings of Ray, and for workers
CHILDREN = "HYBRIDRL_TEST_CHILDREN"  # the Python that forks what the library itself starts
DAEMONS = "HYBRIDRL_TEST_DAEMONS"  # the Python that forks Ray's own processes
# A forked agent is no child of its raylet; with this it notices by a pipe that the raylet has ended.
AGENTS_WATCH_A_PIPE = "RAY_enable_pipe_based_agent_to_parent_health_check"
# Workers started ahead stay idle. The Ray that all tests share needs them: its first worker must belong to no job.
PRESTART = "RAY_prestart_worker_first_driver"
SETUP_WORKER = "HYBRIDRL_TEST_SETUP_WORKER"  # Ray's own program
ENGINES = "HYBRIDRL_TEST_ENGINES"  # the Python that forks the processes of inference engines
SERVER = "--server"  # what is asked for is a server
CLIENT = Path(__file__).with_name("fork_client.py")
#: environment variables that imports have set, which every forked process has
SET_BY_IMPORTS: dict[str, str] = {}

# Nothing here may start a thread: a fork would lose it.
PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "tensordict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "pydantic.v1",
    "pydantic.main",
    "pydantic.types",
    "pydantic.deprecated.class_validators",
    "starlette.datastructures",
    "peft",
    "pyarrow.json",
    "pytest",  # workers whose class is in a file of tests
    "hybridrl.engine.fsdp.engine",
)
# Programs, their workers and their children, which import the rest themselves.
OF_PROGRAMS = (
    "hydra",
    "rich.console",
    "omegaconf",
    "safetensors.torch",
    "transformers.models.auto.configuration_auto",
    "aiohttp.web",
    "hybridrl.config",
    "hybridrl.utils.agent_host",
)
# Clients that processes of agents import ahead.
OF_AGENTS = ("anthropic", "openai")
# Ray reads its settings, the cluster's token among them, when it is imported.
WITH_RAYS_ENVIRONMENT = (
    "ray._private.workers.default_worker",
    "hybridrl.workers.actor_rollout_ref",
    "hybridrl.workers.critic",
)
# Programs and processes of servers, which import Ray with the settings of this one.
OF_CONTROLLERS = (
    "ray._private.workers.default_worker",
    "hybridrl.serve.server_child",
    "hybridrl.trainer.main_ppo",
    "hybridrl.trainer.ppo.run_ppo",
    "hybridrl.trainer.ppo.prepare_ppo",
    "hybridrl.workers.actor_rollout_ref",
    "hybridrl.observe.figures",
    "matplotlib.backends.backend_agg",
    "ray.dag.compiled_dag_node",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
)
# Arrow's allocator has a thread of its own, unless it reads this when it is imported.
WITHOUT_ARROWS_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Ray's own processes, apart from its workers.
DAEMONS_OF_RAY = (
    "ray.autoscaler._private.monitor",
    "ray._private.log_monitor",
    "ray.dashboard.dashboard",
    "ray.dashboard.agent",
    "ray._private.runtime_env.agent.main",
)
# vLLM's processes go without PyTorch's compiler, which takes seconds in each of them for single functions.
WITHOUT_COMPILER = {"TORCH_COMPILE_DISABLE": "1"}
#: milliseconds after which a process of vLLM that waits for another looks again, were it not woken
LOOKS_AGAIN_MS = 20
# What a replica imports before it starts the processes of vLLM; SGLang's host imports it itself.
OF_REPLICAS = ("vllm.engine.arg_utils", "vllm.v1.engine.async_llm", "hybridrl.rollout.vllm.engine")
# What the processes of an engine import, with the environment of the first.
OF_ENGINES = {
    "vllm": (
        "ray._private.workers.default_worker",  # the main module of a replica, which its children import too
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.executor.multiproc_executor",
        "vllm.model_executor.model_loader.base_loader",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm._aiter_ops",
        "vllm.model_executor.models.qwen2",
        "hybridrl.rollout.vllm.engine",
    ),
    "sglang": (
        "sglang.srt.entrypoints.engine",
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.models.qwen2",
        "hybridrl.rollout.sglang.sglang_child",
    ),
}


@dataclass
class Request:
    """The process that a test or Ray asks for."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    numbers: list[int]  # of the client's files that the process gets: 0, 1, 2, and what else the client inherited
    files: list[int]  # these files, in the server

    @property
    def is_program(self) -> bool:
        """`--program` and what follows Python's name in a command; else it is a worker."""
        return self.words[0] == "--program"

    @property
    def runs_tests(self) -> bool:
        """What pytest-xdist starts. A test decides itself what is forked."""
        return any("sys.stdin.readline" in word for word in self.words)

    @property
    def is_server(self) -> bool:
        return self.words[0] == SERVER


@dataclass
class Child:
    """A forked process, and the client that it has been forked for."""

    pid: int
    handle: int
    client: socket.socket | None  # None for a server


def serve(kind: str, listener: socket.socket, second: socket.socket | None = None) -> Request | None:
    """Fork for every client, until the standard input is closed.

    Args:
        kind: "base", or "engines" of one Ray's replicas, which have the environment of the first.
        listener: where clients connect.
        second: where programs connect whose settings of Ray are this process's; Ray is imported for them.

    Returns:
        In a forked process what it is to become; None in the server.
    """
    if kind == "engines":  # few tests need them
        return _serve(kind, listener, sys.stdin)
    _import((*PRELOADED, *OF_PROGRAMS, *filter(importlib.util.find_spec, OF_AGENTS)))
    _import_megatron()
    _fill_caches()
    assert "ray" not in sys.modules, "Ray was imported before the environment of a program was known"
    assert second is not None
    own, with_ray = os.getpid(), os.fork()
    if with_ray == 0:
        listener.close()
        _import_ray()
        return _serve("programs", second, sys.stdin)
    second.close()
    _settle()
    try:
        return _serve(kind, listener, sys.stdin)
    finally:
        if os.getpid() == own:
            os.waitpid(with_ray, 0)


def _serve(kind: str, listener: socket.socket, life: IO[str] | socket.socket) -> Request | None:
    """Fork for every client.

    Args:
        kind: of `serve`; or "programs", which find Ray imported; or "workers" of one Ray, which is imported with its
            first worker's environment, or "replicas", if some of these start engines.
        life: the server ends when this is closed at its other end.
    """
    selector = selectors.DefaultSelector()
    selector.register(life, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    children: dict[int, Child] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is life:
                for child in children.values():
                    if child.client is not None:
                        os.kill(child.pid, signal.SIGKILL)
                return None
            if key.fileobj is listener:
                client, _ = listener.accept()
                request = _received(client)
                if request is None:
                    continue
                _finish_imports_of(kind, request)
                pid = os.fork()
                if pid == 0:
                    for file in (listener, selector, life, *(child.client for child in children.values())):
                        if file is not None and file is not sys.stdin:
                            file.close()
                    for child in children.values():
                        os.close(child.handle)
                    if "numpy.random" in sys.modules:  # Python's own generator is seeded anew by fork
                        sys.modules["numpy"].random.seed()
                    if request.is_server:
                        return _become_server(request, client)
                    client.close()
                    return request
                _started(pid, client, request, children, selector)
            elif key.data.pid not in children:
                continue  # it ended in the same moment as its client
            elif key.fileobj is key.data.client:  # the client was killed, and so is the process that it stands for
                selector.unregister(key.data.client)
                os.kill(key.data.pid, signal.SIGKILL)
            else:
                if kind == "engines":  # with a process goes what it started, which is forked too
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(key.data.pid, signal.SIGKILL)
                _ended(children.pop(key.data.pid), selector)


def _finish_imports_of(kind: str, request: Request) -> None:
    if kind in ("workers", "replicas"):
        _finish_imports(request, "ray", WITH_RAYS_ENVIRONMENT)
        if kind == "replicas" and importlib.util.find_spec("vllm"):
            _finish_imports(request, "vllm", OF_REPLICAS)
    elif kind == "engines":
        engine = next(name for name in OF_ENGINES if importlib.util.find_spec(name))
        if _finish_imports(request, engine, (*PRELOADED, *OF_ENGINES[engine])) and engine == "vllm":
            _wait_without_spinning()
            _hold_little()


def _become_server(request: Request, client: socket.socket) -> Request | None:
    """Serve in a forked process, as long as the client is there."""
    for number, file in zip(request.numbers, request.files[:-1], strict=True):
        os.dup2(file, number)
        os.close(file)
    return _serve(request.words[1], socket.socket(fileno=request.files[-1]), client)


def _started(
    pid: int, client: socket.socket, request: Request, children: dict[int, Child], selector: selectors.BaseSelector
) -> None:
    """Tell the client, and watch it and its process. A server has the connection for itself."""
    for file in request.files:
        os.close(file)
    if request.is_server:
        client.close()
        children[pid] = child = Child(pid, os.pidfd_open(pid), None)
    else:
        with contextlib.suppress(OSError):
            client.sendall(pid.to_bytes(8, "big"))
        children[pid] = child = Child(pid, os.pidfd_open(pid), client)
        selector.register(client, selectors.EVENT_READ, child)
    selector.register(child.handle, selectors.EVENT_READ, child)


def _received(client: socket.socket) -> Request | None:
    """What the client asks for; None where it has gone already."""
    size, files, _, _ = socket.recv_fds(client, 8, 200)
    text = client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    if len(size) < 8 or len(text) < int.from_bytes(size, "big"):
        for file in files:
            os.close(file)
        client.close()
        return None
    return Request(**json.loads(text), files=files)


def _finish_imports(request: Request, package: str, names: tuple[str, ...]) -> bool:
    """Import modules as the first process would that asks for one; whether they had not been imported before."""
    if package in sys.modules:
        return False
    os.environ.update(request.environment)
    if package == "vllm":
        os.environ.update(WITHOUT_COMPILER)
    elif package == "sglang":
        importlib.import_module("hybridrl.rollout.sglang.compat").use_stand_ins()
    _import(names)
    _settle()
    return True


def _import(names: Iterable[str]) -> None:
    """Import modules, without a thread of Arrow's allocator."""
    os.environ.update(WITHOUT_ARROWS_THREAD)
    for name in names:
        importlib.import_module(name)
    for name in WITHOUT_ARROWS_THREAD:
        del os.environ[name]


def _fill_caches() -> None:
    """Do what takes a process long once: the first composition takes a second, each later one a tenth of that."""
    for tree in ("ppo_trainer", "sft_trainer"):
        importlib.import_module("hybridrl.config.compose").compose_config(tree)
    # Renamings of weights, which transformers compiles when it first loads a model: 0.1 s.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen2")


def _import_megatron() -> None:
    """Import Megatron-core as its engine does, which takes each process two seconds: on a CPU it is compiled anew.

    On a machine with a GPU the engine asks for the GPU first, and a process that has done so cannot be forked.
    """
    if importlib.util.find_spec("megatron") is None or os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return
    importlib.import_module("hybridrl.engine.megatron.parallel").import_parallel_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about packages that are not installed
        for name in ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.dist_checkpointing"):
            importlib.import_module(name)
    importlib.import_module("torch._dynamo.repro.after_dynamo")  # of the first function that is compiled
    importlib.import_module("hybridrl.engine.megatron.engine")
    importlib.import_module("hybridrl.engine.megatron.checkpoint")


def _wait_without_spinning() -> None:
    """Let processes of one vLLM engine sleep until they are woken; they spin for a second after each message."""
    queues = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    start = queues.SpinCondition.__init__

    def start_asleep(self: Any, *arguments: Any, **keywords: Any) -> None:
        start(self, *arguments, **keywords)
        self.busy_loop_s = 0

    queues.SpinCondition.__init__ = start_asleep
    queues.SHM_READER_RECHECK_INTERVAL_MS = LOOKS_AGAIN_MS


def _hold_little() -> None:
    """Give engines 64 MiB for keys and values in place of the GiB that is the least one can set, all of it written at
    the start; and let them end without a search for garbage among all that was imported, which copies its memory.
    """
    worker = importlib.import_module("vllm.v1.worker.cpu_worker").CPUWorker
    least = worker.determine_available_memory
    worker.determine_available_memory = lambda self: min(least(self), 64 << 20)
    gc.unfreeze = lambda: None


def _import_ray() -> None:
    """Import what programs, their workers and Ray's own processes import, and have all of them forked."""
    before = dict(os.environ)
    _import((*OF_CONTROLLERS, *DAEMONS_OF_RAY))
    from ray._private import ray_constants, services

    own = Path(services.RAY_PATH) / "_private" / "workers" / ray_constants.SETUP_WORKER_FILENAME
    ray_constants.SETUP_WORKER_FILENAME = str(CLIENT)
    daemons, start = os.environ[DAEMONS], services.start_ray_process

    def start_forked(command: list[str], *arguments: Any, **keywords: Any) -> Any:
        forked = any(Path(word).name in ("monitor.py", "log_monitor.py") for word in command[:3])
        return start([daemons, *command[1:]] if forked else command, *arguments, **keywords)

    services.start_ray_process = start_forked
    services._build_python_executable_command_memory_profileable = lambda *_, **__: [daemons]
    SET_BY_IMPORTS.update({name: value for name, value in os.environ.items() if name not in before})
    SET_BY_IMPORTS[SETUP_WORKER] = str(own)
    _settle()


def _settle() -> None:
    """Make forks cheap; a thread would be missing in them."""
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread"
    gc.collect()
    gc.freeze()


def _ended(child: Child, selector: selectors.BaseSelector) -> None:
    _, status = os.waitpid(child.pid, 0)
    selector.unregister(child.handle)
    os.close(child.handle)
    if child.client is not None:
        with contextlib.suppress(OSError):
            child.client.sendall(status.to_bytes(8, "big"))
        with contextlib.suppress(KeyError):
            selector.unregister(child.client)
        child.client.close()


def enter(request: Request) -> None:
    """Give a forked process the environment, the folder and the files that were asked for."""
    out_of_the_way = [fcntl.fcntl(file, fcntl.F_DUPFD, 512) for file in request.files]
    for file in request.files:
        os.close(file)
    for number, file in zip(request.numbers, out_of_the_way, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.folder)
    multiprocessing.process.ORIGINAL_DIR = request.folder  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(SET_BY_IMPORTS | request.environment)
    if "ray" in sys.modules and SET_BY_IMPORTS:  # its core has read the server's
        sys.modules["ray._raylet"].Config.initialize("")  # type: ignore[attr-defined]
    forks = os.environ.get(ENGINES, os.environ.get(CHILDREN))
    if forks is not None and not request.runs_tests:
        sys.executable = forks  # for what this process starts next
        multiprocessing.set_executable(sys.executable)


def become_program(request: Request) -> None:
    """Do in a forked process what Python does with these words; the workers of its Ray are forked as well."""
    os.setsid()
    enter(request)
    if "ray" not in sys.modules:
        sys.meta_path.insert(0, ForkRaysWorkers())
    words = request.words[1:]
    if words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:1] = [request.folder, *python_path()]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif words[0].endswith(".py"):
        sys.argv = words
        file = os.path.abspath(sys.argv[0])
        sys.path[:1] = [os.path.dirname(file), *python_path()]
        runpy.run_path(file, run_name="__main__")
    else:
        place = words.index("-c")
        sys.argv = ["-c", *words[place + 2 :]]
        if "--multiprocessing-fork" not in words:
            sys.path[:1] = ["", *python_path()]
            sys.modules["__main__"] = ModuleType("__main__")
        exec(words[place + 1], sys.modules["__main__"].__dict__)


def python_path() -> list[str]:
    """Return the folders that the environment puts before those that this process had at its start."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class ForkRaysWorkers:
    """Sets what Ray starts as a worker as soon as Ray is imported, which is up to the program."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "ray._private.ray_constants":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            assert spec.origin is not None
            own = Path(spec.origin).parent / "workers" / module.SETUP_WORKER_FILENAME
            os.environ[SETUP_WORKER] = str(own)
            module.SETUP_WORKER_FILENAME = str(CLIENT)  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def become_worker(request: Request) -> tuple[CodeType, dict[str, Any]]:
    """Do in a forked process what Ray's `setup_worker.py` does, except that no other Python is started.

    Returns:
        The worker's program and its module's names. The caller runs it, so that stacks are as deep as a worker's own.
    """
    os.setpgid(0, 0)  # as Ray does: with a worker it ends the worker's process group
    enter(request)  # before Ray is imported, which reads it
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    own, sys.argv = parser.parse_known_args(request.words)
    context = RuntimeEnvContext.deserialize(own.serialized_runtime_env_context or "{}")
    update_envs(context.env_vars)
    program = sys.argv[0]
    sys.path[:1] = [os.path.dirname(program), *python_path()]
    module = ModuleType("__main__")
    module.__file__ = program
    sys.modules["__main__"] = module
    return compile(Path(program).read_text(), program, "exec"), module.__dict__


def leave(error: BaseException | None) -> NoReturn:
    """End a forked process with the status, the messages and the exit handlers that Python's own end would have.

    Objects are not finalized: in a process with all these modules that takes one to two seconds of processor time.

    Args:
        error: what the process's program has raised.
    """
    status: Any = 0
    if isinstance(error, SystemExit):
        status = error.code
        if not isinstance(status, int):
            if status is not None:
                print(status, file=sys.stderr)
            status = int(status is not None)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    asked = serve(sys.argv[1], *(socket.socket(fileno=int(file)) for file in sys.argv[2:]))
    if asked is None:
        os._exit(0)
    try:
        if asked.is_program:
            become_program(asked)
        else:
            exec(*become_worker(asked))
    except BaseException as error:
        leave(error)
    leave(None)
