"""Several adapters on the one base of an engine. One at a time is in its module; the others wait next to it.

The module has an adapter of the largest rank R on every layer that may have one. An adapter of rank r < R, or of fewer
layers, has zeros in the rest of A and B. They stay zero: a row of A is trained through the same column of B, which is
zero, and the other way round. So one module serves adapters of any shape, and under FSDP2 none has shards of its own.

An adapter keeps its values, its summed gradients and its optimizer's state apart from those of the others. Calls in
turn therefore give each of them the very bits that it would have alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.engine.fsdp.adapted import required_adapter
from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.engine.optim.meshes import by_mesh, total_norm
from hybridrl.errors import ModelError
from hybridrl.layouts.slices import whole
from hybridrl.models import lora
from hybridrl.utils import distributed
from hybridrl.utils.files import use_umask

#: scale of the product B A is ALPHA / rank
ALPHA = 32
OPTIMIZER_FILE = "optimizer.safetensors"
_A, _B = ".lora_A.", ".lora_B."
_STATES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class AdapterShape:
    """The shape of an adapter.

    Attributes:
        rank: of A and B.
        attention, mlp, head: which layers have it: those of attention, the output layer, and all others.
    """

    rank: int
    attention: bool = True
    mlp: bool = True
    head: bool = True

    def covers(self, kind: str) -> bool:
        """Whether layers of this kind (`kind_of`) have an adapter."""
        return {"attention": self.attention, "mlp": self.mlp, "head": self.head}[kind]


@dataclass(frozen=True)
class AdamStep:
    """Numbers of one step of AdamW; `clip` is the largest norm of the gradients, 0: they are not clipped."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float = 0.0
    clip: float = 0.0


@dataclass
class _Entry:
    """One adapter: its shape, this rank's parts of its tensors by name, and its optimizer."""

    shape: AdapterShape
    values: dict[str, Tensor]
    optimizer: torch.optim.AdamW
    gradients: dict[str, Tensor] = field(default_factory=dict)


def kind_of(layer: str, head: str) -> str:
    """Return the kind of a linear layer by its name in the module: attention, mlp, or head for the output layer."""
    if layer == head:
        return "head"
    parents = layer.lower().split(".")[:-1]
    return "attention" if any("attn" in part or "attention" in part or "mixer" in part for part in parents) else "mlp"


class AdapterBank:
    """The adapters of one engine.

    Args:
        engine: with an adapter of the largest rank, which is trained, and without offloading.
    """

    def __init__(self, engine: FSDPEngine) -> None:
        self._engine = engine
        self._adapter = required_adapter(engine.model_state.adapter)
        self._parameters = engine.model_state.trainable
        head = engine.module.get_output_embeddings()  # type: ignore[operator]
        self._head = next((name for name, part in engine.module.named_modules() if part is head), "")
        self._entries: dict[str, _Entry] = {}
        self._inside: str | None = None  # whose values the module has

    @property
    def largest_rank(self) -> int:
        """R."""
        return int(self._adapter.config.r)

    def create(self, name: str, shape: AdapterShape, seed: int) -> None:
        """Add a new adapter: A uniform in [-1, 1] / sqrt(m) for a layer of m inputs, B = 0."""
        generator = torch.Generator().manual_seed(seed)
        whole_values = {}
        for key, parameter in self._parameters.items():
            rows, columns = parameter.shape
            if _A in key and self._covers(shape, key):
                tensor = torch.zeros(shape.rank, columns)
                nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
                whole_values[key] = _padded(tensor, (rows, columns))
        self._add(name, shape, whole_values)

    def remove(self, name: str) -> None:
        """Forget an adapter; nothing happens if there is none of this name."""
        self._entries.pop(name, None)
        if self._inside == name:
            self._inside = None

    def use(self, name: str) -> None:
        """Put an adapter into the module."""
        if self._inside != name:
            entry = self._entries[name]
            self._put(name, entry.shape, entry.values)

    def use_saved(self, key: str, folder: Path) -> None:
        """Put the adapter of a folder into the module.

        Args:
            key: another one for other content.
        """
        if self._inside != key:
            shape, values = self._read(folder)
            self._put(key, shape, self._own_parts(values))

    def collect_gradients(self, name: str) -> None:
        """Take the gradients that the engine has computed, and add them to those of the adapter."""
        gradients = self._entries[name].gradients
        for key, parameter in self._parameters.items():
            if parameter.grad is not None:
                own = _local(parameter.grad)
                gradients[key] = own.clone() if key not in gradients else gradients[key] + own
        self._engine.discard_gradients()

    def step(self, name: str, numbers: AdamStep) -> float | None:
        """Take a step of AdamW by the summed gradients, and forget them.

        Returns:
            Their norm before clipping, over all ranks; NaN or infinite where no step was taken. None: there are none.
        """
        entry = self._entries[name]
        if not distributed.all_reduce_max(len(entry.gradients)):
            return None
        self.use(name)
        for key, parameter in self._parameters.items():
            if key in entry.gradients:
                _set_gradient(parameter, entry.gradients[key])
        entry.gradients = {}
        norm = total_norm(p.grad for p in self._parameters.values() if p.grad is not None)
        if bool(torch.isfinite(norm)):
            for group in entry.optimizer.param_groups:
                group |= {"lr": numbers.lr, "betas": numbers.betas, "eps": numbers.eps}
                group["weight_decay"] = numbers.weight_decay
            if numbers.clip > 0:
                for parameters in by_mesh(self._parameters.values()):
                    nn.utils.clip_grads_with_norm_(parameters, numbers.clip, norm)
            entry.optimizer.step()
            entry.values = {key: _local(parameter.detach()).clone() for key, parameter in self._parameters.items()}
            self._copy_to_module()
        self._engine.discard_gradients()
        return float(norm)

    def save(self, name: str, folder: Path, base: str, optimizer: bool) -> None:
        """Write an adapter in PEFT's format, and with `optimizer` its optimizer's state. Ranks call it together.

        Args:
            base: of `base_model_name_or_path`.
        """
        from peft import LoraConfig

        self.use(name)
        entry = self._entries[name]
        rank = entry.shape.rank
        covered = [key for key in self._parameters if self._covers(entry.shape, key)]
        tensors = {lora.file_name(key): _cut(self._whole(self._parameters[key].detach()), key, rank) for key in covered}
        states = dict(self._states(entry)) if optimizer else {}
        if distributed.get_rank() == 0:
            layers = [key.rpartition(_A)[0] for key in covered if _A in key]
            config = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=layers, task_type="CAUSAL_LM")
            config.base_model_name_or_path = base
            lora.save(folder, config, tensors)
            if optimizer:
                save_file(states, folder / OPTIMIZER_FILE)
                use_umask(folder / OPTIMIZER_FILE)
        distributed.barrier()

    def load(self, name: str, folder: Path, optimizer: bool) -> None:
        """Replace an adapter, or add one, by what `save` wrote; its gradients are forgotten.

        Args:
            optimizer: with the optimizer's state; else the optimizer begins anew.
        """
        shape, values = self._read(folder)
        self._add(name, shape, values)
        if not optimizer:
            return
        entry, stored = self._entries[name], load_file(folder / OPTIMIZER_FILE)
        for key, parameter in self._parameters.items():
            state = {name: stored[f"{name}:{key}"] for name in _STATES if f"{name}:{key}" in stored}
            if not state:
                continue
            for moment in _STATES[:2]:
                like = torch.zeros_like(parameter)
                _local(like).copy_(self._own_part(parameter, _padded(state[moment], tuple(parameter.shape))))
                state[moment] = like.detach()
            entry.optimizer.state[parameter] = state

    def has_optimizer(self, folder: Path) -> bool:
        """Whether `save` wrote an optimizer's state there."""
        return (folder / OPTIMIZER_FILE).is_file()

    def _add(self, name: str, shape: AdapterShape, values: Mapping[str, Tensor]) -> None:
        optimizer = torch.optim.AdamW(list(self._parameters.values()), lr=0.0)
        self._entries[name] = _Entry(shape, self._own_parts(values), optimizer)
        if self._inside == name:
            self._inside = None

    def _put(self, key: str, shape: AdapterShape, values: Mapping[str, Tensor]) -> None:
        self._inside = None
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                _local(parameter).copy_(values[name])
        self._adapter.rescale(ALPHA / shape.rank)
        self._copy_to_module()
        self._inside = key

    def _copy_to_module(self) -> None:
        masters = self._engine.model_state.masters
        if masters is not None:
            masters.copy_to_module()

    def _covers(self, shape: AdapterShape, key: str) -> bool:
        return shape.covers(kind_of(key.rpartition(".lora_")[0], self._head))

    def _states(self, entry: _Entry) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's state of covered tensors, whole and cut to the rank."""
        for key, parameter in self._parameters.items():
            state = entry.optimizer.state.get(parameter, {})
            if not state or not self._covers(entry.shape, key):
                continue
            for name in _STATES:
                tensor = state[name]
                value = tensor.cpu() if name == "step" else _cut(self._whole(tensor), key, entry.shape.rank)
                yield f"{name}:{key}", value

    def _own_parts(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole tensors; zeros where there is none."""
        return {
            name: torch.zeros_like(_local(parameter.detach()))
            if name not in values
            else self._own_part(parameter, values[name])
            for name, parameter in self._parameters.items()
        }

    def _own_part(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        part, local = self._engine.model_state.shard(parameter.detach())
        return tensor[part.within(whole(tuple(parameter.shape)))].to(local.device, local.dtype, copy=True)

    def _whole(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            sharded = self._engine.model_state.sharded
            assert sharded is not None
            tensor = sharded.full_tensor(tensor)
        return tensor.cpu()

    def _read(self, folder: Path) -> tuple[AdapterShape, dict[str, Tensor]]:
        """The shape and the whole tensors of an adapter in PEFT's format.

        Raises:
            ModelError: it does not fit the module.
        """
        config, stored = lora.read_config(folder), load_file(folder / lora.WEIGHTS_FILE)
        rank = int(config.r)
        by_file = {lora.file_name(key): key for key in self._parameters}
        unknown = sorted(stored.keys() - by_file.keys())
        if unknown or rank > self.largest_rank or config.lora_alpha != ALPHA:
            problem = f"has {unknown[0]}" if unknown else f"has rank {rank} and lora_alpha {config.lora_alpha}"
            raise ModelError(
                f"the adapter in {folder} does not fit this server, whose adapters have at most rank "
                f"{self.largest_rank} and lora_alpha {ALPHA}: it {problem}"
            )
        kinds = {kind_of(by_file[name].rpartition(".lora_")[0], self._head) for name in stored}
        shape = AdapterShape(rank, attention="attention" in kinds, mlp="mlp" in kinds, head="head" in kinds)
        values = {by_file[name]: tensor for name, tensor in stored.items()}
        return shape, {key: _padded(tensor, tuple(self._parameters[key].shape)) for key, tensor in values.items()}


def layers_by_kind(engine: FSDPEngine) -> dict[str, int]:
    """Return how many layers of each kind may have an adapter."""
    head = engine.module.get_output_embeddings()  # type: ignore[operator]
    own = next((name for name, part in engine.module.named_modules() if part is head), "")
    keys = [key for key in engine.model_state.trainable if _A in key]
    kinds: Sequence[str] = [kind_of(key.rpartition(_A)[0], own) for key in keys]
    return {kind: kinds.count(kind) for kind in ("attention", "mlp", "head")}


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    padded = torch.zeros(shape, dtype=tensor.dtype)
    padded[: tensor.shape[0], : tensor.shape[1]] = tensor
    return padded


def _cut(tensor: Tensor, key: str, rank: int) -> Tensor:
    return (tensor[:rank] if _A in key else tensor[:, :rank]).contiguous()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _set_gradient(parameter: Tensor, local: Tensor) -> None:
    gradient = torch.zeros_like(parameter)
    _local(gradient).copy_(local)
    parameter.grad = gradient
