"""A model whose base is what 4-bit layers would stand for: an oracle for `model.load_in_4bit`."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hybridrl.models import four_bit

#: how the names of weights end that are in 4 bits
LAYERS = tuple(f".{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down", "out"))
LAYERS += tuple(f".in_proj_{name}.weight" for name in ("qkv", "z", "a", "b"))


def rounded_copy(model: Path, folder: Path) -> Path:
    """Copy a model of one file to `folder`, with the weights of its linear layers rounded to 4 bits and back."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(LAYERS) and "visual." not in name and tensor.shape[1] % four_bit.BLOCKS[-1] == 0:
            tensors[name] = four_bit.unpack(four_bit.pack(tensor), tensor.shape[1], torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
