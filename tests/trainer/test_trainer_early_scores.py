"""Scores that were begun while others were generated are those of the whole batch, and never of other tokens."""

import pytest
import torch
from sampler_tools import WIDTH, OwnRollout, prompts_of

from hybridrl.config import PPOTrainerConfig
from hybridrl.errors import RewardError
from hybridrl.models.tiny import build_tokenizer
from hybridrl.protocol import object_array
from hybridrl.protocol.sample_names import request_names
from hybridrl.reward import RewardManager, create_reward_manager
from hybridrl.rollout.batch import prompt_ids_of
from hybridrl.rollout.trajectory import Trajectory
from hybridrl.trainer.ppo.early_scores import scored_early
from hybridrl.trainer.ppo.responses import respond

FUNCTION = """
def compute_score(solution_str, ground_truth, extra_info):
    if extra_info["row"] == FAILS:
        raise ValueError("no score")
    return {"score": len(solution_str) + 100.0 * extra_info["row"], "text": solution_str}
"""
WORKS = FUNCTION.replace("FAILS", "None")


class Telling(OwnRollout):
    """Tells of each sample in the reverse order, but for those that are skipped, and then changes its answer."""

    def __init__(self, skipped=(), change=lambda answer, prompts: answer) -> None:
        super().__init__(change)
        self.skipped = skipped

    def generate(self, prompts, on_finished=None):
        names = list(zip(prompt_ids_of(prompts), request_names(prompts), strict=True))
        for row, (ids, (uid, sample)) in reversed(list(enumerate(names))):
            tokens = [row + 10] * (row % WIDTH + 1)
            one = Trajectory(uid, sample, ids, tokens, [1] * len(tokens), [0.0] * len(tokens), [(0, len(tokens))])
            if on_finished is not None and row not in self.skipped:
                on_finished([one])
        return super().generate(prompts)


@pytest.fixture
def manager_for(tmp_path):
    made = []

    def make(source=WORKS, kind=None):
        config = PPOTrainerConfig()
        config.reward.num_workers = 1
        path = tmp_path / f"mine{len(made)}.py"
        path.write_text(source)
        config.reward.custom_reward_function.path = str(path)
        manager = create_reward_manager(config, build_tokenizer())
        if kind is not None:
            manager = kind(config, manager.tokenizer, manager.pool)
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.close()


def scored(manager, rollout):
    """A batch, and what is made of it with scores that were begun early."""
    asked = prompts_of(["a", "b"], samples=3)
    with scored_early(manager, asked) as scores:
        batch = respond(rollout, asked, 1.0, scores.on_finished)
    return batch, scores(batch)


class Unasked(Telling):
    """Has also finished a sample that this batch does not have, as a phase of one's own may ask for it."""

    def generate(self, prompts, on_finished=None):
        if on_finished is not None:
            on_finished([Trajectory("another", 0, [1, 2], [3], [1], [0.0], [(0, 1)])])
        return super().generate(prompts, on_finished)


def test_samples_of_others_are_left_alone(manager_for) -> None:
    manager = manager_for()
    batch, early = scored(manager, Unasked())
    assert torch.equal(early["reward_tensor"], manager(batch, return_dict=True)["reward_tensor"])


@pytest.mark.parametrize("skipped", [(), (0, 4), range(6)], ids=["all", "some", "none"])
def test_they_are_those_of_the_whole_batch(manager_for, skipped) -> None:
    manager = manager_for()
    batch, early = scored(manager, Telling(skipped))
    later = manager(batch, return_dict=True)
    assert torch.equal(early["reward_tensor"], later["reward_tensor"]) and early["reward_tensor"].sum() > 0
    assert early["reward_extra_info"] == later["reward_extra_info"]
    assert early["metrics"]["perf/reward_scored_early"] <= 1 - len(skipped) / 6


def test_rows_with_other_tokens_or_in_another_order_are_scored_as_they_are(manager_for) -> None:
    def change(answer, prompts):
        answer = answer.select_idxs([5, 0, 1, 2, 3, 4])
        answer.batch["responses"][2] = 40
        return answer

    manager = manager_for()
    batch, early = scored(manager, Telling(change=change))
    assert torch.equal(early["reward_tensor"], manager(batch, return_dict=True)["reward_tensor"])


class Adjusted(RewardManager):
    def adjust(self, score, extra, sample, length):
        return score + 1000, extra


def test_a_session_of_which_a_row_changed_is_scored_as_a_whole(manager_for) -> None:
    """Its first row brought a reward along, which is adjusted only where a session ends."""

    def change(answer, prompts):
        wide = answer.select_idxs([0, 0, 1, 2, 3, 4, 5])
        wide.non_tensor_batch |= {
            "session_id": object_array(["s", "s", 1, 2, 3, 4, 5]),
            "trajectory_index": object_array([0, 1, 0, 0, 0, 0, 0]),
            "trajectory_reward": object_array([0.5, 7.0, *[None] * 5]),
        }
        wide.batch["responses"][0] = 40  # the other row of the session is as it was told
        return wide

    class TwoRows(Telling):
        def generate(self, prompts, on_finished=None):
            on_finished([two_rows(0, 0.5), two_rows(1, 7.0)])
            return super().generate(prompts, on_finished)

    def two_rows(turn, reward):
        return Trajectory("a", 0, [1, 1], [10], [1], [0.0], [(0, 1)], session="s", turn=turn, reward=reward)

    manager = manager_for(kind=Adjusted)
    batch, early = scored(manager, TwoRows(skipped=(0,), change=change))
    later = manager(batch, return_dict=True)
    assert torch.equal(early["reward_tensor"], later["reward_tensor"])
    assert early["reward_tensor"].sum(1)[:2].tolist() == [0.5, 1007.0]


def test_a_function_that_fails_says_so_where_the_batch_is_scored(manager_for) -> None:
    manager = manager_for(FUNCTION.replace("FAILS", "4"))
    with pytest.raises(RewardError, match=r"uid 'b'(.|\n)*no score"):
        scored(manager, Telling())


class Whole(RewardManager):
    def score_batch(self, samples, name):
        return super().score_batch(samples, name)


@pytest.mark.parametrize("kind", [None, Whole])
def test_what_scores_whole_batches_does_so(manager_for, kind) -> None:
    source = WORKS
    if kind is None:
        source = "def compute_reward(responses, ground_truths): return [float(len(one)) for one in responses]"
    manager = manager_for(source, kind)
    batch, found = scored(manager, Telling())
    assert "perf/reward_scored_early" not in found["metrics"]
    assert torch.equal(found["reward_tensor"], manager(batch, return_dict=True)["reward_tensor"])
