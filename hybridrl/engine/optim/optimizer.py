"""Optimizers and learning-rate schedules, built from the configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hybridrl.config.schema.choices import LR_SCHEDULERS
from hybridrl.engine.optim import low_bit
from hybridrl.engine.optim.meshes import by_mesh
from hybridrl.engine.optim.muon import MuonAndAdamW, ShardedMuon
from hybridrl.errors import ModelError
from hybridrl.utils import device
from hybridrl.utils.user_code import load_module

# Share of the steps after warm-up during which the "wsd" schedule stays at its peak.
STABLE_SHARE = 0.9
# Rows and columns of a parameter that an optimizer's state is measured on; 8-bit state has no smaller ones.
_SAMPLE = 256


def build_optimizer(
    parameters: Iterable[torch.Tensor], optim: Any, matrices: Collection[torch.Tensor] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer class `optim.optimizer` of the module or Python file `optim.optimizer_impl`.

    `betas` is passed to classes that accept it; `override_optimizer_config` is passed last and has precedence. The
    fused kernel is used if the class has one and no other kernel is requested: it is several times faster, also on a
    CPU. `Muon` of `torch.optim` optimizes `matrices`, and AdamW the rest. `AdamW8bit` and `Adam8bit` of
    `torchao.optim` keep their moments in 8 bits.

    Args:
        matrices: the parameters that Muon orthogonalises (`hidden_matrices`).

    Raises:
        ModelError: there is no such module, file or class, or it does not accept an argument or its value.
    """
    kind = _optimizer_class(optim)
    parameters, overrides = list(parameters), dict(optim.override_optimizer_config or {})
    if kind is torch.optim.Muon:
        return _build_muon(parameters, optim, matrices, overrides)
    if optim.optimizer_impl.removeprefix("pkg://").split(".")[0] == "torchao":
        kind = low_bit.row_blocks(kind)
    return _make(kind, parameters, optim, overrides)


def check_optimizer(optim: Any) -> None:
    """Raise what `build_optimizer` would, without a model."""
    samples = [torch.zeros(2, 2, requires_grad=True) for _ in range(2)]
    build_optimizer(samples, optim, samples[:1])


def state_bytes(parameters: Iterable[torch.Tensor], optim: Any, matrices: Collection[torch.Tensor] = ()) -> int:
    """Bytes of state on this rank that the optimizer makes in its first step; see `build_optimizer`.

    They are measured on two small parameters, one of which counts as one of `matrices`.
    """
    parameters = list(parameters)
    like: Any = {"dtype": parameters[0].dtype, "device": device.current_device(), "requires_grad": True}
    samples = [torch.zeros(_SAMPLE, _SAMPLE, **like) for _ in range(2)]
    optimizer = build_optimizer(samples, optim, samples[:1])
    for sample in samples:
        sample.grad = torch.zeros_like(sample)
    optimizer.step()
    if low_bit.keeps(optimizer):
        moments = sum(_bytes_of(value) > 0 for value in optimizer.state[samples[0]].values())
        return moments * sum(map(low_bit.moment_bytes, parameters))
    per_element = [
        sum(_bytes_of(value) for value in optimizer.state.get(sample, {}).values()) / sample.numel()
        for sample in samples
    ]
    matrix_ids, total = {id(matrix) for matrix in matrices}, 0.0
    for parameter in parameters:
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total += own.numel() * per_element[0 if id(parameter) in matrix_ids else 1]
    return int(total)


def _bytes_of(value: Any) -> int:
    """Bytes of a tensor of an optimizer's state; one of quantised state consists of several tensors."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return 0
    if not is_traceable_wrapper_subclass(value):
        return value.nbytes
    return sum(_bytes_of(getattr(value, name)) for name in value.__tensor_flatten__()[0])


def _optimizer_class(optim: Any) -> Any:
    module = load_module(optim.optimizer_impl, "optim.optimizer_impl", ModelError)
    try:
        return getattr(module, optim.optimizer)
    except AttributeError as error:
        same = [name for name in dir(module) if name.lower() == optim.optimizer.lower()]
        remedy = f"; use {same[0]} and its settings in optim.override_optimizer_config" if same else ""
        raise ModelError(
            f"optim.optimizer={optim.optimizer!r} of optim.optimizer_impl={optim.optimizer_impl!r} cannot be "
            f"imported: {error}{remedy}"
        ) from error


def _build_muon(
    parameters: Sequence[torch.Tensor], optim: Any, matrices: Collection[torch.Tensor], overrides: dict[str, Any]
) -> torch.optim.Optimizer:
    """Muon with the settings in `overrides`, and AdamW with those that begin with `adamw_`.

    By default Muon's update is scaled to the size of AdamW's (`adjust_lr_fn=match_rms_adamw`), so that one learning
    rate and weight decay, known from AdamW, fit both.
    """
    if not matrices:
        raise ModelError("optim.optimizer=Muon: the model has no trainable hidden matrix; use AdamW")
    matrix_ids = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in parameters if id(parameter) not in matrix_ids]
    prefix = "adamw_"
    for_adamw = {name[len(prefix) :]: overrides.pop(name) for name in list(overrides) if name.startswith(prefix)}
    muon = _make(ShardedMuon, list(matrices), optim, {"adjust_lr_fn": "match_rms_adamw", **overrides})
    adamw = _make(torch.optim.AdamW, rest, optim, for_adamw) if rest else None
    return MuonAndAdamW(muon, adamw)


def _make(kind: Any, parameters: Sequence[torch.Tensor], optim: Any, overrides: Mapping[str, Any]) -> Any:
    takes = inspect.signature(kind).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    arguments: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if "betas" in takes:
        arguments["betas"] = tuple(optim.betas)
    arguments.update(overrides)
    if "fused" in takes and not {"fused", "foreach", "capturable", "differentiable"} & arguments.keys():
        # DTensor supports the fused kernels of Adam and AdamW only.
        sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        arguments["fused"] = (not sharded or kind in (torch.optim.Adam, torch.optim.AdamW)) and all(
            parameter.is_floating_point() for parameter in parameters
        )
    unknown = [] if anything else sorted(arguments.keys() - takes.keys())
    if unknown:
        raise ModelError(
            f"optimizer {optim.optimizer_impl}.{kind.__name__} does not accept {', '.join(unknown)} "
            "(see optim.override_optimizer_config); it accepts " + ", ".join(name for name in takes if name != "params")
        )
    groups = by_mesh(parameters)  # fused kernels take parameters of one mesh
    try:
        return kind(parameters if len(groups) == 1 else [{"params": group} for group in groups], **arguments)
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"optimizer {optim.optimizer_impl}.{kind.__name__} refuses its settings: {error}; change "
            "optim.override_optimizer_config or the setting of optim"
        ) from error


def build_schedule(optimizer: torch.optim.Optimizer, optim: Any) -> LambdaLR:
    """The schedule `optim.lr_scheduler_type`; call its `step()` after each optimizer step."""
    return LambdaLR(optimizer, lr_factor(optim))


def lr_factor(optim: Any) -> Callable[[int], float]:
    """The learning rate of step 0, 1, 2, ... as a fraction of `optim.lr`.

    With w warm-up steps, n steps in total, m = `min_lr_ratio` (or `min_lr` / `lr`), q = (step - w) / (n - w) in [0, 1]:

        step < w   step / w
        constant   1
        linear     m + (1 - m) (1 - q)
        cosine     max(m, (1 + m) / 2 + (1 - m) / 2 cos(2 pi num_cycles q))
        wsd        1 while q < 0.9, then the cosine from 1 to m over the rest

    w is `lr_warmup_steps`, or `lr_warmup_steps_ratio` of n if that is not above 0.

    Raises:
        ModelError: the type is unknown, or it needs `total_training_steps` and that is not set.
    """
    kind, total = optim.lr_scheduler_type, optim.total_training_steps
    if kind not in LR_SCHEDULERS:
        raise ModelError(f"optim.lr_scheduler_type={kind!r} is unknown; use one of {', '.join(LR_SCHEDULERS)}")
    needs_total = kind != "constant" or (optim.lr_warmup_steps <= 0 and optim.lr_warmup_steps_ratio > 0)
    if needs_total and total <= 0:
        raise ModelError(
            f"optim.total_training_steps={total}: lr_scheduler_type={kind} with "
            f"lr_warmup_steps={optim.lr_warmup_steps} and "
            f"lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio} needs the number of training steps; set it"
        )
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * max(total, 0))
    floor = optim.min_lr_ratio if optim.min_lr is None else optim.min_lr / optim.lr
    cycles = optim.num_cycles

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        if kind == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        if kind == "linear":
            return floor + (1 - floor) * (1 - progress)
        if kind == "wsd":
            progress = max(0.0, (progress - STABLE_SHARE) / (1 - STABLE_SHARE))
            return (1 + floor) / 2 + (1 - floor) / 2 * math.cos(math.pi * progress)
        return max(floor, (1 + floor) / 2 + (1 - floor) / 2 * math.cos(2 * math.pi * cycles * progress))

    return factor


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a group's learning rate; torchao's optimizers keep it in a tensor that must not be replaced."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
