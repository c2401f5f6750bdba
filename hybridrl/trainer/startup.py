"""Starts worker processes in parallel with everything else that has to be done before the first step."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray

from hybridrl.config import CheckpointConfig, ModelConfig, OptimConfig, RayConfig
from hybridrl.config.entry_settings import engine_group, engine_settings
from hybridrl.config.schema.node import ConfigNode
from hybridrl.errors import ModelError, UserError
from hybridrl.notify import notify
from hybridrl.observe.events import beginning
from hybridrl.processes.inherited import block_stop_signals
from hybridrl.registry import TRAIN_ENGINES
from hybridrl.single_controller.ray import ResourcePoolManager, init_ray, shutdown_ray
from hybridrl.utils.files import check_writable

Groups = TypeVar("Groups")


USES_GPU = {
    "auto": None,
    "cpu": False,
    "cuda": True,
}  # trainer.device -> use_gpu of the resource pools; None uses a GPU if there is one


#: settings whose effect depends on the model, by the last parts of their names
_OF_MODELS = (
    *("freeze_vision_tower", "router_aux_loss_coef", "router_replay.mode", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "target_modules", "exclude_modules"),
)


def depends_on_model(config: ConfigNode) -> bool:
    """Whether a setting was set that only some models have: such models are looked at before anything starts.

    Other runs look at their models while Ray starts, which saves seconds.
    """
    return any(key.endswith(_OF_MODELS) for key in config.set_keys)


def check_engine(
    where: str,
    part: Any,
    model: ModelConfig,
    ranks: int,
    optim: OptimConfig | None,
    checkpoint: CheckpointConfig | None = None,
    *,
    weights: bool = True,
) -> None:
    """Refuse weights and settings that the training engine of a role cannot work with; see `Engine.check`.

    Args:
        where: the role's place in the configuration.
        part: its settings, with `strategy`.
        ranks: number of its processes.
        optim: None for a role that does not learn.
        checkpoint: how its checkpoints are saved; None: it has none.
        weights: look for the files of the first weights; False where these are on another machine.
    """
    settings, group = engine_settings(part, model.external_lib), engine_group(part)
    engine = TRAIN_ENGINES.get(part.strategy)
    if checkpoint is not None and checkpoint.async_save:
        key = "checkpoint.async_save=True" if where == "engine" else f"{where}.checkpoint.async_save=True"
        engine.check_async_save(key)
    if model.adapted:
        key = f"{where}.strategy={part.strategy} with model.lora_rank or model.lora_adapter_path"
        engine.check_adapter(key)
    if model.load_in_4bit:
        engine.check_four_bit(f"{where}.strategy={part.strategy} with model.load_in_4bit=True")
    if weights:
        engine.check_first_weights(model, settings)
    try:
        engine.check(model, settings, ranks, None if settings.forward_only else optim)
    except ModelError as error:
        raise ModelError(f"{where}{'.' * bool(group)}{group}: {error}") from error


@contextmanager
def workers_starting(
    ray_settings: RayConfig, manager: ResourcePoolManager, device: str, spawn: Callable[[], Groups]
) -> Iterator[Callable[[], Groups]]:
    """Start Ray and the worker processes in a thread. The block gets a function that waits for them.

    Reading data and checking the user's settings takes as long as starting processes, and does not need them. The
    processes end with the block, whatever happens in it, and so does Ray if this block started it. A Ray that the
    program started or joined before, also by `init_ray`, goes on.

    Args:
        ray_settings: `ray_kwargs`.
        manager: the pools that the workers run in.
        device: `trainer.device`.
        spawn: starts the worker groups in the manager's pools, once Ray runs.
    """
    timeline = ray_settings.timeline_json_file
    if timeline:
        _check_timeline(Path(timeline))
    # Two threads that import it for the first time at once may see a part of it: so Python ends a deadlock of imports.
    import transformers  # noqa: F401

    given_up, is_callers_ray = threading.Event(), ray.is_initialized()
    count = sum(map(sum, manager.resource_pool_spec.values()))
    notify(f"starting {count} worker {'process' if count == 1 else 'processes'}")

    def start() -> Groups | None:
        block_stop_signals()  # Ray's processes and the workers inherit it
        init_ray(dict(ray_settings.ray_init), manager.resource_pool_spec, use_gpu=USES_GPU[device])
        return None if given_up.is_set() else spawn()

    # The thread must outlive Ray: the kernel ends Ray's processes when the thread that started them ends.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="start-workers") as background:
        starting = background.submit(start)
        try:
            with beginning():
                yield starting.result  # type: ignore[misc]
        finally:
            given_up.set()
            wait([starting])  # Ray cannot be shut down in the middle of its start
            if timeline and ray.is_initialized():
                _write_timeline(timeline)
            if not is_callers_ray:
                shutdown_ray()
            if ray.is_initialized():  # the calling program gets its devices back
                for pool in manager.resource_pool_dict.values():
                    pool.release()


def _check_timeline(path: Path) -> None:
    try:
        check_writable(path.absolute().parent)
    except OSError as error:
        raise UserError(
            f"ray_kwargs.timeline_json_file={path}: its folder cannot be written ({error.strerror or error}): name a "
            "file in another folder"
        ) from error


def _write_timeline(path: str) -> None:
    try:
        ray.timeline(filename=path)
    except Exception as error:  # Ray may have died, which the run's own error tells
        notify(f"ray_kwargs.timeline_json_file={path} could not be written: {error}", "warning")
