"""`verl.tools.schemas`. Descriptions of tools are plain dicts here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridrl.agents.tools.tool import ToolResponse, checked_schema

__all__ = ["OpenAIFunctionToolSchema", "ToolResponse"]


class OpenAIFunctionToolSchema(dict[str, Any]):
    """A description in OpenAI's format: a dict with the two methods of pydantic's models that verl's tools call."""

    @classmethod
    def model_validate(cls, value: Mapping[str, Any]) -> OpenAIFunctionToolSchema:
        """Check a description.

        Raises:
            RolloutError: it is not one.
        """
        return cls(checked_schema(value, str(value.get("function", value))))

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The description as a plain dict; arguments of pydantic have no effect, because nothing is unset."""
        return dict(self)
