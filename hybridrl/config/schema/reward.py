"""Settings of the reward: `reward`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema.actor import MICRO_BATCH_SIZE
from hybridrl.config.schema.conditions import Condition, PartNeed, among, any_of, entry_has, is_not_set, is_set, off, on
from hybridrl.config.schema.engine import FSDPConfig, strategy_key
from hybridrl.config.schema.mappings import Unchecked
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.node import ConfigNode, Follow, group, key
from hybridrl.config.schema.serving import ServingConfig
from hybridrl.registry import REWARD_MANAGERS
from hybridrl.utils.json_client import is_address

#: reward functions run
_FUNCTIONS = PartNeed(
    "reward.runs_functions",
    "no reward function runs",
    "set reward.reward_model.combine=sum, and reward.reward_manager.name to one that runs functions",
    ("reward.reward_manager.name", "reward.reward_model.enable"),
)
#: the manager asks for scores
_SCORING_MANAGER = any_of(
    entry_has("reward.reward_manager.name", REWARD_MANAGERS, "runs_functions"),
    also=(among("reward.reward_manager.source", "importlib"),),
)
#: a language model judges, for settings of its group and of the group `parse` in it
_A_JUDGE, _PARSING_JUDGE = (any_of(on(f"{up}enable"), is_set(f"{up}url")) for up in (".", ".."))
#: a training engine computes the reward model
_COMPUTED = (off(".judge.enable"), is_not_set(".judge.url"), is_not_set(".rollout.name"))
_NOT_TRAINED = PartNeed("reward.reward_model.learns", "the reward model does not learn", "")


def _no_judge(up: str) -> tuple[Condition, ...]:
    """A classifier scores; `up` are the dots that lead to `reward_model`."""
    return off(f"{up}judge.enable"), is_not_set(f"{up}judge.url")


@dataclass
class CustomRewardConfig(ConfigNode):
    """`reward.custom_reward_function`."""

    path: str | None = key(
        None,
        "Python file with the user's function, or a .pkl file of one; null: built-in scorers by data source",
        needs=_FUNCTIONS,
        place="code",
    )
    name: str | None = key(
        None, "its name; null: compute_score, compute_reward, or the only function of the file", needs=is_set(".path")
    )
    reward_kwargs: dict[str, Any] = key(
        {}, "further arguments of the function", needs=is_set(".path"), read_by="function-arguments"
    )


@dataclass
class RewardPartConfig(CustomRewardConfig):
    """One entry of `reward.functions`."""

    path: str | None = key(None, "as that of `custom_reward_function`", needs=(), place="code")
    weight: float = key(1.0, "factor of its score in the sum")


@dataclass
class RewardModuleConfig(ConfigNode):
    """`reward.reward_manager.module`: the location of a user's own manager."""

    path: str | None = key(None, "Python file that holds the manager class", place="code")
    name: str | None = key(None, "name of the class")


@dataclass
class RewardManagerConfig(ConfigNode):
    """`reward.reward_manager`."""

    name: str = key(
        "naive",
        "how scores are asked for and shaped",
        registry=REWARD_MANAGERS,
        needs=among(".source", "register"),
    )
    source: str = key("register", "register: by name; importlib: from module.path", choices=("register", "importlib"))
    module: RewardModuleConfig = group(RewardModuleConfig, needs=among(".source", "importlib"))


@dataclass
class OverlongBufferConfig(ConfigNode):
    """`overlong_buffer_cfg` of the manager `dapo`."""

    enable: bool = key(False, "penalise responses that come close to the length limit")
    len: int | None = key(None, "tokens before the limit at which the penalty begins", gt=0, needs=on(".enable"))
    penalty_factor: float = key(1.0, "the penalty at the limit", needs=on(".enable"))
    log: bool = key(False, "return the penalty next to the score", needs=on(".enable"))


@dataclass
class DapoConfig(ConfigNode):
    """`reward.reward_kwargs` of the manager `dapo`."""

    max_resp_len: int | None = key(None, "the length limit; null: data.max_response_length", gt=0)
    overlong_buffer_cfg: OverlongBufferConfig = group(OverlongBufferConfig)

    def check(self, config: Any) -> Iterator[str]:
        """Yield a sentence for each fault of these settings in a run of `config`."""
        longest, buffer = self.max_resp_len or config.data.max_response_length, self.overlong_buffer_cfg
        if buffer.enable and not (buffer.len is not None and buffer.len <= longest):
            yield (
                f"reward.reward_kwargs.overlong_buffer_cfg.len={buffer.len}: must be from 1 to {longest} "
                "(reward.reward_kwargs.max_resp_len, else data.max_response_length) where the buffer is enabled"
            )


@dataclass
class GdpoManagerConfig(ConfigNode):
    """`reward.reward_kwargs` of the manager `gdpo`, which has none."""

    def check(self, config: Any) -> Iterator[str]:
        """Yield a sentence for each fault of these settings in a run of `config`."""
        if not config.algorithm.gdpo_reward_keys:
            yield (
                "reward.reward_manager.name=gdpo checks the components that algorithm.gdpo_reward_keys names, and it "
                "names none; set it, with algorithm.adv_estimator=gdpo, or take reward.reward_manager.name=naive"
            )


@dataclass
class RateLimitConfig(ConfigNode):
    """`reward.reward_kwargs` of the manager `rate_limited`."""

    max_concurrent: int = key(1, "samples that are being scored at once", gt=0)
    max_rpm: float | None = key(None, "samples that begin within any 60 seconds; null: any number", ge=1)
    max_tpm: float | None = key(None, "tokens of samples that begin within any 60 seconds; null: any number", gt=0)
    estimated_tokens_per_request: int = key(2000, "tokens that each sample counts as", gt=0)

    def check(self, config: Any) -> Iterator[str]:
        """Yield a sentence for each fault of these settings in a run of `config`."""
        if self.max_tpm is not None and self.estimated_tokens_per_request > self.max_tpm:
            yield (
                f"reward.reward_kwargs.max_tpm={self.max_tpm:g} is below reward.reward_kwargs."
                f"estimated_tokens_per_request={self.estimated_tokens_per_request}, so no sample could be scored"
            )


@dataclass
class StepsConfig(ConfigNode):
    """`reward.reward_kwargs` of the manager `steps`."""

    separator: str = key("\n\n", "text between two steps of a response")
    weight: float = key(1.0, "factor of the scores of steps")

    def check(self, config: Any) -> Iterator[str]:
        """Yield a sentence for each fault of these settings in a run of `config`."""
        if not self.separator:
            yield "reward.reward_kwargs.separator is empty; give the text between two steps, such as a blank line"


@dataclass
class RemoteScoresConfig(ConfigNode):
    """`reward.reward_kwargs` of the manager `remote`."""

    url: str | None = key(
        None, 'service that answers POST {"samples": [...]} with {"scores": [...]}; null: functions in processes'
    )
    max_concurrent: int = key(32, "requests at once", gt=0)
    batch_size: int = key(16, "samples that arrive together and share a request", gt=0)
    attempts: int = key(4, "how often a request that fails is sent", gt=0)
    token_env: str | None = key(
        "HYBRIDRL_REWARD_TOKEN", "environment variable with the bearer token, where it is set; null: none"
    )

    def check(self, config: Any) -> Iterator[str]:
        """Yield a sentence for each fault of these settings in a run of `config`."""
        custom = config.reward.custom_reward_function.path or config.reward.functions
        model = config.reward.reward_model
        if self.url is not None and model.enable and (model.is_judge or model.combine != "sum"):
            judge = "judge.enable" if model.serves_judge else "judge.url"
            reason = f"{judge}: one of them scores" if model.is_judge else f"combine={model.combine}: set it to sum"
            yield f"reward.reward_kwargs.url={self.url} with reward.reward_model.{reason}"
        if self.url is not None and not is_address(self.url):
            yield f"reward.reward_kwargs.url={self.url}: give an address such as http://HOST:8000/scores"
        if self.url is not None and custom:
            yield (
                f"reward.reward_kwargs.url={self.url} and a reward function (reward.custom_reward_function.path or "
                "reward.functions) are both set, and one of them scores; remove the other"
            )


@dataclass
class SandboxConfig(ConfigNode):
    """`reward.sandbox_fusion`: where the built-in scorers run programs."""

    url: str | None = key(
        None,
        "server that speaks SandboxFusion's HTTP API (POST /run_code), such as `hybridrl sandbox-server`; null: this "
        "machine. The token is read from HYBRIDRL_SANDBOX_TOKEN",
    )
    max_concurrent: int = key(
        64, "programs that run at once behind the url, per node of this run", gt=0, needs=is_set(".url")
    )
    max_local: int | None = key(
        None, "programs that run at once without a url; null: one per core", gt=0, needs=is_not_set(".url")
    )
    memory_limit_mb: int = key(1024, "memory of each process of a program", gt=0)
    allow_unisolated: bool = key(
        False,
        "run programs on this machine also where its kernel gives no namespaces, with all that they then reach: the "
        "network, files, other processes",
        needs=is_not_set(".url"),
    )


@dataclass
class ScoringConfig(ConfigNode):
    """`reward` of `evaluation`: which functions score, and their processes."""

    custom_reward_function: CustomRewardConfig = group(CustomRewardConfig)
    functions: dict[str, Any] = key(
        {},
        "several functions in place of one, {name: {path, name, weight, reward_kwargs}}; their weighted sum counts",
        needs=_FUNCTIONS,
        read_by=Unchecked("hybridrl.config.checks.paths reads each as RewardPartConfig"),
    )
    sandbox_fusion: SandboxConfig = group(SandboxConfig, needs=_FUNCTIONS)
    num_workers: int | None = key(
        None,
        "processes that score, per function; null: one per core that may be used, at most 8",
        gt=0,
        needs=_FUNCTIONS,
    )
    timeout_s: float = key(
        30.0, "seconds a sample's score may take before its process is ended", gt=0, needs=_FUNCTIONS
    )


@dataclass
class ParseConfig(ConfigNode):
    """`reward.reward_model.judge.parse`: the function that reads a judge's answer."""

    path: str | None = key(
        None, "Python file with the function; null: the number after the last `Score:`", place="code"
    )
    name: str | None = key(
        None,
        "its name; null: parse. It gets (text) or (text, sample) and returns what a score may be",
        needs=is_set(".path"),
    )


@dataclass
class JudgeConfig(ConfigNode):
    """`reward.reward_model.judge`: a language model that is asked about each response, in place of a classifier."""

    enable: bool = key(
        False,
        "the run serves the judge: reward_model.model.path in replicas of the engine reward_model.rollout.name",
        needs=_SCORING_MANAGER,
    )
    url: str | None = key(
        None,
        "OpenAI-compatible API that serves the judge instead, such as http://HOST:8000/v1; null: none does",
        needs=_SCORING_MANAGER,
    )
    model: str | None = key(None, "its name there; null: the only one that the endpoint has", needs=is_set(".url"))
    token_env: str | None = key(
        "OPENAI_API_KEY", "environment variable with the API key, where it is set; null: none", needs=is_set(".url")
    )
    template: str | None = key(
        None,
        "file with the question, a Jinja template of prompt, messages, response, ground_truth, data_source and "
        "extra_info; null: a question that asks for a score from 0 to 10",
        needs=_A_JUDGE,
        place="file",
    )
    system_prompt: str | None = key(None, "text of a system message before the question", needs=_A_JUDGE)
    parse: ParseConfig = group(ParseConfig, inner={"path": _PARSING_JUDGE})
    temperature: float = key(0.0, "of the judge's answers", ge=0, needs=_A_JUDGE)
    max_tokens: int = key(1024, "most tokens of an answer", gt=0, needs=_A_JUDGE)
    extra_body: dict[str, Any] = key(
        {},
        "further fields of each request; with enable: top_p, top_k, seed and chat_template_kwargs",
        needs=_A_JUDGE,
        read_by="judge-requests",
    )
    max_concurrent: int = key(64, "requests at once", gt=0, needs=is_set(".url"))
    attempts: int = key(4, "how often a request that fails is sent", gt=0, needs=is_set(".url"))
    timeout_s: float = key(
        120.0,
        "seconds for the score of a response, with all attempts; with enable: for template and parse each, because "
        "the engine has limits of its own",
        gt=0,
        needs=_A_JUDGE,
    )


@dataclass
class StepScoresConfig(ConfigNode):
    """`reward.reward_model.steps`: a classifier that scores each step of a response (a process reward model)."""

    enable: bool = key(
        False, "the model is a classifier of tokens, and scores each step where it ends", needs=_no_judge("..")
    )
    separator: str = key("\n\n", "text between two steps of a response", needs=on(".enable"))
    mark: str | None = key(
        None,
        "text that the model reads after each step in place of the separator, and scores at; null: the separator",
        needs=on(".enable"),
    )
    reward: str = key(
        "each",
        "each: each score at the end of its step; else one number of them at the end of the response",
        choices=("each", "mean", "min", "product", "last"),
        needs=on(".enable"),
    )


_POLICY = "${actor_rollout_ref.model."


@dataclass
class RewardModelConfig(ConfigNode):
    """`reward.reward_model`: a classifier that scores responses, or a judge that is asked about them."""

    enable: bool = key(False, "a reward model takes part in the run", needs=())
    combine: str = key(
        "auto",
        "how its score and that of reward functions make the reward; sum: weight * its score + theirs; only: functions "
        "do not run; auto: sum if the settings name a function, otherwise only",
        choices=("auto", "sum", "only"),
    )
    weight: float = key(1.0, "factor of its score")
    model: ModelConfig = group(
        ModelConfig,
        needs=is_not_set(".judge.url"),
        inner=dict.fromkeys(("enable_gradient_checkpointing", "recompute_granularity"), _NOT_TRAINED),
        external_lib=Follow(_POLICY + "external_lib}", None),
        trust_remote_code=Follow(_POLICY + "trust_remote_code}", False),
    )
    max_length: int | None = key(
        None, "tokens of a conversation that it reads; the rest is cut off; null: all", gt=0, needs=_no_judge(".")
    )
    strategy: str = strategy_key(follows="${oc.select:actor_rollout_ref.actor.strategy,fsdp2}", needs=_COMPUTED)
    micro_batch_size_per_gpu: int = key(
        MICRO_BATCH_SIZE,
        "sequences that a process computes at once",
        follows="${oc.select:actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,8}",
        gt=0,
        needs=(*_COMPUTED, off(".use_dynamic_bsz")),
    )
    use_dynamic_bsz: bool = key(
        False,
        "fill micro-batches by tokens, not by sequences",
        follows="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}",
        needs=_COMPUTED,
    )
    forward_max_token_len_per_gpu: int = key(
        32768, "most tokens per micro-batch", gt=0, needs=(*_COMPUTED, on(".use_dynamic_bsz"))
    )
    enable_resource_pool: bool = key(
        False, "it runs in processes of its own: nnodes x n_gpus_per_node", needs=is_not_set(".judge.url")
    )
    n_gpus_per_node: int = key(8, "processes per node of that pool", gt=0, needs=on(".enable_resource_pool"))
    nnodes: int = key(0, "nodes of that pool", ge=0, needs=on(".enable_resource_pool"))
    fsdp_config: FSDPConfig = group(
        FSDPConfig,
        needs=_COMPUTED,
        forward_only=True,
        strategy=Follow("${reward.reward_model.strategy}", "fsdp2"),
    )
    megatron: MegatronConfig = group(
        MegatronConfig,
        needs=_COMPUTED,
        forward_only=True,
        strategy=Follow("${reward.reward_model.strategy}", "fsdp2"),
    )
    steps: StepScoresConfig = group(StepScoresConfig, "single steps of a response are scored")
    rollout: ServingConfig = group(
        ServingConfig, "an inference engine that serves the model instead", needs=is_not_set(".judge.url")
    )
    judge: JudgeConfig = group(JudgeConfig, "a language model that judges instead")

    @property
    def learns(self) -> bool:
        """Whether it is trained, which it never is."""
        return False

    @property
    def is_judge(self) -> bool:
        """Whether a language model judges, so that no classifier takes part."""
        return self.enable and (self.judge.enable or self.judge.url is not None)

    @property
    def serves_judge(self) -> bool:
        """Whether that language model runs in replicas of the run."""
        return self.is_judge and self.judge.enable

    @property
    def own_pool(self) -> list[int]:
        """The processes of its own pool, by node; empty if `placement` says where it runs."""
        owns = self.enable and self.enable_resource_pool and (self.serves_judge or not self.is_judge)
        return [self.n_gpus_per_node] * self.nnodes if owns else []


@dataclass
class RewardConfig(ScoringConfig):
    """`reward` of `ppo_trainer`."""

    reward_manager: RewardManagerConfig = group(RewardManagerConfig)
    reward_kwargs: dict[str, Any] = key(
        {},
        "arguments of the manager; dapo: max_resp_len, overlong_buffer_cfg.{enable,len,penalty_factor,log}; "
        "rate_limited: max_concurrent, max_rpm, max_tpm, estimated_tokens_per_request; remote: url, max_concurrent, "
        "batch_size, attempts, token_env; steps: separator, weight",
        read_by=Unchecked("hybridrl.config.checks.check_run has the manager read them"),
    )
    on_error: str | None = key(
        None,
        "a sample that the reward function fails for; stop: ends the run; zero: scores 0, as where the function takes "
        "too long; drop: is not trained on; refill: is generated again (algorithm.missing.max_refills); null: stop if "
        "the function raises or returns no score, algorithm.missing.infra if its process ends",
        choices=("stop", "zero", "drop", "refill"),
        needs=any_of(_FUNCTIONS, also=(PartNeed("reward.reward_model.is_judge", "", ""),)),
    )
    max_error_rate: float = key(
        0.1,
        "with on_error=zero, drop or refill, the run ends if a larger share of a batch's samples fails",
        ge=0,
        le=1,
        needs=among(".on_error", "zero", "drop", "refill"),
    )
    reward_model: RewardModelConfig = group(RewardModelConfig, needs=on(".reward_model.enable"))

    @property
    def runs_functions(self) -> bool:
        """Whether reward functions run; otherwise the reward model or the sessions themselves score."""
        manager = self.reward_manager
        if manager.source == "register" and not REWARD_MANAGERS.metadata(manager.name).runs_functions:
            return False
        named = bool(self.functions) or self.custom_reward_function.path is not None
        how = self.reward_model.combine
        return not self.reward_model.enable or how == "sum" or (how == "auto" and named)
