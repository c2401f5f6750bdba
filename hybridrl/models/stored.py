"""Weights that stay in a checkpoint's files until they are sent on, one decoder layer after the other.

`from_pretrained` holds the whole model in main memory where it converts weights, for example to stack a layer's
experts. Here it prepares the model without reading a value, and the same conversions then run for one layer at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, modeling_utils
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)

from hybridrl.errors import ModelError
from hybridrl.models.loading import (
    auto_class,
    call_from_pretrained,
    check_missing,
    layer_of,
    load_reports_in,
    without_progress_bar,
)
from hybridrl.models.surplus import check_surplus, is_replaceable

#: name, dtype and shape of tensors
Specs = list[tuple[str, torch.dtype, tuple[int, ...]]]


@dataclass(slots=True)
class _Files:
    """The results of `from_pretrained`: a model, the stored tensors by their names in files, and the load config."""

    model: Any
    stored: dict[str, Any]
    how: Any


class StoredWeights:
    """A model, and its weights in the files of a checkpoint.

    Attributes:
        module: the model. Weights that are in the files are on the meta device, what the model computes by itself (such
            as rotary frequencies) is in main memory.
    """

    def __init__(self, module: nn.Module, source: str | Path, files: _Files | None, prefix: str = "") -> None:
        self.module = module
        self._source = source
        self._files = files
        self._prefix = prefix
        self.layers = {} if files is None else _layers(files)

    def within(self, module: nn.Module, prefix: str) -> StoredWeights:
        """The same weights in a module that holds this one's under `prefix`."""
        return StoredWeights(module, self._source, self._files, prefix)

    def specs(self) -> Specs:
        """Return the names, dtypes and shapes of `tensors`, without reading them."""
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors(self.module)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter and buffer once, by its first name in `module`. Memory for one layer is used at a time.

        Raises:
            ModelError: a file cannot be read.
        """
        first = _first_names(self.module)
        for name, tensor in named_tensors(self.module):
            if not tensor.is_meta:
                yield name, tensor.detach()
        sent = set()
        for layer in self.layers:
            for own, tensor in self.read_layer(layer):
                name = first[self._prefix + own]
                if name not in sent:
                    sent.add(name)
                    yield name, tensor

    def tie_equal(self) -> None:
        """Tie weights that the files hold twice, as files of an older format do, if they are equal."""
        model: Any = self.module
        for target, tied_to in dict(model.all_tied_weights_keys).items():
            if model.get_parameter(target) is model.get_parameter(tied_to):
                continue
            values = {name: dict(self.read_layer(layer_of(name)))[name] for name in (target, tied_to)}
            if torch.equal(values[target], values[tied_to]):
                parent, _, name = target.rpartition(".")
                setattr(model.get_submodule(parent), name, model.get_parameter(tied_to))

    def read_layer(self, layer: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a layer, whose memory is freed with them."""
        assert self._files is not None
        model = self._files.model
        try:
            with without_progress_bar():
                report, _ = convert_and_load_state_dict_in_model(
                    model=model, state_dict=self.layers[layer], load_config=self._files.how
                )
        except Exception as error:  # transformers may raise anything for a broken file
            raise ModelError(
                f"the weights of {self._source} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if failed := {**report.conversion_errors, **{name: shapes for name, *shapes in report.mismatched_keys}}:
            name, why = next(iter(failed.items()))
            raise ModelError(f"the weights of {self._source} cannot be read: {name}: {why}")
        loaded = [name for name in model.state_dict() if name not in report.missing_keys]
        values = {name: model.get_parameter_or_buffer(name).detach() for name in loaded}
        for name, value in values.items():
            _replace(model, name, torch.empty_like(value, device="meta"))
        yield from values.items()


def open_language_model(
    path: str | Path, config: PreTrainedConfig, dtype: torch.dtype | str, trust_remote_code: bool = False
) -> StoredWeights:
    """Open a causal language model's checkpoint without reading its weights; `auto` is the dtype of the checkpoint.

    Raises:
        ModelError: there are no weights, or they do not fit the configuration (missing names or other shapes).
    """
    return open_pretrained(auto_class(config), path, config, dtype, trust_remote_code)


def open_pretrained(
    model_class: Any, path: str | Path, config: PreTrainedConfig, dtype: torch.dtype | str, trust_remote_code: bool
) -> StoredWeights:
    """Call `model_class.from_pretrained`, which downloads and checks everything; the weights stay in their files."""
    files: list[_Files] = []
    with _keeping_values_back(files):
        model = call_from_pretrained(model_class, path, config, dtype, trust_remote_code)
    weights = StoredWeights(model, path, files[0] if files else None)
    if files:
        weights.tie_equal()
    return weights


class _NeedsValuesError(BaseException):
    """Weights are not converted without their values. It is no `Exception`, which callers turn into others."""


def check_names(path: str | Path, config: PreTrainedConfig, trust_remote_code: bool = False) -> None:
    """Refuse safetensors files of a folder whose tensors are not those of the model, by their headers alone.

    Heads are left out, because models of other kinds (value and reward models) have others. What cannot be told
    without values (4 bits, some conversions, architectures that are no language models) is left to who loads the model.

    Raises:
        ModelError: tensors are missing, left over, or of another shape.
    """
    folder = Path(path).expanduser()
    if not any(folder.glob("*.safetensors")) or getattr(config, "quantization_config", None) is not None:
        return
    options: dict[str, Any] = {"ignore_mismatched_sizes": True, "local_files_only": True}
    options |= {"trust_remote_code": True} if trust_remote_code else {}
    try:
        with without_progress_bar(), load_reports_in([]), _keeping_values_back([], needs_values=_NeedsValuesError):
            model, report = auto_class(config).from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True, **options
            )
    except (Exception, _NeedsValuesError):  # who loads the model tells; transformers may raise anything
        return
    if wrong := sorted(entry for entry in report["mismatched_keys"] if not is_replaceable(entry[0])):
        name, stored, expected = wrong[0]
        raise ModelError(
            f"the weights of {folder} do not fit its config.json: {len(wrong)} tensors have other shapes, the first "
            f"{name}: {list(stored)} in the files, {list(expected)} by the configuration"
        )
    check_missing(model, [name for name in report["missing_keys"] if not is_replaceable(name)], folder)
    check_surplus(model, report["unexpected_keys"], folder)


@contextlib.contextmanager
def _keeping_values_back(files: list[_Files], needs_values: type[BaseException] | None = None) -> Iterator[None]:
    """Make `from_pretrained` load only names, shapes and dtypes within the context.

    Some conversions do not work without values. Their models are loaded as usual, and `files` stays empty; or
    `needs_values` is raised.
    """

    def load(model: Any, state_dict: Any, load_config: Any, disk_offload_index: Any = None) -> Any:
        described = {name: _described(value) for name, value in state_dict.items()}
        report, index = convert_and_load_state_dict_in_model(
            model=model, state_dict=described, load_config=replace(load_config, device_map={"": "meta"})
        )
        if report.conversion_errors and needs_values is not None:
            raise needs_values
        if report.conversion_errors:
            return convert_and_load_state_dict_in_model(model=model, state_dict=state_dict, load_config=load_config)
        files.append(_Files(model, dict(state_dict), load_config))
        return report, index

    before = modeling_utils.convert_and_load_state_dict_in_model
    modeling_utils.convert_and_load_state_dict_in_model = load
    try:
        yield
    finally:
        modeling_utils.convert_and_load_state_dict_in_model = before


def _described(value: Any) -> torch.Tensor:
    """A tensor without values, like this one: a part of a safetensors file, or a tensor of another format."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device="meta")
    return torch.empty(value.get_shape(), dtype=modeling_utils.str_to_torch_dtype[value.get_dtype()], device="meta")


def _layers(files: _Files) -> dict[str, dict[str, Any]]:
    """Group the stored tensors by the layer of the model; a tensor outside of layers is a group of its own."""
    mapping = files.how.weight_mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, own = files.model.base_model_prefix, files.model.state_dict()
    layers: dict[str, dict[str, Any]] = {}
    for name in sorted(files.stored, key=dot_natural_key):
        renamed, _ = rename_source_key(name, renamings, converters, prefix, own)
        if renamed not in own:
            renamed, _ = rename_source_key(name, [], [], prefix, own)
        if renamed in own:
            layers.setdefault(layer_of(renamed), {})[name] = files.stored[name]
    return layers


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers; tied ones once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _first_names(module: nn.Module) -> dict[str, str]:
    """The name that a parameter or buffer has in `named_tensors`, by each name that it has."""
    first = {id(tensor): name for name, tensor in named_tensors(module)}
    every = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: first[id(tensor)] for name, tensor in every}


def _replace(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    parent = model.get_submodule(path)
    if last in parent._buffers:
        parent._buffers[last] = value
    else:
        parent._parameters[last] = nn.Parameter(value, requires_grad=False)
