"""The values that SPO tracks of prompts, against the paper's recurrence."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.algorithms import AlgorithmError
from hybridrl.algorithms.prompt_values import PromptValues
from hybridrl.protocol import DataProto, object_array
from hybridrl.trainer.ppo.advantage import add_prompt_values, prompt_keys

#: steps of samples: the prompt and the reward of each
runs = st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 1.0])), max_size=5), max_size=5)


@given(steps=runs, rho=st.sampled_from([0.5, 0.875, 0.96]))
def test_the_recurrence_of_the_paper(steps: list[list[tuple[str, float]]], rho: float) -> None:
    tracked, evidence = PromptValues(rho), dict.fromkeys("abc", (0.5, 0.5))
    for samples in steps:
        for prompt in {prompt for prompt, _ in samples}:
            alpha, beta = evidence[prompt]
            own = [reward for name, reward in samples if name == prompt]
            evidence[prompt] = rho * alpha + sum(own), rho * beta + len(own) - sum(own)
        tracked.update([prompt for prompt, _ in samples], torch.tensor([reward for _, reward in samples]))
    wanted = [alpha / (alpha + beta) for alpha, beta in evidence.values()]
    assert tracked.values(list("abc")).tolist() == pytest.approx(wanted, rel=1e-12)
    assert len(tracked) == len({prompt for samples in steps for prompt, _ in samples})


@given(before=runs, after=runs)
def test_a_resumed_run_goes_on_exactly(before: list, after: list) -> None:
    straight = PromptValues(0.9)
    for number, samples in enumerate([*before, *after]):
        if number == len(before):
            resumed = PromptValues(0.9)
            resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
        straight.update([prompt for prompt, _ in samples], torch.tensor([reward for _, reward in samples]))
        if number >= len(before):
            resumed.update([prompt for prompt, _ in samples[::-1]], torch.tensor([r for _, r in samples[::-1]]))
            assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize("reward", [-0.5, 1.5])
def test_rewards_outside_0_to_1_are_refused_and_change_nothing(reward: float) -> None:
    tracked = PromptValues(0.9)
    with raises_with(AlgorithmError, "samples [1]", str(reward), "0 to 1"):
        tracked.update(["a", "b"], torch.tensor([1.0, reward]))
    assert not tracked.state_dict()


def batch_of(prompts: list[str], rewards: list[list[float]], mask: list[list[int]], **columns: list) -> DataProto:
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return DataProto.from_dict(
        {"token_level_rewards": torch.tensor(rewards), "response_mask": torch.tensor(mask)},
        {"raw_prompt": object_array(messages), **{name: object_array(value) for name, value in columns.items()}},
    )


def test_values_are_those_before_the_batch_and_a_sample_without_a_token_is_none() -> None:
    tracked = PromptValues(0.5)
    batch = batch_of(["a", "b", "a"], [[0.0, 1.0], [0.0, 0.0], [1.0, 9.0]], [[1, 1], [0, 0], [1, 0]])
    metrics = add_prompt_values(batch, tracked)
    assert batch.batch["prompt_values"].tolist() == [0.5] * 3 and metrics["critic/prompt_values/prompts"] == 1
    add_prompt_values(batch, tracked)
    assert batch.batch["prompt_values"].tolist() == pytest.approx([2.25 / 2.5, 0.5, 2.25 / 2.5])


def test_the_rows_of_a_session_are_one_sample_with_the_sum_of_their_rewards() -> None:
    tracked, whole = PromptValues(0.5), PromptValues(0.5)
    names = {"uid": ["u", "u", "u"], "session_id": ["s", "t", "s"], "trajectory_index": [0, 0, 1]}
    rows = batch_of(["a", "a", "a"], [[0.25], [0.0], [0.5]], [[1], [1], [1]], **names)
    add_prompt_values(rows, tracked)
    whole.update([prompt_keys(rows)[0]] * 2, torch.tensor([0.75, 0.0]))
    assert tracked.state_dict() == whole.state_dict()


def test_keys_are_of_the_content() -> None:
    columns = {"data_source": ["x", "x", "y", "x"], "image_digest": [None, None, None, "p"]}
    same, again, other_source, with_image = prompt_keys(
        batch_of(["a"] * 4, [[0.0]] * 4, [[1]] * 4, uid=["1", "2", "3", "4"], **columns)
    )
    assert same == again and len({same, other_source, with_image}) == 3
    batch = batch_of(["a"], [[0.0]], [[1]])
    del batch.non_tensor_batch["raw_prompt"]
    with raises_with(AlgorithmError, "raw_prompt"):
        prompt_keys(batch)
