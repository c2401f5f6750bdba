"""LoRA adapters: small trained matrices next to the frozen weights of a model, by PEFT.

A linear layer with the frozen weight W [n, m] computes

    y = W x + s B (A x),    A [r, m], B [n, r], s = lora_alpha / r

Only A and B are trained. B starts at 0, so that the model starts as its base (Hu et al., 2021, arXiv 2106.09685).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hybridrl.config import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.models import loading, value
from hybridrl.models.model_config import config_of
from hybridrl.models.routers import router_layers
from hybridrl.utils.files import use_umask

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
#: where the adapter is, in the folder of a model that it is merged into
FOLDER = "lora_adapter"
#: of names in PEFT's files
PREFIX = "base_model.model."
_NAME = "default"  # of the adapter in the module
_BASE, _OWN = ".base_layer.", (".lora_A.", ".lora_B.")
# What an adapter may have besides A and B, with the value at which it has not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none",),
    "lora_bias": (False, None),
    "lora_dropout": (0, 0.0),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "megatron_config": (None,),
    # Other starts (pissa, olora, corda, loftq, ...) change the base, which is read as it is here.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


class Adapter:
    """The adapter of a module.

    Args:
        module: the model, with the adapter attached (`attach`).
        config: of the adapter.

    Attributes:
        names: the parameters that belong to the adapter and not to the base: A, B, and the head of a value model.
    """

    def __init__(self, module: nn.Module, config: LoraConfig) -> None:
        from peft.tuners.lora import LoraLayer

        self.config = config
        self._layers: dict[str, Any] = {
            name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)
        }
        head = (f"{value.HEAD_NAME}.",) if isinstance(module, value.ValueModel) else ()
        named = [name for name, _ in module.named_parameters()]
        self.names = [name for name in named if is_own(name) or name.startswith(head)]

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Compute without the adapter within the context, as the base does."""
        # PEFT's `enable_adapters(False)` would make A and B frozen as well, which FSDP2 must not see.
        before = [(layer, layer._disable_adapters) for layer in self._layers.values()]
        for layer, _ in before:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer, was in before:
                layer._disable_adapters = was

    def rescale(self, scaling: float) -> None:
        """Multiply the product B A by another factor from now on."""
        for layer in self._layers.values():
            layer.scaling[_NAME] = scaling

    def parts_of(self, name: str) -> tuple[str, str] | None:
        """The names of A and B of the layer whose weight is the parameter `name`; None for any other parameter."""
        layer, separator, rest = name.rpartition(_BASE)
        if not separator or rest != "weight" or layer not in self._layers:
            return None
        return f"{layer}.lora_A.{_NAME}.weight", f"{layer}.lora_B.{_NAME}.weight"

    def merged(self, name: str, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """W + s B A of the layer whose weight is the parameter `name`, in float32."""
        layer = self._layers[name.rpartition(_BASE)[0]]
        change = b.float() @ a.float() * layer.scaling[_NAME]
        return weight.float() + (change.T if layer.fan_in_fan_out else change)

    def first_values(self, seed: int, path: str | None) -> dict[str, torch.Tensor]:
        """Return the initial values of A and B by their names in the module: those of an adapter's files, or PEFT's.

        PEFT's are A uniform in [-1, 1] / sqrt(m), and B = 0.

        Args:
            seed: of A.
            path: the folder of an adapter; None for a new one.

        Raises:
            ModelError: the adapter's files cannot be read, or belong to another model.
        """
        shapes = {
            name: tuple(part.weight.shape)
            for layer, own in self._layers.items()
            for name, part in (
                (f"{layer}.lora_A.{_NAME}.weight", own.lora_A[_NAME]),
                (f"{layer}.lora_B.{_NAME}.weight", own.lora_B[_NAME]),
            )
        }
        if path is not None:
            return _read(Path(path).expanduser(), shapes, frozenset(self.names))
        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for name, tensor in values.items():
            if _OWN[0] in name:
                nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        return values


def attach(module: nn.Module, model: ModelConfig, dtype: torch.dtype) -> Adapter:
    """Attach the adapter that a `model` group describes. Its tensors have no values yet; the base is frozen.

    Args:
        module: a language model or a `ValueModel`, whose head stays trainable.
        dtype: of A and B.

    Raises:
        ModelError: PEFT is missing, or the adapter does not fit the model.
    """
    layers = linear_layers(_within(module), head=model.adapts_head)
    if model.lora_adapter_path is None:
        config = _peft().LoraConfig(r=model.lora_rank, lora_alpha=model.lora_alpha)
        selected = _selected_layers(model, layers)
    else:
        config = read_config(Path(model.lora_adapter_path).expanduser())
        _check_config(model, config)
        selected = _of_config(config, layers)
    adapter = _inject(module, config, selected, layers)
    for name in filter(is_own, adapter.names):
        parameter = module.get_parameter(name)
        parameter.data = parameter.data.to(dtype)
    config.base_model_name_or_path = str(model.path)
    return adapter


def attach_saved(module: nn.Module, config: LoraConfig) -> Adapter:
    """Attach the adapter of a checkpoint, without values; see `attach`."""
    layers = linear_layers(_within(module))
    return _inject(module, config, _of_config(config, layers), layers)


def _within(module: nn.Module) -> nn.Module:
    return module.backbone if isinstance(module, value.ValueModel) else module


def _inject(module: nn.Module, config: LoraConfig, selected: Sequence[str], layers: Sequence[str]) -> Adapter:
    within = _within(module)
    config.task_type = "TOKEN_CLS" if within is not module else "CAUSAL_LM"
    config.inference_mode, config.exclude_modules = False, None
    settings: Any = config
    settings.target_modules = set(selected)
    with _quiet():
        _peft().inject_adapter_in_model(config, within, adapter_name=_NAME, low_cpu_mem_usage=True)
    # PEFT takes short names for those of experts, too, where a layer keeps all experts in one tensor.
    settings.target_modules = set(selected) if has_fused_experts(module) else _shortened(selected, layers)
    return Adapter(module, config)


def fill(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give A and B their values; they take the dtype and the device that the others have."""
    own = {name: module.get_parameter(name) for name in values}
    home = next(parameter for name, parameter in module.named_parameters() if not is_own(name)).device
    state = {name: tensor.to(home, own[name].dtype) for name, tensor in values.items()}
    module.load_state_dict(state, strict=False, assign=True)


def is_own(name: str) -> bool:
    """Whether a parameter is an A or a B."""
    return any(part in name for part in _OWN)


def base_name(name: str) -> str:
    """The name that a parameter of the base has in a module without the adapter."""
    return name.replace(_BASE, ".")


def file_name(name: str) -> str:
    """The name in PEFT's files of a parameter that belongs to the adapter."""
    return PREFIX + name.replace(f".{_NAME}.", ".")


def check(model: ModelConfig, optim: Any = None) -> None:
    """Refuse an adapter that cannot be trained; the model is built without weights.

    Args:
        optim: an `OptimConfig`; None if nothing is trained.

    Raises:
        ModelError: the message names the key, and the layers of the model.
    """
    config = config_of(model)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{_key(model)} with {model.path}, whose weights are quantized (quantization_config in config.json); use "
            "the model without quantization, and model.load_in_4bit=True to keep it in 4 bits (QLoRA)"
        )
    if optim is not None and optim.optimizer == "Muon":
        raise ModelError(
            f"{_key(model)} with optim.optimizer=Muon: Muon is for whole hidden matrices, not for the factors of an "
            "adapter; use AdamW"
        )
    module = loading.build_language_model(config, torch.float32, model.trust_remote_code)
    attach(module, model, torch.float32)


def linear_layers(module: nn.Module, head: bool = False) -> list[str]:
    """The names of the layers that may have an adapter: linear ones without routers, and without the output layer.

    The output projections of Mamba's mixers are left out: their kernels read the weight alone, so that an adapter next
    to it would have no effect (PEFT refuses it).

    Args:
        head: with the output layer.
    """
    output_layer = None if head else module.get_output_embeddings()  # type: ignore[operator]
    mixers = [part for part in module.modules() if hasattr(part, "A_log") and hasattr(part, "D")]
    projections = [getattr(mixer, "out_proj", None) for mixer in mixers]
    apart = {id(output_layer), *map(id, router_layers(module)), *map(id, projections)}
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, _conv1d())
    return [name for name, part in module.named_modules() if isinstance(part, kinds) and id(part) not in apart]


def has_fused_experts(module: nn.Module) -> bool:
    """Whether there are experts whose weights are one tensor, which have no adapter."""
    own = [part for part in module.modules() if type(part).__name__.endswith("Experts")]
    return any(parameter.ndim == 3 for part in own for parameter in part.parameters(recurse=False))


def save(folder: Path, config: LoraConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write an adapter as PEFT does.

    Args:
        tensors: by their names in files.
    """
    save_text(folder, as_text(config, heads=tensors), tensors)


def save_text(folder: Path, config: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Save like `save`, given the content of `adapter_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    use_umask(folder / WEIGHTS_FILE)


def rank_of(model: ModelConfig) -> int:
    """The rank of the adapter that a `model` group describes; of layers that differ, the highest."""
    if model.lora_adapter_path is None:
        return model.lora_rank
    config = read_config(Path(model.lora_adapter_path).expanduser())
    return max(int(config.r), *map(int, (config.rank_pattern or {}).values()), 0)


def as_text(config: LoraConfig, heads: Iterable[str] = ()) -> str:
    """Return the content of `adapter_config.json`.

    Args:
        heads: names of tensors in the files; a value model's head among them is listed in `modules_to_save`.
    """
    values = config.to_dict()
    if any(name.startswith(f"{PREFIX}{value.HEAD_NAME}.") for name in heads):
        values["modules_to_save"] = [value.HEAD_NAME]
    values["inference_mode"] = True  # as PEFT writes it: who loads it says whether it is to be trained
    plain = {name: sorted(setting) if isinstance(setting, set) else setting for name, setting in values.items()}
    return json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n"


def base_digest(path: str) -> str:
    """Return the identity of a base's weights: for a local folder a digest of samples of its files, else its id.

    Of each file its size, its beginning (names and shapes) and 64 further blocks count, so that another checkpoint of
    the same architecture is noticed without reading it.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return str(path)
    total = hashlib.sha256()
    for file in sorted(weight_file for pattern in loading.WEIGHT_PATTERNS for weight_file in folder.glob(pattern)):
        size = file.stat().st_size
        total.update(f"{file.name} {size}".encode())
        with open(file, "rb") as opened:
            for place in sorted({size * number // _SAMPLES for number in range(_SAMPLES)}):
                opened.seek(place)
                total.update(opened.read(_SAMPLE_BYTES))
    return f"sha256:{total.hexdigest()}"


def _key(model: ModelConfig) -> str:
    if model.lora_adapter_path is not None:
        return f"model.lora_adapter_path={model.lora_adapter_path}"
    return f"model.lora_rank={model.lora_rank}"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"model.lora_rank and model.lora_adapter_path need PEFT, which cannot be imported ({error}): bash "
            "scripts/install.sh auto peft"
        ) from error
    return peft


@functools.cache
def _conv1d() -> Any:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without PEFT's warnings about patterns of experts and the layout of GPT-2's layers, which it handles itself."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _selected_layers(model: ModelConfig, layers: Sequence[str]) -> list[str]:
    """Return the layers that `target_modules` and `exclude_modules` select.

    Raises:
        ModelError: a name selects nothing; the message lists the layers of the model.
    """
    targets, excluded = model.target_modules, model.exclude_modules
    selected = list(layers)
    if targets != ALL_LINEAR:
        selected = _matching("model.target_modules", targets, layers)
    if excluded:
        left_out = set(_matching("model.exclude_modules", excluded, layers))
        selected = [name for name in selected if name not in left_out]
    if not selected:
        raise ModelError(
            f"model.target_modules={targets} and model.exclude_modules={excluded} leave no layer for the adapter; "
            f"{_there_are(layers)}"
        )
    return selected


def _matching(key: str, targets: str | Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return the layers with these names (or ends of names), or whose whole name matches a regular expression."""
    if isinstance(targets, str):
        try:
            matches = [name for name in layers if re.fullmatch(targets, name)]
        except re.error as error:
            raise ModelError(f"{key}={targets!r} is no regular expression ({error}); give a list of names") from error
        if not matches:
            raise ModelError(
                f"{key}={targets!r} matches the whole name of no linear layer, such as {layers[0]}; give a list of "
                f"names. {_there_are(layers)}"
            )
        return matches
    of_name = {target: [name for name in layers if name == target or name.endswith(f".{target}")] for target in targets}
    if unknown := [target for target, matches in of_name.items() if not matches]:
        raise ModelError(f"{key}: this model has no linear layer {', '.join(unknown)}; {_there_are(layers)}")
    every = {name for matches in of_name.values() for name in matches}
    return [name for name in layers if name in every]


def _there_are(layers: Sequence[str]) -> str:
    return f"there are {', '.join(dict.fromkeys(name.rpartition('.')[2] for name in layers))} (or {ALL_LINEAR})"


def _shortened(selected: Sequence[str], layers: Sequence[str]) -> set[str]:
    """Return the last parts of the names if they select the same layers, else the names."""
    ends = {name.rpartition(".")[2] for name in selected}
    return ends if [name for name in layers if name.rpartition(".")[2] in ends] == list(selected) else set(selected)


def read_config(folder: Path) -> LoraConfig:
    """The configuration of an adapter in PEFT's format.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder} holds no adapter of PEFT ({CONFIG_FILE} is missing); name a folder that does")
    try:
        config: LoraConfig = _peft().PeftConfig.from_pretrained(str(folder))
        return config
    except Exception as error:  # PEFT raises anything for a broken file
        raise ModelError(f"{folder / CONFIG_FILE} cannot be read: {type(error).__name__}: {error}") from error


def _check_config(model: ModelConfig, config: LoraConfig) -> None:
    """Refuse an adapter that is no plain LoRA, or differs from the settings."""
    key, folder = _key(model), Path(str(model.lora_adapter_path)).expanduser()
    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(f"{key}: it holds no adapter of PEFT ({WEIGHTS_FILE} is missing); name a folder that does")
    kind: Any = config.peft_type
    if str(getattr(kind, "value", kind)) != "LORA":
        raise ModelError(f"{key}: it is a {kind}, and only LoRA is trained here")
    for name, plain in _PLAIN.items():
        if getattr(config, name, plain[0]) not in plain:
            raise ModelError(
                f"{key} has {name}={getattr(config, name)}, and only plain LoRA is trained here; convert it with PEFT, "
                "or merge it into its base and train a new adapter on that"
            )
    if model.lora_rank and model.lora_rank != config.r:
        raise ModelError(
            f"model.lora_rank={model.lora_rank}, and the adapter of {key} has rank {config.r}; leave lora_rank out"
        )


def _of_config(config: LoraConfig, layers: Sequence[str]) -> list[str]:
    """Return the layers that the configuration of an adapter selects."""

    def named(key: str, patterns: Any) -> list[str]:
        return _matching(f"{CONFIG_FILE}: {key}", patterns if isinstance(patterns, str) else sorted(patterns), layers)

    targets = config.target_modules
    selected = list(layers) if targets in (None, ALL_LINEAR) else named("target_modules", targets)
    left_out = set(named("exclude_modules", config.exclude_modules)) if config.exclude_modules else set()
    return [name for name in selected if name not in left_out]


def _read(folder: Path, shapes: Mapping[str, tuple[int, ...]], names: frozenset[str]) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's files, by their names in the module.

    Args:
        shapes: of A and B.
        names: all names that the files may hold.
    """
    try:
        stored = load_file(folder / WEIGHTS_FILE)
    except Exception as error:  # safetensors' own
        raise ModelError(f"{folder / WEIGHTS_FILE} cannot be read: {type(error).__name__}: {error}") from error
    by_file = {file_name(name): name for name in names}
    unknown = sorted(stored.keys() - by_file.keys())
    missing = sorted({file_name(name) for name in shapes} - stored.keys())
    if unknown or missing:
        problem = f"has {unknown[0]}, which the model has not" if unknown else f"lacks {missing[0]}"
        raise ModelError(f"{folder / WEIGHTS_FILE} is not an adapter of this model: it {problem}")
    values = {by_file[name]: tensor for name, tensor in stored.items()}
    for name, shape in shapes.items():
        if tuple(values[name].shape) != shape:
            raise ModelError(
                f"{folder / WEIGHTS_FILE} is not an adapter of this model: {file_name(name)} has shape "
                f"{list(values[name].shape)} there and {list(shape)} here"
            )
    return values
