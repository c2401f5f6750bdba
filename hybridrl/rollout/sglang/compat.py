"""Everything that depends on SGLang's version: the known versions, its arguments, and the calls into it.

The upper half runs in any process; `Server` runs in SGLang's own process (`sglang_child.py`).
"""

import base64
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.version import Version

from hybridrl.errors import RolloutError
from hybridrl.models.info import engine_overrides
from hybridrl.models.model_config import config_of
from hybridrl.models.rope import check_length
from hybridrl.models.vision import is_vision_model
from hybridrl.rollout.inference_engine import EngineSpec, classifier_overrides
from hybridrl.rollout.request import PrefillRequest, PromptLogprobs
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.sglang.weights import LOADER
from hybridrl.utils import device
from hybridrl.utils.stand_ins import gpu_packages

if TYPE_CHECKING:
    from hybridrl.rollout.sglang.images import NamedImages
    from hybridrl.rollout.sglang.weights import Content

#: tested with this code on a CPU
TESTED = ("0.5.23",)
#: 0.5.21 introduced sessions of weight updates and log-probabilities of the truncated distribution; it and earlier ones
#: pin a transformers that is too old
SUPPORTED = (Version("0.5.22"), Version("0.6"))
#: families of whose classifiers it has a class
CLASSIFIERS = ("Qwen2", "Qwen3", "Llama", "Gemma2")
#: bytes of the KV cache on a CPU, unless engine_kwargs.sglang.max_total_tokens sets the number of tokens
CPU_CACHE_BYTES = 2**30
#: of a CPU's memory that SGLang may plan with for a vision-language model; `CPU_CACHE_BYTES` bounds the KV cache
CPU_MEMORY_SHARE = 0.5
# SGLang reserves a few tokens of its context length: it refuses prompts of context - 6 and ends at context - 2.
_CONTEXT_MARGIN = 6
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def installed() -> Version:
    """The installed version.

    Raises:
        RolloutError: there is none.
    """
    try:
        return Version(importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError:
        raise RolloutError(
            "actor_rollout_ref.rollout.name=sglang needs SGLang, which is not installed here: bash scripts/install.sh "
            "cuda sglang (cpu sglang on a machine without a GPU)"
        ) from None


def check_version() -> str | None:
    """A warning where this version was never tested with this code.

    Raises:
        RolloutError: it is known not to work.
    """
    version = installed()
    low, high = SUPPORTED
    if not low <= Version(version.base_version) < high:
        raise RolloutError(f"sglang {version} does not work with this release: install sglang>={low},<{high}")
    if version.base_version not in TESTED:
        return f"sglang {version} was never tested with this release (tested: {', '.join(TESTED)})"
    return None


def environment(spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables to set before SGLang is imported; the user's own win.

    On a CPU each of the engine's processes gets separate cores, to which SGLang's optimised kernels bind.
    """
    variables = {"TOKENIZERS_PARALLELISM": "false"}
    if not spec.devices:
        cores = sorted(os.sched_getaffinity(0))
        processes = spec.config.tensor_model_parallel_size * spec.config.pipeline_model_parallel_size
        first = spec.index * processes * spec.threads
        groups = [
            [cores[(first + rank * spec.threads + thread) % len(cores)] for thread in range(spec.threads)]
            for rank in range(processes)
        ]
        variables |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, sorted(set(group)))) for group in groups),
        }
    return {key: value for key, value in variables.items() if key not in os.environ} | {
        # Overrides the user: the number of threads depends on the replicas of the node, and the package that releases
        # SGLang's memory refuses expandable segments.
        "OMP_NUM_THREADS": str(spec.threads),
        **device.without_expandable_segments(os.environ),
    }


def use_stand_ins() -> None:
    """Let Python find stand-ins for GPU packages after all installed ones, in this process and in those it spawns.

    Raises:
        RolloutError: the distribution that holds them is not installed.
    """
    folder = gpu_packages("actor_rollout_ref.rollout.name=sglang", "sglang")
    if folder not in sys.path:
        sys.path.append(folder)


def dtype_of(spec: EngineSpec) -> str:
    """Return the dtype of the model's computation."""
    dtype = spec.config.dtype
    return dtype if dtype != "auto" else (device.half_name() if spec.devices else "float32")


def arguments(spec: EngineSpec) -> dict[str, Any]:
    """SGLang's arguments for an engine; `rollout.engine_kwargs.sglang` overrides all of them."""
    config, model, on_gpu = spec.config, spec.model, bool(spec.devices)
    hf_config = config_of(model).get_text_config()
    # SGLang, too, takes the factors of all sequences that it computes together from the longest of them.
    check_length(hf_config, spec.max_model_len, f"{model.path} in SGLang with max_model_len")
    dtype = dtype_of(spec)
    server_args: dict[str, Any] = {
        "model_path": model.path,
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "dtype": dtype,
        "load_format": "auto" if spec.load_weights else config.load_format,
        # a text that is scored may have all tokens, because nothing comes after it
        "context_length": spec.max_model_len + _CONTEXT_MARGIN + (spec.task == "score"),
        "max_running_requests": config.max_num_seqs,
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "tp_size": config.tensor_model_parallel_size,
        "pp_size": config.pipeline_model_parallel_size,
        "ep_size": config.expert_parallel_size,
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_cuda_graph": config.enforce_eager or not on_gpu,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": config.scheduling_policy == "priority",
        "schedule_low_priority_values_first": config.scheduling_policy == "priority",
        "enable_deterministic_inference": config.full_determinism,
        "random_seed": config.seed + spec.index,
        "custom_weight_loader": [LOADER],
        "sampling_mask_max_tokens": hf_config.vocab_size,
        "watchdog_timeout": config.stuck_timeout_s,
        "log_level": "error",
    }
    if spec.task == "score":
        server_args["is_embedding"] = True
    if overrides := engine_overrides(model) | classifier_overrides(spec):
        server_args["json_model_override_args"] = json.dumps(overrides)
    if is_vision_model(config_of(model)):
        server_args["mm_feature_transport"] = "cpu"  # patches come from another process
        if not on_gpu:  # SGLang itself computes a share below zero on a small machine
            server_args["mem_fraction_static"] = CPU_MEMORY_SHARE
    if spec.records_routing:
        server_args["enable_return_routed_experts"] = True
    if on_gpu:
        server_args |= {
            "mem_fraction_static": config.gpu_memory_utilization,
            "enable_memory_saver": config.free_cache_engine,
            # Nobody sends weights again that the engine loaded itself.
            "enable_weights_cpu_backup": config.free_cache_engine and (spec.load_weights or config.sleep_level == 1),
        }
        if config.cudagraph_capture_sizes:
            server_args["cuda_graph_bs_decode"] = list(config.cudagraph_capture_sizes)
    else:
        server_args |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "grammar_backend": "none",
            "sleep_on_idle": True,  # an idle scheduler would otherwise keep a core busy
            "max_total_tokens": _cpu_cache_tokens(spec, hf_config, _DTYPE_BYTES[dtype]),
        }
    return server_args | dict(config.engine_kwargs.sglang)


def _cpu_cache_tokens(spec: EngineSpec, hf_config: Any, dtype_bytes: int) -> int:
    """Return the cache size in tokens: as many as all sequences could need, within `CPU_CACHE_BYTES`."""
    heads = hf_config.num_attention_heads
    head_size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    token_bytes = 2 * hf_config.num_hidden_layers * kv_heads * head_size * dtype_bytes
    length = spec.max_model_len + _CONTEXT_MARGIN
    return max(length, min(spec.config.max_num_seqs * length, CPU_CACHE_BYTES // token_bytes))


def sampling(params: SamplingParams, eos_token_ids: Sequence[int], max_tokens: int, seeded: bool) -> dict[str, Any]:
    """SGLang's sampling parameters. They hold no stop strings, which need a tokenizer inside SGLang.

    Args:
        params: of the request.
        eos_token_ids: end a response, unless `ignore_eos`.
        max_tokens: most tokens that fit.
        seeded: whether this engine takes a seed for every request.
    """
    sampling_params: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": params.temperature if params.do_sample else 0.0,
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": [] if params.ignore_eos else list(eos_token_ids),
    }
    if params.do_sample:
        sampling_params |= {"top_p": params.top_p, "top_k": params.top_k}
        if seeded and params.seed is not None:
            sampling_params["sampling_seed"] = params.seed % 2**31
    return sampling_params


@dataclass(slots=True)
class PartialOutput:
    """Output of SGLang for a request so far.

    Attributes:
        token_ids: all tokens so far.
        log_probs: of each; none before the end.
        finish: why it ended: "stop", "length", "abort"; None while it runs.
        message: SGLang's, of an abort.
        cached_tokens: of the prompt, from the prefix cache.
        experts: int32, flat, in the order [t, all layers, K]; of the first t tokens of prompt and response. None before
            the end, and if they were not requested.
        prompt_logprobs: of the prompt's tokens, for a request that reads.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish: str | None
    message: str
    cached_tokens: int
    experts: np.ndarray | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Server:
    """SGLang's engine in this process, which has to be in its main thread.

    Raises:
        Exception: whatever SGLang raises. Where one of its processes fails at the start, SGLang kills this one.
    """

    def __init__(self, spec: EngineSpec) -> None:
        if not spec.devices:
            use_stand_ins()
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.utils.hf_transformers_utils import get_context_length

        if spec.max_model_len <= get_context_length(config_of(spec.model).get_text_config()):
            # Only the margin may exceed the model's limit; no request uses it.
            os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        from hybridrl.rollout.sglang.images import replace_processor

        if is_vision_model(model := config_of(spec.model)):
            replace_processor(model)
        self._engine = Engine(**arguments(spec))
        self.loop = self._engine.loop
        self._manager = self._engine.tokenizer_manager
        self.vocabulary: int = self._manager.model_config.vocab_size
        config = spec.config
        self._tensor_ranks: int = config.tensor_model_parallel_size
        self._by_priority = config.scheduling_policy == "priority"

    @property
    def leftovers(self) -> list[str]:
        """Patterns of the files that SGLang leaves in shared memory when its processes are killed."""
        segments = [f"/dev/shm/sgl_shm_*_{pid}_*" for pid in (os.getpid(), *self._engine.get_all_child_pids())]
        path = getattr(self._manager.load_snapshot_reader, "path", None)
        return [*segments, *([path] if path else [])]

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        stream_interval: int | None,
        priority: int,
        routing: bool,
        images: "NamedImages | None" = None,
    ) -> AsyncIterator[PartialOutput]:
        """The request's outputs: one at its end, or, with `stream_interval`, one every so many tokens.

        With `routing`, the last one has the experts of the tokens.

        Raises:
            ValueError: SGLang refuses the request.
        """
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = dict(sampling)
        truncated = sampling.get("top_p", 1.0) < 1 or 0 < sampling.get("top_k", -1) < self.vocabulary
        if truncated:
            # Log-probabilities of the truncated distribution come only with its token set, and need a finite top_k.
            top_k = sampling["top_k"]
            sampling["top_k"] = min(top_k, self.vocabulary) if top_k > 0 else self.vocabulary
        if stream_interval is not None:
            sampling["stream_interval"] = stream_interval
        request = GenerateReqInput(
            input_ids=list(prompt_ids),
            image_data=None if images is None else [images],
            sampling_params=sampling,
            return_logprob=True,
            return_sampling_mask=truncated,
            return_routed_experts=routing,
            rid=request_id,
            stream=stream_interval is not None,
            priority=priority if self._by_priority else None,  # otherwise SGLang logs that it ignores it
        )
        try:
            async for reply in self._manager.generate_request(request, None):
                yield _output(reply, truncated)
        except HTTPException as error:
            raise ValueError(error.detail) from error

    async def read(
        self, request_id: str, prompt_ids: Sequence[int], prefill: PrefillRequest, priority: int
    ) -> PartialOutput:
        """Compute the log-probabilities of a prompt; the output has no tokens.

        Raises:
            ValueError: SGLang refuses the request.
        """
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=list(prompt_ids),
            sampling_params={"max_new_tokens": 0, "temperature": 0.0},
            return_logprob=True,
            logprob_start_len=prefill.first - 1,  # whose own entry is empty
            top_logprobs_num=prefill.top,
            rid=request_id,
            stream=False,
            priority=priority if self._by_priority else None,
        )
        try:
            async for reply in self._manager.generate_request(request, None):
                output = _output(reply, False)
                if output.finish != "abort":
                    output.prompt_logprobs = _prompt_logprobs(reply["meta_info"], prefill)
        except HTTPException as error:
            raise ValueError(error.detail) from error
        return output

    async def score(self, request_id: str, prompt_ids: Sequence[int], priority: int) -> PartialOutput:
        """Compute a classifier's score of a prompt; the output has no tokens.

        Raises:
            ValueError: SGLang refuses the request.
        """
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        request = EmbeddingReqInput(
            input_ids=list(prompt_ids), rid=request_id, priority=priority if self._by_priority else None
        )
        try:
            async for reply in self._manager.generate_request(request, None):
                finish = reply["meta_info"].get("finish_reason") or {}
                output = PartialOutput([], [], finish.get("type"), str(finish.get("message") or ""), 0)
                if output.finish != "abort":
                    output.prompt_logprobs = PromptLogprobs(score=float(reply["embedding"][0]))
        except HTTPException as error:
            raise ValueError(error.detail) from error
        return output

    def abort(self, request_id: str) -> bool:
        """End a request; it completes with its tokens so far. False where SGLang does not know it (any more)."""
        state = self._manager.rid_to_state.get(request_id)
        if state is None:
            return False
        state.abort_sent = False  # it may have been sent before the request itself
        self._manager.abort_request(rid=request_id)
        return True

    async def begin_update(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _succeeded(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(selector="all")))

    async def load(self, content: "Content") -> None:
        """Have every process load a bucket, answer a question, divide logits, or (None) release the sender's memory."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        from hybridrl.rollout.sglang.weights import message

        payload = MultiprocessingSerializer.serialize(message(content))
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self._tensor_ranks, load_format=LOADER, flush_cache=False
        )
        _succeeded(await self._manager.update_weights_from_tensor(update))

    async def end_update(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        _succeeded(await self._manager.end_weight_update(EndWeightUpdateReqInput()))

    async def drop_prefixes(self) -> None:
        """Empty the prefix cache; SGLang refuses while it works, and a request may just be ending."""
        result = await self._manager.flush_cache(timeout_s=60)
        if not result.success:
            raise RolloutError("SGLang did not empty its prefix cache within 60 s after a weight update")

    async def release(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags)))

    async def resume(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags)))

    async def gauges(self) -> dict[str, float]:
        """`running`, `waiting`, `kv_cache_usage`."""
        loads = await self._manager.get_loads()
        return {
            "running": float(sum(load.num_running_reqs for load in loads)),
            "waiting": float(sum(load.num_waiting_reqs for load in loads)),
            "kv_cache_usage": max((load.token_usage for load in loads), default=0.0),
        }

    def output_mark(self) -> float:
        """A number that changes whenever SGLang sends something: at the latest every 50 tokens of any response."""
        return float(self._manager.last_receive_tstamp)

    def close(self) -> None:
        """End SGLang's processes, and wait until they have ended."""
        self._engine.shutdown()


def _output(reply: Mapping[str, Any], truncated: bool) -> PartialOutput:
    meta, tokens = reply["meta_info"], reply["output_ids"]
    finish = meta.get("finish_reason") or {}
    log_probs: list[float] = []
    if finish:  # before the end only the tokens are used
        if truncated:
            log_probs = [float(value) for value in meta.get("output_token_sampling_logprobs", [])]
        else:
            log_probs = [float(entry[0]) for entry in meta.get("output_token_logprobs", [])]
        tokens = tokens[: len(log_probs)]
    return PartialOutput(
        token_ids=list(tokens),
        log_probs=log_probs[: len(tokens)],
        finish=finish.get("type"),
        message=str(finish.get("message") or ""),
        cached_tokens=meta.get("cached_tokens", 0),
        experts=_experts(meta.get("routed_experts")) if finish else None,
    )


def _experts(encoded: str | None) -> np.ndarray | None:
    return None if encoded is None else np.frombuffer(base64.b64decode(encoded), dtype=np.int32)


def _prompt_logprobs(meta: Mapping[str, Any], prefill: PrefillRequest) -> PromptLogprobs:
    """Read SGLang's entries, (log-probability, token, text) of each token; the first token has none."""
    own = meta["input_token_logprobs"][1:]
    tops = [entries[: prefill.top] for entries in meta["input_top_logprobs"][1:]] if prefill.top else [[] for _ in own]
    shape = (len(own), prefill.top)
    return PromptLogprobs(
        log_probs=np.asarray([entry[0] for entry in own], np.float32),
        top_log_probs=np.asarray([[entry[0] for entry in row] for row in tops], np.float32).reshape(shape),
        top_ids=np.asarray([[entry[1] for entry in row] for row in tops], np.int64).reshape(shape),
    )


def _succeeded(result: tuple[bool, str]) -> None:
    success, message = result
    if not success:
        raise RolloutError(f"SGLang refused a weight update: {message}")
