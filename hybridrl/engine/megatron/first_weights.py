"""The weights that a Megatron engine starts from: of a Hugging Face checkpoint, or of one that Megatron-core wrote."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException

from hybridrl.engine.megatron.hf_weights import load_hf, load_masters, open_source
from hybridrl.engine.megatron.mapping import WeightMap
from hybridrl.errors import ModelError

if TYPE_CHECKING:
    from hybridrl.engine.megatron.sharded_optimizer import Shard

#: Folders of a model directory in which a distributed checkpoint may be.
_FOLDERS = (".", "dist_ckpt")


def load_first_weights(weights: WeightMap, path: str | Path, settings: Any) -> None:
    """Fill this rank's parameters. All ranks call it together, while Megatron's parallel state is this model's.

    Args:
        weights: the map of the model.
        path: `model.path`; a directory may hold a distributed checkpoint of Megatron-core instead of safetensors.
        settings: a `MegatronConfig`; with `use_dist_checkpointing`, its `dist_checkpointing_path` has the weights.

    Raises:
        ModelError: there are no weights, or they belong to another model.
    """
    folder = dist_checkpoint_of(path, settings)
    if folder is not None:
        load_dist_checkpoint(weights, folder)
        return
    with open_source(path) as source:
        load_hf(weights, source)


def load_first_masters(weights: WeightMap, path: str | Path, settings: Any, shards: Iterable[Shard]) -> None:
    """Fill the master weights of a model whose parameters `load_first_weights` filled with fewer digits.

    They keep the parameters' values where those are of a checkpoint of Megatron-core.
    """
    if dist_checkpoint_of(path, settings) is None:
        with open_source(path) as source:
            load_masters(weights, source, shards)


def dist_checkpoint_of(path: str | Path, settings: Any) -> Path | None:
    """Return the folder of the distributed checkpoint that has the first weights; None if `path` has them itself.

    Raises:
        ModelError: `use_dist_checkpointing` is set, and `dist_checkpointing_path` names no such folder.
    """
    return _configured(settings) or _within(Path(path).expanduser())


def _configured(settings: Any) -> Path | None:
    if not settings.use_dist_checkpointing:
        return None
    if not settings.dist_checkpointing_path:
        raise ModelError(
            "megatron.use_dist_checkpointing=True needs megatron.dist_checkpointing_path, the folder of a distributed "
            "checkpoint of Megatron-core; set it, or use_dist_checkpointing=False to load model.path"
        )
    folder = Path(settings.dist_checkpointing_path).expanduser()
    if not _is_dist_checkpoint(folder):
        raise ModelError(
            f"megatron.dist_checkpointing_path={folder} is no distributed checkpoint of Megatron-core: it has no "
            "metadata.json; name the folder that has one"
        )
    return folder


def _within(path: Path) -> Path | None:
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    return next((path / name for name in _FOLDERS if _is_dist_checkpoint(path / name)), None)


def _is_dist_checkpoint(folder: Path) -> bool:
    return (folder / "metadata.json").is_file() and (folder / "common.pt").is_file()


def load_dist_checkpoint(weights: WeightMap, folder: Path) -> None:
    """Fill this rank's parameters from a distributed checkpoint of Megatron-core, whatever its layout was.

    A value model takes the head of a value model's checkpoint; on that of a language model, it starts at 0.

    Raises:
        ModelError: the checkpoint cannot be read, or belongs to another model.
    """
    from megatron.core import dist_checkpointing

    try:
        stored = dist_checkpointing.load_tensors_metadata(str(folder))
        state_dicts: dict[str, Any] = {}
        for number, chunk in enumerate(weights.chunks):
            own = chunk.sharded_state_dict()  # type: ignore[operator]
            if weights.has_value_head and not _has_value_head(stored):
                own = {name: item for name, item in own.items() if not name.startswith("output_layer.")}
            state_dicts[f"chunk{number}"] = own
        loaded = dist_checkpointing.load(state_dicts, str(folder))
    except (Exception, CheckpointException) as error:  # they raise anything for a checkpoint that does not fit
        raise ModelError(
            f"{folder} cannot be loaded as a distributed checkpoint of this model: {_reason(error)}; "
            "model.path names its Hugging Face configuration, which must be that of the checkpoint"
        ) from error
    for number, chunk in enumerate(weights.chunks):
        chunk.load_state_dict(loaded[f"chunk{number}"], strict=False)
    for entry in weights.entries:
        covered = sum(piece.slice.elements for piece in entry.pieces)
        starts_at_zero = entry.may_be_absent and not _has_value_head(stored)
        if starts_at_zero:
            entry.tensor.detach().zero_()
        elif covered < entry.tensor.numel():  # rows that pad the vocabulary
            rows = sum(piece.slice.extents[0] for piece in entry.pieces)
            entry.tensor.detach()[rows:].zero_()


def _reason(error: BaseException) -> str:
    """Return the error of the first rank that failed; PyTorch's own message has the tracebacks of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


def _has_value_head(stored: Any) -> bool:
    head = stored.get("output_layer.weight")
    return head is not None and tuple(head.global_shape)[:1] == (1,)
