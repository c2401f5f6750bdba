"""Stands in for torchvision where SGLang runs on a CPU without it.

Many machines have CUDA builds of torchvision only, with which a CPU build of torch cannot import transformers. SGLang
imports names of its image code at load time, whatever the model. What transforms images raises when it is called.
"""

import enum
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.0.0+hybridrl.cpu"


class InterpolationMode(enum.Enum):
    """transformers builds a table of these when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Submodule(ModuleType):
    """Any module below torchvision: every name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return InterpolationMode
        full_name = f"{self.__name__}.{name}"

        def missing(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"{full_name} is not here: images come as patches, and nothing here prepares any")

        return missing


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
