"""Parallel layout of an engine's model over its ranks, and Megatron-core's global state for one such layout.

Megatron-core keeps its process groups in the globals of one module, so a process has one layout. Here every engine has
its own: it takes a copy of these globals when its groups were made, and puts them in place around every call.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hybridrl.engine.megatron.attention_backend import AttentionVariables
from hybridrl.engine.train_engine import Geometry
from hybridrl.errors import ModelError
from hybridrl.utils import device, distributed

_GLOBAL = re.compile(r"_[A-Z][A-Z0-9_]*")
#: settings by the names of `ParallelSizes`
KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def import_parallel_state() -> Any:
    """Megatron-core's `parallel_state`; every import of Megatron-core in this package comes after this one.

    Raises:
        ModelError: Megatron-core is not installed.
    """
    if not device.is_gpu():
        from hybridrl.engine.megatron import cpu_backend

        cpu_backend.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each optional package that is not installed
            from megatron.core import distributed, parallel_state, pipeline_parallel  # noqa: F401
            from megatron.core.models import gpt  # noqa: F401
        # Megatron-core calls them by names that PyTorch has replaced.
        warnings.filterwarnings(
            "ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning
        )
    except ImportError as error:
        raise ModelError(
            f"strategy=megatron needs Megatron-core, which cannot be imported ({error}); install it with "
            "`bash scripts/install.sh auto megatron`, or train with strategy=fsdp2"
        ) from error
    return parallel_state


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Numbers of ranks that share a model.

    Attributes:
        tp: that share each layer.
        pp: stages of consecutive layers.
        vpp: model chunks per stage; above 1, the schedule is interleaved.
        cp: that share each sequence.
        ep: that share the experts of a layer.
        etp: that share each expert.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, settings: Any) -> ParallelSizes:
        """The sizes in an engine's settings."""
        tp = settings.tensor_model_parallel_size
        return cls(
            tp=tp,
            pp=settings.pipeline_model_parallel_size,
            vpp=settings.virtual_pipeline_model_parallel_size or 1,
            cp=settings.context_parallel_size,
            ep=settings.expert_model_parallel_size,
            etp=settings.expert_tensor_parallel_size or tp,
        )

    def __str__(self) -> str:
        sizes = {KEYS[field.name]: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{key}={size}" for key, size in sizes.items() if size > 1) or "no model parallelism"

    def dp(self, world: int) -> int:
        """Number of shards of a batch on so many ranks."""
        return world // (self.tp * self.pp * self.cp)

    def check(self, world: int, model_fields: Mapping[str, Any]) -> None:
        """Refuse a layout that does not fit the ranks or the model.

        Args:
            model_fields: numbers of a model, as Megatron-core's TransformerConfig names them.

        Raises:
            ModelError: it names the key and the sizes that fit.
        """
        ranks = self.tp * self.pp * self.cp
        if world % ranks:
            raise ModelError(
                f"{self}: one copy of the model takes {ranks} ranks, and {world} ranks are no multiple of that; change "
                "the sizes, or trainer.n_gpus_per_node"
            )
        experts = model_fields.get("num_moe_experts") or 0
        if not experts and (self.ep > 1 or self.etp != self.tp):
            raise ModelError(f"{self}: the model has no experts to share; leave {KEYS['ep']} and {KEYS['etp']} unset")
        self._divides("tp", model_fields["num_attention_heads"], "attention heads")
        groups, layers = (
            model_fields.get("num_query_groups") or model_fields["num_attention_heads"],
            model_fields["num_layers"],
        )
        if not model_fields.get("multi_latent_attention"):
            self._divides("tp", groups, "heads of keys and values")
        if not _sets_stages(model_fields):
            self._check_stages(layers, [name for name in _COUNTED_AS_LAYERS if model_fields.get(name)])
        if self.vpp > 1 and self.pp == 1:
            raise ModelError(f"{KEYS['vpp']}={self.vpp} needs {KEYS['pp']} of 2 or more; it is 1")
        if experts:
            self._check_experts(world, experts)

    def _check_stages(self, layers: int, extra_layers: Sequence[str]) -> None:
        """Refuse stages of different sizes; each setting in `extra_layers` counts as one more layer."""
        total, chunks = layers + len(extra_layers), self.pp * self.vpp
        if total % chunks == 0:
            return
        with_stages = f" with {KEYS['pp']}={self.pp}" if self.vpp > 1 else ""
        which = "vpp" if self.vpp > 1 else "pp"
        number = total // self.pp if which == "vpp" and total % self.pp == 0 else total
        chunked = f"{layers} layers" + "".join(f" and one for {name}" for name in extra_layers)
        raise ModelError(
            f"{KEYS[which]}={getattr(self, which)}{with_stages}: {chunked} do not divide into {chunks} chunks; sizes "
            f"that fit: {_listed(number)}"
        )

    def _check_experts(self, world: int, experts: int) -> None:
        self._divides("ep", experts, "experts")
        stage = world // self.pp
        if stage % (self.ep * self.etp):
            fit = [size for size in _divisors(experts) if stage % (size * self.etp) == 0]
            raise ModelError(
                f"{KEYS['ep']}={self.ep}, {KEYS['etp']}={self.etp}: the {stage} ranks of a pipeline stage are no "
                f"multiple of {self.ep * self.etp}; {KEYS['ep']} that fit: {', '.join(map(str, fit)) or 'none'}"
            )
        if self.ep == 1 and self.etp != self.tp:
            raise ModelError(
                f"{KEYS['etp']}={self.etp} differs from {KEYS['tp']}={self.tp}, which Megatron-core supports with "
                f"{KEYS['ep']} above 1 only; set it to {self.tp}, or {KEYS['ep']} to 2 or more"
            )

    def _divides(self, name: str, number: int, unit: str) -> None:
        size = getattr(self, name)
        if number % size:
            raise ModelError(
                f"{KEYS[name]}={size} does not divide the model's {number} {unit}; sizes that fit: {_listed(number)}"
            )


#: settings of `override_transformer_config` by which the embedding and the output layer count as layers
_COUNTED_AS_LAYERS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def stages_differ(model_fields: Mapping[str, Any]) -> bool:
    """Whether stages may have different numbers or kinds of layers."""
    has_extra_layers, kinds = (
        any(model_fields.get(name) for name in _COUNTED_AS_LAYERS),
        model_fields.get("moe_layer_freq"),
    )
    return has_extra_layers or _sets_stages(model_fields) or (isinstance(kinds, (list, tuple)) and len(set(kinds)) > 1)


def _sets_stages(model_fields: Mapping[str, Any]) -> bool:
    names = (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    )
    return any(model_fields.get(name) is not None for name in names)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _listed(number: int) -> str:
    return ", ".join(map(str, _divisors(number)))


# Layouts whose groups exist in this process, by the process group of the world that they were made in.
_made: dict[tuple[ParallelSizes, int], tuple[Any, dict[str, Any]]] = {}


class ParallelState:
    """Megatron-core's process groups for one layout, and this rank's place in it.

    Engines with the same layout share their groups.

    Attributes:
        sizes: the layout.
        tp_rank, pp_rank, cp_rank, ep_rank, etp_rank, dp_rank: this rank's coordinates.
        tp_group, pp_group, cp_group, ep_group, etp_group: the ranks that share with this one what the sizes count.
        dp_group: the ranks with the same part of the model, one per shard of a batch.
        dp_cp_group: the ranks with the same part of the model, over which gradients are summed.
        expert_dp_group: the same for the parameters of experts.
    """

    def __init__(self, sizes: ParallelSizes) -> None:
        self.sizes = sizes
        self._module = import_parallel_state()
        if not dist.is_initialized():  # one process alone
            dist.init_process_group(device.backend_name(), store=dist.HashStore(), rank=0, world_size=1)
        world = dist.group.WORLD
        key = sizes, id(world)
        if key not in _made:
            _made[key] = world, self._make_groups()
        self._globals = dict(_made[key][1])
        self._attention = AttentionVariables()
        with self.activate():
            state = self._module
            self.tp_group = state.get_tensor_model_parallel_group()
            self.pp_group = state.get_pipeline_model_parallel_group()
            self.cp_group = state.get_context_parallel_group()
            self.ep_group = state.get_expert_model_parallel_group()
            self.etp_group = state.get_expert_tensor_parallel_group()
            self.dp_group = state.get_data_parallel_group()
            self.dp_cp_group = state.get_data_parallel_group(with_context_parallel=True)
            self.expert_dp_group = state.get_expert_data_parallel_group()
        self.tp_rank, self.pp_rank, self.cp_rank = self.tp_group.rank(), self.pp_group.rank(), self.cp_group.rank()
        self.ep_rank, self.etp_rank, self.dp_rank = self.ep_group.rank(), self.etp_group.rank(), self.dp_group.rank()

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.sizes.pp - 1

    @property
    def geometry(self) -> Geometry:
        sizes = self.sizes
        return Geometry(
            dp_rank=self.dp_rank,
            dp_size=self.dp_group.size(),
            dp_group=self.dp_group,
            tp_rank=self.tp_rank,
            tp_size=sizes.tp,
            cp_rank=self.cp_rank,
            cp_size=sizes.cp,
            pp_rank=self.pp_rank,
            pp_size=sizes.pp,
        )

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Within the context, Megatron-core sees this layout, and this engine's choice of attention kernels."""
        before = _globals_of(self._module)
        vars(self._module).update(self._globals)
        try:
            with self._attention.activate():
                yield
        finally:
            self._globals = _globals_of(self._module)
            vars(self._module).update(before)

    def release_buffers(self) -> None:
        """Free the memory that Megatron-core keeps for gathered activations, also of engines with the same layout."""
        with self.activate():
            self._module.get_global_memory_buffer().buffer.clear()

    def _make_groups(self) -> dict[str, Any]:
        before = _globals_of(self._module)
        vars(self._module).update(_initial_globals(self._module))
        try:
            self._module.initialize_model_parallel(
                tensor_model_parallel_size=self.sizes.tp,
                pipeline_model_parallel_size=self.sizes.pp,
                virtual_pipeline_model_parallel_size=self.sizes.vpp if self.sizes.vpp > 1 else None,
                context_parallel_size=self.sizes.cp,
                expert_model_parallel_size=self.sizes.ep,
                expert_tensor_parallel_size=self.sizes.etp,
                create_gloo_process_groups=False,
                distributed_timeout_minutes=distributed.collective_timeout() / timedelta(minutes=1),
            )
            return _globals_of(self._module)
        finally:
            vars(self._module).update(before)


_initial: dict[str, Any] = {}


def _initial_globals(module: Any) -> dict[str, Any]:
    """The globals as they were before the first layout."""
    if not _initial:
        _initial.update(_globals_of(module))
    return {name: type(value)() if isinstance(value, dict) else value for name, value in _initial.items()}


def _globals_of(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _GLOBAL.fullmatch(name)}
