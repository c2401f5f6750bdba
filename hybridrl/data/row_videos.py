"""The videos of a data set's rows: files, arrays and lists of frames."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridrl.data.row_images import open_image
from hybridrl.errors import DataError
from hybridrl.models.pictures import as_rgb, upright_size

if TYPE_CHECKING:
    from PIL.Image import Image

    from hybridrl.models.videos import FrameSource

_FORMS = (
    'a path, bytes, {"bytes": ...} or {"path": ...} of a file, or {"frames": ..., "fps": ...} with a list of images or '
    "an array [frames, height, width, 3] of uint8"
)


class Frames:
    """Frames that are there already.

    Attributes:
        count, fps, size: see `FrameSource`.
    """

    def __init__(self, images: Sequence[Image], fps: float) -> None:
        self._images = list(images)
        self.count, self.fps, self.size = len(self._images), fps, upright_size(self._images[0])

    def frames(self, indices: Sequence[int]) -> list[Image]:
        """See `FrameSource.frames`."""
        return [as_rgb(self._images[index]) for index in indices]


class VideoFile:
    """A file, decoded by PyAV when its frames are asked for.

    Attributes:
        count, fps, size: see `FrameSource`.
    """

    def __init__(self, source: Path | bytes) -> None:
        self._source = source
        with self._opened() as container:
            stream = container.streams.video[0]
            self.count = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
            self.fps, self.size = float(stream.average_rate), (stream.width, stream.height)

    def frames(self, indices: Sequence[int]) -> list[Image]:
        """See `FrameSource.frames`."""
        requested = set(indices)
        frames: dict[int, Image] = {}
        with self._opened() as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in requested:
                    frames[number] = frame.to_image()
                if number >= indices[-1]:
                    break
        if missing := requested - frames.keys():
            raise ValueError(f"it has {self.count} frames by its header, and frame {min(missing)} is not there")
        return [frames[index] for index in indices]

    def _opened(self) -> Any:
        import av

        return av.open(io.BytesIO(self._source) if isinstance(self._source, bytes) else str(self._source))


def open_video(source: Any, where: str) -> FrameSource:
    """Open a video without decoding it.

    Args:
        source: see `_FORMS`.
        where: the row and the video, for messages.

    Raises:
        DataError: it is none of these, cannot be read, or has no frames per second.
    """
    rate = None
    if isinstance(source, Mapping):
        if source.get("video") is not None:
            raise DataError(
                f"{where}: it has the settings of one video ('video'); give {_FORMS}, and set fps and its like with "
                "data.mm_processor_kwargs, for all videos."
            )
        rate = source.get("fps")
        source = next((source[name] for name in ("frames", "bytes", "path") if source.get(name) is not None), None)
    if isinstance(source, str):
        if "://" in source and not source.startswith("file://"):
            raise DataError(f"{where}: {source[:80]!r} is an address; download the video and give its path.")
        source = Path(source.removeprefix("file://")).expanduser()
    if isinstance(source, bytes | bytearray | Path):
        if rate is not None:
            raise DataError(f"{where}: a file says its fps itself; set data.mm_processor_kwargs.fps to read fewer.")
        return _file(source if isinstance(source, Path) else bytes(source), where)
    frames = _frames(source, where)
    if not isinstance(rate, int | float) or rate <= 0:
        raise DataError(f'{where}: frames need their number per second: give {{"frames": ..., "fps": 2.0}}.')
    return Frames(frames, float(rate))


def _file(source: Path | bytes, where: str) -> FrameSource:
    try:
        return VideoFile(source)
    except ImportError as error:
        raise DataError(f"{where}: files of videos are read by PyAV: pip install av, or give frames.") from error
    except Exception as error:  # PyAV raises a dozen kinds of errors for a damaged file
        raise DataError(f"{where}: it cannot be opened: {type(error).__name__}: {error}") from error


def _frames(source: Any, where: str) -> list[Image]:
    import PIL.Image

    if hasattr(source, "numpy") and hasattr(source, "cpu"):  # a tensor
        source = source.cpu().numpy()
    if isinstance(source, np.ndarray) and source.dtype != object:
        if source.ndim == 4 and source.shape[1] == 3 and source.shape[3] != 3:
            source = source.transpose(0, 2, 3, 1)
        if source.ndim != 4 or source.shape[3] != 3 or source.dtype != np.uint8 or not len(source):
            raise DataError(f"{where}: it is an array {list(source.shape)} of {source.dtype}; give {_FORMS}.")
        return [PIL.Image.fromarray(np.ascontiguousarray(frame)) for frame in source]
    if not isinstance(source, Sequence | np.ndarray) or isinstance(source, str | bytes) or not len(source):
        kind = "missing" if source is None else type(source).__name__
        raise DataError(f"{where}: it is {kind}; give {_FORMS}.")
    images = [open_image(frame, f"{where}, frame {number}") for number, frame in enumerate(source)]
    first = upright_size(images[0])
    if sizes := {upright_size(frame) for frame in images} - {first}:
        raise DataError(f"{where}: its frames are of different sizes, {first} and {min(sizes)}.")
    return images
