"""Settings of generation: `actor_rollout_ref.rollout`."""

from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema import choices
from hybridrl.config.schema.actor import MICRO_BATCH_SIZE
from hybridrl.config.schema.conditions import (
    SESSIONS,
    TRAINS,
    Need,
    above,
    any_of,
    entry,
    entry_has,
    is_set,
    off,
    on,
)
from hybridrl.config.schema.mappings import Unchecked
from hybridrl.config.schema.multi_turn import AgentConfig, MultiTurnConfig
from hybridrl.config.schema.node import ConfigNode, group, key
from hybridrl.registry import INFERENCE_ENGINES, TRACES, is_endpoint

#: an engine with weights of its own generates
_REPLICAS = entry_has(".name", INFERENCE_ENGINES, "has_replicas")
#: the same, for settings of `rollout.replicas`, with devices of its own
_OWN_REPLICAS = (entry_has("..name", INFERENCE_ENGINES, "has_replicas"), above("..nnodes"))
#: an endpoint generates, which `auto` never chooses
_ENDPOINT = Need(".name", is_endpoint, "=openai")
#: a model of the run generates, and no endpoint
_OWN_MODEL = entry_has(".name", INFERENCE_ENGINES, "takes_weights")


@dataclass
class SamplingConfig(ConfigNode):
    """`rollout.val_kwargs`: how validation samples; greedy by default."""

    n: int = key(1, "samples per prompt", gt=0)
    do_sample: bool = key(False, "false: greedy")
    temperature: float = key(0.0, "softmax temperature; 0 is greedy", ge=0, needs=on(".do_sample"))
    top_k: int = key(-1, "sample from the k likeliest tokens; -1: all", ge=-1, needs=on(".do_sample"))
    top_p: float = key(
        1.0, "sample from the smallest set of tokens with this probability", gt=0, le=1, needs=on(".do_sample")
    )


def _engine(name: str) -> Need:
    """This engine generates, or one that `auto` chooses."""
    return entry("..name", INFERENCE_ENGINES, name)


@dataclass
class EngineKwargsConfig(ConfigNode):
    """`rollout.engine_kwargs`: further arguments of an engine, by its own names; they override everything here."""

    vllm: dict[str, Any] = key(
        {}, "arguments of vLLM's AsyncEngineArgs", needs=_engine("vllm"), read_by="vllm-arguments"
    )
    sglang: dict[str, Any] = key(
        {}, "arguments of SGLang's ServerArgs", needs=_engine("sglang"), read_by="sglang-arguments"
    )


@dataclass
class WeightTransferConfig(ConfigNode):
    """`rollout.checkpoint_engine`: how new weights reach the engines."""

    method: str = key(
        "auto",
        "planned: each engine process gets the part of the weights that it needs; streamed: all parameters pass by "
        "every engine, whole; auto: planned where training and engine support it",
        choices=("auto", "planned", "streamed"),
    )
    check_weights: bool = key(
        False, "planned: compare a digest of every part of every tensor in the engines with training's at each update"
    )
    delta: bool = key(
        False,
        "send replicas on devices of their own (rollout.nnodes) only the elements that have changed since the last "
        "update; both sides keep a copy of the last ones in main memory",
    )
    update_weights_bucket_megabytes: int = key(
        2048,
        "maximum size of a bucket of weights in MiB; one parameter is never split, so it may be larger",
        gt=0,
        needs=entry_has("..name", INFERENCE_ENGINES, "has_replicas"),
    )


@dataclass
class ReplicaNumberConfig(ConfigNode):
    """`rollout.replicas`: replicas join and leave a running asynchronous run (`trainer.v1.trainer_mode`)."""

    min: int | None = key(
        None,
        "engines: a replica whose node is lost leaves, and the run goes on with at least so many; null: as many as it "
        "starts with",
        gt=0,
        needs=_OWN_REPLICAS,
    )
    max: int | None = key(
        None,
        "engines: further replicas join while there are fewer, wherever Ray has room; null: as many as the run starts "
        "with. With min and max null the number does not change",
        gt=0,
        needs=_OWN_REPLICAS,
    )
    wait_s: float = key(
        600.0,
        "engines: seconds for which there may be fewer replicas than min before the run saves and ends",
        gt=0,
        needs=any_of(is_set(".min"), is_set(".max")),
    )

    def bounds(self, initial: int) -> tuple[int, int] | None:
        """Return the bounds of the number of replicas of a run that starts with `initial`; None: it does not change."""
        if self.min is None and self.max is None:
            return None
        return (initial if self.min is None else self.min, initial if self.max is None else self.max)


@dataclass
class ServerConfig(ConfigNode):
    """`rollout.server`: the policy over HTTP in the dialects of OpenAI and Anthropic, for agents and other clients."""

    enable: bool = key(False, "serve the policy while the run lasts")
    host: str | None = key(
        None,
        "address to listen on; null: the node's address, 0.0.0.0: all",
        needs=any_of(on(".enable"), on("..prometheus.enable")),
    )
    port: int = key(
        0, "port to listen on; 0: a free one", ge=0, le=65535, needs=any_of(on(".enable"), on("..prometheus.enable"))
    )
    api_key_env: str | None = key(
        None,
        "environment variable with the bearer token that clients send; null: a random token per run",
        needs=any_of(on(".enable"), on("..prometheus.enable")),
    )
    max_connections: int = key(
        1024,
        "clients connected at once; more are refused (503)",
        gt=0,
        needs=any_of(on(".enable"), on("..prometheus.enable")),
    )
    max_requests: int = key(
        4096,
        "samples generated or waiting at once; more are refused (429)",
        gt=0,
        needs=any_of(on(".enable"), on("..prometheus.enable")),
    )
    max_sessions: int = key(
        16384,
        "sessions open at once; more are refused (429)",
        gt=0,
        needs=any_of(on(".enable"), on("..prometheus.enable")),
    )
    max_body_mb: int | None = key(
        None,
        "MiB of a request's body; longer ones are refused (413); null: 8, or 64 with a model that reads images",
        gt=0,
        needs=any_of(on(".enable"), on("..prometheus.enable")),
    )
    session_idle_s: float = key(
        21600.0,
        "seconds without a request after which a session is closed where another needs its place",
        gt=0,
        needs=any_of(on(".enable"), on("..prometheus.enable")),
    )


@dataclass
class PrometheusConfig(ConfigNode):
    """`rollout.prometheus`: registration of this run's servers with Prometheus."""

    enable: bool = key(False, "add the servers to Prometheus' configuration")
    port: int = key(
        9090,
        "port of Prometheus on this machine, which is asked to reload its configuration",
        gt=0,
        le=65535,
        needs=on(".enable"),
    )
    file: str = key(
        "/tmp/ray/session_latest/metrics/prometheus/prometheus.yml",
        "Prometheus' configuration file; other jobs in it are kept",
        needs=on(".enable"),
        place="output",
    )
    served_model_name: str | None = key(
        None,
        "name of the model for clients and metrics; null: its path",
        follows="${oc.select:actor_rollout_ref.model.path,null}",
        needs=any_of(on(".enable"), on("..server.enable")),
    )


@dataclass
class OpenAIConfig(ConfigNode):
    """`rollout.openai`: an endpoint that speaks the OpenAI API, for `rollout.name=openai`."""

    base_url: str | None = key(None, "address of the endpoint, e.g. http://localhost:8000/v1; must be set")
    model: str | None = key(None, "name of the model at the endpoint; null: the only one that it lists")
    api_key_env: str | None = key(None, "environment variable with the API key; null: no key")
    max_concurrency: int = key(64, "requests in flight", gt=0)
    timeout_s: float = key(600.0, "seconds a request may take before it is sent again", gt=0)
    max_retries: int = key(
        6, "times a request is sent again, after 429, 5xx, a timeout or a broken connection; delays increase", ge=0
    )
    max_tokens_name: str = key(
        "max_tokens",
        "the endpoint's name of the length limit",
        choices=("max_tokens", "max_completion_tokens"),
    )
    extra_body: dict[str, Any] = key(
        {}, "further entries of each request's body", read_by=Unchecked("the server behind the address reads them")
    )


@dataclass
class TraceConfig(ConfigNode):
    """`rollout.trace`: samples as traces in a tracing service."""

    backend: str | None = key(
        None, "service that gets the traces: mlflow, weave, or your own; null: none", registry=TRACES
    )
    token2text: bool = key(
        False, "add prompts, responses and turns as text to their token ids", needs=is_set(".backend")
    )
    max_samples_per_step_per_worker: int | None = key(
        None,
        "prompts of a step (and of a validation) that are traced, with all of their samples; null: all",
        gt=0,
        needs=is_set(".backend"),
    )
    project_name: str | None = key(
        None, "project in the service", follows="${oc.select:trainer.project_name,null}", needs=is_set(".backend")
    )
    experiment_name: str | None = key(
        None,
        "name of the run in the service",
        follows="${oc.select:trainer.experiment_name,null}",
        needs=is_set(".backend"),
    )


@dataclass
class RolloutConfig(ConfigNode):
    """`actor_rollout_ref.rollout`: how the policy generates and how its log-probabilities are recomputed."""

    name: str = key(
        "auto",
        "generation engine; auto: the fastest that is installed and supports the model",
        choices=("auto",),
        registry=INFERENCE_ENGINES,
        later=choices.ROLLOUTS_LATER,
    )
    n: int = key(1, "samples per prompt", gt=0)
    temperature: float = key(1.0, "softmax temperature, of the sampler and of the trained distribution; above 0", ge=0)
    top_k: int = key(-1, "sample from the k likeliest tokens; -1: all", ge=-1, needs=on(".do_sample"))
    top_p: float = key(
        1.0, "sample from the smallest set of tokens with this probability", gt=0, le=1, needs=on(".do_sample")
    )
    do_sample: bool = key(True, "false: greedy")
    ignore_eos: bool = key(False, "generate up to the length limit, even after EOS")
    stop: list[str] = key([], "end a response after the token that completes one of these strings")
    val_kwargs: SamplingConfig = group(SamplingConfig, needs=(TRAINS, is_set("data.val_files")))
    prompt_length: int = key(512, "prompt width in tokens", follows="${oc.select:data.max_prompt_length,512}", gt=0)
    response_length: int = key(
        512, "maximum tokens per response", follows="${oc.select:data.max_response_length,512}", gt=0
    )
    max_model_len: int | None = key(None, "maximum tokens of prompt plus response; null: the sum of both limits", gt=0)
    max_num_seqs: int = key(256, "sequences that a process generates at once", gt=0, needs=_OWN_MODEL)
    dtype: str = key(
        "auto",
        "dtype of generation; auto: bfloat16 on a GPU (float16 on one that lacks it), float32 on a CPU",
        choices=(*choices.DTYPES, "float16"),
        synonyms=choices.DTYPE_SYNONYMS,
        needs=_OWN_MODEL,
    )
    seed: int = key(42, "seed of sampling", ge=0)
    full_determinism: bool = key(
        False,
        "engines: a seed for every request, and batch-invariant kernels if available; slower. hf: always",
        needs=_OWN_MODEL,
    )
    tensor_model_parallel_size: int = key(
        1, "engines: devices that share each layer of a replica", gt=0, needs=_REPLICAS
    )
    pipeline_model_parallel_size: int = key(
        1, "engines: groups of devices that share a replica's layers", gt=0, needs=_REPLICAS
    )
    data_parallel_size: int = key(1, "engines: copies of the model inside a replica", gt=0, needs=_REPLICAS)
    expert_parallel_size: int = key(
        1, "engines: devices that share the experts of a mixture-of-experts model", gt=0, needs=_REPLICAS
    )
    nnodes: int = key(0, "engines: nodes of a separate pool for generation; 0: generate on the policy's devices", ge=0)
    n_gpus_per_node: int = key(
        8,
        "engines: devices per node of that pool",
        follows="${oc.select:trainer.n_gpus_per_node,8}",
        gt=0,
        needs=above(".nnodes"),
    )
    replicas: ReplicaNumberConfig = group(ReplicaNumberConfig)
    gpu_memory_utilization: float = key(
        0.5, "engines: share of a GPU's memory for weights and KV cache", gt=0, le=1, needs=_REPLICAS
    )
    free_cache_engine: bool = key(True, "engines: release that memory while the policy trains", needs=_REPLICAS)
    sleep_level: int = key(
        2,
        "engines on a GPU, while the policy trains: 2: their weights are dropped; 1: copied to host memory, for models "
        "that keep more than weights in the same memory",
        choices=(1, 2),
        needs=(_REPLICAS, on(".free_cache_engine")),
    )
    load_format: str = key(
        "dummy",
        "engines: dummy: start without weights, which come from the trainer; auto: load the checkpoint first",
        choices=choices.LOAD_FORMATS,
        synonyms=choices.LOAD_FORMAT_SYNONYMS,
        needs=_REPLICAS,
    )
    lora_transfer: str = key(
        "merged",
        "engines: how an adapter (model.lora_rank) reaches them. merged: as whole weights with the adapter merged; "
        "adapter: vLLM reads the base from model.path itself, gets the adapter alone, and keeps the base in host "
        "memory while the policy trains",
        choices=("merged", "adapter"),
        needs=(_REPLICAS, any_of(above("..model.lora_rank"), is_set("..model.lora_adapter_path"))),
    )
    enforce_eager: bool = key(False, "engines: no CUDA graphs", needs=_REPLICAS)
    cudagraph_capture_sizes: list[int] | None = key(
        None,
        "engines: batch sizes of CUDA graphs; null: the engine's default",
        needs=(_REPLICAS, off(".enforce_eager")),
    )
    enable_chunked_prefill: bool = key(
        True, "engines: process long prompts in chunks, interleaved with other requests", needs=_REPLICAS
    )
    enable_prefix_caching: bool = key(True, "engines: compute common prefixes of prompts once", needs=_REPLICAS)
    max_num_batched_tokens: int = key(8192, "engines: tokens computed at once", gt=0, needs=_REPLICAS)
    limit_images: int | None = key(
        None,
        "engines: most images of a prompt, for the memory that they set aside; null: as many as fit",
        gt=0,
        needs=_REPLICAS,
    )
    scheduling_policy: str = key(
        "fcfs",
        "order of requests inside an engine; priority: by `Request.priority`, so HTTP clients come after training",
        choices=("fcfs", "priority"),
        needs=_REPLICAS,
    )
    engine_kwargs: EngineKwargsConfig = group(EngineKwargsConfig, needs=_REPLICAS)
    checkpoint_engine: WeightTransferConfig = group(WeightTransferConfig, needs=TRAINS)
    start_timeout_s: float = key(
        1200.0,
        "engines: seconds that a replica may take to start; large models compile and capture graphs",
        gt=0,
        needs=_REPLICAS,
    )
    stuck_timeout_s: float = key(
        300.0,
        "engines: seconds without progress, with requests waiting, after which a replica is restarted",
        gt=0,
        needs=_REPLICAS,
    )
    max_restarts: int = key(
        3,
        "engines: restarts of a replica, without a finished request in between, before the run ends",
        ge=0,
        needs=_REPLICAS,
    )
    log_prob_micro_batch_size_per_gpu: int = key(
        MICRO_BATCH_SIZE,
        "sequences that a process computes at once for old log-probabilities",
        follows="${oc.select:actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,8}",
        gt=0,
        needs=(TRAINS, off(".log_prob_use_dynamic_bsz")),
    )
    log_prob_use_dynamic_bsz: bool = key(
        False,
        "fill these micro-batches by tokens",
        follows="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}",
        needs=TRAINS,
    )
    log_prob_max_token_len_per_gpu: int = key(
        16384,
        "most tokens per such micro-batch",
        follows="${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}",
        gt=0,
        needs=(TRAINS, on(".log_prob_use_dynamic_bsz")),
    )
    multi_turn: MultiTurnConfig = group(MultiTurnConfig, needs=SESSIONS)
    agent: AgentConfig = group(AgentConfig, needs=SESSIONS)
    trace: TraceConfig = group(TraceConfig, needs=SESSIONS)
    server: ServerConfig = group(ServerConfig, needs=TRAINS)
    prometheus: PrometheusConfig = group(PrometheusConfig, needs=TRAINS)
    openai: OpenAIConfig = group(OpenAIConfig, needs=_ENDPOINT)
