"""The images of a data set's rows: read, counted against the placeholders of the prompt, and made ready for the model.

A row has its images in a column (`data.image_key`), a list of `{"bytes": ...}`, `{"path": ...}`, paths or PIL images.
The text of its messages has `<image>` where each belongs. A message may instead be a list of parts, in which
`{"type": "image"}` stands for the next image of the column and `{"type": "image", "image": ...}` has its own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import DataError
from hybridrl.models.chat import Message
from hybridrl.models.vision import ImageProcessor
from hybridrl.protocol.names import IMAGE_FILES

if TYPE_CHECKING:
    from PIL.Image import Image

PLACEHOLDER, VIDEO_PLACEHOLDER = "<image>", "<video>"
#: the formats of Pillow that are sent as they are
_MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
_PIECES = re.compile(f"({re.escape(PLACEHOLDER)})")


class RowImages:
    """What a data set does with the images of its rows.

    Args:
        processor: of the model.
        column: where rows have their images (`data.image_key`).
    """

    def __init__(self, processor: ImageProcessor, column: str) -> None:
        self.processor = processor
        self.column = column

    def place(
        self, messages: Sequence[Message], row: Mapping[str, Any], where: str
    ) -> tuple[list[Message], list[Image]]:
        """Return messages as the chat template takes them, and their images in order. No pixel is decoded yet.

        Args:
            messages: of the row, with placeholders.
            row: its columns.
            where: the row, for messages.

        Raises:
            DataError: the row has more or fewer images than placeholders, an image cannot be read, or it has a video.
        """
        own = row.get(self.column)
        if own is not None and (isinstance(own, str | bytes | Mapping) or not isinstance(own, Sequence)):
            own = [own]
        waiting = list(own or ())
        shown, sources, wanted = [], [], 0
        for message in messages:
            parts = _parts(message.get("content"), where)
            for part in parts if isinstance(parts, list) else ():
                if part["type"] == "image":
                    given = part.pop("image", None)
                    if given is None:
                        given = waiting[wanted] if wanted < len(waiting) else None
                        wanted += 1
                    sources.append(given)
            shown.append(message if parts is None else {**message, "content": parts})
        if wanted != len(waiting):
            raise DataError(
                f"{where}: the prompt has {wanted} {PLACEHOLDER} and column {self.column!r} (data.image_key) has "
                f"{len(waiting)} images; write {PLACEHOLDER} once for each image, where it belongs."
            )
        return shown, [open_image(source, f"{where}, image {number}") for number, source in enumerate(sources)]

    def expand(self, ids: Sequence[int], images: Sequence[Image], where: str) -> list[int]:
        """Return the prompt's token ids with as many placeholders as its images have tokens.

        Raises:
            DataError: see `repeats`.
        """
        times = self.repeats(ids, images, where)
        return [one for token, count in zip(ids, times, strict=True) for one in [token] * count]

    def repeats(self, ids: Sequence[int], images: Sequence[Image], where: str) -> list[int]:
        """Return how often each token occurs: placeholders as often as their images have tokens, others once.

        Raises:
            DataError: the rendered prompt has another number of placeholders than of images, or the image processor
                refuses an image's size.
        """
        try:
            return self.processor.repeats(ids, [self.processor.placeholders(image) for image in images])
        except ValueError as error:
            raise DataError(
                f"{where}: {error}. Check the images' sizes, that the text has no image token of its own, and that the "
                "chat template (actor_rollout_ref.model.custom_chat_template) writes images."
            ) from error

    def files(self, images: Sequence[Image], where: str) -> dict[str, Any]:
        """Return `image_files`, for images that are not decoded yet.

        Raises:
            DataError: an image is damaged.
        """
        try:
            return {IMAGE_FILES: [file_of(image) for image in images]}
        except Exception as error:  # see `item`
            raise _damaged(where, error) from error

    def item(self, ids: Sequence[int], images: Sequence[Image], where: str) -> dict[str, Any]:
        """Return `multi_modal_inputs`, what the model reads of the images, and `position_ids` `[4, L]` of the prompt.

        Raises:
            DataError: an image is damaged.
        """
        try:
            inputs = self.processor.pixels([image.convert("RGB") for image in images]) if images else {}
        except Exception as error:  # Pillow and image processors may raise anything for a damaged file
            raise _damaged(where, error) from error
        positions = self.processor.positions(ids, inputs.get("image_grid_thw"))
        return {"multi_modal_inputs": inputs, "position_ids": positions}


def _damaged(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: an image cannot be decoded: {type(error).__name__}: {error}")


def file_of(image: Image) -> tuple[str, bytes]:
    """The media type and the bytes of an image: of the file that it was opened from, or of a PNG file.

    Call it before the image is decoded.
    """
    file, kind = getattr(image, "fp", None), _MEDIA_TYPES.get(getattr(image, "format", None) or "")
    if isinstance(file, io.BytesIO) and kind is not None:
        return kind, file.getvalue()
    written = io.BytesIO()
    image.convert("RGB").save(written, "PNG", compress_level=1)
    return "image/png", written.getvalue()


def open_image(source: Any, where: str) -> Image:
    """Open an image without decoding it.

    Args:
        source: a PIL image, bytes of a file, a path, or `{"bytes": ...}` or `{"path": ...}`, as parquet files of images
            have them.
        where: the row and the image, for messages.

    Raises:
        DataError: it is none of these, or cannot be read.
    """
    import PIL.Image

    if isinstance(source, Mapping):
        source = next((source[name] for name in ("bytes", "image", "path") if source.get(name) is not None), None)
    if isinstance(source, PIL.Image.Image):
        return source
    if isinstance(source, str):
        if "://" in source and not source.startswith("file://"):
            raise DataError(f"{where}: {source[:80]!r} is an address; download the image and give its path.")
        source = Path(source.removeprefix("file://")).expanduser()
    elif isinstance(source, bytes | bytearray):
        source = io.BytesIO(source)
    elif not isinstance(source, Path):
        kind = "missing" if source is None else type(source).__name__
        raise DataError(f'{where}: it is {kind}; give a path, bytes, {{"bytes": ...}}, {{"path": ...}} or a PIL image.')
    try:
        # A file that is opened by its path stays open until its pixels are decoded.
        return PIL.Image.open(io.BytesIO(source.read_bytes()) if isinstance(source, Path) else source)
    except Exception as error:  # Pillow may raise anything for a damaged file
        raise DataError(f"{where}: it cannot be opened: {type(error).__name__}: {error}") from error


def _parts(content: Any, where: str) -> Any:
    """The content of a message: text without images as it is, else a list of parts that may be changed."""
    if isinstance(content, str):
        if VIDEO_PLACEHOLDER in content:
            raise DataError(f"{where}: the prompt has {VIDEO_PLACEHOLDER}, and videos are not supported.")
        if PLACEHOLDER not in content:
            return content
        pieces = [piece for piece in _PIECES.split(content) if piece]
        return [{"type": "image"} if piece == PLACEHOLDER else {"type": "text", "text": piece} for piece in pieces]
    if content is None:
        return content
    return [{name: value for name, value in part.items() if value is not None} for part in content]
