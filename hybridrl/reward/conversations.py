"""Finished responses as a reward model reads them: whole conversations, in its own tokens and chat template.

Shapes: B rows, W tokens of the longest conversation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hybridrl.config import ModelConfig, PPOTrainerConfig
from hybridrl.errors import ModelError, RewardError
from hybridrl.models.chat import encode, with_answer
from hybridrl.models.classifier import check_reward_model, scored_length
from hybridrl.models.info import tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.models.rendering import rendered
from hybridrl.models.tokenizer import check_vocabulary
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import MULTI_MODAL_INPUTS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

KEY = "reward.reward_model.model"


def own_tokenizer(model: ModelConfig, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Return the reward model's tokenizer.

    Raises:
        ModelError: there is none, or it has tokens that the model does not know.
    """
    try:
        tokenizer = tokenizer_of(model)
        check_vocabulary(tokenizer, config.get_text_config().vocab_size, model.tokenizer_path or model.path)
    except ModelError as error:
        raise ModelError(f"{KEY}: {error} (here {KEY}.tokenizer_path)") from error
    return tokenizer


def refuse_images(batch: DataProto) -> None:
    """Refuse prompts whose images the reward model would not see.

    Raises:
        RewardError: there are some.
    """
    if any(len(images) for images in batch.non_tensor_batch.get(MULTI_MODAL_INPUTS, ())):
        raise RewardError(
            "reward.reward_model.enable=True: the reward model reads text, and prompts of this batch have images; "
            "score them with a reward function"
        )


def generated_tokens(batch: DataProto, reason: str) -> list[list[int]]:
    """Return the tokens of each response, those of tools included; a warning tells of these.

    Args:
        reason: why it reads them as one text.
    """
    width = batch.batch["responses"].shape[1]
    mask = batch.batch["attention_mask"][:, -width:].bool()
    written = batch.batch.get("response_mask", None)
    if written is not None and bool((mask & ~written.bool()).any()):
        notify(
            f"the reward model {reason} reads a session with tools (rollout.multi_turn, rollout.agent) as one long "
            "answer, which holds the text of the tools too; a classifier of whole responses with tokenizer and "
            "template of the policy would read the session's turns",
            "warning",
            once=True,
        )
    return [row[keep].tolist() for row, keep in zip(batch.batch["responses"], mask, strict=True)]


class Conversations:
    """Makes the batches that the reward model scores.

    If its tokenizer and chat template are those of the policy, the tokens of prompt and response are used as they are,
    and what the template writes after an answer is added where the response lacks it. Otherwise the messages of the
    prompt and the text of the response are rendered with its own template and tokenized. In both cases the score is
    that of transformers for the rendered conversation.

    Args:
        config: the run's configuration.
        tokenizer: the policy's.

    Attributes:
        renders: whether conversations are tokenized anew.

    Raises:
        ModelError: the model cannot score, or its tokenizer cannot render conversations.
    """

    def __init__(self, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        part = config.reward.reward_model
        self._config = config_of(part.model)
        check_reward_model(part.model, self._config, KEY)
        self._own = own_tokenizer(part.model, self._config)
        self._policy = tokenizer
        self._max_length = part.max_length
        same_template = tokenizer.chat_template == self._own.chat_template
        self.renders = not same_template or tokenizer.get_vocab() != self._own.get_vocab()
        if self.renders and self._own.chat_template is None:
            raise ModelError(
                f"{KEY}: its tokenizer is not the policy's and has no chat template, so it cannot read conversations; "
                f"set {KEY}.custom_chat_template"
            )
        if self.renders:
            difference = "chat template" if not same_template else "tokenizer"
            notify(f"the reward model has a {difference} of its own: conversations are rendered and tokenized for it")
        self._closing = [] if self.renders else self._closing_tokens()
        self._told = False

    def __call__(self, batch: DataProto) -> DataProto:
        """Return the conversations of a batch of responses.

        Returns:
            `input_ids`, `attention_mask` [B, W + 1], padded at the left, and `response_mask` [B, 1]: the last column
            holds a token that is never read, before which the score is taken.

        Raises:
            RewardError: a prompt has images, which the model would not see.
        """
        refuse_images(batch)
        rows = self._rendered(batch) if self.renders else self._as_generated(batch)
        cut = [row[: self._max_length] for row in rows]
        if not self._told and any(len(short) < len(row) for short, row in zip(cut, rows, strict=True)):
            self._told = True
            notify(f"conversations of more than reward.reward_model.max_length={self._max_length} tokens are cut")
        cut = [row[: scored_length(row, self._config)] for row in cut]
        width = max(map(len, cut)) + 1
        ids, mask = torch.zeros(len(cut), width, dtype=torch.int64), torch.zeros(len(cut), width, dtype=torch.int64)
        for number, row in enumerate(cut):
            ids[number, width - 1 - len(row) : width - 1] = torch.tensor(row)
            mask[number, width - 1 - len(row) :] = 1
        response_mask = torch.ones(len(cut), 1, dtype=torch.int64)
        return DataProto.from_dict(tensors={"input_ids": ids, "attention_mask": mask, "response_mask": response_mask})

    def _as_generated(self, batch: DataProto) -> list[list[int]]:
        ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"].bool()
        rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        return [row + self._closing[self._closed(row) :] for row in rows]

    def _closed(self, row: list[int]) -> int:
        """Count the closing tokens that a row already ends with."""
        counts = range(len(self._closing), 0, -1)
        return next((count for count in counts if row[-count:] == self._closing[:count]), 0)

    def _rendered(self, batch: DataProto) -> list[list[int]]:
        reason = "has a tokenizer or chat template of its own, so it"
        answers = self._policy.batch_decode(generated_tokens(batch, reason), skip_special_tokens=True)
        prompts = batch.non_tensor_batch["raw_prompt"]
        texts = [self._render(with_answer(prompt, answer)) for prompt, answer in zip(prompts, answers, strict=True)]
        return encode(self._own, texts, self._max_length)

    def _closing_tokens(self) -> list[int]:
        """The tokens that the chat template writes after the last answer; none without a template."""
        if self._own.chat_template is None:
            return []
        answer = "ANSWER"
        text = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}])
        return self._own.encode(text.rpartition(answer)[2], add_special_tokens=False)

    def _render(self, messages: list[Any]) -> str:
        return rendered(self._own, messages, is_generated=True, add_generation_prompt=False)
