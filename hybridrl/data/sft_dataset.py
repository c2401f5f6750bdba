"""Conversations for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from hybridrl.data.chat import check_chat_template, render
from hybridrl.data.files import read_table
from hybridrl.data.rl_dataset import choose_rows, pad_token_id, seed_of
from hybridrl.data.table import Table
from hybridrl.errors import DataError
from hybridrl.models.chat import Message, as_messages, fault_in_messages, fault_in_prompt
from hybridrl.notify import notify

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import SFTDataConfig

TRUNCATIONS = ("error", "left", "right", "middle")
_CHUNK = 1024

Span = tuple[int, int]


class SFTDataset(Dataset):
    """Whole conversations as token ids, with a mask of the tokens that the loss covers.

    A row holds `config.messages_key`, a list of messages with at least one from the assistant. If `config.prompt_key`
    and `config.response_key` are set, it holds a prompt (text or messages) and a response (text) instead. The loss
    covers the assistant's turns: the text from the end of the turn's opening, as the generation prompt writes it, to
    the end of the turn, including the template's end-of-turn token but not the whitespace after it.

    An item is `{"input_ids": list[int], "loss_mask": list[int], "index": int}`. Both lists have the same length.

    Args:
        data_files: one or several paths.
        tokenizer: a tokenizer with a chat template and offsets (a "fast" tokenizer).
        config: `SFTDataConfig`.
        max_samples: number of rows to use; -1 uses all.
        key: the configuration key that named the files, for messages.

    Raises:
        DataError: a file is unreadable, a column is missing, a row is bad or overlong (each is named), or the chat
            template renders earlier turns differently once later ones follow, so that the model would be prompted with
            text that it was never trained on.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
        max_samples: int = -1,
        key: str = "data.train_files",
    ) -> None:
        if config.truncation not in TRUNCATIONS:
            raise DataError(f"data.truncation={config.truncation!r}: allowed are {', '.join(TRUNCATIONS)}.")
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'} ({type(tokenizer).__name__}) gives no "
                "character offsets, which are "
                "needed to find the assistant's tokens. Use a fast tokenizer (a model directory with tokenizer.json)."
            )
        check_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self.config = config
        self.key = key
        self.table: Table = read_table(data_files, key)
        self._rows = choose_rows(len(self.table), max_samples, config.shuffle, seed_of(config))
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        conversations = self._conversations()
        for start in range(0, len(conversations), _CHUNK):
            self._tokenize(conversations[start : start + _CHUNK], start)
        self._check_end_of_turn()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {
            "input_ids": self._ids[item].tolist(),
            "loss_mask": self._masks[item].astype(np.int64).tolist(),
            "index": int(self._rows[item]),
        }

    @property
    def pad_token_id(self) -> int:
        """The id that shorter sequences are padded with. The mask, not this id, marks padding."""
        return pad_token_id(self.tokenizer)

    def locate(self, item: int) -> str:
        """Return the file and row of an item, for messages."""
        return self.table.locate(int(self._rows[item]))

    def _conversations(self) -> list[list[Message]]:
        prompt_key, response_key = self.config.prompt_key, self.config.response_key
        if (prompt_key is None) != (response_key is None):
            raise DataError(
                f"data.prompt_key={prompt_key} and data.response_key={response_key}: set both for rows of prompt and "
                "response, or neither for rows of messages (data.messages_key)."
            )
        if prompt_key is not None and response_key is not None:
            return self._from_prompt_and_response(prompt_key, response_key)
        name = self.config.messages_key
        self.table.require(
            name,
            "data.messages_key",
            "Name the column of messages with data.messages_key, or set data.prompt_key and data.response_key.",
        )
        column = self.table.column(name)
        conversations = []
        for index in map(int, self._rows):
            fault = fault_in_messages(column[index])
            if fault is None and not any(message["role"] == "assistant" for message in column[index]):
                fault = "it has no message of role 'assistant', so there is nothing to learn"
            if fault:
                raise DataError(
                    f"{self.table.locate(index)}: column {name!r} cannot be used as a conversation: {fault}."
                )
            conversations.append(as_messages(column[index], self.config.system_prompt))
        return conversations

    def _from_prompt_and_response(self, prompt_key: str, response_key: str) -> list[list[Message]]:
        self.table.require(prompt_key, "data.prompt_key")
        self.table.require(response_key, "data.response_key")
        prompts, responses = self.table.column(prompt_key), self.table.column(response_key)
        conversations = []
        for index in map(int, self._rows):
            prompt = self._inside(index, prompts[index], prompt_key, "prompt_dict_keys")
            response = self._inside(index, responses[index], response_key, "response_dict_keys")
            fault = fault_in_prompt(prompt)
            if fault:
                raise DataError(
                    f"{self.table.locate(index)}: column {prompt_key!r} cannot be used as a prompt: {fault}."
                )
            if not isinstance(response, str) or not response:
                kind = "empty" if response == "" else "missing" if response is None else type(response).__name__
                raise DataError(
                    f"{self.table.locate(index)}: column {response_key!r} must be text that is not empty; it is {kind}."
                )
            messages = as_messages(prompt, self.config.system_prompt)
            answer: Message = {"role": "assistant", "content": response}
            fault = fault_in_messages([answer])
            if fault:
                raise DataError(f"{self.table.locate(index)}: column {response_key!r} cannot be learned: {fault}.")
            conversations.append([*messages, answer])
        return conversations

    def _inside(self, index: int, value: Any, column: str, key: str) -> Any:
        """The entry of a column's mappings that `data.<key>` leads to."""
        for name in self.config[key]:
            if not isinstance(value, Mapping) or name not in value:
                found = f"has {', '.join(map(str, value))}" if isinstance(value, Mapping) else "is no mapping"
                raise DataError(
                    f"{self.table.locate(index)}: data.{key}={self.config[key]}: column {column!r} {found}, and "
                    f"{name!r} is looked for in it."
                )
            value = value[name]
        return value

    def _tokenize(self, conversations: list[list[Message]], start: int) -> None:
        texts, spans = self._render_with_spans(conversations, start)
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        for number, (ids, offsets) in enumerate(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)):
            mask = token_mask(np.asarray(offsets).reshape(-1, 2), spans[number])
            self._append(np.asarray(ids, dtype=np.int32), mask, start + number)

    def _append(self, ids: np.ndarray, mask: np.ndarray, item: int) -> None:
        limit = self.config.max_length
        if len(ids) > limit:
            if self.config.truncation == "error":
                raise DataError(
                    f"{self.locate(item)}: the conversation has {len(ids)} tokens, more than data.max_length={limit}. "
                    "Raise data.max_length, or set data.truncation to left or right."
                )
            keep = kept_positions(len(ids), limit, self.config.truncation)
            ids, mask = ids[keep], mask[keep]
        self._ids.append(ids)
        self._masks.append(mask)

    def _render_with_spans(self, conversations: list[list[Message]], start: int) -> tuple[list[str], list[list[Span]]]:
        """Return the text of every conversation, and the spans of the assistant's turns in it."""
        prefixes: list[list[Message]] = []
        openings: list[list[Message]] = []
        owners: list[int] = []
        for number, messages in enumerate(conversations):
            for turn, message in enumerate(messages):
                if message["role"] == "assistant":
                    openings.append(messages[:turn])
                    prefixes.append(messages[: turn + 1])
                    owners.append(number)

        def render_all(items: list[list[Message]], generation: bool, rows: Sequence[int]) -> list[str]:
            return render(
                self.tokenizer,
                items,
                lambda i: self.locate(start + rows[i]),
                add_generation_prompt=generation,
                template_kwargs=self.config.apply_chat_template_kwargs or {},
            )

        texts = render_all(conversations, False, range(len(conversations)))
        opened, closed = render_all(openings, True, owners), render_all(prefixes, False, owners)
        spans: list[list[Span]] = [[] for _ in conversations]
        for owner, before, after in zip(owners, opened, closed, strict=True):
            self._check_append_only(texts[owner], before, after, start + owner)
            spans[owner].append((len(before), len(after.rstrip())))
        return texts, spans

    def _check_append_only(self, text: str, before: str, after: str, item: int) -> None:
        for part, what in (
            (before, "the prompt of an assistant turn"),
            (after, "the conversation up to an assistant turn"),
        ):
            if not text.startswith(part):
                at = next(
                    (i for i, (a, b) in enumerate(zip(text, part, strict=False)) if a != b), min(len(text), len(part))
                )
                raise DataError(
                    f"{self.locate(item)}: the chat template of {self.tokenizer.name_or_path or 'the tokenizer'} is "
                    f"not append-only: {what} is rendered as {part[max(0, at - 20) : at + 30]!r} on its own but as "
                    f"{text[max(0, at - 20) : at + 30]!r} in the whole conversation. Which tokens to learn cannot be "
                    "told. Make one row of each assistant turn (it last, the turns before it as its prompt), set "
                    "data.apply_chat_template_kwargs (for example enable_thinking), or give an append-only "
                    "model.custom_chat_template."
                )

    def _check_end_of_turn(self) -> None:
        """Warn once if no assistant turn ends in the EOS token, because a model trained this way may never stop."""
        eos = self.tokenizer.eos_token_id
        if eos is not None and not any(
            (ids[mask.astype(bool)] == eos).any() for ids, mask in zip(self._ids, self._masks, strict=True)
        ):
            notify(
                f"{self.key}: no learnt turn contains the EOS token {self.tokenizer.eos_token!r}; the chat template "
                "ends turns in another way, so generation must stop at that token",
                "warning",
            )


def token_mask(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return 1 for each token whose characters lie inside one of the spans, and 0 for the others.

    A token that begins before a span belongs to the prompt. A token without characters belongs to no span.

    Args:
        offsets: `[T, 2]` first and past-the-last character of each token.
        spans: first and past-the-last character of each piece of text that the loss covers.
    """
    mask = np.zeros(len(offsets), dtype=np.int8)
    for first, last in spans:
        mask |= ((offsets[:, 0] >= first) & (offsets[:, 0] < last) & (offsets[:, 1] > offsets[:, 0])).astype(np.int8)
    return mask


def kept_positions(length: int, limit: int, side: str) -> np.ndarray:
    """Return the positions of a sequence that survive truncation to `limit`; see `hybridrl.data.chat.truncate`."""
    if side == "left":
        return np.arange(length - limit, length)
    if side == "right":
        return np.arange(limit)
    head = limit // 2
    return np.concatenate([np.arange(head), np.arange(length - (limit - head), length)])
