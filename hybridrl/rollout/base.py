"""A model that generates: the interface of every rollout engine, and the choice between them.

Shapes: B rows, P prompt width (left-padded), T response width (right-padded).
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from hybridrl.config import RolloutConfig
from hybridrl.protocol import DataProto
from hybridrl.utils.errors import UserError


class RolloutError(UserError):
    """The rollout engine cannot be had or cannot do what is asked."""


class Rollout(ABC):
    """Generates responses for prompts with the policy's current weights.

    An implementation registers itself with `@RolloutRegistry.register(name)` and is created inside each worker.
    """

    name: ClassVar[str]

    @abstractmethod
    def generate(self, prompts: DataProto) -> DataProto:
        """One response a row, in the rows' order.

        Args:
            prompts: tensors `input_ids`, `attention_mask`, `position_ids` [B, P], left-padded; non-tensors `uid` (one a
                prompt) and, where a prompt has several rows, `sample` (which of them); meta `eos_token_id` (int or
                list), `pad_token_id`, `global_steps`, `validate`, and any field of `SamplingParams` to override.

        Returns:
            A batch of tensors in the prompts' order: `prompts` [B, P], `responses` [B, T], `input_ids`,
            `attention_mask`, `position_ids` [B, P + T], `response_mask` [B, T] and `rollout_log_probs` [B, T]; T is
            `rollout.response_length`.
        """


class RolloutRegistry:
    """Rollout engines by `actor_rollout_ref.rollout.name`.

    The values say what must be importable for an engine to run here; "auto" takes the first name of `PREFERENCE` that
    is registered and installed.
    """

    PREFERENCE: ClassVar[tuple[str, ...]] = ("hf",)
    _classes: ClassVar[dict[str, type[Rollout]]] = {}
    _requirements: ClassVar[dict[str, str]] = {}

    @classmethod
    def register(cls, name: str, requires: str) -> Callable[[type[Rollout]], type[Rollout]]:
        """Class decorator: the engine `name` needs the package `requires`."""

        def add(rollout: type[Rollout]) -> type[Rollout]:
            rollout.name = name
            cls._classes[name] = rollout
            cls._requirements[name] = requires
            return rollout

        return add

    @classmethod
    def resolve(cls, name: str) -> str:
        """The engine that `rollout.name` stands for on this machine.

        Raises:
            RolloutError: the name is unknown, or its package is not installed.
        """
        if name == "auto":
            for candidate in cls.PREFERENCE:
                if candidate in cls._classes and importlib.util.find_spec(cls._requirements[candidate]):
                    return candidate
        if name not in cls._classes:
            known = ", ".join(sorted(cls._classes))
            raise RolloutError(f"actor_rollout_ref.rollout.name is {name!r}; this build has: auto, {known}")
        package = cls._requirements[name]
        if importlib.util.find_spec(package) is None:
            raise RolloutError(
                f"actor_rollout_ref.rollout.name={name} needs the package {package}, which is not installed: "
                f"pip install 'hybridrl[{name}]'"
            )
        return name

    @classmethod
    def create(cls, name: str, config: RolloutConfig, **kwargs: Any) -> Rollout:
        return cls._classes[cls.resolve(name)](config, **kwargs)  # type: ignore[call-arg]


def assemble(
    prompts: DataProto, responses: torch.Tensor, lengths: torch.Tensor, log_probs: torch.Tensor, pad_token_id: int
) -> DataProto:
    """The batch that every engine returns, from what it generated.

    Args:
        prompts: the batch that was asked for, [B, P].
        responses: [B, T] token ids; whatever stands beyond a row's length is overwritten with padding.
        lengths: [B] number of generated tokens, the EOS included.
        log_probs: [B, T] log-probability of each generated token.
        pad_token_id: fills the rest of each row.
    """
    width = responses.shape[1]
    steps = torch.arange(width, device=responses.device)
    mask = steps[None, :] < lengths[:, None]
    responses = torch.where(mask, responses, pad_token_id)
    prompt_ids, prompt_mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    last_position = prompts.batch["position_ids"][:, -1:]
    response_mask = mask.to(prompt_mask.dtype)
    tensors = {
        "prompts": prompt_ids,
        "responses": responses,
        "input_ids": torch.cat([prompt_ids, responses], dim=1),
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
        "position_ids": torch.cat([prompts.batch["position_ids"], last_position + 1 + steps[None, :]], dim=1),
        "response_mask": response_mask,
        "rollout_log_probs": torch.where(mask, log_probs.float(), 0.0),
    }
    return DataProto.from_dict(tensors=tensors)
