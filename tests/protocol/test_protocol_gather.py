"""all_gather_data_proto over real gloo processes."""

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from tensordict import TensorDict

from hybridrl.errors import BatchError
from hybridrl.protocol import DataProto, all_gather_data_proto, concat_tensordict

COUNTS = [3, 2]


def part(rank: int) -> DataProto:
    rows = [f"{rank}.{i}" for i in range(COUNTS[rank])]
    values = torch.arange(sum(range(COUNTS[rank]))) + 100 * rank
    offsets = torch.tensor([sum(range(i)) for i in range(COUNTS[rank] + 1)])
    tensors = {
        "x": torch.tensor([[rank, i] for i in range(COUNTS[rank])], dtype=torch.int64).reshape(-1, 2),
        "half": torch.full((COUNTS[rank],), rank + 0.5).bfloat16(),
        "flag": torch.arange(COUNTS[rank]) % 2 == rank % 2,
        "tiny": torch.full((COUNTS[rank], 3), rank).to(torch.float8_e4m3fn),
        "jagged": torch.nested.nested_tensor_from_jagged(values, offsets),
    }
    return DataProto.from_dict(tensors, {"uid": rows, "turns": [[1, 2]] * COUNTS[rank]}, {"rank": rank})


def run(rank: int) -> None:
    data = part(rank)
    all_gather_data_proto(data, dist.group.WORLD)
    whole = DataProto.concat([part(r).select(meta_info_keys=[]) for r in range(len(COUNTS))])
    assert data.meta_info == {"rank": rank}
    assert len(data) == sum(COUNTS)
    assert set(data.batch.keys()) == {"x", "half", "flag", "tiny", "jagged"}
    data.union(whole)  # refuses any difference
    wrong = DataProto.from_dict({"x": torch.zeros(1, 2 + rank)})
    with pytest.raises(ValueError, match="the group has fields"):
        all_gather_data_proto(wrong, dist.group.WORLD)
    data = part(rank) if rank == 0 else part(rank)[:0]
    all_gather_data_proto(data, dist.group.WORLD)
    data.union(part(0).select(meta_info_keys=[]))
    assert len(data) == COUNTS[0]
    texts = DataProto.from_dict(non_tensors={"uid": [str(rank)]})
    all_gather_data_proto(texts, dist.group.WORLD)
    assert texts.non_tensor_batch["uid"].tolist() == ["0", "1"]


def test_rows_of_all_ranks_in_rank_order() -> None:
    spawn(run, len(COUNTS))


def test_a_field_that_not_every_part_has_is_named() -> None:
    first = TensorDict({"a": torch.ones(2)}, [2])
    more = TensorDict({"a": torch.ones(1), "entropys": torch.zeros(1)}, [1])
    assert concat_tensordict([first, first])["a"].tolist() == [1.0] * 4
    for parts in ([first, more], [more, first]):
        with pytest.raises(BatchError, match=r"entropys"):
            concat_tensordict(parts)
