"""Results of the checks of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hybridrl.errors import UserError

Status = Literal["ok", "no", "failed"]


@dataclass(frozen=True)
class ModelCheckRow:
    """One property of a model.

    Attributes:
        topic: the property.
        status: `ok`: it holds, or the feature works; `no`: the model lacks the feature, and the library refuses or
            replaces it; `failed`: a number differs, or something is lost.
        text: the figure, or the reason.
    """

    topic: str
    status: Status
    text: str


def checked(topic: str, check: Callable[[], str], refused: Status = "failed") -> ModelCheckRow:
    """Run a check, whose text is returned where it passes.

    Args:
        topic: of the row.
        check: raises where the property does not hold.
        refused: the status where it raises a `UserError`.
    """
    try:
        return ModelCheckRow(topic, "ok", check())
    except UserError as error:
        return ModelCheckRow(topic, refused, one_line(error))
    except Exception as error:  # code of a model may raise anything, and the other checks go on
        return ModelCheckRow(topic, "failed", f"{type(error).__name__}: {one_line(error)}")


def one_line(error: object) -> str:
    """A message as one line."""
    return " ".join(str(error).split())


def as_table(rows: Iterable[ModelCheckRow], width: int) -> Iterator[str]:
    """Yield the lines of a table for people, with topics in `width` columns."""
    for row in rows:
        yield f"{row.topic:<{width}}  {row.status:<6}  {row.text}"


def as_data(rows: Iterable[ModelCheckRow]) -> list[dict[str, Any]]:
    """The rows as plain data."""
    return [{"topic": row.topic, "status": row.status, "text": row.text} for row in rows]
