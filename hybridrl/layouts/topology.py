"""Layouts: the number of devices that share a model, and the part that each of them holds.

A layout has `devices` devices, numbered from 0. `coordinates(device)` identifies the part of the model that a device
holds; devices with equal coordinates hold the same bytes. Rank orders are those of the engines: FSDP2's mesh is
(replicate, shard), and Megatron-core numbers ranks with tensor parallelism fastest, then context, data and pipeline
parallelism.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TypeVar

from hybridrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The part of the model that a device holds.

    Attributes:
        pipeline: index of its pipeline stage.
        tensor: index of its part of the tensors that are cut by tensor parallelism; for FSDP, of its shard.
        expert: index of its group of experts.
        expert_tensor: index of its part of each expert's tensors.
    """

    pipeline: int = 0
    tensor: int = 0
    expert: int = 0
    expert_tensor: int = 0


class Layout(ABC):
    """Layout of a model on devices."""

    @property
    @abstractmethod
    def devices(self) -> int:
        """Number of devices that hold the model, all copies together."""

    @abstractmethod
    def coordinates(self, device: int) -> Coordinates:
        """Return the part that a device holds."""

    @abstractmethod
    def copy(self, device: int) -> int:
        """Return the index of the copy of the model that a device belongs to."""

    def describe(self) -> str:
        """Return the sizes that are above 1, as `name=size`."""
        sizes = ((field.name, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return ",".join(f"{name}={size}" for name, size in sizes if size and size != 1) or "one device"


def _check_positive(layout: Layout) -> None:
    for field in fields(layout):  # type: ignore[arg-type]
        size = getattr(layout, field.name)
        if size < (0 if field.default == 0 else 1):
            raise ConfigError(f"{type(layout).__name__}: {field.name}={size} must be at least 1")


@dataclass(frozen=True, slots=True)
class ShardedLayout(Layout):
    """FSDP2 (`replicate=1`) or HSDP: each tensor is cut into `shard` parts of equal size along its first dimension.

    The last parts are smaller, or empty, if the dimension does not divide (as `torch.chunk` cuts it).

    With `expert` above 1, tensors of experts are cut into so many groups of experts first. Each group is cut again for
    the devices that hold it: along the dimension of the experts if it divides, otherwise along the next one.
    """

    shard: int = 1
    replicate: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.shard % self.expert:
            fit = [size for size in range(1, self.shard + 1) if self.shard % size == 0]
            raise ConfigError(f"FSDP2: expert={self.expert} does not divide shard={self.shard}; it can be one of {fit}")

    @property
    def devices(self) -> int:
        return self.shard * self.replicate

    def coordinates(self, device: int) -> Coordinates:
        return Coordinates(tensor=device % self.shard)

    def copy(self, device: int) -> int:
        return device // self.shard


LayoutT = TypeVar("LayoutT", bound=Layout)


class ParallelLayout(Layout):
    """A layout with tensor, pipeline and expert parallelism: training with Megatron-core, or an inference engine."""

    @property
    @abstractmethod
    def sizes(self) -> Coordinates:
        """Numbers of pipeline stages, parts of tensors, groups of experts, and parts of an expert."""

    @property
    @abstractmethod
    def vocabulary_multiple(self) -> int:
        """The vocabulary is padded to a multiple of this before it is cut."""

    @property
    @abstractmethod
    def shares_kv_heads(self) -> bool:
        """Whether several devices may hold the same KV head, if there are fewer heads than tensor parallel parts."""

    @abstractmethod
    def stages(self, layers: int) -> tuple[int, ...]:
        """Return the pipeline stage of each decoder layer.

        Raises:
            ConfigError: the layers do not divide; the error names the sizes that do.
        """


@dataclass(frozen=True, slots=True)
class MegatronLayout(ParallelLayout):
    """A Megatron-core training layout of `tp * cp * dp * pp` devices.

    Attributes:
        tp: tensor parallel size of everything but experts.
        pp: pipeline stages.
        dp: data parallel size, without context parallelism.
        cp: context parallel size; weights are copied over it.
        ep: groups of experts.
        etp: tensor parallel size of each expert. 0 stands for `tp`, as in Megatron-core.
        vpp: model chunks per stage (interleaved schedule): chunk c of stage s is chunk c * pp + s of the model.
        first_layers, last_layers: decoder layers of the first and last stage, if they differ from the others; 0: no.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 1
    first_layers: int = 0
    last_layers: int = 0

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        per_stage = self.tp * self.cp * self.dp
        if per_stage % (self.ep * self.etp):
            fit = [e for e in range(1, per_stage + 1) if per_stage % (e * self.etp) == 0]
            raise ConfigError(
                f"Megatron: ep={self.ep} with etp={self.etp} does not divide the tp * cp * dp = {per_stage} devices of "
                f"a pipeline stage; ep can be one of {fit}"
            )
        if self.vpp > 1 and (self.first_layers or self.last_layers):
            raise ConfigError("Megatron: first_layers and last_layers need vpp=1")

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def sizes(self) -> Coordinates:
        return Coordinates(self.pp, self.tp, self.ep, self.etp)

    @property
    def vocabulary_multiple(self) -> int:
        return 128 * self.tp

    @property
    def shares_kv_heads(self) -> bool:
        return False

    def coordinates(self, device: int) -> Coordinates:
        stage, within = divmod(device, self.tp * self.cp * self.dp)
        return Coordinates(
            pipeline=stage,
            tensor=within % self.tp,
            expert=within // self.etp % self.ep,
            expert_tensor=within % self.etp,
        )

    def copy(self, device: int) -> int:
        return device % (self.tp * self.cp * self.dp) // self.tp

    def stages(self, layers: int) -> tuple[int, ...]:
        ends = [self.first_layers, self.last_layers]
        middle_stages = self.pp - sum(1 for end in ends if end)
        middle = layers - sum(ends)
        chunks = middle_stages * self.vpp
        if middle_stages < 0 or middle < 0 or (chunks == 0 and middle) or (chunks and middle % chunks):
            fit = [size for size in range(1, layers + 1) if layers % (size * self.vpp) == 0]
            raise ConfigError(
                f"Megatron: {layers} decoder layers do not divide into {self.describe()}; pp can be one of {fit}, or "
                "set first_layers and last_layers so that the stages between them get equal shares"
            )
        if not (self.first_layers or self.last_layers):
            size = layers // (self.pp * self.vpp)
            return tuple(layer // size % self.pp for layer in range(layers))
        counts = [middle // chunks if chunks else 0] * self.pp
        if self.first_layers:
            counts[0] = self.first_layers
        if self.last_layers:
            counts[-1] = self.last_layers
        return tuple(stage for stage, count in enumerate(counts) for _ in range(count))


@dataclass(frozen=True, slots=True)
class GenerationLayout(ParallelLayout):
    """`replicas` inference engines of `pp * dp * tp` devices each.

    Attributes:
        tp: tensor parallel size.
        pp: pipeline stages; layers that do not divide go to the later stages, the last one excepted (vLLM's rule).
        dp: copies of everything but the experts within one engine (attention data parallelism).
        ep: groups of experts over the `dp * tp` devices of a stage; within a group, each expert is cut into
            `dp * tp / ep` parts.
        replicas: engines.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.tp * self.dp % self.ep:
            fit = [size for size in range(1, self.tp * self.dp + 1) if self.tp * self.dp % size == 0]
            raise ConfigError(
                f"generation: ep={self.ep} does not divide tp * dp = {self.tp * self.dp}; ep can be one of {fit}"
            )

    @property
    def per_replica(self) -> int:
        """Devices of one engine."""
        return self.tp * self.dp * self.pp

    @property
    def devices(self) -> int:
        return self.per_replica * self.replicas

    @property
    def etp(self) -> int:
        """Parts of each expert."""
        return self.tp * self.dp // self.ep

    @property
    def sizes(self) -> Coordinates:
        return Coordinates(self.pp, self.tp, self.ep, self.etp)

    @property
    def vocabulary_multiple(self) -> int:
        return 64

    @property
    def shares_kv_heads(self) -> bool:
        return True

    def coordinates(self, device: int) -> Coordinates:
        stage, within = divmod(device % self.per_replica, self.tp * self.dp)
        return Coordinates(
            pipeline=stage,
            tensor=within % self.tp,
            expert=within // self.etp,
            expert_tensor=within % self.etp,
        )

    def copy(self, device: int) -> int:
        return device // self.per_replica

    def stages(self, layers: int) -> tuple[int, ...]:
        if layers < self.pp:
            raise ConfigError(f"generation: pp={self.pp} is more than the model's {layers} decoder layers")
        counts = [layers // self.pp] * self.pp
        for index in range(layers % self.pp):
            counts[-2 - index] += 1
        return tuple(stage for stage, count in enumerate(counts) for _ in range(count))


def parse_layout(text: str, kind: type[LayoutT]) -> LayoutT:
    """Make a layout of `name=size,name=size`.

    Raises:
        ConfigError: a name that the layout does not have, or a size that is no whole number.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in names or not size.isdecimal():
            raise ConfigError(f"layout {text!r}: {part!r} is not NAME=SIZE with NAME one of {', '.join(names)}")
        sizes[name] = int(size)
    return kind(**sizes)


def paper_slot(training: MegatronLayout, generation: GenerationLayout, device: int) -> int:
    """Return the generation slot that the paper's grouping gives a training device (HybridFlow, section 5.3).

    With r_t = t / t_g and r_p = p / p_g, the device with training coordinates (pipeline i, tensor j, copy c) gets
    generation coordinates (i // r_p, j // r_t) in engine number c * r_t * r_p + (i mod r_p) * r_t + (j mod r_t). Its
    training shard then lies within its generation shard.

    Raises:
        ConfigError: t_g does not divide t or p_g does not divide p; the rule is defined for such layouts alone.
    """
    if training.tp % generation.tp or training.pp % generation.pp or generation.dp != 1:
        raise ConfigError(
            f"the paper's grouping needs a generation tp that divides {training.tp}, a pp that divides {training.pp} "
            f"and dp=1; found {generation.describe()}"
        )
    if training.devices != generation.devices:
        raise ConfigError(f"training has {training.devices} devices and generation {generation.devices}")
    ratio_t, ratio_p = training.tp // generation.tp, training.pp // generation.pp
    at = training.coordinates(device)
    micro = (at.pipeline % ratio_p) * ratio_t + at.tensor % ratio_t
    replica = training.copy(device) * ratio_t * ratio_p + micro
    return replica * generation.per_replica + (at.pipeline // ratio_p) * generation.tp + at.tensor // ratio_t
