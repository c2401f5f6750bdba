"""Faults of the YAML files of tools, users, environments and loops are named before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from raising import raises_with
from rollout_stage import ROLLOUT

from hybridrl.agents.environments.load_environments import load_environments
from hybridrl.agents.interactions.load_interactions import load_interactions
from hybridrl.agents.tools.load_tools import load_tools
from hybridrl.config import ConfigError, load_config
from hybridrl.config.checks.check_run import check
from hybridrl.errors import RolloutError

OWN = """
from hybridrl.agents import BaseTool, Environment

class Counts(BaseTool):
    config_names = ("start", "step")

class Subclass(Counts):
    pass

class Named:
    def __init__(self, size, seed=0):
        self.size = size
    def reset(self, row): ...
    def step(self, action): ...

class Free(Environment):
    def reset(self, row): ...
    def step(self, action): ...
"""


def faults_before_the_start(model: Path, data: Path, *words: str) -> str:
    given = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}/train.parquet"]
    given += [f"data.val_files={data}/test.parquet", *(f"{ROLLOUT}.{word}" for word in words)]
    try:
        check(load_config("ppo_trainer", given))
    except ConfigError as error:
        return "\n".join(error.faults)
    return ""


def written(folder: Path, text: str) -> str:
    (folder / "own_classes.py").write_text(OWN)
    (folder / "file.yaml").write_text(text.replace("OWN", f"{folder}/own_classes.py"))
    return str(folder / "file.yaml")


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("{class_name: gsm8k_answer, config: {penaltie: 1}}", ["penaltie=1", "penalty"]),
        ("{class_name: calculator, config: {digits: 3}}", ["digits=3"]),
        ("{class_name: search, config: {retrieval_service_url: 'http://h:1', top_k: 3}}", ["top_k=3", "topk"]),
        ("{class_name: python, config: {wall: 3}}", ["wall=3", "wall_s"]),
        ("{class_name: mcp, config: {mcp_servers_config_path: x, tools: [a]}}", ["tools", "tool_selected_list"]),
        ("{class_name: calculater}", ["calculater", "calculator"]),
        ("{class_name: no_such_module.Tool}", ["no_such_module"]),
        ("{class_name: calculator, conf: {}}", ["conf"]),
        ("{class_name: calculator, config: [1]}", ["[1]"]),
        ("{class_name: 'OWN:Counts', config: {stop: 3}}", ["stop=3", "step"]),
    ],
)
def test_tools(micro_model: Path, sort_data: Path, tmp_path: Path, entry: str, named: list[str]) -> None:
    path = written(tmp_path, f"tools: [{entry}, {{class_name: calculator, config: {{digits: 4}}}}]")
    words = ("multi_turn.enable=True", f"multi_turn.tool_config_path={path}")
    fault = faults_before_the_start(micro_model, sort_data, *words)
    assert all(word in fault for word in [*named, "tools[0]"]) and "digits=4" in fault  # all entries are looked at
    with raises_with(RolloutError, "tools[0]"):
        load_tools(path, None)


def test_what_a_tool_of_ones_own_reads_is_its_own(micro_model: Path, sort_data: Path, tmp_path: Path) -> None:
    entries = "{class_name: 'OWN:Subclass', config: {stop: 3}}, {class_name: calculator, config: {type: native}}"
    words = ("multi_turn.enable=True", f"multi_turn.tool_config_path={written(tmp_path, f'tools: [{entries}]')}")
    assert not faults_before_the_start(micro_model, sort_data, *words)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("{class_name: gymnasium, config: {id: a, sed: 3}}", ["sed=3"]),
        ("{class_name: openenv, config: {url: 'http://h:1', session: 3}}", ["session=3", "max_sessions"]),
        ("{class_name: 'OWN:Named', config: {size: 2, sead: 3}}", ["sead=3", "seed"]),
        ("{class_name: gymnasiun, config: {id: a}}", ["gymnasiun", "gymnasium"]),
    ],
)
def test_environments(micro_model: Path, sort_data: Path, tmp_path: Path, entry: str, named: list[str]) -> None:
    path = written(tmp_path, f"environments: [{entry}]")
    words = ("agent.default_agent_loop=env_agent", f"agent.environment_config_path={path}")
    fault = faults_before_the_start(micro_model, sort_data, *words)
    assert all(word in fault for word in [*named, "environment_config_path"])
    with raises_with(RolloutError, "environment_config_path"):
        load_environments(path, None, [])


def test_environments_of_ones_own(micro_model: Path, sort_data: Path, tmp_path: Path) -> None:
    entries = "{name: a, class_name: 'OWN:Named', config: {size: 2}}, {name: b, class_name: 'OWN:Free', config: {x: 1}}"
    path = written(tmp_path, f"environments: [{entries}]")
    words = ("agent.default_agent_loop=env_agent", f"agent.environment_config_path={path}")
    assert not faults_before_the_start(micro_model, sort_data, *words)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("{name: a, class_name: gsm8k, config: {hints: 3}}", ["hints=3"]),
        ("{name: a, class_name: model, config: {url: 'http://h:1/v1', modle: m}}", ["modle=m", "model"]),
        ("{name: a, class_name: gsm9k}", ["gsm9k", "gsm8k"]),
    ],
)
def test_users(micro_model: Path, sort_data: Path, tmp_path: Path, entry: str, named: list[str]) -> None:
    path = written(tmp_path, f"interaction: [{entry}]")
    words = ("multi_turn.enable=True", f"multi_turn.interaction_config_path={path}")
    fault = faults_before_the_start(micro_model, sort_data, *words)
    assert all(word in fault for word in [*named, "interaction_config_path"])
    with raises_with(RolloutError, "interaction_config_path"):
        load_interactions(path)


def test_loops(micro_model: Path, sort_data: Path, tmp_path: Path) -> None:
    path = written(tmp_path, "[{name: mine, _target_: tool_agnt}]")
    fault = faults_before_the_start(micro_model, sort_data, f"agent.agent_loop_config_path={path}")
    assert "tool_agnt" in fault and "tool_agent" in fault and "agent_loop_config_path" in fault


@pytest.mark.parametrize(
    "server", [{"command": "x", "cmd": 1}, {"url": "http://h:1", "headers": {"Authorization": "t"}}]
)
def test_what_nothing_reads_of_an_mcp_server_is_refused(tmp_path: Path, server: dict[str, object]) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"a": server}}))
    config = f"{{mcp_servers_config_path: {tmp_path}/servers.json}}"
    path = written(tmp_path, f"tools: [{{class_name: mcp, config: {config}}}]")
    with pytest.raises(RolloutError, match=r"cmd|headers"):
        load_tools(path, None)
