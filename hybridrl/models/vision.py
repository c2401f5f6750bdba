"""Vision-language models: images and clips as the patches, placeholders and positions that a model reads.

An image is resized and cut into patches by the model's own image processor. The vision tower turns squares of
`merge**2` patches into one token each, and the prompt has one placeholder for each of these tokens. Clips of videos are
images to the model, with more than one grid of patches where they are longer (`hybridrl.models.videos`).

Shapes: N patches, D numbers per patch, K images and clips, L tokens of a sequence, b rows, W columns.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hybridrl.errors import ModelError
from hybridrl.models.pictures import as_rgb, upright_size
from hybridrl.models.videos import OWN_SETTINGS, Clip, VideoProcessor
from hybridrl.models.vision_families import FAMILIES

if TYPE_CHECKING:
    from PIL.Image import Image

    from hybridrl.config import ModelConfig

#: positions of a token: its number in the sequence, and the temporal, vertical and horizontal one of rotary embeddings
KINDS_OF_POSITIONS = 4
#: files next to a model's weights that say how its images and videos are prepared
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")

#: `pixel_values` [N, D], `image_grid_thw` [K, 3] and, with clips whose positions follow the clock,
#: `second_per_grid_ts` float32 [K], 0 for images
ImageTensors = dict[str, torch.Tensor]
#: the part of these that the vision tower reads
PIXELS, GRID, SECONDS = "pixel_values", "image_grid_thw", "second_per_grid_ts"

_places: ContextVar[torch.Tensor | None] = ContextVar("hybridrl_image_places", default=None)


def is_vision_model(config: PreTrainedConfig) -> bool:
    """Return whether this is a vision-language model of a supported family."""
    return config.model_type in FAMILIES


def tokens_per_image(config: PreTrainedConfig, grid: torch.Tensor) -> torch.Tensor:
    """Return the number of placeholders of each image, `[K]`, from its patches `[K, 3]` in time, height and width."""
    return grid.prod(dim=-1) // config.vision_config.spatial_merge_size**2


def media_tokens(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the ids of the placeholders of images and of videos."""
    return int(config.image_token_id), int(config.video_token_id)


def placeholders_in(config: PreTrainedConfig, ids: torch.Tensor) -> torch.Tensor:
    """Return a mask of the shape of `ids`, true where a token has the id of a placeholder."""
    image, video = media_tokens(config)
    return (ids == image) | (ids == video)


class ImageProcessor:
    """Turns images and clips into what the model reads, and prompts into token ids with placeholders for them.

    Args:
        path: the model's directory or hub name.
        config: its configuration.
        options: settings that replace those of the model's image processor, such as `max_pixels`. Those that say how
            many frames of a video are read, such as `fps`, and `videos_kwargs` are of its video processor.

    Raises:
        ModelError: the model has no image processor, or one that does not fit it, or an option is unknown.
    """

    def __init__(self, path: str | Path, config: PreTrainedConfig, options: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.media_tokens = media_tokens(config)
        image_options = dict(options or {})
        of_videos = {name: image_options.pop(name) for name in OWN_SETTINGS if name in image_options}
        of_videos |= image_options.pop("videos_kwargs", None) or {}
        self._processor = _load(path, image_options)
        self.videos = VideoProcessor(path, config, self._processor, of_videos)
        vision = config.vision_config
        for own, expected in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.spatial_merge_size),
            ("temporal_patch_size", vision.temporal_patch_size),
        ):
            if (actual := getattr(self._processor, own, expected)) != expected:
                raise ModelError(
                    f"the image processor of {path} has {own}={actual}, and the model's vision_config {expected}: "
                    "preprocessor_config.json and config.json belong to different models"
                )
        self._positions = RotaryPositions(config)

    def placeholders(self, image: Image | Clip) -> int:
        """Return the number of tokens of an image or a clip, by its size alone.

        Raises:
            ValueError: the image processor refuses this size.
        """
        if isinstance(image, Clip):
            patches = math.prod(image.grid)
        else:
            width, height = upright_size(image)
            patches = int(self._processor.get_number_of_image_patches(height, width, {}))
        return patches // int(self.config.vision_config.spatial_merge_size) ** 2

    def pixels(self, images: Sequence[Image | Clip]) -> ImageTensors:
        """Return the patches of all images and clips, float32; see `ImageTensors`."""
        patches, grids, seconds = [], [], []
        for image in images:
            if isinstance(image, Clip):
                patches.append(self.videos.patches(image))
                grids.append(torch.tensor([image.grid]))
                seconds.append(image.seconds)
            else:
                processed = self._processor(images=[as_rgb(image)], return_tensors="pt")
                patches.append(processed["pixel_values"].float())
                grids.append(processed["image_grid_thw"])
                seconds.append(0.0)
        tensors = {PIXELS: torch.cat(patches).contiguous(), GRID: torch.cat(grids)}
        return {**tensors, SECONDS: torch.tensor(seconds, dtype=torch.float32)} if any(seconds) else tensors

    def repeats(self, ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Return how often each token of a rendered prompt occurs: placeholders as often as their images have tokens.

        Raises:
            ValueError: there is another number of placeholders than of images.
        """
        placeholder_count = sum(token in self.media_tokens for token in ids)
        if placeholder_count != len(counts):
            raise ValueError(
                f"the chat template writes {placeholder_count} image placeholders (tokens {self.media_tokens}) for "
                f"{len(counts)} images"
            )
        remaining = iter(counts)
        return [next(remaining) if token in self.media_tokens else 1 for token in ids]

    def expand(self, ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Return token ids with each placeholder repeated as often as its image has tokens.

        Raises:
            ValueError: there is another number of placeholders than of images.
        """
        times = self.repeats(ids, counts)
        return [repeated for token, count in zip(ids, times, strict=True) for repeated in [token] * count]

    def positions(
        self, ids: Sequence[int], images: Mapping[str, torch.Tensor] | None, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the positions `[4, L]` of a sequence; see `RotaryPositions.of`."""
        return self._positions.of(ids, images, places)


class RotaryPositions:
    """Computes the positions of tokens, which images of a sequence change.

    Args:
        config: of the model.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._model = _positions_only(config)

    def of(
        self, ids: Sequence[int], images: Mapping[str, torch.Tensor] | None, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the positions `[4, L]` of a sequence: numbers of its tokens, and those of rotary embeddings.

        The model's own `get_rope_index` computes the latter. Both count up by one after the sequence.

        Args:
            ids: the sequence.
            images: of the sequence, `ImageTensors`, in the order of their tokens; None or empty: it has none.
            places: `[L]`, true for tokens of images; None: every token with a placeholder's id is one.
        """
        row = torch.tensor([list(ids)], dtype=torch.int64)
        kinds = (placeholders_in(self._config, row) if places is None else places[None]).int()
        grid = images[GRID].cpu() if images else None
        named: dict[str, Any] = {"image_grid_thw": grid}
        seconds = images[SECONDS].cpu() if images and SECONDS in images else torch.zeros(0)
        if grid is not None and seconds.any():
            timed = seconds > 0  # the model's own code spreads these over time where they are videos
            kinds[kinds.bool()] = (1 + timed.int()).repeat_interleave(tokens_per_image(self._config, grid))
            named = {
                "image_grid_thw": grid[~timed] if not timed.all() else None,
                "video_grid_thw": grid[timed],
                "second_per_grid_ts": seconds[timed],
            }
        rotary, _ = self._model.get_rope_index(row, mm_token_type_ids=kinds, **named)
        return torch.cat([torch.arange(row.shape[1])[None], rotary[:, 0]])


def offset_after(rotary: torch.Tensor) -> int:
    """Return the offset between a later token's index and its position, which counts up from the last token's.

    The times of a clip may lie beyond the positions of the text after it, so this is not the largest position.

    Args:
        rotary: `[3, L]` of the sequence.
    """
    return int(rotary[:, -1].max()) + 1 - rotary.shape[1]


def processor_of(model: ModelConfig, options: Mapping[str, Any] | None = None) -> ImageProcessor | None:
    """Return the image processor of a `model` group; None for a model without vision.

    Raises:
        ModelError: `options` (`data.mm_processor_kwargs`) has what the processor does not take, or the model has none.
    """
    from hybridrl.models.model_config import config_of

    config = config_of(model)
    if is_vision_model(config):
        return ImageProcessor(model.path, config, options)
    if options:
        raise ModelError(
            f"data.mm_processor_kwargs={dict(options)} has no effect, because {model.path} ({config.model_type}) reads "
            "text alone. Remove it"
        )
    return None


def digest(images: Mapping[str, torch.Tensor]) -> str:
    """Return a fingerprint of the patches of a row's images, in order; "" for a row without images."""
    if not images:
        return ""
    hashed = hashlib.blake2b(digest_size=16)
    for name in (key for key in (GRID, SECONDS, PIXELS) if key in images):
        values = images[name].detach().cpu().contiguous()
        hashed.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        hashed.update(values.numpy().data)
    return hashed.hexdigest()


def smallest_image(config: PreTrainedConfig) -> ImageTensors:
    """Return an image of one token, for ranks without images while other ranks compute some."""
    vision = config.vision_config
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    merge = vision.spatial_merge_size
    return {"pixel_values": torch.zeros(merge**2, size), "image_grid_thw": torch.tensor([[1, merge, merge]])}


def vision_tower(module: nn.Module) -> nn.Module:
    """Return the part of a model that turns patches into embeddings of tokens."""
    return module.get_submodule("model.visual")


def place_images_by_position(module: nn.Module) -> None:
    """Have a model put images where `placed_at` says, and not at every token with the placeholder's id.

    A policy may sample the placeholder's id. Such a token is read as any other, in training as in generation.
    """
    inner: Any = module.get_submodule("model")
    by_id = inner.get_placeholder_mask

    def mask(input_ids: Any, inputs_embeds: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        places = _places.get()
        if places is None:
            return by_id(input_ids, inputs_embeds, *arguments, **named)
        return places[..., None], torch.zeros_like(places)[..., None]

    inner.get_placeholder_mask = mask


@contextlib.contextmanager
def placed_at(places: torch.Tensor | None) -> Iterator[None]:
    """Put images at the true elements of `places` `[b, W]` within the context; None: at every placeholder."""
    token = _places.set(places)
    try:
        yield
    finally:
        _places.reset(token)


def copy_processor(path: str | Path, folder: Path) -> None:
    """Write the files of the image processor next to saved weights."""
    from transformers.utils import cached_file

    for name in PROCESSOR_FILES:
        cached = cached_file(
            str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else str(path),
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if cached is not None:
            (folder / name).write_bytes(Path(cached).read_bytes())


def _load(path: str | Path, options: dict[str, Any]) -> Any:
    """Load the model's image processor in the implementation that needs neither a GPU nor torchvision."""
    try:
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    except Exception as error:  # transformers may raise anything for a broken file
        raise ModelError(
            f"the image processor of {path} cannot be loaded: {type(error).__name__}: {error}. A vision-language model "
            "needs its preprocessor_config.json, and the package pillow"
        ) from error
    if not options:
        return processor
    option_names = {*processor.valid_kwargs.__annotations__, "size"}
    if unknown := sorted(options.keys() - option_names):
        raise ModelError(
            f"data.mm_processor_kwargs: {type(processor).__name__} has no {', '.join(unknown)}; it has "
            f"{', '.join(sorted(option_names))}"
        )
    if "size" in options and (limits := sorted(options.keys() & _LIMITS.keys())):
        raise ModelError(
            f"data.mm_processor_kwargs: {' and '.join(limits)} and size are the same thing; set one of them"
        )
    size = {"shortest_edge": processor.size.shortest_edge, "longest_edge": processor.size.longest_edge}
    size |= {key: options.pop(name) for name, key in _LIMITS.items() if name in options}
    return type(processor).from_dict({**processor.to_dict(), "size": size, **options})


#: names of limits of an image's size in pixels -> those of transformers
_LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def _positions_only(config: PreTrainedConfig) -> Any:
    """Return an object with the model's `get_rope_index`, without its layers."""
    from transformers import MODEL_MAPPING

    model_class: Any = MODEL_MAPPING[type(config)]
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    model.config = config
    return model
