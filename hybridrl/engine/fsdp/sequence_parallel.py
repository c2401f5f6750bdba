"""The ranks that share each sequence (Ulysses): which tokens of a micro-batch each has, and joining their outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from hybridrl.engine.microbatch import MicroBatchLayout
from hybridrl.engine.shared_sum import SharedSum
from hybridrl.engine.train_engine import Geometry
from hybridrl.errors import ModelError
from hybridrl.models import attention, ulysses
from hybridrl.utils import device, distributed

KEY = ulysses.KEY


def check_sequence_parallel(size: int, ranks: int, model: Any, config: PreTrainedConfig) -> None:
    """Refuse ranks or a model that cannot share sequences.

    Args:
        size: ranks that share each sequence.
        ranks: of the engine.
        model: a `ModelConfig`.
        config: of the model of transformers.

    Raises:
        ModelError: it names the key at fault and the values that fit.
    """
    if ranks % size:
        fitting = ", ".join(str(divisor) for divisor in range(1, ranks + 1) if ranks % divisor == 0)
        raise ModelError(f"{KEY}={size} does not divide the {ranks} ranks; sizes that fit: {fitting}")
    if not model.use_remove_padding:
        raise ModelError(f"{KEY}={size} splits packed rows: it needs model.use_remove_padding=True, which is False")
    implementation = model.override_config.get("attn_implementation", attention.VARLEN)
    if implementation != attention.VARLEN:
        raise ModelError(
            f"{KEY}={size} needs the attention that exchanges heads, {attention.VARLEN}, and "
            f"model.override_config.attn_implementation is {implementation}; remove it"
        )
    reason = attention.packing_unsupported_reason(config) or attention.varlen_unsupported_reason(config)
    if reason is not None:
        raise ModelError(
            f"{KEY}={size}: sequences of {model.path} cannot be split, because {reason}; set it to 1, and use smaller "
            "micro-batches and model.enable_gradient_checkpointing for long sequences"
        )
    ulysses.check_model(config, size)


class SequenceParallel:
    """The ranks that share this rank's sequences: `size` consecutive ones.

    Attributes:
        group: those ranks.
        geometry: this rank's place among all ranks.
    """

    def __init__(self, size: int) -> None:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        self.group, dp_group = _groups(size)
        self.size, self.rank = size, rank % size
        self.geometry = Geometry(rank // size, world // size, dp_group, cp_rank=self.rank, cp_size=size)

    def split(self, layout: MicroBatchLayout) -> tuple[MicroBatchLayout, torch.Tensor]:
        """Return this rank's tokens of a micro-batch of one row, and the mask of the N outputs that are theirs, `[N]`.

        The row is padded to a multiple of the ranks by a sequence of its own. The boundaries stay those of the whole
        row.
        """
        length = layout.input_ids.shape[1]
        missing = -length % self.size
        begin, end = self._place(length)
        owned = (layout.selected >= begin) & (layout.selected < end)
        lengths = layout.lengths or [length]
        part = MicroBatchLayout(
            input_ids=pad(layout.input_ids, [0, missing])[:, begin:end],
            position_ids=pad(layout.position_ids, [0, missing])[..., begin:end],
            selected=layout.selected[owned] - begin,
            labels=layout.labels[owned],
            lengths=[*lengths, missing] if missing else lengths,
            inputs=None if layout.inputs is None else {name: tensor[owned] for name, tensor in layout.inputs.items()},
        )
        return part, owned

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of `[L]` numbers of a row's tokens; 0 where the row is padded."""
        begin, end = self._place(len(flat))
        return pad(flat, [0, -len(flat) % self.size])[begin:end]

    def _place(self, length: int) -> tuple[int, int]:
        """Return the begin and the end of this rank's tokens in a row."""
        own = -(-length // self.size)
        return self.rank * own, (self.rank + 1) * own

    def join(self, computed: dict[str, torch.Tensor], owned: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gather all N outputs on every rank."""
        names = sorted(computed)
        # A row for each number of a token. Integers are tokens of a vocabulary, which float32 holds exactly.
        parts = [computed[name].flatten(1).T if computed[name].dim() > 1 else computed[name][None] for name in names]
        own = torch.cat([part.float() for part in parts])
        owned = owned.to(own.device).expand(len(own), -1)
        whole = SharedSum.apply(own.new_zeros(owned.shape).masked_scatter(owned, own), self.group)
        split = whole.split([len(part) for part in parts])
        return {
            name: rows.T.reshape(-1, *computed[name].shape[1:]).to(computed[name].dtype)
            for name, rows in zip(names, split, strict=True)
        }


# Groups of ranks that share sequences by their size, and the process group of the world that they were made in.
_made: dict[int, tuple[Any, ProcessGroup, ProcessGroup]] = {}


def _groups(size: int) -> tuple[ProcessGroup, ProcessGroup]:
    """This rank's group, and one rank of each group in the same place. Engines share them, as each takes memory."""
    world = dist.group.WORLD
    if size not in _made or _made[size][0] is not world:
        ranks = torch.arange(distributed.get_world_size(), device="cpu").view(-1, size)
        timeout = distributed.collective_timeout()
        own, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
        across, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
        _made[size] = world, own, across
    return _made[size][1:]


def of_settings(size: int, model: Any, config: PreTrainedConfig) -> SequenceParallel | None:
    """The ranks that share sequences with this one; None where each rank has sequences of its own.

    Raises:
        ModelError: see `check_sequence_parallel`.
    """
    if size == 1:
        return None
    check_sequence_parallel(size, distributed.get_world_size(), model, config)
    if device.is_gpu() and not device.supports_varlen_attention():
        raise ModelError(
            f"{KEY}={size}: attention over packed rows needs a GPU of compute capability 8.0 or newer; set it to 1"
        )
    return SequenceParallel(size)
