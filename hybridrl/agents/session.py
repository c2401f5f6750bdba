"""One attempt at a session: from the row of a batch to trajectories, or to the reason why there are none."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.agents.agents import Agents
from hybridrl.agents.loop import AgentLoopMetrics, AgentLoopOutput, GenerationFailedError, SessionClient
from hybridrl.agents.session_executor import was_cancelled
from hybridrl.agents.trajectory_record import trajectory_of
from hybridrl.config import RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.protocol.names import ATTEMPT, ROUTED_EXPERTS, SESSION_LOG
from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.noise import purpose_of, stream_keys
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.trajectory import Trajectory
from hybridrl.scored import Unscored, unscored_by

#: entries of the batch's meta that sessions read
META = ("global_steps", "validate", ATTEMPT, ROUTED_EXPERTS)


@dataclass(frozen=True)
class Task:
    """An attempt at a session.

    Attributes:
        row: the keyword arguments of `AgentLoopBase.run`.
        uid, sample: which sample it is.
        sampling: the settings of the step.
        meta: entries of the batch's meta; see `META`.
        seeded: each turn draws with a seed of its own, so that a resumed run draws the same again.
        attempt: attempts before this one.
    """

    row: Mapping[str, Any]
    uid: str
    sample: int
    sampling: SamplingParams
    meta: Mapping[str, Any]
    seeded: bool = False
    attempt: int = 0


@dataclass(frozen=True)
class OutputCost:
    """Cost of an output of a loop: seconds and faults.

    Attributes:
        generate_sequences, tool_calls: seconds.
        faults: kinds of faults of its tool calls.
    """

    generate_sequences: float
    tool_calls: float
    faults: tuple[str, ...] = ()


@dataclass
class SessionResult:
    """The trajectories of an attempt at a session, or the reason why there are none.

    Attributes:
        trajectories: of its outputs, in their order.
        costs: of each of them.
        unscored: why there are no trajectories; None: there are.
        tokens: that were generated, where there are none; None: the attempt was cut off.
        failure: the exception that ended it.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    costs: list[OutputCost] = field(default_factory=list)
    unscored: Unscored | None = None
    tokens: int | None = None
    failure: BaseException | None = None


async def run_attempt(agents: Agents, client: GenerationClient, task: Task) -> SessionResult:
    """Run the loop of a row. An exception of the loop leaves the sample unscored.

    Raises:
        Exception: generation as a whole failed.
    """
    rollout = agents.config.actor_rollout_ref.rollout
    session = SessionClient(
        client,
        task.sampling,
        rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        f"{task.uid}/{task.sample}",
        _seeds(rollout.seed, task),
        trains=not task.meta.get("validate", False),
        images=agents.session_images(),
        routing=bool(task.meta.get(ROUTED_EXPERTS, False)),
    )
    try:
        loop = agents.loop(task.row.get("agent_name"), session)
        sampling_params = {key: getattr(task.sampling, key) for key in ("do_sample", "temperature", "top_p", "top_k")}
        outputs = await loop.run(sampling_params, **task.row)
        several = outputs if isinstance(outputs, Sequence) else [outputs]
        if not several or not all(isinstance(output, AgentLoopOutput) for output in several):
            raise RolloutError(f"an agent loop returned {outputs!r}, and must return AgentLoopOutput or a list of them")
        missing = [output.reward_score for output in several if isinstance(output.reward_score, Unscored)]
        if missing:
            return SessionResult(
                unscored=missing[0], tokens=sum(sum(map(int, output.response_mask)) for output in several)
            )
        return SessionResult(_trajectories(several, session, task, rollout), [_cost_of(output) for output in several])
    except GenerationFailedError as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None
    except (Exception, SystemExit) as error:  # user code may call sys.exit
        return SessionResult(unscored=unscored_by(error), failure=error)
    except asyncio.CancelledError as cancelled:
        if was_cancelled():
            raise
        itself = RuntimeError(f"the code of the session cancelled itself: {cancelled!r}")
        return SessionResult(unscored=unscored_by(itself), failure=itself)


def _trajectories(
    outputs: Sequence[AgentLoopOutput], session: SessionClient, task: Task, rollout: RolloutConfig
) -> list[Trajectory]:
    """The trajectories of what a loop returned."""
    for name in (SESSION_LOG, "__num_turns__"):
        if any(name in output.extra_fields for output in outputs):
            raise RolloutError(
                f"an agent loop returned the extra field {name!r}, which sessions record themselves; give the field "
                "another name (num_turns of AgentLoopOutput is the number of turns)"
            )
    outputs[0].extra_fields[SESSION_LOG] = session.log.record()
    trajectories = []
    for number, output in enumerate(outputs):
        name = f"sample {task.sample}" if len(outputs) > 1 else ""
        trajectory = trajectory_of(output, session.generated, task.uid, task.sample, name, number, session.images)
        _check_extra(trajectory.extra, task.row)
        # The reward function scores a session once, where it ended; what its other parts bring is added.
        unscored = number < len(outputs) - 1 and trajectory.reward is None
        trajectories.append(replace(trajectory, reward=0.0) if unscored else trajectory)
        if len(output.response_ids) > rollout.response_length:
            raise RolloutError(
                f"an agent loop returned {len(output.response_ids)} response_ids, more than "
                f"response_length={rollout.response_length}; end the session, or cut it"
            )
    return trajectories


def _check_extra(extra: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """Refuse extra fields that would replace what the data say, such as the ground truth, in the whole batch."""
    replaced = sorted(name for name, value in extra.items() if name in row and value is not row[name])
    if replaced:
        raise RolloutError(
            f"an agent loop returned the extra field {replaced[0]!r} (extra_fields, or extra of a Scored), which is a "
            "column of the data; give the field another name"
        )


def _seeds(seed: int, task: Task) -> Callable[[int], int | None]:
    """The seed of each turn, where seeds decide what is drawn."""
    if not task.seeded:
        return lambda _: None
    step, purpose = int(task.meta.get("global_steps", 0)), purpose_of(task.meta)

    def seed_of(turn: int) -> int:
        name = f"{task.uid} turn {turn} attempt {task.attempt}"
        return int(stream_keys(seed, step, purpose, [name], [task.sample])[0]) % 2**63

    return seed_of


def _cost_of(output: AgentLoopOutput) -> OutputCost:
    metrics = output.metrics
    seconds = metrics if isinstance(metrics, Mapping) else _seconds_of(metrics)
    return OutputCost(
        float(seconds.get("generate_sequences", 0.0)),
        float(seconds.get("tool_calls", 0.0)),
        tuple(output.extra_fields.get("tool_faults") or ()),
    )


def _seconds_of(metrics: AgentLoopMetrics) -> dict[str, float]:
    return {"generate_sequences": metrics.generate_sequences, "tool_calls": metrics.tool_calls}
