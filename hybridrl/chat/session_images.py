"""The images of sessions: each is read once, placed by its tokens, and recorded for each request.

In the messages of a session an image is the part `{"type": "image", "image": ...}`. `ImageReader.prepared` replaces
what a tool, an environment or a user gave by its patches, which the sampler and the trainer get.

Shapes: L tokens of a sequence, N patches of D numbers.
"""

import asyncio
import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import PIL.Image
import torch
from PIL.Image import Image

from hybridrl.errors import RolloutError
from hybridrl.models.chat import Message
from hybridrl.models.pictures import as_rgb
from hybridrl.models.vision import ImageProcessor, ImageTensors
from hybridrl.rollout.request import Completion
from hybridrl.rollout.request_images import PromptImages, join_images

_PLACEHOLDER = re.compile("(<image>)")  # in the text of a data set's messages

#: what OpenAI's and Anthropic's APIs take, too; other decoders of Pillow are not for untrusted files
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 2**25  # of an untrusted image: 100 MB while it is decoded

#: media type and bytes
ImageFile = tuple[str, bytes]
#: (prompt, completion) of each call of a session
Generated = Sequence[tuple[Sequence[int], Completion]]


def opened(data: bytes) -> Image:
    """An image out of an untrusted file, whose pixels are not decoded yet.

    Raises:
        RolloutError: it is none of `FORMATS`, or too large.
    """
    try:
        image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # Pillow may raise anything for a damaged file
        raise RolloutError(f"an image cannot be read as {', '.join(FORMATS)}: {type(error).__name__}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise RolloutError(f"an image has {width} x {height} pixels; the limit is {MAX_PIXELS}. Make it smaller")
    return image


class ImageReader:
    """Makes patches of images, for all sessions of a run.

    Args:
        processor: of the model.
        most: images of a request (`rollout.limit_images`); None: any number.
    """

    def __init__(self, processor: ImageProcessor, most: int | None = None) -> None:
        self.processor = processor
        self.most = most

    def patches(self, image: Any) -> ImageTensors:
        """Return the patches of an image.

        Args:
            image: a PIL image; or patches, `{"pixel_values" [N, D], "image_grid_thw" [1, 3]}`.

        Raises:
            RolloutError: it is neither, or cannot be read.
        """
        if isinstance(image, Mapping) and {"pixel_values", "image_grid_thw"} <= image.keys():
            return dict(image)
        if not isinstance(image, Image):
            raise RolloutError(f"an image of a session is {type(image).__name__}; give a PIL image")
        try:
            return self.processor.pixels([as_rgb(image)])
        except Exception as error:  # Pillow and image processors may raise anything for a damaged or a strange image
            raise RolloutError(f"an image cannot be read: {type(error).__name__}: {error}") from error

    async def read(self, images: Sequence[Any]) -> list[ImageTensors]:
        """The patches of images, computed in a thread."""
        return await asyncio.to_thread(lambda: [self.patches(image) for image in images]) if images else []

    async def prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Messages whose images are patches."""
        prepared: list[Message] = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list | tuple):
                content = [dict(part) for part in content]
                image_parts = [part for part in content if part.get("type") == "image"]
                for part, patches in zip(
                    image_parts, await self.read([entry.get("image") for entry in image_parts]), strict=True
                ):
                    part["image"] = patches
            prepared.append({**message, "content": content})
        return prepared

    def in_request(
        self, prompt: Sequence[int], images: Sequence[ImageTensors], generated: Generated
    ) -> PromptImages | None:
        """The images of a request of a session.

        Args:
            prompt: with as many placeholders as the images have tokens, next to those that the policy wrote.
            images: in the order of their tokens.
            generated: of the session so far.

        Raises:
            RolloutError: placeholders and images do not fit, or there are too many images.
        """
        if self.most is not None and len(images) > self.most:
            raise RolloutError(
                f"a session has {len(images)} images, and the engine was started for prompts of "
                f"actor_rollout_ref.rollout.limit_images={self.most}; raise it, or set it to null"
            )
        tokens, ids = self.processor.media_tokens, list(prompt)
        written = {place for place, _, _ in generated_in(ids, generated) if ids[place] in tokens}
        subject = "a session's prompt"
        return PromptImages.of(ids, join_images(images), self.processor.config, subject, written)

    def positions(self, ids: Sequence[int], images: PromptImages | None) -> torch.Tensor:
        """The positions [4, L] of a trajectory's tokens."""
        mask = torch.zeros(len(ids), dtype=torch.bool) if images is None else images.mask(len(ids))
        return self.processor.positions(ids, None if images is None else tensors_of(images), mask)


class SeenImages:
    """The images of one session.

    Args:
        reader: of the run.

    Attributes:
        requests: the images of each call in the session, in the order of `SessionClient.generated`.
    """

    def __init__(self, reader: ImageReader) -> None:
        self.reader = reader
        self.requests: list[PromptImages | None] = []
        #: id of an object -> (object, patches); the objects are kept, so that their ids stay theirs
        self._patches_by_id: dict[int, tuple[Any, ImageTensors]] = {}

    async def read(self, images: Sequence[Any]) -> list[ImageTensors]:
        """The patches of images; an object that was read before is not read again."""
        new = [image for image in images if id(image) not in self._patches_by_id]
        for image, patches in zip(new, await self.reader.read(new), strict=True):
            self._patches_by_id[id(image)] = (image, patches)
        return [self._patches_by_id[id(image)][1] for image in images]

    def of_trajectory(
        self, whole: Sequence[int], generated: Generated, returned: Sequence[Any] | None
    ) -> tuple[PromptImages | None, list[int]]:
        """The images of a trajectory, and the numbers of the calls that had these, or the first of them.

        Args:
            whole: tokens of the trajectory.
            generated: of the session.
            returned: the images as a loop returned them; None: those of the longest request in the trajectory.

        Raises:
            RolloutError: the loop returned others, or in another order, than the sampler saw.
        """
        ids = list(whole)
        numbers = [n for n, (prompt, _) in enumerate(generated) if ids[: len(prompt)] == list(prompt)]
        numbers.sort(key=lambda number: len(generated[number][0]))
        if not numbers:
            return None, []
        if returned is not None:
            patches = [
                self._patches_by_id[id(image)][1] if id(image) in self._patches_by_id else self.reader.patches(image)
                for image in returned
            ]
            names = [PromptImages(tensors, ()).digest() for tensors in patches]
            matching = [number for number in numbers if self._digests(number) == names[: len(self._digests(number))]]
            if not matching:
                raise RolloutError(
                    "an agent loop returned multi_modal_data with other images than those that its response was "
                    "generated from, or in another order; return the image_data of the last request"
                )
            numbers = matching
        last = self._digests(numbers[-1])
        return self.requests[numbers[-1]], [n for n in numbers if self._digests(n) == last[: len(self._digests(n))]]

    def _digests(self, number: int) -> list[str]:
        images = self.requests[number]
        return [] if images is None else images.digests()


def generated_in(whole: Sequence[int], generated: Generated) -> Iterator[tuple[int, int, int]]:
    """The tokens of a sequence that the policy wrote, each after exactly the tokens that stand before it.

    Yields:
        (place in the sequence, number of the call, place in its completion).
    """
    ids = list(whole)
    for number, (prompt, completion) in enumerate(generated):
        first = len(prompt)
        if ids[:first] != list(prompt):
            continue
        for index, token in enumerate(completion.token_ids):
            if first + index >= len(ids) or ids[first + index] != token:
                break
            yield first + index, number, index


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[ImageTensors]:
    """The patches of messages that were prepared, in order."""
    parts = [part for message in messages for part in _parts(message.get("content")) if part.get("type") == "image"]
    missing = [part for part in parts if not isinstance(part.get("image"), Mapping)]
    if missing:
        raise RolloutError("a message has an image that was not prepared; pass messages to `self.prepared` first")
    return [part["image"] for part in parts]


def with_row_images(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[Message]:
    """The messages of a data set's row with its images, such as their patches, at their placeholders."""
    remaining, converted = iter(images), []
    for message in messages:
        content: Any = message.get("content")
        parts = [] if isinstance(content, str | None) else content
        if (images and isinstance(content, str) and "<video>" in content) or any(
            part["type"] == "video" for part in parts
        ):
            raise RolloutError("a prompt of a session has a video; sessions show images and text")
        if images and isinstance(content, str) and "<image>" in content:
            pieces = [piece for piece in _PLACEHOLDER.split(content) if piece]
            content = [{"type": "image"} if piece == "<image>" else {"type": "text", "text": piece} for piece in pieces]
        if not isinstance(content, str | None):
            content = [
                {**part, "image": next(remaining)} if part["type"] == "image" else dict(part) for part in content
            ]
        converted.append({**message, "content": content})
    return converted


def with_data_urls(messages: Sequence[Mapping[str, Any]], files: Sequence[ImageFile]) -> list[Message]:
    """The messages of a data set's row with its images as OpenAI's chat API takes them."""
    converted = with_row_images(messages, files)
    for message in converted:
        if isinstance(message.get("content"), list):
            message["content"] = [
                _as_data_url(part) if part["type"] == "image" else part for part in message["content"]
            ]
    return converted


def _as_data_url(part: Mapping[str, Any]) -> dict[str, Any]:
    kind, data = part["image"]
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}


def tensors_of(images: PromptImages) -> ImageTensors:
    """The patches of images that have not been sent anywhere."""
    assert isinstance(images.tensors, dict)
    return images.tensors


def _parts(content: Any) -> Sequence[Mapping[str, Any]]:
    return () if content is None or isinstance(content, str) else content
