"""Selection of the engine for `actor_rollout_ref.rollout.name`, and the checks that it can work, before any start."""

import importlib.util

from hybridrl.config import ActorRolloutRefConfig, RolloutConfig
from hybridrl.config.entry_settings import engine_group, engine_settings
from hybridrl.engine.capabilities import GeneratesInPlace, require
from hybridrl.engine.train_engine import Engine, train_engine_class
from hybridrl.errors import RolloutError
from hybridrl.models.model_config import config_of
from hybridrl.models.rope import check_length
from hybridrl.models.vision import is_vision_model
from hybridrl.notify import notify
from hybridrl.registry import INFERENCE_ENGINES
from hybridrl.rollout.inference_engine import (
    automatic_engines,
    in_place_engine,
    inference_engine_class,
    missing_packages,
)
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.utils import device

_KEY = "actor_rollout_ref.rollout"
SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
#: settings that only engines with weights of their own read
ENGINE_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
    "nnodes",
    "gpu_memory_utilization",
    "sleep_level",
    "load_format",
    "lora_transfer",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "limit_images",
    "engine_kwargs",
    "checkpoint_engine",
)


def resolve_rollout(config: ActorRolloutRefConfig, use_gpu: bool | None = None) -> str:
    """The engine's name, checked against the model; "auto" is resolved.

    Args:
        use_gpu: whether the policy lives on GPUs; None: whether this machine has one.

    With a GPU, auto is vLLM, else SGLang, where one is installed and takes the settings. Without a GPU it is `hf`, if
    the training engine can generate: small models, the only ones a CPU trains, generate faster in place than through
    an inference engine. With devices of its own (`rollout.nnodes`) it is an engine, also without a GPU.

    Raises:
        RolloutError, UserError: it is not installed, or a setting cannot work with it.
    """
    rollout = config.rollout
    SamplingParams.for_training(rollout)
    SamplingParams.for_validation(rollout)
    on_gpu = device.is_gpu() if use_gpu is None else use_gpu
    name = rollout.name
    if name == "auto":
        in_place = issubclass(_training_engine(config), GeneratesInPlace)
        takes_turns = in_place and not on_gpu and not rollout.nnodes
        name = in_place_engine(name) if takes_turns else _fastest(config, on_gpu)
    _check_lengths(config)
    metadata = INFERENCE_ENGINES.metadata(name)
    _check_routing(config, name)
    _check_adapter(config, name)
    _check_images(config, name)
    if metadata.in_place:
        _check_engine(config)
        _check_dtype(config)
        _warn_unused(name, rollout)
    else:
        if missing := missing_packages(name):
            raise RolloutError(
                f"actor_rollout_ref.rollout.name={name}: {', '.join(missing)} is not installed. "
                f"{metadata.install or 'pip install ' + ' '.join(missing)}"
            )
        engine = inference_engine_class(name)
        engine.check(rollout, config.model, on_gpu)
        if config.actor.router_replay.records_in_generation:
            engine.check_routing(rollout, config.model, on_gpu)
    if is_served(rollout):
        if not metadata.serves:
            raise RolloutError(
                f"actor_rollout_ref.rollout.server and .prometheus serve engines, and rollout.name={rollout.name} "
                f"({name}) cannot be served; set rollout.name to {' or '.join(automatic_engines())}, or leave "
                "them off"
            )
        check_server_packages()
    return name


def is_served(rollout: RolloutConfig) -> bool:
    """Whether replicas are reached over HTTP: their API, or their metrics."""
    return rollout.server.enable or rollout.prometheus.enable


def check_server_packages() -> None:
    """Refuse to serve where the packages that `hybridrl.serve` imports are missing."""
    missing = [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise RolloutError(
            f"actor_rollout_ref.rollout.server and .prometheus need {', '.join(missing)}, which the engines bring and "
            "this environment lacks: bash scripts/install.sh auto server"
        )


def _fastest(config: ActorRolloutRefConfig, on_gpu: bool) -> str:
    for name in automatic_engines():
        if not missing_packages(name):
            try:
                _check_images(config, name)
                _check_routing(config, name)
                engine = inference_engine_class(name)
                engine.check(config.rollout, config.model, on_gpu)
                if config.actor.router_replay.records_in_generation:
                    engine.check_routing(config.rollout, config.model, on_gpu)
            except RolloutError as error:
                notify(f"actor_rollout_ref.rollout.name=auto: not {name}, because {error}")
                continue
            return name
    if config.rollout.nnodes:
        raise RolloutError(
            f"{_KEY}.nnodes={config.rollout.nnodes} with name=auto: none of {', '.join(automatic_engines())} can "
            "generate on devices of its own here; install one, or set nnodes=0"
        )
    return in_place_engine("auto")


def _check_lengths(config: ActorRolloutRefConfig) -> None:
    """Refuse lengths that the model was not made for, or not with the same numbers for each sequence.

    Engines refuse some of them minutes later, `hf` never.
    """
    model = config_of(config.model)
    text = model.get_text_config()
    limit, rollout = getattr(text, "max_position_embeddings", None), config.rollout
    length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    plain = rope.get("rope_type", "default") == "default"
    if limit is not None and plain and length > limit:
        raise RolloutError(
            f"prompt and response are {length} tokens (data.max_prompt_length + data.max_response_length, or "
            f"actor_rollout_ref.rollout.max_model_len), and {config.model.path} was made for {limit} "
            "(max_position_embeddings): lower them, or set actor_rollout_ref.model.override_config.rope_parameters"
        )
    check_length(
        model,
        length,
        f"actor_rollout_ref.model.path={config.model.path} with prompt and response (data.max_prompt_length + "
        "data.max_response_length, or actor_rollout_ref.rollout.max_model_len)",
    )


def _check_engine(config: ActorRolloutRefConfig) -> None:
    """The training engine must be able to generate."""
    require(
        _training_engine(config),
        GeneratesInPlace,
        key=f"actor_rollout_ref.rollout.name={config.rollout.name}",
        instead=f"set actor_rollout_ref.rollout.name to {' or '.join(automatic_engines())}, or change "
        f"actor.strategy={config.actor.strategy}",
    )


def _check_routing(config: ActorRolloutRefConfig, name: str) -> None:
    """Router replay R3 needs an engine that returns the experts of tokens."""
    if not config.actor.router_replay.records_in_generation or INFERENCE_ENGINES.metadata(name).records_routing:
        return
    engines = [engine for engine in INFERENCE_ENGINES.names() if INFERENCE_ENGINES.metadata(engine).records_routing]
    raise RolloutError(
        f"actor_rollout_ref.actor.router_replay.mode={config.actor.router_replay.mode} replays the experts that tokens "
        f"chose in generation, and {name} (actor_rollout_ref.rollout.name={config.rollout.name}) does not return them; "
        f"set rollout.name to {' or '.join(engines)}, or router_replay.mode to R2 or disabled"
    )


def _check_adapter(config: ActorRolloutRefConfig, name: str) -> None:
    """Refuse to send an adapter alone to an engine that cannot apply it."""
    metadata, setting = INFERENCE_ENGINES.metadata(name), f"{_KEY}.lora_transfer={config.rollout.lora_transfer}"
    if config.rollout.lora_transfer != "adapter" or metadata.in_place:
        return
    if not config.model.adapted:
        raise RolloutError(
            f"{setting} without an adapter: set actor_rollout_ref.model.lora_rank, or leave lora_transfer out"
        )
    if config.model.load_in_4bit:
        raise RolloutError(
            f"{setting} with actor_rollout_ref.model.load_in_4bit=True: the engine would read the base from model.path "
            "in its full precision, which is another model than the one that is trained; set lora_transfer=merged"
        )
    if not metadata.takes_adapters:
        engines = [engine for engine in INFERENCE_ENGINES.names() if INFERENCE_ENGINES.metadata(engine).takes_adapters]
        raise RolloutError(
            f"{setting}: {name} ({_KEY}.name={config.rollout.name}) gets weights with the adapter merged; set "
            f"lora_transfer=merged, or name to {' or '.join(engines)}"
        )


def _check_images(config: ActorRolloutRefConfig, name: str) -> None:
    """A vision-language model needs an engine that gets the very images that the trainer sees."""
    model = config_of(config.model)
    if not is_vision_model(model) or INFERENCE_ENGINES.metadata(name).sees_images:
        return
    engines = [engine for engine in INFERENCE_ENGINES.names() if INFERENCE_ENGINES.metadata(engine).sees_images]
    raise RolloutError(
        f"actor_rollout_ref.rollout.name={config.rollout.name}: {config.model.path} is a vision-language model "
        f"({model.model_type}), and generating from images with {name} is not built; set rollout.name to "
        f"{' or '.join(engines)}"
    )


def _training_engine(config: ActorRolloutRefConfig) -> type[Engine]:
    return train_engine_class("language_model", config.actor.strategy)


def _check_dtype(config: ActorRolloutRefConfig) -> None:
    training, rollout = engine_settings(config.actor).dtype, config.rollout
    if rollout.dtype not in ("auto", training):
        raise RolloutError(
            f"actor_rollout_ref.rollout.dtype={rollout.dtype}: generation with the training weights in place computes "
            f"in actor_rollout_ref.actor.{engine_group(config.actor)}.dtype={training}; leave it at auto, or set that"
        )


def _warn_unused(name: str, rollout: RolloutConfig) -> None:
    """One line where settings were made that generating in place does not read."""
    plain = RolloutConfig()
    changed = [key for key in ENGINE_KEYS if getattr(rollout, key) != getattr(plain, key)]
    if changed:
        notify(
            f"actor_rollout_ref.rollout.name={name} generates with the training weights in place and does "
            f"not read rollout.{', rollout.'.join(changed)}"
        )
