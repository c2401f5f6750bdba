"""Pictures as models read them: upright, with 8 bits of red, green and blue."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
from PIL.ExifTags import Base
from PIL.Image import Transpose

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST_8, _LARGEST_16 = 2**8 - 1, 2**16 - 1
#: the values of the tag Orientation, and what makes such a picture upright
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
#: where a PNG file may have the tag; its end is read only if one of these is in it
_TAGS_OF_PNG = (b"eXIf", b"Raw profile type exif", b"tiff:Orientation")


def upright_size(image: Image) -> tuple[int, int]:
    """Width and height of an image that `as_rgb` has turned; its pixels are not decoded."""
    width, height = image.size
    return (height, width) if _orientation(image) in _SIDEWAYS else (width, height)


def as_rgb(image: Image) -> Image:
    """An image with 8 bits of red, green and blue, turned as its tag Orientation says.

    Pillow would cut grey values of 16 bits at 255, so that nearly every image of them were white: they are scaled.

    Raises:
        ValueError: its values have no range.
    """
    turn = _UPRIGHT.get(_orientation(image))
    if image.mode == "F":
        raise ValueError("its values are floats, of no known range; write it with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if values.size and (values.min() < 0 or values.max() > _LARGEST_16):
            raise ValueError(f"its values are integers of 32 bits from {values.min()} to {values.max()}")
        # Integers of 32 bits say nothing of their range: those up to 255 are of 8 bits, as they are anywhere else.
        if image.mode != "I" or (values.size and values.max() > _LARGEST_8):
            values = values.astype(np.uint32) * _LARGEST_8 // _LARGEST_16
        image = PIL.Image.fromarray(values.astype(np.uint8))
    rgb = image.convert("RGB")
    return rgb if turn is None else rgb.transpose(turn)


def _orientation(image: Image) -> int:
    """The tag Orientation of an image, 1 if it is upright or its tags are damaged."""
    kind, file = getattr(image, "format", None), getattr(image, "fp", None)
    if kind == "TIFF":  # which Pillow turns when it decodes the pixels, and whose size it gives as turned
        return 1
    if kind == "PNG" and isinstance(file, io.BytesIO) and not any(tag in file.getvalue() for tag in _TAGS_OF_PNG):
        return 1  # Pillow would decode the whole file to look for tags at its end
    try:
        return int(image.getexif().get(Base.Orientation, 1))
    except Exception:  # Pillow may raise anything for damaged tags; the pixels say themselves if they are damaged
        return 1
