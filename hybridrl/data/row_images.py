"""The images and videos of a data set's rows: read, counted against the placeholders of the prompt, and made ready for
the model.

A row has its images in a column (`data.image_key`), a list of `{"bytes": ...}`, `{"path": ...}`, paths or PIL images.
The text of its messages has `<image>` where each belongs. A message may instead be a list of parts, in which
`{"type": "image"}` stands for the next image of the column and `{"type": "image", "image": ...}` has its own, which may
also be called `path`, `bytes` or `url`. Videos
(`data.video_key`, `<video>`, parts of type `video`) likewise; see `hybridrl.data.row_videos`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import DataError
from hybridrl.models.chat import Message
from hybridrl.models.pictures import as_rgb
from hybridrl.models.videos import Clip
from hybridrl.models.vision import ImageProcessor
from hybridrl.protocol.names import IMAGE_FILES

if TYPE_CHECKING:
    from PIL.Image import Image

PLACEHOLDER, VIDEO_PLACEHOLDER = "<image>", "<video>"
#: the formats of Pillow that are sent as they are
_MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
_KIND_OF = {PLACEHOLDER: "image", VIDEO_PLACEHOLDER: "video"}
#: names that a part may have for its file, besides that of its kind, and those that only other libraries read
_SOURCES = ("bytes", "path", "url")
_UNREAD_SOURCES = ("image_url", "video_url", "base64", "data", "file", "uri")
_PIECES = re.compile(f"({'|'.join(map(re.escape, _KIND_OF))})")


class RowImages:
    """Reader of the images and videos of a data set's rows.

    Args:
        processor: of the model.
        column: where rows have their images (`data.image_key`).
        video_column: where rows have their videos (`data.video_key`).
    """

    def __init__(self, processor: ImageProcessor, column: str, video_column: str) -> None:
        self.processor = processor
        self.column, self.video_column = column, video_column

    @property
    def columns(self) -> tuple[str, str]:
        """Those of images and of videos."""
        return self.column, self.video_column

    def place(
        self, messages: Sequence[Message], row: Mapping[str, Any], where: str
    ) -> tuple[list[Message], list[Image | Clip]]:
        """Return messages as the chat template takes them, and their images and clips in order; nothing is decoded yet.

        Args:
            messages: of the row, with placeholders.
            row: its columns.
            where: the row, for messages.

        Raises:
            DataError: the row has more or fewer images or videos than placeholders, or one cannot be read.
        """
        waiting = {"image": _Waiting(row.get(self.column)), "video": _Waiting(row.get(self.video_column))}
        template_messages: list[Message] = []
        media: list[Image | Clip] = []
        opened = 0
        for message in messages:
            parts = _parts(message.get("content"))
            if not isinstance(parts, list):
                template_messages.append(message)
                continue
            content: list[Mapping[str, Any]] = []
            for part in parts:
                kind = part["type"]
                if kind not in waiting:
                    content.append(part)
                    continue
                own = _own_source(part, kind, where)
                source = waiting[kind].next() if own is None else own
                if source is None and waiting[kind].is_short:
                    continue  # refused below, with both numbers
                name = f"{where}, {kind} {opened}"
                opened += 1
                if kind == "image":
                    content.append(part)
                    media.append(open_image(source, name))
                else:
                    self._show(source, name, content, media)
            template_messages.append({**message, "content": content})
        for kind, column, key, mark in (
            ("image", self.column, "data.image_key", PLACEHOLDER),
            ("video", self.video_column, "data.video_key", VIDEO_PLACEHOLDER),
        ):
            if waiting[kind].requested != waiting[kind].available:
                raise DataError(
                    f"{where}: the prompt has {waiting[kind].requested} {mark} and column {column!r} ({key}) has "
                    f"{waiting[kind].available} {kind}s; write {mark} once for each {kind}, where it belongs."
                )
        return template_messages, media

    def _show(self, source: Any, name: str, content: list[Mapping[str, Any]], media: list[Image | Clip]) -> None:
        """Append a video to the parts of a message, and its clips to `media`."""
        from hybridrl.data.row_videos import open_video

        video = open_video(source, name)
        try:
            clips = self.processor.videos.clips(video)
        except ValueError as error:
            raise DataError(f"{name}: {error}.") from error
        for text, clip in clips:
            if text:
                content.append({"type": "text", "text": text})
            if clip is not None:
                content.append({"type": "video"})
                media.append(clip)

    def expand(self, ids: Sequence[int], images: Sequence[Image | Clip], where: str) -> list[int]:
        """Return the prompt's token ids with as many placeholders as its images and clips have tokens.

        Raises:
            DataError: see `repeats`.
        """
        times = self.repeats(ids, images, where)
        return [repeated for token, count in zip(ids, times, strict=True) for repeated in [token] * count]

    def repeats(self, ids: Sequence[int], images: Sequence[Image | Clip], where: str) -> list[int]:
        """Return how often each token occurs: placeholders as often as their images have tokens, others once.

        Raises:
            DataError: the rendered prompt has another number of placeholders than of images, or the image processor
                refuses an image's size.
        """
        try:
            self._check_kinds(ids, images)
            return self.processor.repeats(ids, [self.processor.placeholders(image) for image in images])
        except ValueError as error:
            raise DataError(
                f"{where}: {error}. Check the images' sizes, that the text has no image token of its own, and that the "
                "chat template (actor_rollout_ref.model.custom_chat_template) writes images."
            ) from error

    def _check_kinds(self, ids: Sequence[int], images: Sequence[Image | Clip]) -> None:
        tokens = self.processor.media_tokens
        expected = [tokens[isinstance(medium, Clip)] for medium in images]
        actual = [token for token in ids if token in tokens]
        if len(actual) == len(expected) and actual != expected:
            raise ValueError("the chat template writes images and videos in another order than the messages have them")

    def files(self, images: Sequence[Image | Clip], where: str) -> dict[str, Any]:
        """Return `image_files`, for images that are not decoded yet.

        Raises:
            DataError: an image is damaged, or one of them is a video, which gateway agents cannot be shown.
        """
        stills = [image for image in images if not isinstance(image, Clip)]
        if len(stills) < len(images):
            raise DataError(f"{where} has a video, which gateway agents cannot be shown; leave the row out")
        try:
            return {IMAGE_FILES: [file_of(image) for image in stills]}
        except Exception as error:  # see `item`
            raise _damaged(where, error) from error

    def item(self, ids: Sequence[int], images: Sequence[Image | Clip], where: str) -> dict[str, Any]:
        """Return `multi_modal_inputs`, what the model reads of the images, and `position_ids` `[4, L]` of the prompt.

        Raises:
            DataError: an image or a video is damaged.
        """
        try:
            inputs = self.processor.pixels(images) if images else {}
        except Exception as error:  # Pillow, PyAV and image processors may raise anything for a damaged file
            raise _damaged(where, error) from error
        return {"multi_modal_inputs": inputs, "position_ids": self.processor.positions(ids, inputs)}


class _Waiting:
    """The images or videos of a row's column.

    Attributes:
        available: how many there are.
        requested: how many were asked for.
    """

    def __init__(self, column: Any) -> None:
        if column is not None and (isinstance(column, str | bytes | Mapping) or not isinstance(column, Sequence)):
            column = [column]
        self._entries = list(column or ())
        self.available, self.requested = len(self._entries), 0

    @property
    def is_short(self) -> bool:
        """Whether more were asked for than there are."""
        return self.requested > self.available

    def next(self) -> Any:
        """The next one; None if there is none."""
        self.requested += 1
        return None if self.is_short else self._entries[self.requested - 1]


def _own_source(part: dict[str, Any], kind: str, where: str) -> Any:
    """Take the image or video out of its part; None where it is the next one of the column.

    Raises:
        DataError: it is under a name that is not read.
    """
    if unread := next((name for name in _UNREAD_SOURCES if part.get(name) is not None), None):
        raise DataError(
            f"{where}: a part of type {kind!r} has {unread!r}, which is not read; write its file as {kind!r}: a path, "
            'or {"bytes": ...}.'
        )
    sources = {name: part.pop(name) for name in (kind, *_SOURCES) if part.get(name) is not None}
    files = {name: value for name, value in sources.items() if name in ("bytes", "path")}
    return sources.get(kind, sources.get("url", files or None))


def _damaged(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: an image or a video cannot be decoded: {type(error).__name__}: {error}")


def file_of(image: Image) -> tuple[str, bytes]:
    """The media type and the bytes of an image: of the file that it was opened from, or of a PNG file.

    Call it before the image is decoded.
    """
    file, kind = getattr(image, "fp", None), _MEDIA_TYPES.get(getattr(image, "format", None) or "")
    if isinstance(file, io.BytesIO) and kind is not None:
        return kind, file.getvalue()
    written = io.BytesIO()
    as_rgb(image).save(written, "PNG", compress_level=1)
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


def _parts(content: Any) -> Any:
    """The content of a message: text without placeholders as it is, else a list of parts that may be changed."""
    if isinstance(content, str):
        if not _PIECES.search(content):
            return content
        pieces = [piece for piece in _PIECES.split(content) if piece]
        return [{"type": _KIND_OF[piece]} if piece in _KIND_OF else {"type": "text", "text": piece} for piece in pieces]
    if content is None:
        return content
    return [{name: value for name, value in part.items() if value is not None} for part in content]
