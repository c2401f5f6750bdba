"""The place of an image in a prompt."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """An image among the tokens of a prompt.

    Attributes:
        first: the index of its first token.
        tokens: how many it has.
        digest: fingerprint of its patches (`hybridrl.models.vision.digest`).
    """

    first: int
    tokens: int
    digest: str
