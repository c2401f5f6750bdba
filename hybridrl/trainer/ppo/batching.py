"""Splitting and ordering a batch on the controller: samples of a prompt, ranks, mini-batches.

Everything here depends only on the batch and never on the number of ranks, except the last step, which spreads the rows
over the ranks.

Shapes: B sequences, P prompt width, T response width.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hybridrl.algorithms.sessions import ORDER_KEY, SESSION_KEY
from hybridrl.config import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.models.model_config import config_of
from hybridrl.models.work import Work, work_of
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.fields import Widths, narrow, padded, widen
from hybridrl.protocol.packed import PackedProto
from hybridrl.utils.seqlen_balancing import LINEAR_WORK, calculate_workload, get_seqlen_balanced_partitions
from hybridrl.workers.losses import SEQUENCE_IDS, SEQUENCE_TOKENS
from hybridrl.workers.update_plan import MiniBatch


def repeat_for_sampling(prompts: DataProto, n: int) -> DataProto:
    """Repeat each prompt n times in succession. The column `sample` numbers the rows of a prompt."""
    batch = prompts.repeat(repeat_times=n, interleave=True)
    batch.non_tensor_batch["sample"] = np.tile(np.arange(n), len(prompts)).astype(object)
    return batch


def trim(batch: DataProto) -> DataProto:
    """Cut the response columns that no row uses. Engines always return `rollout.response_length` columns.

    `attention_mask` says which columns a row uses. `response_mask` may have holes, for example where a tool answered.
    """
    attention = batch.batch["attention_mask"]
    if attention.is_nested:
        return batch
    widths = _widths(batch)
    used = attention[:, widths.prompt :].bool().any(dim=0).nonzero()
    columns = int(used[-1]) + 1 if len(used) else 1
    if columns == widths.response:
        return batch
    tensors = {name: narrow(name, tensor, widths, 0, columns) for name, tensor in _tensors(batch).items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=batch.non_tensor_batch, meta_info=batch.meta_info)


def join_generated(parts: Sequence[DataProto], pad_token_id: int) -> DataProto:
    """Concatenate generated batches of different widths. A non-tensor column that a part lacks is None in its rows.

    Prompts are padded on the left, responses on the right. Where some parts have sessions of several rows, each sample
    of the others is a session of one row.
    """
    if len(parts) == 1:
        return parts[0]
    columns = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    jagged = any(part.batch["attention_mask"].is_nested for part in parts)
    widths = [] if jagged else [_widths(part) for part in parts]
    wide = []
    for number, part in enumerate(parts):
        tensors = _tensors(part)
        if not jagged:
            prompt, response = max(w.prompt for w in widths), max(w.response for w in widths)
            tensors = {
                name: widen(name, tensor, widths[number], prompt, response, pad_token_id)
                for name, tensor in tensors.items()
            }
        empty = np.full(len(part), None, dtype=object)
        objects = {name: part.non_tensor_batch.get(name, empty) for name in columns}
        if SESSION_KEY in columns and SESSION_KEY not in part.non_tensor_batch:
            numbers = part.non_tensor_batch.get("sample", np.arange(len(part))).tolist()
            objects[SESSION_KEY] = object_array([f"sample {number}" for number in numbers])
            objects[ORDER_KEY] = object_array([0] * len(part))
        wide.append(DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info=part.meta_info))
    return DataProto.concat(wide)


def _tensors(batch: DataProto) -> dict[str, torch.Tensor]:
    return {str(name): batch.batch[name] for name in batch.batch.keys()}


def _widths(batch: DataProto) -> Widths:
    return Widths(batch.batch["prompts"].shape[1], batch.batch["responses"].shape[1])


def padded_batch(batch: DataProto) -> DataProto:
    """Return a batch without jagged tensors. Fields that are added to it do not appear in `batch`."""
    tensors = _tensors(batch)
    if not any(tensor.is_nested for tensor in tensors.values()):
        return batch.select()
    return DataProto.from_dict(
        tensors=padded(tensors), non_tensors=dict(batch.non_tensor_batch), meta_info=dict(batch.meta_info)
    )


def sequence_work(model: ModelConfig) -> Work | None:
    """Return what a sequence costs this model, by its configuration; None if that cannot be read here.

    Without attention it is in proportion to the length.
    """
    try:
        config = config_of(model)
    except ModelError:
        return None
    has_attention = getattr(config.get_text_config(), "num_attention_heads", None) is not None
    return work_of(config) if has_attention else Work()


def _workload(attention_mask: torch.Tensor, work: Work | None) -> list[int]:
    """The work for each row, in arbitrary units; None is the work of a 7B model."""
    lengths = attention_mask.sum(dim=1)
    if work is None:
        return [int(each) for each in calculate_workload(lengths).tolist()]
    unit = max(1, work.per_token // LINEAR_WORK)  # keeps sums within 64 bits
    of_length = {length: work.of(length) // unit for length in set(lengths.tolist())}
    return [of_length[length] for length in lengths.tolist()]


def balanced_order(
    batch: DataProto, ranks: int, families: np.ndarray | None = None, work: Work | None = None
) -> torch.Tensor:
    """Return an order [B] of the rows in which `ranks` equal consecutive shards have about the same work.

    Args:
        families: for each row what it belongs to; see `split_rows`.
        work: what a sequence costs the model; None: a model with 7B parameters.
    """
    parts = split_rows(_workload(batch.batch["attention_mask"], work), ranks, families)
    return torch.tensor([row for part in parts for row in part], dtype=torch.int64)


def split_rows(workload: Sequence[int], count: int, families: np.ndarray | None = None) -> list[list[int]]:
    """Split rows into parts of the same number of rows and about the same work.

    Args:
        workload: of each row.
        count: number of parts.
        families: for each row what it belongs to. Rows of one family share prefixes, which are computed once on each
            rank that has some of them, so families stay together: all of them if they are equally large and their
            number can be divided evenly, else all but `count - 1`, without regard to work.
    """
    if families is None:
        return get_seqlen_balanced_partitions(workload, k_partitions=count, equal_size=True)
    members: dict[str, list[int]] = {}
    for row, family in enumerate(families.astype(str)):
        members.setdefault(family, []).append(row)
    rows_of = list(members.values())
    if len(rows_of) % count == 0 and len({len(rows) for rows in rows_of}) == 1:
        work = [sum(workload[row] for row in rows) for rows in rows_of]
        parts = get_seqlen_balanced_partitions(work, k_partitions=count, equal_size=True)
        return [[row for family in part for row in rows_of[family]] for part in parts]
    order = [row for rows in rows_of for row in rows]
    size = len(order) // count
    return [order[start : start + size] for start in range(0, len(order), size)]


def epochs_of_mini_batches(
    uids: np.ndarray, prompts_per_mini_batch: int, epochs: int, shuffle: bool, seed: int
) -> Iterator[list[np.ndarray]]:
    """Yield the rows of each mini-batch, for each epoch.

    A mini-batch is `prompts_per_mini_batch` prompts with all of their samples, as `ppo_mini_batch_size` counts. Prompts
    are in the order in which they first appear. With `shuffle` each epoch has another order, which depends on
    (seed, epoch).
    """
    _, first, prompt_of = np.unique(uids.astype(str), return_index=True, return_inverse=True)
    by_appearance = np.argsort(np.argsort(first))
    prompt_of = by_appearance[prompt_of]
    count = len(first)
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(count) if shuffle else np.arange(count)
        place = np.empty(count, dtype=np.int64)
        place[order] = np.arange(count)
        mini_of = place[prompt_of] // prompts_per_mini_batch
        yield [np.flatnonzero(mini_of == index) for index in range(-(-count // prompts_per_mini_batch))]


def seed_of(*numbers: int) -> int:
    """Combine several numbers (step, epoch, ...) into one seed. Each of them changes it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def spread_over_ranks(
    batch: DataProto,
    mini_batches: Sequence[np.ndarray],
    dp_size: int,
    seeds: Sequence[int] | None = None,
    families: np.ndarray | None = None,
    rows_together: int = 1,
    sessions: np.ndarray | None = None,
    work: Work | None = None,
) -> tuple[DataProto, tuple[MiniBatch, ...]]:
    """Arrange a batch for one update call: by shard, and by mini-batch within each shard.

    The work of every mini-batch is balanced over the shards. A mini-batch that cannot be divided evenly is padded with
    copies of its first row. The copies have an empty `response_mask`, so they add nothing to any loss.

    Args:
        batch: padded; see `padded_batch`. It may be packed, and what is returned is.
        mini_batches: the rows of each mini-batch.
        dp_size: number of shards, `WorkerGroup.dp_size`.
        seeds: seed of each mini-batch; None means 0 for all.
        families: for each row of the batch what it belongs to; see `split_rows`.
        rows_together: so many consecutive rows of a mini-batch stay together, in their order. Copies that pad it are
            copies of all of them.
        sessions: for each row of the batch the sequence that it is a part of; a sequence is in one mini-batch. The
            batch gets the fields `sequence_ids` and `sequence_tokens` then. None: each row is a sequence.
        work: what a sequence costs the model; None: a model with 7B parameters.

    Returns:
        The arranged batch, and its mini-batches for an `UpdatePlan`.

    Raises:
        ValueError: the batch is jagged.
    """
    is_packed = isinstance(batch, PackedProto) and batch.is_packed
    if not is_packed and any(tensor.is_nested for tensor in _tensors(batch).values()):
        raise ValueError("spread_over_ranks was given a jagged batch; pass padded_batch(batch)")
    packed = PackedProto.of(batch)
    tokens_of = packed.field("response_mask").sum(dim=1).numpy()
    sequence_of = np.arange(len(packed)) if sessions is None else np.unique(sessions, return_inverse=True)[1]
    if sessions is not None:
        tokens = np.bincount(sequence_of, weights=tokens_of).astype(np.int64)
        packed = packed.select()
        packed.set_field(SEQUENCE_IDS, torch.from_numpy(sequence_of))
        packed.set_field(SEQUENCE_TOKENS, torch.from_numpy(tokens[sequence_of]))
    workload = np.asarray(_workload(packed.field("attention_mask"), work), dtype=np.int64)
    shards: list[list[int]] = [[] for _ in range(dp_size)]
    is_copy: list[list[bool]] = [[] for _ in range(dp_size)]
    planned = []
    for number, rows in enumerate(mini_batches):
        units = rows.reshape(-1, rows_together)
        missing = -len(units) % dp_size
        padded = np.concatenate([units, np.repeat(units[:1], missing, axis=0)])
        first = padded[:, 0]
        parts = split_rows(workload[padded].sum(1).tolist(), dp_size, None if families is None else families[first])
        for shard, part in enumerate(parts):
            shards[shard].extend(padded[part].ravel().tolist())
            is_copy[shard].extend(index >= len(units) for index in part for _ in range(rows_together))
        planned.append(
            MiniBatch(
                rows=padded.size // dp_size,
                tokens=int(tokens_of[rows].sum()),
                sequences=len(np.unique(sequence_of[rows][tokens_of[rows] > 0])),
                seed=0 if seeds is None else seeds[number],
            )
        )
    spread = packed.select_idxs(np.asarray([row for shard in shards for row in shard]))
    copies = torch.tensor([flag for flags in is_copy for flag in flags])
    if bool(copies.any()):
        mask = spread.field("response_mask")
        spread.set_field("response_mask", torch.where(copies[:, None], torch.zeros_like(mask), mask))
    return spread, tuple(planned)
