"""Settings of agents that cannot work are refused by name, and verl's modules are there."""

from __future__ import annotations

import importlib

import pytest

from hybridrl.agents import AgentLoopBase, BaseTool
from hybridrl.config import load_config
from hybridrl.config.checks.check_agents import check_agents
from hybridrl.config.checks.idle import check_idle
from hybridrl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"


def rollout(*words: str):
    return load_config("ppo_trainer", [f"{ROLLOUT}.{word}" for word in words]).actor_rollout_ref.rollout


def test_tools_need_a_loop() -> None:
    (fault,) = check_agents(rollout("multi_turn.tool_config_path=x.yaml"))
    assert "multi_turn.enable=true" in fault and "data.tool_config_path" in fault
    assert not list(check_agents(rollout("multi_turn.tool_config_path=x.yaml", "multi_turn.enable=True")))
    assert not list(check_agents(rollout("multi_turn.tool_config_path=x.yaml", "agent.default_agent_loop=tool_agent")))
    (fault,) = check_agents(rollout("multi_turn.interaction_config_path=x.yaml"))
    assert "multi_turn.enable=true" in fault
    assert not list(check_agents(rollout("multi_turn.interaction_config_path=x.yaml", "multi_turn.enable=True")))
    (fault,) = check_agents(rollout("multi_turn.function_tool_path=no_such.py", "multi_turn.enable=True"))
    assert "no_such.py: no such file" in fault


def test_agents_that_run_at_once_need_connections() -> None:
    words = ["agent.function=agent.py:run", "agent.max_running=65"]
    (fault,) = check_agents(rollout(*words, "server.max_connections=64"))
    assert "agent.max_running=65" in fault and "server.max_connections=64" in fault
    assert not list(check_agents(rollout(*words, "server.max_connections=65")))
    assert not list(check_agents(rollout("server.max_connections=64")))  # no agent runs


def test_other_programs_refuse_agents() -> None:
    words = [f"actor_rollout_ref.rollout.{word}" for word in ("multi_turn.enable=True", "agent.retries=3")]
    (fault,), _ = check_idle(load_config("generation", words))
    assert all(word in fault for word in words) and "this program answers each prompt once" in fault


@pytest.mark.parametrize(
    "word",
    [
        "multi_turn.use_inference_chat_template=True",
        *("multi_turn.num_repeat_rollouts=2", "agent.custom_async_server.path=x.py", "multi_turn.max_parallel_calls=0"),
        *("multi_turn.tool_response_truncate_side=top", "multi_turn.tokenization_sanity_check_mode=off"),
    ],
)
def test_what_is_not_built_stays_refused(word) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        rollout(word)


def test_data_follow_the_tools_of_the_rollout() -> None:
    config = load_config("ppo_trainer", [f"{ROLLOUT}.multi_turn.tool_config_path=x.yaml"])
    assert config.data.tool_config_path == "x.yaml" and config.data.function_tool_path is None


def test_verls_modules_are_there() -> None:
    agent_loop = importlib.import_module("hybridrl.verl_compat.experimental.agent_loop")
    schemas = importlib.import_module("hybridrl.verl_compat.tools.schemas")
    base_tool = importlib.import_module("hybridrl.verl_compat.tools.base_tool")
    assert agent_loop.AgentLoopBase is AgentLoopBase and base_tool.BaseTool is BaseTool
    given = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
    schema = schemas.OpenAIFunctionToolSchema.model_validate(given)
    assert schema.model_dump(exclude_unset=True) == given
    assert base_tool.BaseTool(config={}, tool_schema=schema).name == "f"
