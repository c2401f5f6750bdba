"""Health checks of a run: when they act, and what a rollback goes back to."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from raising import raises_with

from hybridrl.config import (
    HealthCheckConfig,
    HealthConfig,
)
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.health_checks import HealthError, HealthMonitor


def monitor(name: str, **settings) -> HealthMonitor:
    off = {check: HealthCheckConfig(action="off") for check in HealthConfig().keys() if check != "max_rollbacks"}
    kind = type(getattr(HealthConfig(), name))
    return HealthMonitor(replace(HealthConfig(**off), **{name: kind(**settings)}, max_rollbacks=1))


def scored(lengths: list[int], scores: list[float], uids: str) -> DataProto:
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(mask.shape).scatter(1, torch.tensor(lengths)[:, None] - 1, torch.tensor(scores)[:, None])
    return DataProto.from_dict(
        tensors={"token_level_scores": rewards, "response_mask": mask}, non_tensors={"uid": np.array(list(uids))}
    )


def test_length_hacking_is_length_that_pays_and_grows(capsys) -> None:
    health = monitor("length_hacking", threshold=0.5, growth=0.1, patience=3, action="warn")

    def step(length: int, pays: bool) -> dict[str, float]:
        # Prompt b is the harder one: long and badly scored; only within a prompt does length tell something.
        lengths = [length, length + 4, 3 * length, 3 * length + 4]
        scores = [1.0, 2.0, -9.0, -8.0] if pays else [1.0, 1.0, -9.0, -9.0]
        metrics = health.measure(scored(lengths, scores, "aabb"))
        health.act(1, metrics)
        return metrics

    for _ in range(5):  # it pays to be long, and nobody gets longer
        found = step(20, pays=True)
    assert found["health/length_reward_correlation"] == pytest.approx(1.0)
    assert found["health/length_growth"] == pytest.approx(0.0)
    for grown in range(5):  # longer and longer, as reasoning does, and it earns nothing by itself
        found = step(24 + 4 * grown, pays=False)
    assert found["health/length_growth"] > 0.2 and found["health/length_reward_correlation"] == 0.0
    assert capsys.readouterr().err == ""
    usual = health.usual_length
    for grown in range(3):
        usual, found = health.usual_length, step(44 + 4 * grown, pays=True)
    mean = 2 * (44 + 8) + 2
    assert found["health/length_growth"] == pytest.approx(mean / usual - 1)
    assert "trainer.health.length_hacking" in (said := capsys.readouterr().err) and "for 3 steps" in said
    resumed = monitor("length_hacking", threshold=0.5, growth=0.1, patience=3, action="warn")
    resumed.load_state_dict(health.state_dict())
    batch = scored([60, 64], [1.0, 2.0], "aa")
    assert resumed.measure(batch) == health.measure(batch)


@pytest.mark.parametrize(
    ("name", "metric", "threshold", "bad", "good"),
    [
        ("entropy_collapse", "actor/entropy", 0.1, 0.05, 0.2),
        ("kl_blowup", "actor/ref_kl", 1.0, 2.0, 0.5),
        ("kl_blowup", "actor/ppo_kl", 1.0, 2.0, 0.5),
        ("uniform_groups", "health/groups_uniform", 0.9, 1.0, 0.5),
        ("logprob_mismatch", "rollout_corr/k3_kl", 0.1, 0.2, 0.0),
        ("dead_critic", "critic/vf_explained_var", 0.0, -0.3, 0.4),
    ],
)
def test_a_check_acts_after_its_patience(name, metric, threshold, bad, good, capsys) -> None:
    health = monitor(name, threshold=threshold, patience=2, action="warn")
    for value in (bad, good, bad):
        assert health.act(1, {metric: value}) is False
    assert capsys.readouterr().err == ""
    resumed = monitor(name, threshold=threshold, patience=2, action="stop")
    resumed.load_state_dict(health.state_dict())
    health.act(4, {metric: bad})
    assert f"trainer.health.{name}" in (said := capsys.readouterr().err) and metric in said
    with raises_with(HealthError, "step 4", f"trainer.health.{name}"):
        resumed.act(4, {metric: bad})
    assert health.check({}) == []


def test_a_run_goes_back_only_so_often(tmp_path) -> None:
    health = monitor("entropy_collapse", threshold=0.1, patience=1, action="rollback")
    health.saved = tmp_path
    assert health.act(1, {"actor/entropy": 0.2}) is False
    assert health.act(2, {"actor/entropy": 0.0}) is True
    with raises_with(HealthError, "max_rollbacks=1"):
        health.act(3, {"actor/entropy": 0.0})


def test_a_checkpoint_is_good_once_a_later_step_is(tmp_path) -> None:
    """Every step saves; entropy is measured before the update, so step 4 tells that what step 3 saved is bad."""
    health = monitor("entropy_collapse", threshold=0.1, patience=3, action="rollback")
    went_back = []
    for step, entropy in enumerate([0.3, 0.2, 0.2, 0.0, 0.0, 0.0, 0.2], start=1):
        went_back.append(health.act(step, {"actor/entropy": entropy}))
        good = health.good
        health.saved = tmp_path / f"global_step_{step}"
        health.saved.mkdir()
        if step in (4, 5):  # a resume amid the bad steps knows the good one still
            state, folder = health.state_dict(), health.saved
            health = monitor("entropy_collapse", threshold=0.1, patience=3, action="rollback")
            health.load_state_dict(state, folder)
        assert good == health.good
        if step in (4, 5, 6):
            assert good == tmp_path / "global_step_2"
    assert went_back == [False] * 5 + [True, False]
    assert health.good == tmp_path / "global_step_6"  # saved after going back


def test_what_was_given_up_is_not_gone_back_to(tmp_path) -> None:
    """Only step 1 saves before and step 4, a bad one, after: going back leaves step 4's models for good."""
    health = monitor("entropy_collapse", threshold=0.1, patience=2, action="rollback")
    health.saved = tmp_path / "global_step_1"
    health.act(2, {"actor/entropy": 0.2})
    health.act(3, {"actor/entropy": 0.0})
    health.saved = tmp_path / "global_step_3"
    assert health.act(4, {"actor/entropy": 0.0}) is True
    health.act(5, {"actor/entropy": 0.2})
    assert health.good == tmp_path / "global_step_1"


def test_without_a_good_checkpoint_there_is_no_going_back(tmp_path) -> None:
    health = monitor("entropy_collapse", threshold=0.1, patience=1, action="rollback")
    health.saved = tmp_path
    with raises_with(HealthError, "save_freq"):
        health.act(1, {"actor/entropy": 0.0})


def test_by_default_nothing_rolls_back_or_stops() -> None:
    defaults = HealthConfig()
    assert {defaults[name].action for name in defaults.keys() if name != "max_rollbacks"} == {"warn"}
