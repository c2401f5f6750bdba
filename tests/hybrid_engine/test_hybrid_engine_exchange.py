"""Plans carried out by real gloo processes: every byte arrives, and no byte more than the plan and the paper say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paper_table import paper_fraction

from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.exchange import Exchange, Shards, assemble
from hybridrl.hybrid_engine.plan import plan_slices
from hybridrl.hybrid_engine.schedule import ALIGNMENT, schedule
from hybridrl.layouts.slices import TensorSlice


@pytest.mark.slow
def test_eight_processes_get_what_they_need_and_receive_what_the_paper_says(tmp_path: Path) -> None:
    """Random layouts, then every nested pair of power-of-two layouts; the program checks values and counts."""
    program = Path(__file__).with_name("exchange_ranks.py")
    command = [sys.executable, str(program), "7", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(8)]
    assert max(one["trials"] for one in found) == 40 and all(one["rounds"] >= one["trials"] for one in found)
    layouts: dict[tuple[int, ...], list[dict[str, int]]] = {}
    for one in found:
        for case in one["table_2"]:
            layouts.setdefault(tuple(case[name] for name in ("t", "p", "t_g", "p_g", "dp")), []).append(case)
    assert len(layouts) == 34 + 15  # with t * p = 2, 4 or 8 and dp = 1; with t * p = 1, 2 or 4 and dp = 2
    fullest = 0.0
    for (t, p, t_g, p_g, dp), cases in layouts.items():
        model, buckets = cases[0]["model"], 2 * cases[0]["bucket"]
        expected = paper_fraction(t * p, t_g * p_g) * model
        assert [case["received"] for case in cases] == [expected] * (t * p * dp), (t, p, t_g, p_g, dp)
        # Besides the training shard M / (t_g p_g), and two buckets: two slots and what is sent, each with a gap before
        # the message of each rank.
        taken = max(case["peak"] for case in cases) - model // (t_g * p_g)
        assert 0 < taken <= buckets + 3 * ALIGNMENT * len(cases), (t, p, t_g, p_g, dp)
        fullest = max(fullest, taken / buckets)
    assert fullest > 0.9  # some layout takes what the others may


def test_one_process_keeps_everything_in_rounds_of_the_bucket_s_size() -> None:
    """A rank alone: nothing is sent, dtypes change on the way, and one large tensor gets a bucket of its own."""
    shapes = {"a": (6, 4), "b": (3,), "c": (40, 8), "d": (2, 2)}
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    slices = {name: (TensorSlice((0,) * len(shape), shape),) for name, shape in shapes.items()}
    dtypes = dict.fromkeys(shapes, torch.bfloat16) | {"b": torch.float32}
    made = plan_slices(shapes, [slices], [slices])
    rounds = schedule(made, [slices], [slices], dtypes, bucket_bytes=64)
    assert [now.names for now in rounds] == [("a", "b"), ("c",), ("d",)]
    exchange = Exchange(0, torch.device("cpu"))
    shards = Shards((name, slices[name][0], value) for name, value in state.items())
    for now in rounds:
        bucket = torch.zeros(now.bucket, dtype=torch.uint8)
        exchange.run(now, shards, bucket)
        for piece in now.messages[0].pieces:
            expected = state[piece.name].to(dtypes[piece.name])
            assert torch.equal(piece.view(bucket), expected) and piece.view(bucket).dtype == expected.dtype
    assert exchange.traffic.reused == 24 * 2 + 3 * 4 + 320 * 2 + 4 * 2
    assert exchange.traffic.received == exchange.traffic.sent == 0


def test_parts_that_do_not_cover_a_slice_are_named() -> None:
    with pytest.raises(ModelError, match=r"w: 4 of the 8 elements"):
        assemble(torch.empty(2, 4), TensorSlice((0, 0), (2, 4)), [(TensorSlice((0, 0), (1, 4)), torch.ones(1, 4))], "w")
