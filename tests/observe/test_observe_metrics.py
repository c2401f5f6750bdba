"""Step metrics against formulas written out row by row."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with

from hybridrl import DataProto
from hybridrl.config.roles import ROLES, Pass
from hybridrl.observe.step_metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    reduce_metrics,
)
from hybridrl.utils.metrics import Metric

FIELDS = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values")


def make_batch(prompt_lengths: list[int], response_lengths: list[int], P: int, T: int, seed: int = 0) -> DataProto:
    """Left-padded prompts, right-padded responses, noise in every field, also at padding where it must not count.

    Scores and rewards are zero at padding, as the reward manager leaves them.
    """
    generator = torch.Generator().manual_seed(seed)
    B = len(prompt_lengths)
    prompt = torch.arange(P)[None] >= P - torch.tensor(prompt_lengths)[:, None]
    response = torch.arange(T)[None] < torch.tensor(response_lengths)[:, None]
    tensors = {name: torch.randn(B, T, generator=generator) for name in FIELDS}
    for name in FIELDS[:2]:
        tensors[name] = tensors[name] * response
    return DataProto.from_dict(
        tensors={
            "responses": torch.zeros(B, T, dtype=torch.long),
            "attention_mask": torch.cat([prompt, response], 1).long(),
            "response_mask": response.long(),
            **tensors,
        }
    )


lengths = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 5), min_size=n, max_size=n), st.lists(st.integers(0, 4), min_size=n, max_size=n)
    )
)


@given(lengths, st.integers(0, 1000))
@settings(max_examples=40)
def test_data_metrics_are_those_of_plain_python(rows: tuple[list[int], list[int]], seed: int) -> None:
    prompts, responses = rows
    batch = make_batch(prompts, responses, P=5, T=4, seed=seed)
    found = compute_data_metrics(batch)
    data = {name: batch.batch[name].tolist() for name in FIELDS}
    answered = [i for i, n in enumerate(responses) if n > 0]
    tokens = [(i, t) for i, n in enumerate(responses) for t in range(n)]
    series = {
        "critic/score": [sum(data["token_level_scores"][i]) for i in answered],
        "critic/rewards": [sum(data["token_level_rewards"][i]) for i in answered],
        **{f"critic/{name}": [data[name][i][t] for i, t in tokens] for name in ("advantages", "returns", "values")},
        "response_length": responses,
        "response_length_non_aborted": [responses[i] for i in answered],
        "prompt_length": prompts,
    }
    for name, values in series.items():
        for kind, reduce in (("mean", lambda v: sum(v) / len(v)), ("max", max), ("min", min)):
            expected = reduce(values) if values else math.nan
            assert found[f"{name}/{kind}"] == pytest.approx(expected, abs=1e-5, nan_ok=True), (name, kind)
    assert found["response/aborted_ratio"] == pytest.approx(1 - len(answered) / len(responses))
    assert found["response_length/clip_ratio"] == pytest.approx(responses.count(4) / len(responses))
    assert found["prompt_length/clip_ratio"] == pytest.approx(prompts.count(5) / len(prompts))
    if len(tokens) > 1:
        values, returns = np.array(series["critic/values"]), np.array(series["critic/returns"])
        explained = 1 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5)
        assert found["critic/vf_explained_var"] == pytest.approx(explained, rel=1e-3, abs=1e-3)
    else:
        assert math.isnan(found["critic/vf_explained_var"])


def test_rows_without_a_token_change_nothing_but_their_own_count() -> None:
    whole = compute_data_metrics(make_batch([3, 2, 5], [4, 1, 3], P=5, T=4))
    batch = make_batch([3, 2, 5], [4, 1, 3], P=5, T=4)
    padded = DataProto.concat([batch, make_batch([1, 1], [0, 0], P=5, T=4, seed=9)])
    found = compute_data_metrics(padded)
    for name in whole:
        if not name.startswith(("prompt_length", "response_length/", "response/")):
            assert found[name] == pytest.approx(whole[name]), name
    assert found["response/aborted_ratio"] == pytest.approx(0.4)
    assert found["response_length/min"] == 0


def test_wider_padding_changes_only_the_clip_ratios() -> None:
    narrow = make_batch([3, 2], [4, 2], P=3, T=4)
    pad = torch.nn.functional.pad
    tensors = {
        name: pad(value, (2, 3)) if name == "attention_mask" else pad(value, (0, 3), value=7 if name == "values" else 0)
        for name, value in narrow.batch.items()
    }
    first, second = compute_data_metrics(narrow), compute_data_metrics(DataProto.from_dict(tensors=tensors))
    assert {name for name in first if first[name] != pytest.approx(second[name])} == {
        "response_length/clip_ratio",
        "response_length_non_aborted/clip_ratio",
        "prompt_length/clip_ratio",
    }


def test_clip_ratios_are_measured_against_the_configured_limits() -> None:
    """A batch is only as wide as its longest rows, which have not reached any limit by that."""
    batch = make_batch([3, 5, 5], [4, 4, 0], P=5, T=4)
    found = compute_data_metrics(batch, max_prompt_length=6, max_response_length=5)
    clipped = [
        found[f"{name}/clip_ratio"] for name in ("prompt_length", "response_length", "response_length_non_aborted")
    ]
    assert clipped == [0, 0, 0]
    found = compute_data_metrics(batch, max_prompt_length=5, max_response_length=4)
    assert found["prompt_length/clip_ratio"] == pytest.approx(2 / 3)
    assert found["response_length/clip_ratio"] == pytest.approx(2 / 3)
    assert found["response_length_non_aborted/clip_ratio"] == 1


def test_without_a_critic_values_are_left_out() -> None:
    found = compute_data_metrics(make_batch([3], [4], P=5, T=4), use_critic=False)
    assert not [name for name in found if "values" in name or "vf_" in name]
    batch = make_batch([3], [4], P=5, T=4)
    batch.pop(batch_keys=["values"])
    assert "critic/vf_explained_var" not in compute_data_metrics(batch, use_critic=True)


def test_turns_and_tool_calls() -> None:
    batch = make_batch([3, 3], [4, 1], P=5, T=4)
    batch.non_tensor_batch["__num_turns__"] = np.array([2, 5], dtype=object)
    batch.non_tensor_batch["tool_call_counts"] = np.array([0, 3], dtype=object)
    found = compute_data_metrics(batch)
    assert [found[f"num_turns/{kind}"] for kind in ("min", "max", "mean")] == [2, 5, 3.5]
    assert found["tool_call_counts/max"] == 3


def test_timing_and_throughput(monkeypatch) -> None:
    batch = make_batch([3, 2], [4, 1], P=5, T=4)
    timing = compute_timing_metrics(batch, {"gen": 0.5, "update_actor": 1.0, "testing": 2.0})
    assert timing == pytest.approx(
        {
            "timing_s/gen": 0.5,
            "timing_s/update_actor": 1.0,
            "timing_s/testing": 2.0,
            "timing_per_token_ms/gen": 500 / 5,
            "timing_per_token_ms/update_actor": 1000 / 10,
        }
    )
    monkeypatch.setitem(ROLES, "scorer", replace(ROLES["ref"], name="scorer", passes=(Pass("scorer", "score"),)))
    own = compute_timing_metrics(batch, {"scorer": 1.0, "reward": 1.0})
    assert own["timing_per_token_ms/scorer"] == pytest.approx(1000 / 10)
    assert "timing_per_token_ms/reward" not in own
    assert compute_throughout_metrics(batch, {"step": 2.0}, n_gpus=5) == {
        "perf/total_num_tokens": 10,
        "perf/time_per_step": 2.0,
        "perf/throughput": 1.0,
    }
    batch.meta_info["global_token_num"] = [40, 60]
    assert compute_throughout_metrics(batch, {"step": 2.0}, n_gpus=1)["perf/throughput"] == 50
    with raises_with(ValueError, "'step'"):
        compute_throughout_metrics(batch, {"gen": 1.0}, n_gpus=1)
    with raises_with(ValueError, "n_gpus", 0):
        compute_throughout_metrics(batch, {"step": 1.0}, n_gpus=0)


def test_reduce_metrics_by_the_words_of_the_name() -> None:
    found = reduce_metrics(
        {
            "actor/grad_norm": [1.0, 2.0, 6.0],
            "actor/perf/max_memory_allocated_gb": [1, 3, 2],
            "response_length/min": torch.tensor([4.0, 2.0]),
            "rollout/terminated": [0.0, 1.0],
            "actor/lr": 1e-3,
            "critic/maximal": np.array([1.0, 3.0]),
        }
    )
    assert found == pytest.approx(
        {
            "actor/grad_norm": 3.0,
            "actor/perf/max_memory_allocated_gb": 3.0,
            "response_length/min": 2.0,
            "rollout/terminated": 0.5,
            "actor/lr": 1e-3,
            "critic/maximal": 2.0,
        }
    )


def test_reduce_metrics_merges_weighted_metrics() -> None:
    parts = [Metric(1.0, weight=1.0), Metric(4.0, weight=3.0)]
    assert reduce_metrics({"actor/kl_loss": parts}) == {"actor/kl_loss": pytest.approx(3.25)}


@pytest.mark.parametrize("value", [[], ["a"], [[1, 2]], None])
def test_reduce_metrics_names_what_is_no_number(value: object) -> None:
    with raises_with(ValueError, "actor/odd"):
        reduce_metrics({"actor/odd": value})
