"""Models with a scalar head on any Hugging Face backbone: value models and reward models.

Their parameters have the names of the architecture's own `...ForTokenClassification` and
`...ForSequenceClassification` with one label (`model.layers...`, `score.weight`). A saved critic can therefore be
loaded with `AutoModelForTokenClassification`, a saved reward model with `AutoModelForSequenceClassification`, and
either of them here.

The head of a reward model has no bias, as in transformers: only differences of rewards are learned, so that a bias
would be left to rounding errors.

A classifier of steps has one label or two. Of two, the value is the difference of their logits, whose sigmoid is the
probability of the second: one number, as all models here compute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)
from transformers.utils import cached_file

from hybridrl.errors import ModelError
from hybridrl.models.loading import call_from_config, call_from_pretrained
from hybridrl.models.stored import StoredWeights, open_pretrained
from hybridrl.utils.files import use_umask

HEAD_NAME = "score"
#: entry of config.json of a reward model that was trained here, and its value: it learned its score at the last token
#: of a conversation, also where that is the padding token
SCORED_AT, LAST_TOKEN = "scored_at", "last_token"


class ValueHead(nn.Linear):
    """A linear map to one number, computed in float32. In bfloat16 a value would have only 8 bits of precision."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias)


class DeepHead(nn.Sequential):
    """Two linear maps to one number with a ReLU between them, computed in float32; see `ValueHead`."""

    def __init__(self, width: int, inner: int, where: torch.device) -> None:
        first, last = (nn.Linear(*sizes, device=where, dtype=torch.float32) for sizes in ((width, inner), (inner, 1)))
        super().__init__(first, nn.ReLU(), last)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self:
            if isinstance(layer, nn.Linear):
                hidden = nn.functional.linear(hidden.float(), layer.weight.float(), layer.bias.float())
            else:
                hidden = layer(hidden)
        return hidden


class ValueModel(nn.Module):
    """Backbone and head. `model(...)` returns an object whose `logits [..., 1]` are the values in float32."""

    def __init__(self, backbone: nn.Module, config: PreTrainedConfig, bias: bool = True):
        super().__init__()
        self.config = config
        self.base_model_prefix: str = getattr(backbone, "base_model_prefix", None) or "model"
        setattr(self, self.base_model_prefix, backbone)
        width, where = config.get_text_config().hidden_size, next(backbone.parameters()).device
        self.score: nn.Module = ValueHead(width, 1, bias=bias, device=where, dtype=torch.float32)

    @property
    def backbone(self) -> nn.Module:
        return getattr(self, self.base_model_prefix)

    @property
    def _no_split_modules(self) -> Any:
        return getattr(self.backbone, "_no_split_modules", None)

    @property
    def _can_record_outputs(self) -> Any:
        """The attribute in which transformers finds the routers of the backbone."""
        return getattr(self.backbone, "_can_record_outputs", None)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()  # type: ignore[operator]

    def get_output_embeddings(self) -> nn.Module:
        return self.score

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.backbone.gradient_checkpointing_enable(**options)  # type: ignore[operator]

    def forward(self, input_ids: torch.Tensor, **options: Any) -> SimpleNamespace:
        """Compute the values. `options` go to the backbone: attention_mask, position_ids, use_cache."""
        hidden = self.backbone(input_ids=input_ids, **options).last_hidden_state
        return SimpleNamespace(logits=self.score(hidden))


def build_value_model(
    config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False, bias: bool = True
) -> ValueModel:
    """Build a value model without weights, on the meta device; `bias` is that of the head."""
    return ValueModel(call_from_config(AutoModel, config, dtype, trust_remote_code), config, bias)


def load_value_model(
    path: str | Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    bias: bool = True,
    steps: bool = False,
) -> ValueModel:
    """Load a value model from the weights at `path`.

    They may be those of a language model (the head starts at 0), or of a saved value or reward model. With `steps` they
    are those of a classifier of steps.

    Raises:
        ModelError: there are no weights, or they do not fit the configuration.
    """
    backbone = call_from_pretrained(AutoModel, path, config, dtype, trust_remote_code)
    model = ValueModel(backbone, config, bias)
    return _with_step_head(model, path) if steps else _with_head(model, path)


def open_value_model(
    path: str | Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    trust_remote_code: bool = False,
    bias: bool = True,
    steps: bool = False,
) -> StoredWeights:
    """Open what `load_value_model` loads, without reading the weights of the backbone.

    Raises:
        ModelError: there are no weights, or they do not fit the configuration.
    """
    stored = open_pretrained(AutoModel, path, config, dtype, trust_remote_code)
    model = ValueModel(stored.module, config, bias)
    model = _with_step_head(model, path) if steps else _with_head(model, path)
    return stored.within(model, f"{model.base_model_prefix}.")


def _with_head(model: ValueModel, path: str | Path) -> ValueModel:
    """Give the model the head of the weights at `path`, or one of zeros."""
    # Values start at exactly 0, so that the first advantages contain no arbitrary noise.
    head = {name: torch.zeros(parameter.shape) for name, parameter in model.score.named_parameters()}
    head |= _read_head(path)
    if "bias" in head and model.score.bias is None and head.pop("bias").any():
        raise ModelError(
            f"{path} is a value model whose head has a bias, and a reward model's head has none; begin with a language "
            "model or a reward model"
        )
    for name, tensor in head.items():
        value = tensor.float().reshape(getattr(model.score, name).shape)
        setattr(model.score, name, nn.Parameter(value))
    return model


def _with_step_head(model: ValueModel, path: str | Path) -> ValueModel:
    """Give the model the head of a classifier of steps; of two labels, the difference of their logits."""
    head_tensors = {name: tensor.float() for name, tensor in _head_tensors(path).items()}
    deep = f"{HEAD_NAME}.0.weight" in head_tensors
    last = f"{HEAD_NAME}.2." if deep else f"{HEAD_NAME}."
    for name in [name for name in head_tensors if name.startswith(last) and head_tensors[name].shape[0] == 2]:
        head_tensors[name] = head_tensors[name][1:] - head_tensors[name][:1]
    if deep:
        inner, width = head_tensors[f"{HEAD_NAME}.0.weight"].shape
        model.score = DeepHead(width, inner, next(model.score.parameters()).device)
    with torch.no_grad():
        for name, _ in list(model.score.named_parameters()):
            layer, _, kind = name.rpartition(".")
            value = head_tensors.get(f"{HEAD_NAME}.{name}")
            if value is None:  # a bias that the classifier does not have
                value = torch.zeros(model.score.get_parameter(name).shape)
            setattr(model.score.get_submodule(layer), kind, nn.Parameter(value))
    return model


def value_config(config: PreTrainedConfig, bias: bool = True) -> PreTrainedConfig:
    """Return the configuration to save with a model's weights: that of a classifier with one label.

    Args:
        bias: whether the head has a bias: a token classifier has one, a sequence classifier has none.
    """
    saved = type(config).from_dict(config.to_dict())
    saved.num_labels = 1
    if not bias:
        setattr(saved, SCORED_AT, LAST_TOKEN)
    name = type(config)
    auto = AutoModelForTokenClassification if bias else AutoModelForSequenceClassification
    classes: Any = auto._model_mapping
    saved.architectures = [classes[name].__name__] if name in classes else None
    return saved


def check_reward_model(config: PreTrainedConfig) -> None:
    """Refuse an architecture that transformers has no sequence classifier for: nothing could load what is trained.

    Raises:
        ModelError: there is none.
    """
    classes: Any = AutoModelForSequenceClassification._model_mapping
    if type(config) not in classes:
        raise ModelError(
            f"transformers has no AutoModelForSequenceClassification for model_type={config.model_type}, so a reward "
            "model of it could not be loaded; choose another model.path"
        )


def head_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors `score.*` in the safetensors files of a model; empty if there are none."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in _head_files(path):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():
                if name.startswith(f"{HEAD_NAME}."):
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def _read_head(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a head of one number, by `weight` and `bias`; empty if there are none."""
    tensors = {name.removeprefix(f"{HEAD_NAME}."): tensor for name, tensor in _head_tensors(path).items()}
    return {name: tensor for name, tensor in tensors.items() if name in ("weight", "bias") and tensor.shape[0] == 1}


def _head_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the tensors `score.*` in the safetensors files of a model."""
    from safetensors import safe_open

    head_tensors: dict[str, torch.Tensor] = {}
    for file in _head_files(path):
        with safe_open(str(file), framework="pt") as tensors:
            head_tensors |= {
                name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith(f"{HEAD_NAME}.")
            }
    return head_tensors


def _head_files(path: str | Path) -> list[Path]:
    """The safetensors files that may hold a head: of a folder, or of a model on the hub, which are downloaded."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return sorted(folder.glob("*.safetensors"))
    index = _of_hub(path, "model.safetensors.index.json")
    if index is None:
        whole = _of_hub(path, "model.safetensors")
        return [] if whole is None else [whole]
    files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    named = sorted({file for name, file in files.items() if name.startswith(f"{HEAD_NAME}.")})
    return [cached for name in named if (cached := _of_hub(path, name)) is not None]


def _of_hub(path: str | Path, name: str) -> Path | None:
    """A file of a model on the hub, in the cache; None if the model has none of this name."""
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    cached = cached_file(str(path), name, **options)
    return None if cached is None else Path(cached)


def save_value_model(state: Mapping[str, torch.Tensor], config: PreTrainedConfig, folder: Path) -> None:
    """Write whole weights and configuration for transformers' classifiers and `load_value_model`."""
    from safetensors.torch import save_file

    saved = value_config(config, bias=f"{HEAD_NAME}.bias" in state)
    dtypes = {
        tensor.dtype for name, tensor in state.items() if tensor.is_floating_point() and not name.startswith(HEAD_NAME)
    }
    if len(dtypes) == 1:
        saved.dtype = dtypes.pop()
    saved.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})
    use_umask(path)
