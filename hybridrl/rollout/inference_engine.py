"""The interface of a generation engine: requests in, completions out, new weights in between.

An engine lives in the process of its replica (`hybridrl.rollout.replicas.replica_actor`), on that process's event loop.
No other code knows its library. It is a class in a file of its own, registered with `register_inference_engine(name)`.
"""

import asyncio
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.hybrid_engine.buckets import Bucket, Checkpoint, RequiredSlices, ShardBucket
from hybridrl.models.model_config import config_of
from hybridrl.registry import INFERENCE_ENGINES, import_external_lib
from hybridrl.rollout.request import Completion, Request, Task
from hybridrl.utils.entry_metadata import InferenceMetadata

T = TypeVar("T")


class EngineBrokenError(RuntimeError):
    """The engine's processes have ended or do not respond: the replica has to be restarted."""


@dataclass(frozen=True)
class EngineSpec:
    """The start-up settings of an engine.

    Attributes:
        config: `actor_rollout_ref.rollout`.
        model: `actor_rollout_ref.model`.
        eos_token_ids: a response ends with the first of these.
        pad_token_id: the tokenizer's.
        index: which replica this is; engines of different replicas draw different noise.
        devices: accelerators of this replica by their index on the node; empty on a CPU.
        threads: threads for arithmetic, of each process of the engine.
        load_weights: whether to read the checkpoint at the start. Without, weights are random until the first update.
        task: the task that the engine is started for.
        top: with the task `read`, the most likely tokens that a request may ask for.
        logits_temperature: with the task `read`, the divisor of the logits.
        records_routing: requests may ask for the experts of their tokens.
    """

    config: RolloutConfig
    model: ModelConfig
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    index: int = 0
    devices: tuple[int, ...] = ()
    threads: int = 1
    load_weights: bool = False
    task: Task = "generate"
    top: int = 0
    logits_temperature: float = 1.0
    records_routing: bool = False

    @property
    def gets_adapter(self) -> bool:
        """Whether the engine reads the base at the start and is then sent an adapter in place of weights."""
        return self.model.adapted and self.config.lora_transfer == "adapter"

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and response together."""
        return self.config.max_model_len or self.config.prompt_length + self.config.response_length


class InferenceEngine(ABC):
    """One engine over the devices of its replica.

    Attributes:
        name: `rollout.name`.
        always_seeded: draws by a request's own seed even without `full_determinism`.
    """

    name: ClassVar[str]
    always_seeded: ClassVar[bool] = True

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    @classmethod
    def heeds_seeds(cls, config: RolloutConfig) -> bool:
        """Whether a request's own seed decides what is drawn for it."""
        return cls.always_seeded or config.full_determinism

    @classmethod
    @abstractmethod
    def check(cls, config: RolloutConfig, model: ModelConfig, on_gpu: bool) -> None:
        """Check the settings without starting: version, parallel sizes against the model's heads, lengths.

        Must not import the engine's library (which takes seconds) where the package's metadata suffice.

        Args:
            on_gpu: where it is to run; this process may be elsewhere.

        Raises:
            RolloutError: it cannot work; the message says what to change.
        """

    @classmethod  # noqa: B027
    def check_routing(cls, config: RolloutConfig, model: ModelConfig, on_gpu: bool) -> None:
        """Refuse settings with which the experts of tokens cannot be recorded, if the engine records them at all.

        The rest is like `check`, which is called, too.
        """

    @classmethod  # noqa: B027
    def check_scoring(cls, model: ModelConfig) -> None:
        """Refuse a classifier that the engine cannot serve, if it serves any at all.

        The rest is like `check`, which is called, too.
        """

    @abstractmethod
    async def start(self) -> None:
        """Load the model and get ready to generate.

        Raises:
            RolloutError: the engine's own message, with what to change where that is known.
        """

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """The completion of one request, `versions` left empty. Many calls are in flight at once.

        A request that the engine refuses is a completion with `finish_reason` "error"; an engine that is broken raises
        anything but a `RolloutError`, here and in the methods below, and its replica is started again.
        """

    async def read(self, request: Request) -> Completion:
        """Compute the `prefill` of a request, as `prompt_logprobs` of the completion; otherwise like `generate`.

        Only engines that were started for it (`spec.task`) are called.
        """
        raise RolloutError(f"{self.name} was not built to read prompts")

    @abstractmethod
    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests now; their `generate` returns what there is, with `finish_reason` "abort"."""

    @abstractmethod
    async def begin_update(self) -> None:
        """Get ready for new weights; nothing is generated until `end_update`."""

    async def required_slices(self, checkpoint: Checkpoint) -> list[RequiredSlices] | None:
        """Return the parts of the policy's tensors that each process of the engine needs.

        Called between `begin_update` and `load_bucket`.

        Returns:
            None where the engine takes whole tensors only, which are then streamed.
        """
        return None

    @abstractmethod
    async def load_bucket(self, bucket: Bucket | ShardBucket) -> None:
        """Take in a part of the weights. When this returns the sender may overwrite the bucket.

        Each process of the engine has to read it (`hybridrl.hybrid_engine.receive.WeightReceiver`), also where it drops
        the tensors: the sender waits for all of them.

        Args:
            bucket: whole tensors, or, where `required_slices` has answered, what each process needs of them.
        """

    async def load_adapter(self, config: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Generate with this adapter from `end_update` on, and with none that came before.

        Args:
            config: PEFT's `adapter_config.json`.
            tensors: by their names in PEFT's files.
        """
        raise RolloutError(f"{self.name} takes no adapters")

    @abstractmethod
    async def end_update(self) -> None:
        """All weights have arrived: make them the ones that generate, and drop every cache made with the old ones."""

    @abstractmethod
    async def release(self, tags: Sequence[str]) -> None:
        """Give the device memory of `tags` (of `MEMORY_TAGS`) back; what was in it is lost."""

    @abstractmethod
    async def resume(self, tags: Sequence[str]) -> None:
        """Take the device memory of `tags` again; weights have to be updated before they are used."""

    @abstractmethod
    def last_progress(self) -> float:
        """Return the time (`time.monotonic`) of the engine's last progress, by which a stuck engine is detected."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters since the start: `generated_tokens`, `prompt_tokens`, `prefix_cache_queries`, `prefix_cache_hits`
        (tokens), and gauges `running`, `waiting`, `kv_cache_usage` (0 to 1), where the engine tells them."""

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the engine's worker processes by name, such as one of a worker extension of the user's.

        Returns:
            What each process answered.
        """
        raise RolloutError(f"{self.name} offers no calls into its worker processes")

    async def wait_until_dead(self) -> str:
        """Return, with the reason, when the engine's own processes can answer no more; never for one without any.

        Called before `start`. The replica ends then, whatever it waits for: engines leave calls to a process that was
        killed without an answer.
        """
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    @abstractmethod
    async def close(self) -> None:
        """End the engine's processes."""


def register_inference_engine(
    name: str,
    *,
    packages: Sequence[str] = (),
    in_place: bool = False,
    takes_weights: bool = True,
    serves: bool = True,
    auto: int = 0,
    install: str = "",
    reserves_of_total: bool = False,
    records_routing: bool = False,
    takes_adapters: bool = False,
    sees_images: bool = False,
    scores: bool = False,
    reads: bool = False,
    constrains: bool = False,
    settings: type | str | None = None,
) -> Callable[[type[T]], type[T]]:
    """Class decorator that adds an engine; see `hybridrl.utils.entry_metadata.InferenceMetadata`.

    `module:Class` names others.

    The engine's own settings are further keys of `rollout.engine_kwargs`.
    """

    def add(engine: type[T]) -> type[T]:
        engine.name = name  # type: ignore[attr-defined]
        metadata = InferenceMetadata(
            packages=tuple(packages),
            in_place=in_place,
            takes_weights=takes_weights,
            serves=serves,
            auto=auto,
            install=install,
            reserves_of_total=reserves_of_total,
            records_routing=records_routing,
            takes_adapters=takes_adapters,
            sees_images=sees_images,
            scores=scores,
            reads=reads,
            constrains=constrains,
            settings=settings,
        )
        INFERENCE_ENGINES.add(name, engine, metadata)
        return engine

    return add


def inference_engine_class(name: str) -> type[InferenceEngine]:
    """The class of the engine `name`, imported now.

    Raises:
        RolloutError: there is none, or it is not one that runs in replicas.
    """
    engine = INFERENCE_ENGINES.get(name)
    if not (isinstance(engine, type) and issubclass(engine, InferenceEngine)):
        raise RolloutError(
            f"{INFERENCE_ENGINES.key}={name}: {engine!r} is not derived from "
            f"{InferenceEngine.__module__}.{InferenceEngine.__qualname__}"
        )
    return engine


def in_place_engine(name: str) -> str:
    """Return the engine that generates with the training weights: `name` if it is one, else the built-in one."""
    candidates = [name] if INFERENCE_ENGINES.knows(name) else []
    return next(
        candidate
        for candidate in (*candidates, *INFERENCE_ENGINES.names())
        if INFERENCE_ENGINES.metadata(candidate).in_place
    )


def automatic_engines() -> list[str]:
    """The engines that `rollout.name=auto` tries on a GPU, in order."""
    ranked = {name: INFERENCE_ENGINES.metadata(name).auto for name in INFERENCE_ENGINES.names()}
    return sorted((name for name, rank in ranked.items() if rank), key=lambda name: ranked[name])


def missing_packages(name: str) -> list[str]:
    """Return the packages that the engine `name` needs and that are not installed."""
    return [
        package for package in INFERENCE_ENGINES.metadata(name).packages if importlib.util.find_spec(package) is None
    ]


def create_inference_engine(name: str, spec: EngineSpec, **kwargs: Any) -> InferenceEngine:
    """Make the engine `name`, after the modules that the model's `external_lib` names are imported."""
    import_external_lib(spec.model.external_lib)
    return inference_engine_class(name)(spec, **kwargs)


def classifier_overrides(spec: EngineSpec) -> dict[str, Any]:
    """Entries of the model's config.json: a critic is stored as a classifier of tokens, with the same weights."""
    names = list(config_of(spec.model).architectures or ()) if spec.task == "score" else []
    return {"architectures": [f"{family_of(name)}ForSequenceClassification" for name in names]} if names else {}


def family_of(architecture: str) -> str:
    """The family in the name of a model's class: Qwen2 of Qwen2ForCausalLM."""
    return architecture.partition("For")[0].removesuffix("Model")


def check_tensor_parallel(config: RolloutConfig, model: ModelConfig) -> None:
    """Refuse a tensor-parallel size that does not divide the model's attention heads.

    Raises:
        RolloutError: names the sizes that do.
    """
    text = config_of(model).get_text_config()
    heads, size = text.num_attention_heads, config.tensor_model_parallel_size
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in fitting:
        raise RolloutError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide the {heads} attention heads "
            f"and {kv_heads} key-value heads of {model.path}; use one of {', '.join(map(str, fitting))}"
        )
