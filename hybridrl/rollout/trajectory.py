"""The product of one session: the unit that passes from sampling to learning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
import torch

from hybridrl.errors import RolloutError
from hybridrl.rollout.request import Completion, CompletionArrays
from hybridrl.scored import LARGEST_REWARD

Integers = Sequence[int] | np.ndarray
Floats = Sequence[float] | np.ndarray

#: weight version of a token that no weights generated
NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One prompt and everything that followed it. Tokens, masks and log-probabilities are sequences or arrays.

    A sample may be several trajectories, for example where an agent's context was rewritten. They share `uid`, `sample`
    and `session`, and `turn` gives their order.

    Attributes:
        uid: the prompt's group.
        sample: which of the prompt's samples this belongs to.
        prompt_ids: tokens before the first generated one, without padding.
        token_ids: every token after the prompt: generated ones, and those of tools and of later user turns.
        mask: 1 for each generated token, 0 for the others.
        log_probs: the sampler's log-probability of each token; not read where `mask` is 0.
        versions: (weight version, number of tokens) in order, adding up to all tokens; `NO_VERSION` for tokens that
            were not generated.
        session: the session's id, unique within the prompt; "" where a sample is one trajectory.
        turn: position among the trajectories of the session.
        reward: the score of the trajectory where the session gave one; None leaves it to the reward function.
        turn_rewards: rewards of single turns, in order.
        turn_ends: the place in `token_ids` of the last generated token of each of these turns, where its reward is
            added to the score; None: only the reward function gets them.
        turn_states: (the place of a turn's last token, a number above 0 that identifies the situation before it).
        extra: further fields by name; each becomes a non-tensor column.
        multimodal: model inputs that are not token ids, by name.
        image_mask: bool [prompt and later tokens], true for the tokens of images; None: the placeholders of the prompt
            are theirs.
        positions: [k, prompt and later tokens], k positions of each token; None: they count the tokens.
        routed_experts: integers [prompt and later tokens, L, K], the K experts that each token used in L layers.
    """

    uid: str
    sample: int
    prompt_ids: Integers
    token_ids: Integers
    mask: Integers
    log_probs: Floats
    versions: Sequence[tuple[int, int]]
    session: str = ""
    turn: int = 0
    reward: float | None = None
    turn_rewards: Sequence[float] = ()
    turn_ends: Sequence[int] | None = None
    turn_states: Sequence[tuple[int, int]] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    multimodal: Mapping[str, Any] = field(default_factory=dict)
    image_mask: torch.Tensor | None = field(default=None, compare=False)
    positions: torch.Tensor | None = field(default=None, compare=False)
    routed_experts: torch.Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        for name in ("mask", "log_probs"):
            length = len(getattr(self, name))
            if length != count:
                raise RolloutError(
                    f"{self.name}: {name} has {length} entries and token_ids has {count}; give one per token"
                )
        whole = len(self.prompt_ids) + count
        positions = None if self.positions is None else self.positions.T
        per_token = {"routed_experts": self.routed_experts, "image_mask": self.image_mask, "positions": positions}
        for name, tensor in per_token.items():
            if tensor is not None and len(tensor) != whole:
                raise RolloutError(
                    f"{self.name}: {name} has {len(tensor)} entries, and prompt_ids and token_ids together have "
                    f"{whole}; give one per token"
                )
        if any(tokens < 0 for _, tokens in self.versions) or sum(tokens for _, tokens in self.versions) != count:
            raise RolloutError(
                f"{self.name}: versions={list(self.versions)} must be (version, tokens) pairs whose tokens add up to "
                f"the {count} entries of token_ids"
            )
        if self.turn_ends is not None and len(self.turn_ends) != len(self.turn_rewards):
            raise RolloutError(
                f"{self.name}: turn_ends has {len(self.turn_ends)} entries and turn_rewards has "
                f"{len(self.turn_rewards)}; give one per turn"
            )
        rewards = [("turn_rewards", value) for value in self.turn_rewards]
        rewards += [("reward", self.reward)] if isinstance(self.reward, Real) else []
        for name, value in rewards:
            if not abs(value) <= LARGEST_REWARD:  # nor NaN
                raise RolloutError(
                    f"{self.name}: {name} holds {value}; give finite numbers of at most {LARGEST_REWARD:.3g}"
                )
        if not _has_only_0_and_1(self.mask):
            raise RolloutError(f"{self.name}: mask must hold 0 and 1 only")

    @property
    def name(self) -> str:
        """The trajectory's name in messages."""
        session = f", session {self.session!r}, turn {self.turn}" if self.session else ""
        return f"trajectory of uid {self.uid!r}, sample {self.sample}{session}"

    @classmethod
    def single_turn(
        cls,
        prompt_ids: Integers,
        completion: Completion | CompletionArrays,
        uid: str,
        sample: int,
        extra: Mapping[str, Any] | None = None,
    ) -> "Trajectory":
        """The trajectory of one request: all of its tokens are generated."""
        tokens, mask = completion.token_ids, np.ones(len(completion.token_ids), dtype=np.uint8)
        scores, versions = completion.log_probs, completion.versions
        experts = _experts_of(completion, len(prompt_ids) + len(tokens))
        return cls(uid, sample, prompt_ids, tokens, mask, scores, versions, extra=extra or {}, routed_experts=experts)

    def with_arrays(self) -> "Trajectory":
        """Return it with arrays in place of lists, which travel and are read in a fraction of the time."""
        return replace(
            self,
            prompt_ids=np.asarray(self.prompt_ids, dtype=np.int32),
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            mask=np.asarray(self.mask, dtype=np.uint8),
            log_probs=np.asarray(self.log_probs, dtype=np.float32),
        )


def _has_only_0_and_1(mask: Integers) -> bool:
    if isinstance(mask, np.ndarray):
        return bool(((mask == 0) | (mask == 1)).all())
    return {0, 1}.issuperset(mask)


def _experts_of(completion: Completion | CompletionArrays, tokens: int) -> torch.Tensor | None:
    """Return `routed_experts` of a request's `tokens` tokens; the last was not computed and repeats those before it."""
    experts = completion.routed_experts
    if experts is None or not len(completion.token_ids):
        return None
    if len(experts) < tokens - 1:
        raise RolloutError(
            f"the engine returned the experts of {len(experts)} tokens of request {completion.id}, which computed "
            f"{tokens - 1}; set actor_rollout_ref.actor.router_replay.mode to R2 or disabled"
        )
    computed = torch.from_numpy(experts[: tokens - 1])
    return torch.cat([computed, computed[-1:]])
