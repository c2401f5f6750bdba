"""The interface of a simulated user; its methods are verl's."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from hybridrl.registry import INTERACTIONS
from hybridrl.utils.entry_metadata import EntryMetadata

T = TypeVar("T", bound="type[BaseInteraction]")


class BaseInteraction:
    """Answers the model as a user would. Derive from it, and name the class in `multi_turn.interaction_config_path`.

    One object serves all sessions; what belongs to a session is kept under its `instance_id`. The calls of a session
    run in an event loop of that session, in a thread of its own.

    Args:
        config: the entry `config`, with the entry's `name`.

    Attributes:
        config_names: the entries that `config` may have; None: any, which the user reads as it likes.
        name: of the entry.
    """

    config_names: ClassVar[Sequence[str] | None] = None

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a session.

        Args:
            instance_id: of the session.
            kwargs: the row's `interaction_kwargs`.

        Returns:
            The id that the other methods get.
        """
        return instance_id or uuid.uuid4().hex

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str | list[dict[str, Any]], float | None, dict[str, Any]]:
        """Answer the last of `messages`, a turn of the model.

        Args:
            messages: the conversation; turns of the model as text.
            kwargs: the row's `interaction_kwargs`.

        Returns:
            Whether the conversation is over (the answer is not shown then), the answer (text, or parts
            `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}` with PIL images), the score of the
            turn (None: it has none), and further values, which become the column `interaction_extra`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the conversation when it has ended; reward functions get it by the interaction's name."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """The session has ended."""


def register_interaction(name: str) -> Callable[[T], T]:
    """Class decorator: `class_name: NAME` in `multi_turn.interaction_config_path` is this simulated user."""

    def add(interaction: T) -> T:
        INTERACTIONS.add(name, interaction, EntryMetadata())
        return interaction

    return add
