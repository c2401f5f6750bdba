"""Cutting into micro-batches: complete, within the limits, little padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.engine.microbatch import PREFERRED_CELLS, WORTHWHILE_PADDING, BatchPlan
from hybridrl.engine.train_engine import MicroBatching


def fields_of(prompts: list[int], responses: list[int]) -> dict[str, torch.Tensor]:
    rows, start, width = len(prompts), max(prompts), max([1, *responses])
    attention = torch.zeros(rows, start + width, dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        attention[row, start - prompt : start + response] = 1
    ids = torch.arange(attention.numel()).view_as(attention)
    return {"input_ids": ids, "attention_mask": attention, "response_mask": attention[:, start:]}


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=30),
    st.none() | st.integers(1, 8),
    st.none() | st.integers(20, 200),
    st.booleans(),
)
def test_groups_are_complete_and_within_limits(
    rows: list[tuple[int, int]], size: int | None, budget: int | None, packed: bool
) -> None:
    fields = fields_of([p for p, _ in rows], [r for _, r in rows])
    plan = BatchPlan(fields, MicroBatching(size=size, max_tokens=budget), packed)
    used = sorted(row for group in plan.groups for row in group)
    assert used == [row for row, (_, response) in enumerate(rows) if response]
    ids, attention = fields["input_ids"], fields["attention_mask"]
    start = ids.shape[1] - fields["response_mask"].shape[1]
    for group in plan.groups:
        layout = plan.layout(group)
        tokens = layout.input_ids.numel()
        assert len(group) <= (size or len(group))
        assert budget is None or tokens <= budget or len(group) == 1
        real = sum(sum(rows[row]) for row in group)
        if packed:
            assert tokens == real and layout.lengths == [sum(rows[row]) for row in group]
        else:
            limit = max(PREFERRED_CELLS["cpu"], layout.input_ids.shape[1])
            assert tokens - real <= WORTHWHILE_PADDING["cpu"] and tokens <= limit
        # The token after a selected position, in the row it belongs to, is the label.
        flat_ids, flat_positions = layout.input_ids.flatten(), layout.position_ids.flatten()
        assert torch.equal(flat_ids[layout.selected + 1], layout.labels)
        assert (flat_positions[layout.selected + 1] == flat_positions[layout.selected] + 1).all()
        expected = torch.cat([ids[row, start:][fields["response_mask"][row].bool()] for row in group])
        assert torch.equal(layout.labels, expected)
        assert torch.equal(plan.token_positions(group) % plan.response_width, (expected % ids.shape[1]) - start)
        kept = torch.cat([ids[row][attention[row].bool()] for row in group])
        assert set(kept.tolist()) <= set(flat_ids.tolist())


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match=r"MicroBatching\(max_tokens=0\)"):
        MicroBatching(max_tokens=0)
