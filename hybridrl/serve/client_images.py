"""Images of clients: read from their requests, named by the digest of their patches, and placed in prompts.

A request brings its images as `data:` URLs, again at every turn. `PictureReader.extract` reads each once, and leaves
`{"type": "image", "digest": ...}` in the messages, so that conversations are compared, kept and shown as plain data.
"""

import base64
import binascii
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from transformers import PreTrainedConfig

from hybridrl.chat.session_images import FORMATS, ImageReader, opened
from hybridrl.errors import RolloutError
from hybridrl.models.chat import Message
from hybridrl.models.vision import ImageTensors, digest
from hybridrl.rollout.request_images import PromptImages, join_images
from hybridrl.rollout.token_tree import Turn
from hybridrl.serve.schema import TOO_LONG, ApiError, short

_ADVICE = f"send it as data:image/png;base64,... ({', '.join(FORMATS)})"


@dataclass(frozen=True, eq=False)
class ClientImage:
    """An image of a client.

    Attributes:
        number: unique in the process.
        tensors: its patches.
        digest: their fingerprint.
    """

    number: int
    tensors: ImageTensors
    digest: str


@dataclass(frozen=True, slots=True)
class ShownImages(PromptImages):
    """The images of a request, and each of them by itself."""

    pictures: tuple[ClientImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request.

    Attributes:
        ids: its token ids.
        images: its images; None: it has none.
    """

    ids: list[int]
    images: ShownImages | None = None

    def with_more(self, ids: Sequence[int]) -> "Prompt":
        """The prompt with tokens of text after it."""
        return Prompt([*self.ids, *ids], self.images)


class PictureReader:
    """Reads the images of requests, in one thread.

    Args:
        reader: makes patches.
        max_tokens: most tokens of a request; images that have more together are not decoded.
    """

    def __init__(self, reader: ImageReader, max_tokens: int) -> None:
        self._reader = reader
        self._max_tokens = max_tokens
        self._numbers = itertools.count()
        #: digest of a file -> the image, while a session or a request has it
        self._by_file_digest: WeakValueDictionary[bytes, ClientImage] = WeakValueDictionary()

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the model."""
        return self._reader.processor.config

    def extract(
        self, messages: Sequence[Mapping[str, Any]], session_pictures: Mapping[str, ClientImage]
    ) -> tuple[list[dict[str, Any]], dict[str, ClientImage]]:
        """Messages that name their images by digest, and these images.

        Args:
            messages: of the inner request.
            session_pictures: images of the session by digest.

        Raises:
            ApiError: an image cannot be read, or there are too many or too large ones.
        """
        pictures: dict[str, ClientImage] = {}
        rewritten, images, tokens = [], 0, 0
        for number, message in enumerate(messages):
            content = message.get("content")
            if not isinstance(content, list):
                rewritten.append(dict(message))
                continue
            parts = []
            for part in content:
                if isinstance(part, Mapping) and part.get("type") in ("image_url", "image"):
                    where = f"message {number}, image {images}"
                    if message.get("role") == "assistant":
                        raise _refused(f"{where}: the model writes text; leave images out of its messages")
                    images += 1
                    self._check_count(images)
                    picture = self._picture(part, session_pictures, where, self._max_tokens - tokens)
                    tokens += self._tokens(picture)
                    pictures[picture.digest] = picture
                    part = {"type": "image", "digest": picture.digest}
                parts.append(part)
            rewritten.append({**message, "content": parts})
        return rewritten, pictures

    def _tokens(self, picture: ClientImage) -> int:
        return int(picture.tensors["image_grid_thw"].prod()) // int(self.config.vision_config.spatial_merge_size) ** 2

    def _check_count(self, images: int) -> None:
        most = self._reader.most
        if most is not None and images > most:
            raise _refused(f"there are more than {most} images (actor_rollout_ref.rollout.limit_images)")

    def _picture(
        self, part: Mapping[str, Any], session_pictures: Mapping[str, ClientImage], where: str, room: int
    ) -> ClientImage:
        """The image of a part.

        Args:
            room: most tokens that it may have.
        """
        if part["type"] == "image":  # of a conversation that the session keeps
            if part.get("digest") not in session_pictures:
                raise _refused(f"{where}: the session has no image of digest {short(part.get('digest'))}; {_ADVICE}")
            return session_pictures[part["digest"]]
        data = _file_of(part.get("image_url"), where)
        key = hashlib.sha256(data).digest()
        picture = self._by_file_digest.get(key)
        if picture is None:
            picture = self._by_file_digest[key] = self._read(data, where, room)
        elif self._tokens(picture) > room:
            raise self._too_long(where, self._tokens(picture))
        return picture

    def _read(self, data: bytes, where: str, room: int) -> ClientImage:
        try:
            image = opened(data)
            tokens = self._reader.processor.placeholders(image)
            if tokens > room:
                raise self._too_long(where, tokens)
            tensors = self._reader.patches(image)
        except ValueError as error:
            raise _refused(f"{where} has {image.size} pixels, which the model does not take: {error}") from error
        except RolloutError as error:
            raise _refused(f"{where}: {error}") from error
        return ClientImage(next(self._numbers), tensors, digest(tensors))

    def _too_long(self, where: str, tokens: int) -> ApiError:
        return ApiError(
            400,
            f"messages: {where} has {tokens} tokens, and the images of a request may have {self._max_tokens} "
            "(actor_rollout_ref.rollout.max_model_len). Make it smaller, or have the server do so "
            "(data.mm_processor_kwargs.max_pixels)",
            param="messages",
            code=TOO_LONG,
        )


def _refused(message: str) -> ApiError:
    return ApiError(400, f"messages: {message}", param="messages", code="unsupported_image")


def _file_of(value: Any, where: str) -> bytes:
    """The bytes of an image of a chat request.

    Raises:
        ApiError: they are not in the request.
    """
    url, detail = (value.get("url"), value.get("detail")) if isinstance(value, Mapping) else (value, None)
    if detail == "low":
        raise _refused(
            f"{where}: detail='low' is not supported: images have the size that they are sent in, or that "
            "data.mm_processor_kwargs.max_pixels of the run allows. Send a smaller one"
        )
    if not isinstance(url, str) or not url.startswith("data:"):
        raise _refused(
            f"{where} is {short(url)[:80]}: addresses, files and uploads are not read, because the training run has to "
            f"see the very image that was sampled from; {_ADVICE}"
        )
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise _refused(f"{where} is {head[:80]!r}; {_ADVICE}")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"{where}: the base64 data cannot be read: {error}; {_ADVICE}") from error


def with_patches(messages: Sequence[Message], pictures: Mapping[str, ClientImage]) -> list[Message]:
    """Messages as `Turns` takes them: each image with its patches."""
    return [
        {**message, "content": [_with_patches(part, pictures) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _with_patches(part: Mapping[str, Any], pictures: Mapping[str, ClientImage]) -> dict[str, Any]:
    return {"type": "image", "image": pictures[part["digest"]].tensors} if part["type"] == "image" else dict(part)


def pictures_in(messages: Sequence[Message], pictures: Mapping[str, ClientImage]) -> list[ClientImage]:
    """The images of messages, in order."""
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [pictures[part["digest"]] for parts in lists for part in parts if part["type"] == "image"]


def placed(
    ids: list[int], pictures: Sequence[ClientImage], config: PreTrainedConfig | None, continued_turn: Turn | None = None
) -> Prompt:
    """A prompt with its images at its placeholders.

    Args:
        pictures: in the order of their placeholders.
        config: of a model that reads images; None: it reads text alone.
        continued_turn: the turn that the prompt continues; what the policy wrote in it stands for no image.

    Raises:
        RolloutError: the prompt has another number of placeholders.
    """
    if config is None or not (pictures or continued_turn):
        return Prompt(ids)
    spans = continued_turn.images if continued_turn else ()
    of_images = {place for span in spans for place in range(span.first, span.first + span.tokens)}
    plain = set(range(continued_turn.end if continued_turn else 0)) - of_images
    images = PromptImages.of(ids, join_images([picture.tensors for picture in pictures]), config, "the prompt", plain)
    return Prompt(ids, None if images is None else ShownImages(images.tensors, images.places, tuple(pictures)))
