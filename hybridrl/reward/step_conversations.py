"""Finished responses as a classifier of steps reads them: the prompt, and each step with a mark after it.

Shapes: B rows, P tokens of the longest prompt, M tokens of the longest steps and marks, T response width, K steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybridrl.config import PPOTrainerConfig
from hybridrl.errors import ModelError
from hybridrl.models.classifier import check_step_model
from hybridrl.models.model_config import config_of
from hybridrl.models.rendering import rendered
from hybridrl.protocol import DataProto
from hybridrl.reward.conversations import KEY, Conversations, generated_tokens, own_tokenizer, refuse_images
from hybridrl.reward.positions import last_generated, response_lengths, tensors_of
from hybridrl.reward.response_steps import StepPlaces, steps_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STEPS = "reward.reward_model.steps"
#: one number of the scores of all steps, by `steps.reward`
_OF_ALL: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "min": min,
    "product": math.prod,
    "last": lambda scores: scores[-1],
}


def reader_of(config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase) -> Conversations | StepConversations:
    """Return what makes the batches that the reward model scores: of conversations, or of their steps."""
    kind = StepConversations if config.reward.reward_model.steps.enable else Conversations
    return kind(config, tokenizer)


class StepConversations:
    """Makes the batches that a classifier of steps scores, and rewards of its scores.

    It reads the prompt in its own chat template, and then each step of the response without the separators after it,
    followed by the mark. The score of a step is the output at the last token of its mark: of one label the number
    itself, of two the probability of the second. Prompt, steps and marks are tokenized each by itself, so that the
    place of a mark does not depend on what a response says.

    Args:
        config: the run's configuration.
        tokenizer: the policy's.

    Raises:
        ModelError: the model cannot score steps, or its tokenizer cannot render prompts.
    """

    def __init__(self, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        part = config.reward.reward_model
        hf_config = config_of(part.model)
        self._labels = check_step_model(part.model, hf_config, KEY)
        self._own = own_tokenizer(part.model, hf_config)
        if self._own.chat_template is None:
            raise ModelError(
                f"{KEY}: its tokenizer has no chat template, and prompts of steps are rendered for it; set "
                f"{KEY}.custom_chat_template"
            )
        self._policy, self._steps = tokenizer, part.steps
        mark = part.steps.mark if part.steps.mark is not None else part.steps.separator
        self._mark = self._encoded(mark)
        if not self._mark:
            raise ModelError(f"{_STEPS}.mark={mark!r}: the tokenizer of {part.model.path} makes no token of it")
        self._places = StepPlaces(tokenizer, part.steps.separator)

    def __call__(self, batch: DataProto) -> DataProto:
        """Return what the model reads of a batch of responses.

        Returns:
            `input_ids`, `attention_mask` [B, P + M + 1], prompts padded at the left and steps at the right, and
            `response_mask` [B, M + 1]: 1 after the last token of each mark.

        Raises:
            RewardError: a prompt has images, which the model would not see.
        """
        refuse_images(batch)
        reason = "scores steps of the response as a text, so it"
        answers = self._policy.batch_decode(generated_tokens(batch, reason), skip_special_tokens=True)
        prompts = [self._prompt(list(messages)) for messages in batch.non_tensor_batch["raw_prompt"]]
        read = [self._read(answer) for answer in answers]
        prompt_width, answer_width = max(map(len, prompts)), max(len(ids) for ids, _ in read) + 1
        ids = torch.zeros(len(read), prompt_width + answer_width, dtype=torch.int64)
        mask, marks = torch.zeros_like(ids), torch.zeros(len(read), answer_width, dtype=torch.int64)
        for row, (prompt, (answer, ends)) in enumerate(zip(prompts, read, strict=True)):
            ids[row, prompt_width - len(prompt) : prompt_width + len(answer)] = torch.tensor([*prompt, *answer])
            mask[row, prompt_width - len(prompt) : prompt_width + len(answer) + 1] = 1
            marks[row, ends] = 1
        return DataProto.from_dict(tensors={"input_ids": ids, "attention_mask": mask, "response_mask": marks})

    def rewards(self, scores: torch.Tensor, read: DataProto, batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
        """Place scores on the tokens of the responses.

        Args:
            scores: [B, M + 1], the head's output before each token of the responses in `read`.
            read: what this object made of `batch`.

        Returns:
            Rewards [B, T], float32; and columns: `rm_scores`, their sum, and `rm_step_scores`, lists of K.
        """
        tensors, marks = tensors_of(batch), read.batch["response_mask"].bool()
        values = scores.float() if self._labels == 1 else scores.float().sigmoid()
        of_steps = [row[keep].tolist() for row, keep in zip(values, marks, strict=True)]
        rewards = torch.zeros(tensors["responses"].shape, dtype=torch.float32)
        if (number := _OF_ALL.get(self._steps.reward)) is not None:
            rows = torch.arange(len(rewards))
            rewards[rows, last_generated(batch)] = torch.tensor([number(step_scores) for step_scores in of_steps])
        else:
            for row, (place, step_scores) in enumerate(zip(self._ends(batch), of_steps, strict=True)):
                rewards[row].index_add_(0, torch.tensor(place), torch.tensor(step_scores))
        return rewards, {"rm_scores": rewards.sum(-1).tolist(), "rm_step_scores": of_steps}

    def _ends(self, batch: DataProto) -> list[list[int]]:
        """The last generated token of each step of each response."""
        tensors, lengths = tensors_of(batch), response_lengths(batch).tolist()
        own, ends = tensors.get("response_mask", None), []
        for row, length in enumerate(lengths):
            tokens = tensors["responses"][row, :length].tolist()
            ends.append(self._places(tokens, [1] * length if own is None else own[row, :length].tolist()))
        return ends

    def _read(self, answer: str) -> tuple[list[int], list[int]]:
        """The tokens of steps and marks, and the places after the marks."""
        ids: list[int] = []
        ends, separator = [], self._steps.separator
        for step in steps_of(answer, separator):
            while step.endswith(separator):
                step = step.removesuffix(separator)
            ids += [*self._encoded(step), *self._mark]
            ends.append(len(ids))
        return ids, ends

    def _prompt(self, messages: list[Any]) -> list[int]:
        begun = ""
        if messages[-1]["role"] == "assistant":  # data.last_assistant_turn=continue
            messages, begun = messages[:-1], str(messages[-1].get("content") or "")
        return self._encoded(rendered(self._own, messages, is_generated=True, add_generation_prompt=True) + begun)

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._own.encode(text, add_special_tokens=False)
        return ids
