"""Simulated users answer the turns of the model; what they say and how they score is that of verl's classes."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from raising import raises_with
from rollout_stage import ROLLOUT, config_for, prompts_of
from template_families import FAMILIES

from hybridrl.agents import create_agents
from hybridrl.agents.interactions.gsm8k_interaction import Gsm8kInteraction
from hybridrl.agents.interactions.interaction_session import InteractionSession
from hybridrl.agents.interactions.load_interactions import load_interactions
from hybridrl.errors import RolloutError
from hybridrl.models.info import tokenizer_of
from hybridrl.scored import Reason

QWEN = FAMILIES["qwen"]


class Rows:
    """A dataset of one column."""

    columns = ("interaction_kwargs",)

    def __init__(self, *values) -> None:
        self.values = values

    def column(self, name):
        return list(self.values)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "users.yaml"
    found.write_text("interaction:\n- {name: polite, class_name: polite_user.Polite, config: {}}\n")
    return found


def user_config(model, file, *more):
    words = [f"{ROLLOUT}.multi_turn.interaction_config_path={file}", f"{ROLLOUT}.multi_turn.function_tool_path=null"]
    return config_for(model, QWEN.template, f"{ROLLOUT}.multi_turn.format=hermes", *words, *more)


ROWS = Rows({"times": 1})


def test_a_user_answers_until_it_ends_the_session(started, model, file) -> None:
    rollout, recorded = started(user_config(model, file), ROWS)
    kwargs = [{"name": "polite", "times": 3, "mood": "good"}, {"times": 1}, None]
    batch = rollout.generate(prompts_of(rollout, 3, interaction_kwargs=kwargs))
    assert len(recorded.calls) == 5
    log = sorted(rollout.agents.interactions.users["polite"].log.values(), key=lambda one: one["asked"]["times"])
    once, thrice = log
    assert all(one["ended"] for one in log) and thrice["asked"] == {"times": 3, "mood": "good"}
    scores = [len(seen[-1]["content"]) / 10 for seen in thrice["seen"]]
    objects = batch.non_tensor_batch
    assert objects["reward_scores"][0] == {"polite": 0.75, "tool_rewards": [], "user_turn_rewards": scores}
    assert objects["reward_scores"][2] == {"tool_rewards": []}
    assert objects["interaction_extra"][0] == {"last": round(scores[-1] * 10)}
    assert objects["__num_turns__"].tolist() == [6, 2, 2]
    roles = [message["role"] for message in thrice["seen"][-1]]
    assert roles == ["user", "assistant", "user", "assistant", "user", "assistant"]
    text = rollout.agents.tokenizer.decode(batch.batch["responses"][0])
    assert "<|im_start|>user\nPlease go on (1).<|im_end|>\n<|im_start|>assistant\n" in text
    assert "go on (2)" in text and "go on (3)" not in text and len(once["seen"]) == 1
    assert not batch.batch["turn_level_rewards"].any()  # reported, and not added to the score


def test_scores_of_turns_may_be_trained_on(started, model, file) -> None:
    rollout, _ = started(user_config(model, file, f"{ROLLOUT}.multi_turn.turn_rewards=True"), ROWS)
    batch = rollout.generate(prompts_of(rollout, 2, interaction_kwargs=[{"times": 2}, {"times": 1}]))
    rewards, mask = batch.batch["turn_level_rewards"], batch.batch["response_mask"].bool()
    for row, scores in enumerate(batch.non_tensor_batch["turn_scores"]):
        last = mask[row] & ~torch.cat([mask[row, 1:], torch.tensor([False])])
        assert rewards[row][last].tolist() == pytest.approx(scores) and len(scores) == 2 - row
        assert not rewards[row][~last].any()


def test_a_user_that_raises_spoils_its_own_session(started, model, file, capsys) -> None:
    rollout, _ = started(user_config(model, file, f"{ROLLOUT}.agent.retries=0"), ROWS)
    kwargs = [{"times": 1, "how": "raises"}, {"times": 1}]
    batch = rollout.generate(prompts_of(rollout, 2, interaction_kwargs=kwargs))
    assert batch.non_tensor_batch["uid"].tolist() == ["0-1"]
    (missing,) = batch.meta_info["missing_samples"]
    assert missing.unscored.reason is Reason.INFRA and "the judge is gone" in capsys.readouterr().err


def test_a_conversation_about_gsm8k(tmp_path) -> None:
    file = tmp_path / "users.yaml"
    file.write_text(
        "interaction:\n- {name: math, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}\n"
    )
    users = load_interactions(str(file))
    user = users.of({"name": "math"})
    assert type(user) is Gsm8kInteraction and sys.modules["verl.interactions.base"].BaseInteraction

    async def talk(*turns):
        session = InteractionSession(user, {"name": "math", "ground_truth": "18"}, 20)
        replies = [
            await session.reply([{"role": "user", "content": "?"}, {"role": "assistant", "content": t}]) for t in turns
        ]
        score = await session.score()
        await session.close()
        return [(one.ended, one.score) for one in replies], score

    assert asyncio.run(talk("17", "It is 3.\n#### 18")) == ([(False, 0.0), (True, 1.0)], 1.0)
    assert asyncio.run(talk("18", "well, 18?")) == ([(True, 1.0), (False, 0.0)], 0.0)
    assert not user.sessions
    with raises_with(RolloutError, "ground_truth"):
        asyncio.run(InteractionSession(user, {"name": "math"}, 20).reply([]))


def test_what_cannot_work_is_refused(model, file) -> None:
    with raises_with(RolloutError, "interaction_kwargs"):
        load_interactions(str(file)).check_rows([{}, {}])
    with raises_with(RolloutError, "interaction_kwargs.name", "'rude'", "has polite"):
        load_interactions(str(file)).check_rows([{"name": "polite"}, {"name": "rude"}])
    file.write_text("interaction:\n- {name: a, class_name: pathlib.Path}\n")
    with pytest.raises(RolloutError, match="BaseInteraction"):
        load_interactions(str(file))
    file.write_text("interaction:\n- {class_name: guess}\n")
    with pytest.raises(RolloutError, match="gsm8k"):
        load_interactions(str(file))
    config = user_config(model, "nowhere.yaml")
    with pytest.raises(RolloutError, match="no such file"):
        create_agents(config, tokenizer_of(config.actor_rollout_ref.model), [])
