"""A GRPO run whose samples are sessions with a tool, as a user starts it."""

import json
import time
from pathlib import Path

import pandas as pd
import pytest
from template_families import FAMILIES, write_model

from hybridrl.agents import AgentRollout
from hybridrl.config import load_config
from hybridrl.trainer.ppo.run_ppo import started_trainer

ECHO = Path(__file__).with_name("echo_tools.py")
ROLLOUT = "actor_rollout_ref.rollout"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert extra_info["num_turns"] >= 2
    tool_rewards = extra_info["rollout_reward_scores"].get("tool_rewards", [])
    return sum(char < "m" for char in solution_str) / max(len(solution_str), 1) + sum(tool_rewards)
"""


@pytest.fixture(scope="module")
def settings(micro_model: Path, sort_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("agents")
    model = write_model(micro_model, folder / "model")
    (model / "chat_template.jinja").write_text(FAMILIES["qwen"].template)
    (folder / "reward.py").write_text(REWARD)
    rows = pd.read_parquet(sort_data / "train.parquet").head(8)
    rows["agent_name"] = ["tool_agent", None, "single_turn_agent", "tool_agent"] * 2
    rows.to_parquet(folder / "train.parquet")
    return [
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.model.external_lib={ECHO}",
        f"data.train_files={folder / 'train.parquet'}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "data.train_batch_size=4",
        "data.shuffle=False",
        "data.max_prompt_length=600",
        "data.max_response_length=300",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.function_tool_path={ECHO}",
        f"{ROLLOUT}.multi_turn.format=every_turn",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
        f"{ROLLOUT}.stop=[{','.join('ABCDEFGHIJKLMNOPQ')}]",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.recompute_old_log_prob=always",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
        "trainer.save_last=False",
        "trainer.report=False",
        "trainer.logger=[file]",
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_trains_on_the_sampled_tokens_and_reports_turns(ray_session, settings, tmp_path, workers) -> None:
    words = [f"trainer.default_local_dir={tmp_path}", f"{ROLLOUT}.agent.num_workers={workers}", "trainer.dump_freq=1"]
    with started_trainer(load_config("ppo_trainer", [*settings, *words])) as trainer:
        tokenizer = trainer.tokenizer
        result = trainer.fit()
        assert isinstance(trainer.rollout, AgentRollout) and trainer.rollout.version == 1
        assert trainer.agents.workers == workers
        assert trainer.train_loader.dataset.tool_schemas[0]["function"]["name"] == "echo"
    fields, objects = result.batch.batch, result.batch.non_tensor_batch
    generated = fields["response_mask"].bool()
    assert (fields["old_log_probs"] - fields["rollout_log_probs"])[generated].abs().max() < 1e-5
    attended = fields["attention_mask"][:, -generated.shape[1] :].bool()
    assert (attended & ~generated).any()  # answers of the tool stand between turns
    assert not fields["rollout_log_probs"][~generated].any() and not fields["advantages"][~generated].any()
    turns = dict(zip(objects["agent_name"].tolist(), objects["__num_turns__"].tolist(), strict=True))
    assert turns["single_turn_agent"] == 2 and max(objects["__num_turns__"]) > 3
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    last = [row for row in rows if "num_turns/max" in row][-1]
    assert last["num_turns/max"] == max(objects["__num_turns__"]) and last["agent_loop/generate_sequences/mean"] > 0
    assert last["tool_call_counts/mean"] > 0 and last["agent_loop/sessions_failed"] == 0
    check_dump(
        [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()], result, tokenizer
    )


def check_dump(rows: list[dict], result, tokenizer) -> None:
    """Every session is in the dump: what was said, the exact tokens, each generation and each call with its time."""
    fields, objects = result.batch.batch, result.batch.non_tensor_batch
    assert [row["uid"] for row in rows] == objects["uid"].tolist()
    for number, row in enumerate(rows):
        rollout, tokens = row["rollout"], row["rollout"]["tokens"]
        attended = fields["attention_mask"][number].bool()
        width = fields["responses"].shape[1]
        assert tokens["prompt_ids"] + tokens["ids"] == fields["input_ids"][number][attended].tolist()
        real = attended[-width:]
        assert tokens["mask"] == fields["response_mask"][number][real].tolist()
        for name, field in (("log_probs", "rollout_log_probs"), ("advantages", "advantages")):
            assert tokens[name] == pytest.approx(fields[field][number][real].tolist(), rel=1e-5)
        assert "".join(tokens["texts"]) == tokenizer.decode(tokens["ids"], spaces_between_special_tokens=False)
        placed = dict(tokens["rewards"])
        assert sum(placed.values()) == pytest.approx(row["score"], rel=1e-5)
        assert sum(count for _, count in tokens["versions"]) == len(tokens["ids"])

        events, turns = rollout["events"], [event for event in rollout["events"] if event["kind"] == "generate"]
        calls = [event for event in events if event["kind"] == "tool"]
        assert sum(event["tokens"] for event in turns) == sum(tokens["mask"])
        assert turns[0]["prompt_tokens"] == len(tokens["prompt_ids"])
        assert all(one["at"] >= 0 and one["at"] + one["seconds"] <= rollout["seconds"] + 1e-4 for one in events)
        assert abs(rollout["started"] - time.time()) < 600
        if rollout.get("agent_name") == "single_turn_agent":
            assert len(turns) == 1 and not calls and rollout["messages"] is None
            continue
        assert [message["role"] for message in rollout["messages"]].count("assistant") == len(turns)
        assert len(calls) >= len(turns) - 1 and rollout["tool_rewards"] == [call["reward"] for call in calls]
        told = [message["content"] for message in rollout["messages"] if message["role"] == "tool"]
        assert [call["response"] for call in calls][: len(told)] == told and all(
            call["name"] == "echo" for call in calls
        )
