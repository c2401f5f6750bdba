"""Trajectories and the batch made of them: nothing lost, nothing moved, padding outside of every mask."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.errors import RolloutError
from hybridrl.protocol.names import TRAJECTORY_REWARD
from hybridrl.rollout.batch import batch_of
from hybridrl.rollout.request import Completion
from hybridrl.rollout.trajectory import NO_VERSION, Trajectory

PAD = 9


def trajectory(**changes) -> Trajectory:
    plain = Trajectory("p", 0, [1, 2], [3, 4, 5], [1, 0, 1], [-0.5, 0.0, -0.25], [(7, 1), (NO_VERSION, 1), (8, 1)])
    return dataclasses.replace(plain, **changes)


@st.composite
def trajectories(draw) -> list[Trajectory]:
    """Several, with holes in their masks, any number per sample, in any order."""
    made = []
    for turn in range(draw(st.integers(1, 6))):
        mask = draw(st.lists(st.integers(0, 1), max_size=7))
        count = len(mask)
        cut = draw(st.integers(0, count))
        made.append(
            Trajectory(
                uid=draw(st.sampled_from(["a", "b"])),
                sample=draw(st.integers(0, 2)),
                prompt_ids=draw(st.lists(st.integers(0, 20), min_size=1, max_size=5)),
                token_ids=draw(st.lists(st.integers(0, 20), min_size=count, max_size=count)),
                mask=mask,
                log_probs=[-0.5 * (position + 1) for position in range(count)],
                versions=[(3, cut), (4, count - cut)],
                session=draw(st.sampled_from(["", "s"])),
                turn=turn,
                reward=draw(st.none() | st.just(0.5)),
                extra=draw(st.sampled_from([{}, {"tools": 2}, {"tools": 0, "note": ["x"]}])),
            )
        )
    if draw(st.booleans()):  # two layers with three experts per token
        made = [dataclasses.replace(one, routed_experts=experts_of(one)) for one in made]
    return made


def experts_of(one: Trajectory) -> torch.Tensor:
    count = len(one.prompt_ids) + len(one.token_ids)
    return torch.arange(6 * count, dtype=torch.uint8).view(count, 2, 3) + 1


@given(trajectories())
def test_lists_and_arrays_give_the_same_batch(made) -> None:
    of_lists, of_arrays = batch_of(made, PAD), batch_of([one.with_arrays() for one in made], PAD)
    assert list(of_lists.batch.keys()) == list(of_arrays.batch.keys())
    for name, tensor in of_lists.batch.items():
        assert tensor.dtype == of_arrays.batch[name].dtype and torch.equal(tensor, of_arrays.batch[name])
    for name, column in of_lists.non_tensor_batch.items():
        assert column.tolist() == of_arrays.non_tensor_batch[name].tolist()


def test_a_mask_in_an_array_is_checked_like_a_list() -> None:
    with raises_with(RolloutError, "'p'", "mask"):
        trajectory(mask=np.array([1, 2, 0]))


@given(trajectories(), st.integers(0, 3), st.integers(0, 3))
def test_every_trajectory_can_be_read_back_from_its_row(made, more_prompt, more_response) -> None:
    before = max(len(one.prompt_ids) for one in made) + more_prompt
    after = max(len(one.token_ids) for one in made) + more_response
    batch = batch_of(made, PAD, before, after)
    fields, objects = batch.batch, batch.non_tensor_batch
    assert len(batch) == len(made) and fields["input_ids"].shape == (len(made), before + after)
    assert torch.equal(fields["input_ids"], torch.cat([fields["prompts"], fields["responses"]], dim=1))
    for row, one in enumerate(made):
        attended = fields["attention_mask"][row].bool()
        assert fields["input_ids"][row][attended].tolist() == [*one.prompt_ids, *one.token_ids]
        assert (fields["input_ids"][row][~attended] == PAD).all()
        assert int(attended[:before].sum()) == len(one.prompt_ids)  # the rest of the prompt's side is padding
        count = len(one.token_ids)
        assert fields["response_mask"][row].tolist() == [*one.mask, *[0] * (after - count)]
        expected = [p * m for p, m in zip(one.log_probs, one.mask, strict=True)]
        assert fields["rollout_log_probs"][row].tolist() == [*expected, *[0.0] * (after - count)]
        versions = [version for version, tokens in one.versions for _ in range(tokens)]
        assert fields["weight_versions"][row].tolist() == [*versions, *[NO_VERSION] * (after - count)]
        places = fields["position_ids"][row]
        assert places[attended].tolist() == list(range(len(one.prompt_ids) + count))
        assert (places[: before - len(one.prompt_ids)] == 0).all()
        assert (objects["uid"][row], objects["sample"][row]) == (one.uid, one.sample)
        for name in {"tools", "note"} & objects.keys():
            assert objects[name][row] == one.extra.get(name)
        if TRAJECTORY_REWARD in objects:
            assert objects[TRAJECTORY_REWARD][row] == one.reward
        if one.routed_experts is not None:
            assert torch.equal(fields["routed_experts"][row][attended], one.routed_experts)
            assert not fields["routed_experts"][row][~attended].any()
    assert (TRAJECTORY_REWARD in objects) == any(one.reward is not None for one in made)
    assert {"tools", "note"} & objects.keys() == {name for one in made for name in one.extra}


def test_the_widths_are_those_of_the_longest_unless_given() -> None:
    batch = batch_of([trajectory(), trajectory(prompt_ids=[1, 2, 3, 4])], PAD)
    assert batch.batch["prompts"].shape == (2, 4) and batch.batch["responses"].shape == (2, 3)
    with raises_with(RolloutError, "'p'", "sample 0", "token_ids", 3, "response_width=2"):
        batch_of([trajectory()], PAD, response_width=2)
    with raises_with(RolloutError, "prompt_ids", 2, "prompt_width=1"):
        batch_of([trajectory()], PAD, prompt_width=1)


def test_experts_of_some_trajectories_only_are_refused() -> None:
    with raises_with(RolloutError, "'p'", "sample 1", "routed_experts"):
        batch_of([trajectory(routed_experts=torch.zeros(5, 2, 3)), trajectory(sample=1)], PAD)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e300, np.float32("nan")])
def test_rewards_that_no_batch_could_hold_are_refused(value: float) -> None:
    with raises_with(RolloutError, "'p'", "sample 0", "reward", value):
        trajectory(reward=value)
    with raises_with(RolloutError, "'p'", "sample 0", "turn_rewards", value):
        trajectory(turn_rewards=[0.5, value])


def test_sessions_of_several_trajectories_and_samples_of_one() -> None:
    """The estimators join rows by `session_id`: a sample that is one trajectory must not join another's."""
    made = [
        trajectory(session="s", turn=0),
        trajectory(sample=1),
        trajectory(session="s", turn=1, turn_rewards=[0.5, 1.0], multimodal={"pixels": np.ones(2)}),
        trajectory(sample=2),
    ]
    objects = batch_of(made, PAD).non_tensor_batch
    assert objects["session_id"][0] == objects["session_id"][2] and len(set(objects["session_id"].tolist())) == 3
    assert objects["trajectory_index"].tolist() == [0, 0, 1, 0]
    assert objects["turn_rewards"].tolist() == [[], [], [0.5, 1.0], []]
    assert objects["multi_modal_inputs"][0] == {} and objects["multi_modal_inputs"][2]["pixels"].tolist() == [1, 1]
    assert "session_id" not in batch_of([trajectory(), trajectory(sample=1)], PAD).non_tensor_batch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": [1, 0]}, "mask has 2 entries and token_ids has 3"),
        ({"log_probs": [0.0] * 4}, "log_probs has 4 entries and token_ids has 3"),
        ({"versions": [(1, 2)]}, r"versions=\[\(1, 2\)\] .*3"),
        ({"versions": [(1, 4), (2, -1)]}, "versions="),
        ({"mask": [1, 2, 0]}, "mask must hold 0 and 1"),
        ({"routed_experts": torch.zeros(4, 2, 3)}, "routed_experts has 4 entries.* 5"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused_by_name(changes, message) -> None:
    with pytest.raises(RolloutError, match=r"uid 'p', sample 0, session 's', turn 4: " + message):
        trajectory(session="s", turn=4, **changes)


@pytest.mark.parametrize("name", ["uid", "responses", TRAJECTORY_REWARD])
def test_an_extra_field_must_not_replace_a_column(name) -> None:
    with raises_with(RolloutError, f"'{name}'"):
        batch_of([trajectory(extra={name: 1})], PAD)


def test_a_completion_is_a_trajectory_without_holes() -> None:
    one = Trajectory.single_turn([1, 2], Completion("r", [3, 4], [-1.0, -2.0], "stop", [(5, 2)]), "p", 1)
    fields = batch_of([one], PAD, 3, 4).batch
    assert fields["response_mask"].tolist() == [[1, 1, 0, 0]]
    assert fields["rollout_log_probs"].tolist() == [[-1.0, -2.0, 0.0, 0.0]]
    assert fields["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 5]]
