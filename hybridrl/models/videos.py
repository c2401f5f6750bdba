"""Videos: which frames a model reads, how large they are, and the patches that they are cut into.

Frames are prepared as images are, by Pillow and the model's own image processor; `temporal_patch_size` frames after one
another share their patches. Settings are those of the model's video processor, whose implementation in transformers
needs torchvision.

The model reads the patches of a video as those of images. A clip is what has one run of placeholders: for Qwen2.5-VL a
whole video, whose temporal positions follow the clock; for Qwen3-VL the frames of one patch, with the time written
before them as text.

Shapes: N patches of D numbers, H and W the height and width of frames in patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedConfig

from hybridrl.errors import ModelError
from hybridrl.models.vision_families import vision_family

if TYPE_CHECKING:
    from PIL.Image import Image

#: settings of transformers' video processors that act here
SETTINGS = (
    *("fps", "num_frames", "min_frames", "max_frames", "do_sample_frames", "cap_pixels_per_frame", "max_video_tokens"),
    *("size", "min_pixels", "max_pixels", "image_mean", "image_std"),
)
#: of these, the ones that no image processor has
OWN_SETTINGS = SETTINGS[:7]
_SHARED: dict[str, Any] = {"num_frames": None, "min_frames": 4, "max_frames": 768, "cap_pixels_per_frame": False}
_LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


class FrameSource(Protocol):
    """A source of frames.

    Attributes:
        count: number of frames.
        fps: frames per second.
        size: (width, height) in pixels.
    """

    count: int
    fps: float
    size: tuple[int, int]

    def frames(self, indices: Sequence[int]) -> list[Image]:
        """The frames with these numbers, which ascend and may repeat."""


@dataclass
class Video:
    """A video and the frames of it that the model reads.

    Attributes:
        indices: a multiple of `temporal_patch_size` frames; the last one may repeat.
        size: (width, height) that they are resized to.
    """

    source: FrameSource
    indices: tuple[int, ...]
    size: tuple[int, int]
    _frames: list[Image] = field(default_factory=list)

    def frames(self, first: int, count: int) -> list[Image]:
        """Frames at these places of `indices`; all are decoded at the first call."""
        self._frames = self._frames or self.source.frames(self.indices)
        return self._frames[first : first + count]


@dataclass(frozen=True)
class Clip:
    """Frames of a video that have one run of placeholders.

    Attributes:
        first, count: places in `video.indices`.
        grid: temporal patches, H, W.
        seconds: between two temporal patches, where positions follow the clock; else 0.
    """

    video: Video
    first: int
    count: int
    grid: tuple[int, int, int]
    seconds: float


class VideoProcessor:
    """Chooses frames of videos, and makes patches of them.

    Args:
        path: the model's directory or hub name.
        config: its configuration.
        images: its image processor, of transformers.
        options: settings that replace those of the model's video processor.

    Raises:
        ModelError: an option is unknown.
    """

    def __init__(self, path: str | Path, config: PreTrainedConfig, images: Any, options: Mapping[str, Any]) -> None:
        if unknown := sorted(options.keys() - set(SETTINGS)):
            raise ModelError(
                f"data.mm_processor_kwargs.videos_kwargs: there is no {', '.join(unknown)}; there are "
                f"{', '.join(SETTINGS)}"
            )
        self._family = vision_family(config)
        layers = (self._family.video_defaults, _SHARED, _acting_settings(_read(path)), _sampling(options))
        sizes = {name: value for layer in layers for name, value in layer.get("size", {}).items()}
        settings = {name: value for layer in layers for name, value in layer.items()} | {"size": sizes}
        self._settings = settings
        self._together = int(config.vision_config.temporal_patch_size)
        self._patch = int(config.vision_config.patch_size)
        self._merge = int(config.vision_config.spatial_merge_size)
        self._resample = images.resample
        looks = {name: settings[name] for name in ("image_mean", "image_std") if name in settings}
        self._images = type(images).from_dict({**images.to_dict(), **looks, "do_resize": False})

    def clips(self, source: FrameSource) -> list[tuple[str, Clip | None]]:
        """Return the parts that replace a video in a prompt: texts, each followed by a clip, or the last one by None.

        The chat template writes a start and an end around each clip. Those around the whole video are part of the
        texts for Qwen3-VL, as transformers' processor writes them.

        Raises:
            ValueError: too few frames, or a size that is refused.
        """
        indices = self.sampled(source.count, source.fps)
        rate = len(indices) / source.count * source.fps
        indices += indices[-1:] * (-len(indices) % self._together)
        width, height = self._size(len(indices), *source.size)
        video = Video(source, tuple(indices), (width, height))
        grid = (len(indices) // self._together, height // self._patch, width // self._patch)
        if not self._family.writes_times:
            return [("", Clip(video, 0, len(indices), grid, self._together / rate))]
        parts: list[tuple[str, Clip | None]] = []
        for first in range(0, len(indices), self._together):
            last = indices[first + self._together - 1]
            time = (indices[first] / source.fps + last / source.fps) / 2
            clip = Clip(video, first, self._together, (1, *grid[1:]), 0.0)
            parts.append((f"{'' if first else '<|vision_start|>'}<{time:.1f} seconds>", clip))
        return [*parts, ("<|vision_end|>", None)]

    def sampled(self, total: int, fps: float) -> list[int]:
        """Return the indices of the frames to read, of `total` frames at `fps` per second.

        Raises:
            ValueError: there are fewer frames than the settings ask for.
        """
        settings, together = self._settings, self._together
        count, least, most = settings["num_frames"], settings["min_frames"], settings["max_frames"]
        if total < 1:
            raise ValueError("it has no frames")
        if not settings["do_sample_frames"] or (count is None and settings["fps"] is None):
            return list(range(total))
        if self._family.writes_times:
            if count is None:
                count = min(max(int(total / fps * settings["fps"]), least), most, total)
            indices = np.linspace(0, total - 1, count).round().astype(int)
        else:
            if count is None:
                target = min(max(total / fps * settings["fps"], least), most // together * together, total)
                count = math.floor(target / together) * together
            else:
                count = round(count / together) * together
            indices = torch.arange(0, total, total / max(count, 1)).int().numpy()
        if not 0 < count <= total:
            raise ValueError(f"{count} frames are wanted of its {total}; change fps or num_frames")
        return [int(index) for index in indices]

    def patches(self, clip: Clip) -> torch.Tensor:
        """[N, D], float32."""
        frames = [self._resized(frame, clip.video.size) for frame in clip.video.frames(clip.first, clip.count)]
        still = torch.as_tensor(self._images(images=frames, return_tensors="pt")["pixel_values"]).float()
        # each frame's patches have it `temporal_patch_size` times; a clip's have it at its own place alone
        times, height, width = clip.grid
        still = still.view(times, self._together, height * width, -1, self._together, self._patch**2)
        joined = torch.stack([still[:, place, :, :, place] for place in range(self._together)], dim=3)
        return joined.reshape(times * height * width, -1).contiguous()

    def _resized(self, frame: Image, size: tuple[int, int]) -> Image:
        frame = frame.convert("RGB")
        return frame if frame.size == size else frame.resize(size, self._resample)

    def _size(self, count: int, width: int, height: int) -> tuple[int, int]:
        """Width and height that frames are resized to, in multiples of a token's side."""
        settings, side = self._settings, self._patch * self._merge
        least, most = int(settings["size"]["shortest_edge"]), int(settings["size"]["longest_edge"])
        capped, tokens = settings["cap_pixels_per_frame"], int(settings["max_video_tokens"])
        floor = int(least * 1.05)
        if self._family.writes_times:
            from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_video

            if capped:
                most = max(min(tokens * side**2, most // count), floor) * count
            rows, columns = resize_video(
                count,
                height,
                width,
                temporal_factor=self._together,
                factor=side,
                min_pixels=least,
                max_pixels=most,
            )
            return columns, rows
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resize_image

        if capped:
            most = max(min(most, int(tokens * side**2 * 0.9) * self._together // count), floor)
        rows, columns = resize_image(height, width, factor=side, min_pixels=least, max_pixels=most)
        return columns, rows


def _read(path: str | Path) -> dict[str, Any]:
    """Read the settings of the model's video processor, or of its image processor if it has none."""
    from transformers.video_processing_utils import BaseVideoProcessor

    try:
        settings, _ = BaseVideoProcessor.get_video_processor_dict(path)
    except OSError:
        return {}
    return dict(settings)


def _acting_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that act, with the limits of pixels as a part of `size`."""
    acting = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
    limits = {name: acting.pop(short) for short, name in _LIMITS.items() if short in acting}
    if limits or "size" in acting:
        acting["size"] = {**acting.get("size", {}), **limits}
    return acting


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's settings; `fps` or `num_frames` imply `do_sample_frames`."""
    acting = _acting_settings(options)
    if "fps" in acting and "num_frames" in acting:
        raise ModelError("data.mm_processor_kwargs: fps and num_frames say the same thing; set one of them")
    if "fps" in acting or "num_frames" in acting:
        acting = {"do_sample_frames": True, **acting}
    return acting
