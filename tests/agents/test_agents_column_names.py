"""Sessions of rows whose columns have internal names of the run are those of the same rows without these columns."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_stage import ROLLOUT, config_for
from template_families import FAMILIES

from hybridrl.data import PromptLoader, RLHFDataset
from hybridrl.models.info import tokenizer_of
from hybridrl.protocol import DataProto, bookkeeping
from hybridrl.trainer.ppo.sampler import Sampler

NAMES = sorted(bookkeeping.bookkeeping())
ROWS = 2


def reward(batch: DataProto, return_dict: bool = False) -> Any:
    """The sum of the generated tokens."""
    scores = torch.zeros(batch.batch["responses"].shape)
    scores[:, 0] = (batch.batch["responses"] * batch.batch["response_mask"]).sum(-1) % 7
    return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores


def apart(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Columns that differ. Requests that arrive together are computed together, which changes the last digits."""
    return [
        name
        for name, value in left.items()
        if name not in right
        or not (torch.allclose(value, right[name], atol=1e-4) if torch.is_tensor(value) else value == right[name])
    ]


@pytest.fixture
def sampled(started: Any, model: Path, tmp_path: Path) -> Any:
    """What training gets of the sessions of rows with further columns."""
    path = tmp_path / "rows.jsonl"
    words = [f"{ROLLOUT}.n=2", f"data.train_batch_size={ROWS}", f"data.train_files={path}", "data.shuffle=False"]
    config = config_for(model, FAMILIES["qwen"].template, *words, f"{ROLLOUT}.top_k=1")
    rollout, _ = started(config)

    def run(columns: dict[str, Any]) -> dict[str, Any]:
        rows = [
            {"prompt": f"Sort: {n} 3", **{name: values[n] for name, values in columns.items()}} for n in range(ROWS)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        dataset = RLHFDataset(path, tokenizer_of(config.actor_rollout_ref.model), config.data)
        torch.manual_seed(0)
        sampler = Sampler(config, rollout, reward, PromptLoader(dataset, ROWS), 0)  # type: ignore[arg-type]
        batch = sampler.next().batch
        found: dict[str, Any] = {name: batch.batch[name] for name in batch.batch.keys()}
        return found | {name: list(values) for name, values in batch.non_tensor_batch.items() if name != "session_log"}

    return run


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.sets(st.sampled_from(NAMES), min_size=1, max_size=12),
    value=st.sampled_from([7, "a", True, [1.5], {"k": 2}]),
)
def test_columns_of_any_internal_names_change_no_session(sampled, names, value) -> None:
    plain = sampled({})
    named = sampled({name: [value] * ROWS for name in names})
    assert apart(plain, named) == []


def test_all_internal_names_at_once_change_no_session(sampled, capsys) -> None:
    plain, named = sampled({}), sampled({name: list(range(ROWS)) for name in NAMES})
    assert apart(plain, named) == []
    assert "session_id" in capsys.readouterr().err
