"""Gymnasium environments with text: a run of GRPO and one of PPO, seeds, and what is refused."""

import json
from pathlib import Path

import pandas as pd
import pytest
from gymnasium.error import NameNotFound
from raising import raises_with
from template_families import FAMILIES, write_model

from hybridrl.agents.environments.gymnasium import GymnasiumEnvironment
from hybridrl.config import load_config
from hybridrl.errors import RolloutError
from hybridrl.trainer.ppo.run_ppo import started_trainer

GYM = Path(__file__).with_name("text_gym.py")
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def settings(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("gymnasium")
    model = write_model(micro_model, folder / "model")
    (model / "chat_template.jinja").write_text(FAMILIES["qwen"].template)
    (folder / "environments.yaml").write_text(
        f"environments:\n- class_name: gymnasium\n  name: target\n  config: {{id: Target-v0, module: {GYM}}}\n"
    )
    prompts = [[{"role": "user", "content": "Write as you are told."}]] * 4
    kwargs = [{"seed": 7}, {"seed": 8}, None, None]
    pd.DataFrame({"prompt": prompts, "env_kwargs": kwargs}).to_parquet(folder / "train.parquet")
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder / 'train.parquet'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=200",
        "data.max_response_length=200",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.agent.default_agent_loop=env_agent",
        f"{ROLLOUT}.agent.environment_config_path={folder / 'environments.yaml'}",
        f"{ROLLOUT}.agent.environment_turn_tokens=20",
        f"{ROLLOUT}.stop=[{','.join('ABCDEFGHIJKLMNOPQ')}]",
        "reward.reward_manager.name=session",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        "trainer.save_last=False",
        "trainer.report=False",
        "trainer.logger=[file]",
    ]


@pytest.mark.parametrize("estimator", ["gigpo", "gae"])
def test_a_run_on_a_gymnasium_environment(ray_session, settings, tmp_path, estimator) -> None:
    samples = 2 if estimator == "gigpo" else 1
    words = [f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n={samples}"]
    if estimator == "gae":
        words += [f"critic.model.path={settings[0].partition('=')[2]}", "critic.ppo_mini_batch_size=4"]
    with started_trainer(
        load_config("ppo_trainer", [*settings, *words, f"trainer.default_local_dir={tmp_path}"])
    ) as it:
        result = it.fit()
    fields, objects = result.batch.batch, result.batch.non_tensor_batch
    assert len(fields) == 4 * samples and all(objects["env_done"]) and set(objects["env_turns"]) == {3}
    scores, generated = fields["token_level_scores"], fields["response_mask"].bool()
    for row in range(len(fields)):
        placed = scores[row].nonzero().flatten().tolist()
        ends = [t for t in range(generated.shape[1]) if generated[row, t] and not generated[row, t + 1 : t + 2].any()]
        assert set(placed) <= set(ends) and len(ends) == 3
        assert scores[row].sum().item() == pytest.approx(sum(objects["turn_rewards"][row]))
    assert objects["score"].tolist() == pytest.approx(scores.sum(-1).tolist()) and "acc" not in objects
    targets = {objects["uid"][row]: set() for row in range(len(fields))}
    for row in range(len(fields)):
        targets[objects["uid"][row]].add(objects["env_extra"][row]["target"])
    assert all(len(found) == 1 for found in targets.values())  # the samples of a prompt have one task
    assert (scores != 0).sum() > len(fields) / 2
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    means = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
    assert means[-1] == pytest.approx(scores.sum(-1).mean().item(), abs=1e-6)


def test_seeds_and_options_decide_the_episode() -> None:
    environment = GymnasiumEnvironment(id="Target-v0", module=str(GYM), kwargs={"turns": 1})
    first = environment.reset({"seed": 3})
    assert environment.reset({"seed": 4, "env_kwargs": {"seed": 3}}).observation == first.observation
    assert first.extra == {"target": first.observation[-2]}  # what is no plain value is left out
    others = {environment.reset({"seed": seed}).observation for seed in range(20)}
    assert len(others) > 5
    chosen = environment.reset({"seed": 3, "env_kwargs": {"seed": None, "options": {"letters": "z"}}})
    assert chosen.observation == "Write z."
    step = environment.step("ze~~")
    assert (step.reward, step.done, step.observation, step.extra) == (0.5, True, "Again: z.", {"share": 0.5})


def test_what_cannot_work_is_refused(tmp_path) -> None:
    numbers = GymnasiumEnvironment(id="Numbers-v0", module=str(GYM))
    with pytest.raises(RolloutError, match="of type int; only text"):
        numbers.reset({"seed": 1})
    with raises_with(RolloutError, "config.maker=nowhere:make"):
        GymnasiumEnvironment.start({"id": "x", "maker": "nowhere:make"})
    with pytest.raises(NameNotFound, match="Nothing"):
        GymnasiumEnvironment.start({"id": "Nothing-v0"})
