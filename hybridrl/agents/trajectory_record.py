"""Conversion of a loop's output into a trajectory, checked against the record of the session's generations."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from hybridrl.agents.loop import AgentLoopOutput
from hybridrl.chat.session_images import SeenImages, generated_in, tensors_of
from hybridrl.errors import RolloutError
from hybridrl.protocol.bookkeeping import Writer, reserved
from hybridrl.protocol.names import IMAGE_DIGEST, SESSION_LOG
from hybridrl.rollout.parts import extended
from hybridrl.rollout.request import Completion
from hybridrl.rollout.request_images import PromptImages
from hybridrl.rollout.trajectory import NO_VERSION, Trajectory
from hybridrl.scored import LARGEST_REWARD, Scored, Unscored


def trajectory_of(
    output: AgentLoopOutput,
    generated: Sequence[tuple[Sequence[int], Completion]],
    uid: str,
    sample: int,
    session: str,
    turn: int,
    session_images: SeenImages | None = None,
) -> Trajectory:
    """The trajectory with the sampler's log-probabilities and versions of the weights.

    A token is known as generated if the policy wrote it at this place: after exactly the tokens that stand before it.

    Args:
        generated: (prompt, completion) of each call in the session.
        session, turn: see `Trajectory`.
        session_images: the images of the session; None: the model reads text alone. The trajectory gets those that the
            sampler saw.

    Raises:
        RolloutError: a token of `response_mask` 1 is not one that the policy generated here, or the score is not
            finite.
    """
    score, reward = output.reward_score, _reward_of(output)
    _check_names(output)
    extra = {**_COLUMNS, **output.extra_fields, "__num_turns__": output.num_turns}
    if isinstance(score, Scored):
        extra |= score.extra
    start = len(output.prompt_ids)
    whole = [*output.prompt_ids, *output.response_ids]
    log_probs: list[float | None] = [None] * len(output.response_ids)
    versions = [NO_VERSION] * len(output.response_ids)
    by = [[version for version, count in completion.versions for _ in range(count)] for _, completion in generated]
    images, calls = None, list(range(len(generated)))
    if session_images is not None:
        returned = None if output.multi_modal_data is None else output.multi_modal_data.get("images") or ()
        images, calls = session_images.of_trajectory(whole, generated, returned)
        if calls:
            extra[IMAGE_DIGEST] = generated[calls[-1]][1].image_digest
    for place, call, number in generated_in(whole, generated):
        if call not in calls or len(generated[call][0]) < start:
            continue
        log_probs[place - start] = generated[call][1].log_probs[number]
        versions[place - start] = by[call][number] if number < len(by[call]) else NO_VERSION
    _check(output, log_probs)
    # where the mask is 0, nothing of a token is trained on
    trained_versions = [
        version if mask else NO_VERSION for mask, version in zip(output.response_mask, versions, strict=True)
    ]
    return Trajectory(
        uid,
        sample,
        list(output.prompt_ids),
        list(output.response_ids),
        [int(mask) for mask in output.response_mask],
        [0.0 if log_prob is None else log_prob for log_prob in log_probs],
        _spans(trained_versions),
        session=session,
        turn=turn,
        reward=reward,
        extra=extra,
        turn_rewards=[float(value) for _, value in output.turn_rewards],
        turn_ends=[place for place, _ in output.turn_rewards],
        turn_states=[(place, state_key(state)) for place, state in output.turn_states],
        multimodal={} if images is None else tensors_of(images),
        image_mask=None if session_images is None else _mask(images, len(whole)),
        positions=None if session_images is None else session_images.reader.positions(whole, images),
        routed_experts=_experts_in(whole, generated, calls, start + _last_trained(output)),
    )


def _last_trained(output: AgentLoopOutput) -> int:
    """The place of the last token of the response that is trained on; -1 without one."""
    return max((place for place, mask in enumerate(output.response_mask) if mask), default=-1)


def _experts_in(
    whole: Sequence[int], generated: Sequence[tuple[Sequence[int], Completion]], calls: Sequence[int], last: int
) -> torch.Tensor | None:
    """The experts of a trajectory's tokens, [tokens, L, K]: of each those with which what follows it was sampled.

    A call records the tokens of its prompt and its response, so that what tools and users wrote has the experts of the
    call that answered it. Tokens after the last call, and the last that it sampled, were computed by no sampler: they
    get those of the token before. What is trained on does not depend on them, because it stands before.

    Args:
        calls: numbers of the calls that the trajectory's images allow.
        last: the place of the last token that is trained on.

    Raises:
        RolloutError: the engine returned too few; the trainer would replay others.
    """
    experts: np.ndarray | None = None
    for number in sorted(calls):
        prompt, completion = generated[number]
        count = _common_prefix(whole, [*prompt, *completion.token_ids])
        if count > len(prompt) and completion.routed_experts is not None:  # it wrote a part of the trajectory
            experts = extended(experts, completion.routed_experts[:count])
    if experts is None:
        return None
    if len(experts) < last:
        raise RolloutError(
            f"the engine returned the experts of {len(experts)} tokens of a session of which {last} were computed; set "
            "actor_rollout_ref.actor.router_replay.mode to R2 or disabled"
        )
    experts = experts[: len(whole)]
    return torch.from_numpy(np.concatenate([experts, np.repeat(experts[-1:], len(whole) - len(experts), axis=0)]))


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two sequences."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _reward_of(output: AgentLoopOutput) -> float | None:
    """The reward of a loop's output, which is finite."""
    score = output.reward_score
    assert not isinstance(score, Unscored)  # such a session has no trajectories
    reward = score.reward if isinstance(score, Scored) else score
    if reward is not None and not abs(reward) <= LARGEST_REWARD:  # nor NaN
        raise RolloutError(f"an agent loop returned the reward_score {reward}; return a finite number, or an Unscored")
    return reward


def _check(output: AgentLoopOutput, log_probs: Sequence[float | None]) -> None:
    """Refuse tokens that are trained on without a log-probability, and rewards and states of other tokens."""
    for place, (mask, log_prob) in enumerate(zip(output.response_mask, log_probs, strict=True)):
        if mask and log_prob is None:
            raise RolloutError(
                f"an agent loop returned response_mask=1 for token {place} of its response (id "
                f"{output.response_ids[place]}), which the policy did not generate after the tokens before it "
                "(and their images); keep generated token ids as they are, and give text of others response_mask=0"
            )
    for name, entries in (("turn_rewards", output.turn_rewards), ("turn_states", output.turn_states)):
        for place, value in entries:
            if not 0 <= place < len(output.response_mask) or not output.response_mask[place]:
                raise RolloutError(
                    f"an agent loop returned {name} with {value!r} for token {place} of {len(output.response_mask)}, "
                    "which is not trained on (response_mask); name the last generated token of the turn"
                )


def _check_names(output: AgentLoopOutput) -> None:
    """Refuse extra fields with the name of a column that the run writes, or reads from the data."""
    score = output.reward_score
    parts = score.extra if isinstance(score, Scored) else {}
    for name in [*reserved(output.extra_fields, Writer.SESSION), *reserved(parts)]:
        raise RolloutError(
            f"an agent loop returned the extra field {name!r} (extra_fields, or extra of a Scored), which is the name "
            "of a column of the data, or of one that the run itself uses; give the field another name"
        )


def _mask(images: PromptImages | None, length: int) -> torch.Tensor:
    return torch.zeros(length, dtype=torch.bool) if images is None else images.mask(length)


#: columns that every row has, so that loops of different kinds share a batch
_COLUMNS = {"tool_call_counts": 0, SESSION_LOG: None}


def state_key(state: Any) -> int:
    """A number above 0 that is the same for equal states, in every process."""
    return int.from_bytes(blake2b(repr(state).encode(), digest_size=4).digest(), "little") % (2**31 - 1) + 1


def _spans(values: Sequence[int]) -> list[tuple[int, int]]:
    """(value, how often in succession)."""
    spans: list[tuple[int, int]] = []
    for value in values:
        if spans and spans[-1][0] == value:
            spans[-1] = (value, spans[-1][1] + 1)
        else:
            spans.append((value, 1))
    return spans
