"""Renders a dataset's conversations with the chat template, names the row of any error, and truncates."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.data.written_turns import written_form
from hybridrl.errors import DataError
from hybridrl.models.chat import Message
from hybridrl.models.rendering import LostTextError, rendered, unknown_roles, unread_fields
from hybridrl.notify import notify

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: what a text has where an image, a video or a sound belongs
_PLACES = re.compile(r"<(?:image|video|audio)>|<\|(?:image_pad|video_pad|audio_pad|image|image_1)\|>")


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        DataError: there is no chat template; the error says how to supply one.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template, so messages cannot be "
            "turned into a prompt. Use an instruction-tuned model, or give a Jinja template with "
            "actor_rollout_ref.model.custom_chat_template='...' (for main_sft, main_dpo, main_kto and main_rm: "
            "model.custom_chat_template)."
        )


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[Message]],
    locate: Callable[[int], str],
    *,
    add_generation_prompt: bool,
    continues: bool = True,
    template_kwargs: Mapping[str, Any] | Callable[[int], Mapping[str, Any]],
) -> list[str]:
    """Render every conversation to text. No text of a message is lost (`hybridrl.models.rendering`).

    A prompt that ends with a turn of the assistant is continued: the turn's text follows its opening as if the model
    had generated it (`data.last_assistant_turn=continue`; otherwise such prompts are not rendered).

    Args:
        tokenizer: a tokenizer with a chat template.
        conversations: lists of messages.
        locate: returns the file and row of the i-th conversation, for messages.
        add_generation_prompt: whether to end with the opening of an assistant turn.
        continues: whether a last turn of the assistant is continued; otherwise another one is opened after it.
        template_kwargs: further variables of the template (`data.apply_chat_template_kwargs`), or a function that
            returns those of the i-th conversation.

    Raises:
        DataError: the template refuses a conversation, or leaves out text of it; the error names its file, row, and
            turn.
    """
    texts = []
    for index, conversation in enumerate(conversations):
        own = template_kwargs(index) if callable(template_kwargs) else template_kwargs
        own = {name: value for name, value in own.items() if name not in ("tokenize", "add_generation_prompt")}
        begun = ""
        if add_generation_prompt and continues and conversation and conversation[-1].get("role") == "assistant":
            conversation, begun = conversation[:-1], str(conversation[-1].get("content") or "")
        try:
            texts.append(rendered(tokenizer, conversation, add_generation_prompt=add_generation_prompt, **own) + begun)
        except LostTextError as error:
            raise DataError(
                f"{locate(index)}: {error} (template of {tokenizer.name_or_path or 'the tokenizer'}). Change the "
                "message to a form that the template writes, or give another template with "
                "model.custom_chat_template or actor_rollout_ref.model.custom_chat_template."
            ) from error
        except Exception as error:
            # A template is a program and may fail in any way. The row that it fails on is what helps the user.
            raise DataError(
                f"{locate(index)}: the chat template of {tokenizer.name_or_path or 'the tokenizer'} refuses this "
                f"conversation: {type(error).__name__}: {error}. Fix the row, or set data.apply_chat_template_kwargs "
                "or model.custom_chat_template."
            ) from error
    return texts


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Cut a sequence to `limit` tokens.

    `left` drops the beginning, `right` the end, `middle` keeps the first `limit // 2` and the last `limit -
    limit // 2`.
    """
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[len(ids) - limit :]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def _texts(content: Any) -> list[str]:
    """The texts of a message's content."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return [part["text"] for part in parts if isinstance(part.get("text"), str)]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern of the tokenizer's special tokens, without the places of images in a text."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {token.content for token in added if token.special} - {"<image>", "<video>"}
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first))) if tokens else None


class FieldNotice:
    """Counts rows whose messages hold what has no effect or another one, to say it once.

    That are fields that the chat template does not read, roles that it does not name, texts that the tokenizer takes
    for special tokens, texts with turns of their own (`hybridrl.data.written_turns`), and places of media that a model
    of text does not see.

    Args:
        key: the configuration key that named the files.
        columns: the columns that messages come from.
        reads_media: whether the model reads images and videos.
        system_prompt: `data.system_prompt`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        key: str,
        columns: Sequence[str],
        *,
        reads_media: bool,
        system_prompt: str | None,
    ) -> None:
        self._system_prompt, self._with_prompt = system_prompt, 0
        self._places: collections.Counter[str] = collections.Counter()
        self._reads_media, self._with_places = reads_media, 0
        self._tokenizer, self._key, self._columns = tokenizer, key, columns
        self._forms: collections.Counter[str] = collections.Counter()
        self._with_turns = 0
        self._rows: dict[str, int] = {}
        self._unread: dict[tuple[str, str], bool] = {}
        self._special = _special_tokens(tokenizer)
        self._tokens: collections.Counter[str] = collections.Counter()
        self._roles: collections.Counter[str] = collections.Counter()
        self._is_unknown: dict[str, bool] = {}
        self._with_tokens, self._count = 0, 0

    def add(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Count a row."""
        names = set()
        texts = [text for message in messages for text in _texts(message.get("content"))]
        forms = {form for form in map(written_form, texts) if form is not None}
        self._forms.update(forms)
        self._with_turns += bool(forms)
        # The marks of turns that were rendered before may be special tokens: they are reported with the turns.
        tokens = {token for text in texts for token in self._tokens_in(text)} if not forms else set()
        self._tokens.update(tokens)
        self._with_tokens += bool(tokens)
        places = set() if self._reads_media else {place for text in texts for place in _PLACES.findall(text)}
        self._places.update(places)
        self._with_places += bool(places)
        self._count += 1
        self._with_prompt += bool(messages) and messages[0].get("content") == self._system_prompt
        for role in {str(message.get("role")) for message in messages}:
            if role not in self._is_unknown:
                self._is_unknown[role] = bool(unknown_roles(self._tokenizer, [{"role": role}]))
            self._roles[role] += self._is_unknown[role]
        for message in messages:
            role = str(message.get("role"))
            for name in message:
                if name in ("role", "content"):
                    continue
                if (role, name) not in self._unread:
                    self._unread[role, name] = name in unread_fields(self._tokenizer, [message])
                if self._unread[role, name]:
                    names.add(name)
        for name in names:
            self._rows[name] = self._rows.get(name, 0) + 1

    def _tokens_in(self, text: str) -> list[str]:
        """The special tokens that stand in a text."""
        return self._special.findall(text) if self._special else []

    def warn(self, reason: str = "") -> None:
        """Report turns in texts, special tokens, and which fields have no effect, and in how many rows."""
        if self._with_turns:
            columns = " or ".join(map(repr, dict.fromkeys(self._columns)))
            forms = ", ".join(f"{form} ({count} rows)" for form, count in self._forms.most_common(5))
            notify(
                f"{self._key}: texts of {self._with_turns} of {self._count} rows in the column {columns} have turns "
                f"of their own, and the chat template writes each as one turn: {forms}. Make messages of the turns, "
                '[{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...], without the marks '
                "between them",
                "warning",
            )
        if self._with_places:
            places = ", ".join(f"{place} ({count} rows)" for place, count in self._places.most_common())
            notify(
                f"{self._key}: texts of {self._with_places} of {self._count} rows have places of media, which a model "
                f"that reads text alone sees as these words: {places}. Use a vision-language model, or leave such rows "
                "out",
                "warning",
            )
        if self._with_tokens:
            tokens = ", ".join(map(repr, sorted(self._tokens)[:5]))
            notify(
                f"{self._key}: the messages of {self._with_tokens} of {self._count} rows have special tokens in their "
                f"text ({tokens}), which the tokenizer reads as tokens, and not as text. If the texts were rendered "
                "before, remove what the chat template writes itself: the end of an answer would be learnt twice",
                "warning",
            )
        if self._system_prompt and self._count and not self._with_prompt:
            notify(
                f"{self._key}: data.system_prompt has no effect, because every row has a system message of its own; "
                "remove the setting, or these messages",
                "warning",
            )
        if roles := [f"{role!r} ({count} rows)" for role, count in sorted(self._roles.items()) if count]:
            notify(
                f"{self._key}: messages have roles that the chat template does not name, and that it writes as they "
                f"are: {', '.join(roles)}. If a model was not trained with them, write user, assistant or tool",
                "warning",
            )
        if not self._rows:
            return
        counts = ", ".join(f"{name!r} ({count} rows)" for name, count in sorted(self._rows.items()))
        notify(f"{self._key}: fields of messages that the chat template does not read have no effect: {counts}{reason}")
