"""Settings of generation: `actor_rollout_ref.rollout`."""

from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema import choices
from hybridrl.config.schema.actor import MICRO_BATCH_SIZE
from hybridrl.config.schema.conditions import (
    SESSIONS,
    TRAINS,
    Condition,
    Explained,
    LoopNeed,
    MetadataNeed,
    Need,
    above,
    any_of,
    entry,
    entry_has,
    is_not_set,
    is_set,
    off,
    on,
)
from hybridrl.config.schema.mappings import Unchecked
from hybridrl.config.schema.node import ConfigNode, group, key
from hybridrl.registry import AGENT_LOOPS, INFERENCE_ENGINES, TOOL_PARSERS, TRACES, is_endpoint

_AGENT = "actor_rollout_ref.rollout.agent"
_LOOP = f"{_AGENT}.default_agent_loop"


def _loops(because: str, remedy: str, needs: MetadataNeed) -> LoopNeed:
    """A loop of sessions runs for which a condition holds. Rows may choose another than the settings do."""
    by_setting = Explained((is_set(_LOOP), needs), "")
    also: tuple[Condition, ...] = (is_set(f"{_AGENT}.agent_loop_config_path"),)
    if "environments" not in needs.values and "gateway" not in needs.values:
        also = (*also, Explained((is_not_set(_LOOP), on("actor_rollout_ref.rollout.multi_turn.enable")), ""))
    return LoopNeed(
        any_of(by_setting, also=also),
        f"{because}, unless rows name one in the column agent_name",
        f"set {_LOOP}={remedy}",
        condition=needs,
    )


_MANY_TURNS = _loops(
    "no setting chooses a loop of sessions", "tool_agent", entry_has(_LOOP, AGENT_LOOPS, "only_answers", False)
)
_WITH_TOOLS = _loops(
    "no setting chooses a loop with tools", "tool_agent", entry_has(_LOOP, AGENT_LOOPS, "reads", "tools")
)
_ENVIRONMENT = _loops(
    "no setting chooses a loop that acts on environments",
    "env_agent",
    entry_has(_LOOP, AGENT_LOOPS, "reads", "environments"),
)
_GATEWAY = _loops(
    "no setting chooses a loop of agents behind the gateway",
    "gateway_agent",
    entry_has(_LOOP, AGENT_LOOPS, "reads", "gateway"),
)

#: an engine with weights of its own generates
_REPLICAS = entry_has(".name", INFERENCE_ENGINES, "has_replicas")
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
class MultiTurnConfig(ConfigNode):
    """`rollout.multi_turn`: sessions of several turns with tools."""

    enable: bool = key(
        False,
        "answer prompts by the loop tool_agent, unless agent.default_agent_loop names another",
        needs=any_of(
            is_not_set("..agent.default_agent_loop"),
            also=(entry_has("..agent.default_agent_loop", AGENT_LOOPS, "reads", "tools"),),
        ),
    )
    format: str = key("hermes", "how the model writes tool calls", registry=TOOL_PARSERS, needs=_MANY_TURNS)
    tool_config_path: str | None = key(None, "YAML file with tools; null: none", place="file", read_by="tool-file")
    function_tool_path: str | None = key(
        None, "Python file or module with functions marked @function_tool; null: none", place="code"
    )
    interaction_config_path: str | None = key(
        None,
        "YAML file with simulated users, {interaction: [{name, class_name, config}]}; null: none",
        place="file",
        read_by="user-file",
    )
    turn_rewards: bool = key(
        False,
        "tool_agent: scores of simulated users and rewards of tool calls are added to the score, at the last token of "
        "their turn; false: reward functions get them and no more",
        needs=_WITH_TOOLS,
    )
    max_assistant_turns: int | None = key(
        None, "turns of the model in a session; null: any number", gt=0, needs=_MANY_TURNS
    )
    max_user_turns: int | None = key(
        None,
        "rounds of answers of tools, users or environments in a session; null: any number",
        gt=0,
        needs=_MANY_TURNS,
    )
    max_parallel_calls: int = key(
        1, "tool calls of one turn that are run; further ones are answered with an error", gt=0, needs=_WITH_TOOLS
    )
    max_tool_response_length: int = key(
        256, "characters of a tool's answer; longer ones are cut", gt=0, needs=_WITH_TOOLS
    )
    tool_response_truncate_side: str = key(
        "middle",
        "what is cut off a longer answer: its beginning, middle or end",
        choices=("left", "middle", "right"),
        needs=_WITH_TOOLS,
    )
    tool_timeout_s: float = key(
        60.0,
        "seconds that a tool or a simulated user may take for a call; then the model gets an error, or the session has "
        "no score",
        gt=0,
        needs=_WITH_TOOLS,
    )
    tokenization_sanity_check_mode: str = key(
        "strict",
        "refuse chat templates that change earlier text of a conversation that goes on; ignore_strippable: whitespace "
        "may change; disable: anything may",
        choices=("strict", "ignore_strippable", "disable"),
        needs=_MANY_TURNS,
    )


@dataclass
class AgentConfig(ConfigNode):
    """`rollout.agent`: the loops that hold sessions."""

    default_agent_loop: str | None = key(
        None,
        "loop of rows without a column agent_name: its name, or module:Class; null: tool_agent with multi_turn.enable, "
        "else single_turn_agent",
    )
    agent_loop_config_path: str | None = key(
        None,
        "YAML file with loops of one's own, a list of {name, _target_, further arguments}; null: none",
        place="file",
        read_by="loop-file",
    )
    num_workers: int | None = key(
        None,
        "processes that run sessions with tools, environments, users or loops of one's own; 0: the controller runs "
        "them; null: one for each four cores of this machine, at most 8",
        ge=0,
        needs=_MANY_TURNS,
    )
    max_running: int | None = key(
        None,
        "sessions of a batch that run at once, whatever their loop; the others wait. null: 256 gateway "
        "agents, each with a process of its own, and 4096 others",
        gt=0,
        needs=_MANY_TURNS,
    )
    default_environment: str | None = key(
        None,
        "env_agent: environment of rows without env_kwargs.name: a name of environment_config_path, a registered name, "
        "or module:Class; null: the only one of environment_config_path",
        needs=_ENVIRONMENT,
    )
    environment_config_path: str | None = key(
        None,
        "YAML file with environments, {environments: [{name, class_name, config}]}; null: none",
        needs=_ENVIRONMENT,
        place="file",
        read_by="environment-file",
    )
    environment_timeout_s: float = key(
        60.0,
        "seconds that reset or step of an environment may take; then its session has no score",
        gt=0,
        needs=_ENVIRONMENT,
    )
    environment_turn_tokens: int | None = key(
        None,
        "env_agent: tokens of one turn; the environment gets a turn that is cut there; null: any number",
        gt=0,
        needs=_ENVIRONMENT,
    )
    function: str | None = key(
        None,
        "gateway_agent: the agent, a function (base_url, api_key, row) as module:function or FILE.py:function, async "
        "or not; null: agent.command",
        needs=_GATEWAY,
        place="code",
    )
    command: str | None = key(
        None,
        "gateway_agent: the agent, a command that finds OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, "
        "ANTHROPIC_API_KEY and HYBRIDRL_ROW in its environment; null: agent.function",
        needs=_GATEWAY,
    )
    timeout_s: float = key(
        1800.0, "gateway agents: seconds that an agent may take; then it is ended", gt=0, needs=_GATEWAY
    )
    sampling: str = key(
        "run",
        "gateway agents: whose temperature, top_p and top_k hold: run: those of the rollout, whatever "
        "requests say; agent: those of requests, where they have any",
        choices=("run", "agent"),
        needs=_GATEWAY,
    )
    match: str = key(
        "strict",
        "gateway agents: which messages continue a conversation: strict: the same text and calls; loose: "
        "ids of calls, spaces around text and the types of arguments may differ",
        choices=("strict", "loose"),
        needs=_GATEWAY,
    )
    trace_dir: str | None = key(
        None,
        "gateway agents: folder for the trace of each session, a JSON file of OpenEnv's TrainingTrace; "
        "null: none is written",
        needs=_GATEWAY,
        place="output",
    )
    retries: int = key(
        1,
        "times that a failed session is run again at once, next to the others; not after a time limit",
        ge=0,
        needs=_MANY_TURNS,
    )
    on_error: str | None = key(
        None,
        "a session that still fails: drop: its sample is left out; raise: the run ends; null: as algorithm.missing "
        "says for the reason",
        choices=("drop", "raise"),
        needs=_MANY_TURNS,
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
        "dtype of generation; auto: bfloat16 on a GPU, float32 on a CPU",
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
