"""Names what limits the speed of a run, and one setting to try. `report.html` and the summary show it.

The advice compares medians over the last steps. It looks at one thing: the phase that takes most of the time. What it
proposes never changes what is trained, except where it says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from statistics import median
from typing import Any

from hybridrl.config.roles import POLICY, ROLES, MicroBatches, Pass, RoleSpec, Scoring
from hybridrl.config.schema.node import declared
from hybridrl.observe.timeline import rank_seconds
from hybridrl.registry import INFERENCE_ENGINES
from hybridrl.utils.spans import CONTROLLER, TimedSpan

_STEPS = 20  # of the run's end; what happened before may be another setting
_SLOWER = 1.3  # a rank that takes this many times the median of its group limits it
_TAIL = 4.0  # the longest response is this many times the mean
_FEW_TOKENS = 4096  # in a micro-batch: below it, a device waits for its kernels to start
_OUTSIDE = ("save_checkpoint", "testing")  # phases that are no part of `timing_s/step`
_NOT_A_PHASE = ("step", "workers")
_FINE_TUNING = MicroBatches("data", "micro_batch_size_per_gpu", "max_token_len_per_gpu")
_PROFILED_STEP = 3  # of the next run: the first ones compile, allocate and warm up


@dataclass(frozen=True)
class Advice:
    """The phase that limits a run's speed, the reason, and a setting to try.

    Attributes:
        phase: the phase that takes most of the time.
        share: its part of the time.
        rank: the rank that the others wait for, `<role>/<method>` before it; None: no rank stands out.
        reason: what makes the phase slow.
        override: a setting to try, as on the command line.
    """

    phase: str
    share: float
    rank: str | None
    reason: str
    override: str

    def __str__(self) -> str:
        slow = f", where the others wait for rank {self.rank}" if self.rank else ""
        return f"{self.phase} takes {self.share:.0%} of the time{slow}: {self.reason}. Try {self.override}"


@dataclass(frozen=True)
class _RunSummary:
    """Medians over the last steps, and settings."""

    metrics: Mapping[str, float]
    config: Mapping[str, Any]

    def setting(self, key: str, default: Any = None) -> Any:
        node: Any = self.config
        for name in key.split("."):
            if not isinstance(node, Mapping) or node.get(name) is None:
                return _default_in_role(key, default)
            node = node[name]
        return node


def _default_in_role(key: str, default: Any) -> Any:
    """The default of a setting below `roles`, where a run's configuration has only what was set."""
    for spec in ROLES.values():
        if spec.settings is not None and key.startswith(f"{spec.where}."):
            field = declared(spec.settings, f"{spec.where}.").get(key)
            if field is not None and field.default is not MISSING:
                return default if field.default is None else field.default
    return default


def advise(
    metrics: Sequence[Mapping[str, float]], timeline: Mapping[int, Sequence[TimedSpan]], config: Mapping[str, Any]
) -> Advice | None:
    """Return what limits a run; None before a step was measured.

    Args:
        metrics: of each step.
        timeline: spans of each step.
        config: the settings of the run.
    """
    steps = [step for step in metrics if "timing_s/step" in step][-_STEPS:]
    if not steps:
        return None
    if len(steps) > 2:
        steps = steps[1:] if len(steps) < _STEPS else steps  # the first one compiles, allocates and warms up
    names = {name for step in steps for name in step}
    medians = {name: median([step.get(name, 0.0) for step in steps]) for name in names if not name.startswith("timing")}
    # Means, not medians, of times: what happens every tenth step costs a tenth of it in each.
    times = {
        name.removeprefix("timing_s/"): sum(step.get(name, 0.0) for step in steps) / len(steps)
        for name in names
        if name.startswith("timing_s/") and name.count("/") == 1
    }
    phases = {name: seconds for name, seconds in times.items() if name not in _NOT_A_PHASE}
    if "testing_wait" in phases:  # validations run next to steps, which wait only for what is left of them
        phases.pop("testing", None)
    total = times["step"] + sum(phases.get(name, 0.0) for name in _OUTSIDE)
    if not phases or total <= 0:
        return None
    phase = max(phases, key=lambda name: phases[name])
    last = [spans for _, spans in sorted(timeline.items())[-_STEPS:]]
    summary = _RunSummary(medians, config)
    share = min(phases[phase] / total, 1.0)
    slow = _slow_rank(last, phase, phases[phase])
    if slow is not None:
        method, rank, factor = slow
        reason = f"rank {rank} needs {factor:.1f} times as long as the others in {method.partition('/')[2]}"
        return Advice(phase, share, f"{rank} of {method}", reason, _for_slow_rank(summary, phase, rank))
    reason, override = _rule_of(phase)(summary)
    return Advice(phase, share, None, reason, override)


def _slow_rank(steps: Sequence[Sequence[TimedSpan]], phase: str, seconds: float) -> tuple[str, int, float] | None:
    """Return (method, rank, factor) of a rank much slower than its group in most of the limiting phase, or None."""
    slowest: tuple[str, int, float] | None = None
    longest = 0.5 * seconds
    totals: dict[str, dict[int, float]] = {}
    for spans in steps:
        for method, of_ranks in rank_seconds(_within(spans, phase)).items():
            sums = totals.setdefault(method, {})
            for rank, value in of_ranks.items():
                sums[rank] = sums.get(rank, 0.0) + value / len(steps)
    for method, of_ranks in totals.items():
        if len(of_ranks) < 2:
            continue
        rank = max(of_ranks, key=lambda other: of_ranks[other])
        others = median([value for other, value in of_ranks.items() if other != rank])
        if of_ranks[rank] >= longest and of_ranks[rank] > _SLOWER * others:
            slowest, longest = (method, rank, of_ranks[rank] / max(others, 1e-9)), of_ranks[rank]
    return slowest


def _within(spans: Sequence[TimedSpan], phase: str) -> list[TimedSpan]:
    """Return the ranks' spans, cut to the time in which the controller was in a phase."""
    windows = [
        (phase_span.started, phase_span.started + phase_span.seconds)
        for phase_span in spans
        if (phase_span.name, phase_span.rank) == (phase, CONTROLLER)
    ]
    clipped = []
    for span in spans:
        end = span.started + span.seconds
        inside = sum(max(0.0, min(end, stop) - max(span.started, start)) for start, stop in windows)
        if inside and span.rank != CONTROLLER:
            clipped.append(span._replace(seconds=inside))
    return clipped


def _for_slow_rank(summary: _RunSummary, phase: str, rank: int) -> str:
    if summary.setting("trainer.balance_batch") is False:
        return "trainer.balance_batch=True"
    return _profile(summary, _role_of(phase), rank)


def _profile(summary: _RunSummary, spec: RoleSpec | None, rank: int = 0) -> str:
    """Return the settings that profile a rank of a role, or of the policy if the role cannot be profiled."""
    where = "profiler"  # of fine-tuning
    if summary.setting("actor_rollout_ref") is not None:
        profiled = spec if spec is not None and summary.setting(f"{spec.where}.profiler") is not None else ROLES[POLICY]
        where = f"{profiled.where}.profiler"
    return (
        f"global_profiler.tool=torch global_profiler.steps=[{_PROFILED_STEP}] {where}.enable=True "
        f"{where}.ranks=[{rank}], to see what it does"
    )


def _reward(summary: _RunSummary) -> tuple[str, str]:
    workers, judge = summary.setting("reward.num_workers"), "reward.reward_model.judge"
    if summary.setting("reward.reward_model.enable") and summary.setting(f"{judge}.url"):
        return (
            "a judge is slower than the models",
            f"{judge}.max_concurrent={2 * summary.setting(f'{judge}.max_concurrent', 64)}",
        )
    if summary.setting("reward.reward_model.enable") and summary.setting(f"{judge}.enable"):
        key = "reward.reward_model.n_gpus_per_node"
        own = summary.setting("reward.reward_model.enable_resource_pool")
        more = f"{key}={2 * summary.setting(key, 1)}" if own else "reward.reward_model.enable_resource_pool=True"
        return "a judge is slower than the models", f"{more}, or a lower {judge}.max_tokens"
    return (
        "the reward function is slower than the models",
        f"reward.num_workers={2 * workers if workers else 8}",
    )


def _generation(summary: _RunSummary) -> tuple[str, str]:
    mean = summary.metrics.get("response_length/mean", 0.0)
    longest = summary.metrics.get("response_length/max", 0.0)
    if mean and longest >= _TAIL * mean:
        return (
            f"the longest response has {longest:.0f} tokens and the mean {mean:.0f}, so most devices wait for a few "
            "responses",
            f"data.max_response_length={int(longest) // 2} (it cuts off the longest responses, which changes what is "
            "trained)",
        )
    name = summary.setting("actor_rollout_ref.rollout.name", "")
    if INFERENCE_ENGINES.knows(name) and INFERENCE_ENGINES.metadata(name).in_place:
        engines = [engine for engine in INFERENCE_ENGINES.names() if INFERENCE_ENGINES.metadata(engine).auto]
        first = min(engines, key=lambda engine: INFERENCE_ENGINES.metadata(engine).auto)
        return f"rollout.name={name} generates without an inference engine", f"actor_rollout_ref.rollout.name={first}"
    sequences = summary.setting("actor_rollout_ref.rollout.max_num_seqs", 256)
    return "all responses are about as long", f"actor_rollout_ref.rollout.max_num_seqs={2 * sequences}"


def _weights(summary: _RunSummary) -> tuple[str, str]:
    key = "actor_rollout_ref.rollout.checkpoint_engine"
    if summary.setting(f"{key}.method") == "streamed":
        return "whole parameters are sent to the engines (method=streamed)", f"{key}.method=auto"
    size = summary.setting(f"{key}.update_weights_bucket_megabytes", 2048)
    return "new weights take long to reach the engines", f"{key}.update_weights_bucket_megabytes={2 * size}"


def _update(spec: RoleSpec | None, how: MicroBatches | None, model: str, summary: _RunSummary) -> tuple[str, str]:
    """Advise on a slow update: the reason and a setting to try.

    Args:
        spec: the role; None in fine-tuning.
        how: its micro-batches.
        model: where the settings of the model are.
    """
    if how is not None and (advice := _too_small(how, summary)):
        return advice
    if summary.setting(f"{model}.enable_gradient_checkpointing"):
        off = f"{model}.enable_gradient_checkpointing=False"
        if summary.setting(f"{model}.recompute_granularity") == "selective":
            full = f"{model}.recompute_granularity=full"
            return "some activations are computed again", f"{off} {full}, if the memory suffices"
        return "activations are computed twice (enable_gradient_checkpointing)", f"{off}, if the memory suffices"
    reason = "the model's passes are most of the work"
    if how is None or summary.setting(f"{how.where}.{how.dynamic}"):
        return reason, _profile(summary, spec)
    return reason, f"{how.where}.{how.dynamic}=True"


def _too_small(how: MicroBatches, summary: _RunSummary) -> tuple[str, str] | None:
    """Advise on micro-batches of few tokens; None if they have enough."""
    length = summary.metrics.get("response_length/mean", 0.0) + summary.metrics.get("prompt_length/mean", 0.0)
    if not length:  # fine-tuning
        rows = summary.setting("data.train_batch_size", 1)
        length = summary.metrics.get("perf/total_num_tokens", 0.0) / max(rows, 1)
    if summary.setting(f"{how.where}.{how.dynamic}"):
        tokens = summary.setting(f"{how.where}.{how.tokens}", _FEW_TOKENS)
        if tokens < _FEW_TOKENS:
            return f"a micro-batch has at most {tokens} tokens", f"{how.where}.{how.tokens}={2 * _FEW_TOKENS}"
        return None
    size = summary.setting(f"{how.where}.{how.size}", 1)
    target = 2 ** max(size.bit_length(), round(_FEW_TOKENS / max(length, 1)).bit_length())
    if how is _FINE_TUNING:  # a micro-batch is part of a batch of as many rows
        target = min(target, summary.setting("data.train_batch_size", target))
    if 0 < size * length < _FEW_TOKENS and target > size:
        return (
            f"a micro-batch has about {size * length:.0f} tokens, too few to keep a device busy",
            f"{how.where}.{how.size}={target}",
        )
    return None


def _pass(spec: RoleSpec, how: MicroBatches | None, summary: _RunSummary) -> tuple[str, str]:
    """Advise on a pass of a role's model, whose results the step waits for."""
    reason = f"the model of {spec.where} computes the batch in one more pass"
    served = summary.setting(f"{spec.where}.rollout.name") is not None
    if how is not None and not served:
        if not summary.setting(f"{how.where}.{how.dynamic}"):
            return reason, f"{how.where}.{how.dynamic}=True"
        if advice := _too_small(how, summary):
            return advice
    if spec.name == POLICY:
        return reason, _profile(summary, spec)
    return reason, f"placement.roles.{spec.placement[0]}=NAME with devices of its own in placement.pools.NAME"


def _data(summary: _RunSummary) -> tuple[str, str]:
    key = "data.num_workers" if summary.setting("data.micro_batch_size_per_gpu") else "data.dataloader_num_workers"
    return "the next batch is not ready when it is needed", f"{key}={max(2 * int(summary.setting(key, 0)), 4)}"


def _saving(summary: _RunSummary) -> tuple[str, str]:
    key = "actor_rollout_ref.actor.checkpoint" if summary.setting("actor_rollout_ref") else "checkpoint"
    if not summary.setting(f"{key}.async_save"):
        return "training waits while a checkpoint is written", f"{key}.async_save=True"
    frequency = summary.setting("trainer.save_freq", 1)
    return "a checkpoint is due before the one before is written", f"trainer.save_freq={2 * max(int(frequency), 1)}"


def _testing(summary: _RunSummary) -> tuple[str, str]:
    return "validation runs often", f"trainer.test_freq={2 * max(int(summary.setting('trainer.test_freq', 1)), 1)}"


def _other(summary: _RunSummary) -> tuple[str, str]:
    return "no rule here knows this phase", _profile(summary, None)


_Rule = Callable[[_RunSummary], tuple[str, str]]
_RULES: dict[str, _Rule] = {
    "reward": _reward,
    "gen": _generation,
    "gen_max": _generation,
    "update_weights": _weights,
    "update_model": partial(_update, None, _FINE_TUNING, "model"),
    "data": _data,
    "save_checkpoint": _saving,
    "testing": _testing,
    "testing_wait": _testing,
}


def _role_of(phase: str) -> RoleSpec | None:
    """The role whose pass, scoring or update a phase is."""
    for spec in ROLES.values():
        parts = [*spec.passes, spec.scoring, spec.update]
        if any(part is not None and part.phase == phase for part in parts):
            return spec
    return None


def _rule_of(phase: str) -> _Rule:
    """Return the rule of a phase: by its name, else by the role whose update, pass or scoring it is."""
    if phase in _RULES:
        return _RULES[phase]
    for spec in ROLES.values():
        if spec.update is not None and spec.update.phase == phase:
            return partial(_update, spec, spec.update.batching, spec.model_path)
        passes: list[Pass | Scoring] = [*spec.passes, *([spec.scoring] if spec.scoring is not None else [])]
        for model_pass in passes:
            if model_pass.phase == phase:
                return partial(_pass, spec, model_pass.batching)
    return _other
