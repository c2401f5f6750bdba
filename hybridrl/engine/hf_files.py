"""Writes a model as Hugging Face loads it, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from hybridrl.models import loading, value
from hybridrl.models.kinds import KINDS
from hybridrl.utils.files import use_umask

#: A file is written when its tensors have this many bytes.
FILE_BYTES = 4 << 30


class ModelFiles:
    """The safetensors files of a model and their index.

    Args:
        folder: where they are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._written: list[list[str]] = []
        self._bytes = 0
        self.dtypes: set[torch.dtype] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a whole tensor, and write a file if there are enough."""
        waiting = sum(weight.nbytes for weight in self._waiting.values())
        if self._waiting and waiting + tensor.nbytes > FILE_BYTES:
            self._write()
        self._waiting[name] = tensor.detach().cpu().contiguous()
        self._bytes += tensor.nbytes
        if not name.startswith(f"{value.HEAD_NAME}.") and tensor.is_floating_point():
            self.dtypes.add(tensor.dtype)

    def finish(self) -> None:
        """Write the rest, give the files their names, and write the index."""
        self._write()
        number = len(self._written)
        names = [f"model-{index + 1:05d}-of-{number:05d}.safetensors" for index in range(number)]
        if number == 1:
            names = ["model.safetensors"]
        for index, name in enumerate(names):
            self._part(index).replace(self._folder / name)
        if number > 1:
            files = {
                name: file for file, tensor_names in zip(names, self._written, strict=True) for name in tensor_names
            }
            index_file = self._folder / "model.safetensors.index.json"
            text = json.dumps({"metadata": {"total_size": self._bytes}, "weight_map": files}, indent=2)
            index_file.write_text(text + "\n", encoding="utf-8")

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index:05d}.tmp"

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._part(len(self._written))
        save_file(self._waiting, path, metadata={"format": "pt"})
        use_umask(path)
        self._written.append(list(self._waiting))
        self._waiting = {}


def write_config(config: PreTrainedConfig, model_type: str, files: ModelFiles, folder: Path) -> None:
    """Write the configuration of a model whose files are finished.

    Args:
        config: of the model that training started from.
        model_type: a name in `KINDS`.
        files: the files, whose dtype is recorded.
        folder: where they are.
    """
    kind = KINDS[model_type]
    if not kind.predicts_tokens:
        saved = value.value_config(config, bias=kind.has_bias)
    else:
        saved = type(config).from_dict(config.to_dict())
        if not saved.architectures:
            saved.architectures = [loading.auto_class(config)._model_mapping[type(config)].__name__]
    if len(files.dtypes) == 1:
        saved.dtype = next(iter(files.dtypes))
    saved.save_pretrained(folder)


def stored_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """The dtype of the checkpoint that training started from."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None
