"""Rollouts of verifiers behind the run's server: our bridge in its own process, and a stand-in for the package."""

import asyncio
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from raising import raises_with
from test_agents_gateway_loop import ROLLOUT, config_for, engine, generated, model, serving  # noqa: F401  (fixtures)

from hybridrl.agents import create_agents
from hybridrl.agents.environments.install import pinned_file
from hybridrl.agents.environments.verifiers import VerifiersServer
from hybridrl.data import create_rl_dataset
from hybridrl.data.preprocess.verifiers import main, rl_row
from hybridrl.errors import ConfigError, RolloutError
from hybridrl.models.info import tokenizer_of
from hybridrl.protocol.names import MISSING_SAMPLES
from hybridrl.utils.agent_host import AgentJob

STAGE = Path(__file__).with_name("verifiers_stage.py")


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a loop, whose folder has the stand-in."""
    folder = tmp_path_factory.mktemp("verifiers")
    shutil.copy(STAGE, folder / "verifiers.py")
    entry = {"name": "letters", "_target_": "verifiers_agent", "env": {"taskset": {"id": "letters_tasks"}}}
    (folder / "loops.yaml").write_text(json.dumps([entry | {"folder": str(folder), "python": sys.executable}]))
    return folder / "loops.yaml"


def settings(loops: Path, *more: str) -> list[str]:
    agent = f"{ROLLOUT}.agent"
    return [
        f"{agent}.agent_loop_config_path={loops}",
        f"{agent}.default_agent_loop=letters",
        f"{agent}.function=null",
        *more,
    ]


@pytest.fixture(scope="module")
def rollout(model: Path, engine: Any, loops: Path) -> Iterator[Any]:  # noqa: F811
    with serving(config_for(model, *settings(loops)), engine) as made:
        yield made


def test_rewards_of_a_rollout_are_the_score_of_its_tokens(rollout: Any, capfd: pytest.CaptureFixture[str]) -> None:
    kinds = ["fine", "infra", "grading", "timeout", "fine"]
    tasks = [json.dumps({"prompt": f"Write {kind}.", "kind": kind}) for kind in kinds]
    batch = generated(rollout, kinds, more={"verifiers_task": tasks})
    columns = batch.non_tensor_batch
    assert columns["uid"].tolist() == ["0-0", "0-4"] and columns["trajectory_reward"].tolist() == [0.5, 0.5]
    assert columns["metric_length"].tolist() == [4.0, 4.0] and columns["reward_share"].tolist() == [0.25, 0.25]
    missing = {kinds[int(one.uid[2:])]: one.unscored for one in batch.meta_info[MISSING_SAMPLES]}
    reasons = {kind: unscored.reason.value for kind, unscored in missing.items()}
    assert reasons == {"infra": "infra", "grading": "grading", "timeout": "timeout"}
    assert "grading of the task" in missing["grading"].detail
    completions = [list(completion.token_ids) for _, completion in rollout[1].calls]
    for row in range(2):
        trained = batch.batch["responses"][row][batch.batch["response_mask"][row].bool()].tolist()
        assert trained in completions


def test_a_server_that_dies_starts_again_and_a_row_without_a_task_is_told(rollout: Any) -> None:
    dies = [json.dumps({"prompt": "x", "kind": "dies"})]
    for tasks, words in ((dies, "server of the environment failed"), ([None], "no column verifiers_task")):
        both = [*tasks, json.dumps({"prompt": "x"})] if tasks == [None] else tasks
        batch = generated(rollout, ["x"] * len(both), more={"verifiers_task": both})
        assert words in batch.meta_info[MISSING_SAMPLES][0].unscored.detail
    assert batch.non_tensor_batch["trajectory_reward"].tolist() == [0.5]


def test_rollouts_go_on_where_the_server_of_verifiers_died(rollout: Any) -> None:
    """The bridge ends at the next rollout, and the run starts both again."""
    tasks = [json.dumps({"prompt": "x", "kind": kind}) for kind in ("server_dies", "fine")]
    batch = generated(rollout, ["x"], more={"verifiers_task": tasks[:1]})
    assert "the server does not answer" in batch.meta_info[MISSING_SAMPLES][0].unscored.detail
    batch = generated(rollout, ["x"], more={"verifiers_task": tasks[1:]})
    assert "the server of the environment failed" in batch.meta_info[MISSING_SAMPLES][0].unscored.detail
    batch = generated(rollout, ["x"], more={"verifiers_task": tasks[1:]})
    assert batch.non_tensor_batch["trajectory_reward"].tolist() == [0.5]


def test_a_rollout_is_given_up_with_its_session(loops: Path, tmp_path: Path) -> None:
    server = VerifiersServer({"taskset": {"id": "letters_tasks"}}, folder=str(loops.parent), python=sys.executable)
    server.start()
    note = tmp_path / "note"
    task = json.dumps({"prompt": "x", "kind": "hangs", "file": str(note)})

    async def hang_up() -> None:
        running = asyncio.ensure_future(
            server.run(AgentJob("http://127.0.0.1:9/v1", "id", "m", {"verifiers_task": task}))
        )
        while not note.exists():
            await asyncio.sleep(0.02)
        running.cancel()
        while note.read_text() != "given up":
            await asyncio.sleep(0.02)

    try:
        asyncio.run(asyncio.wait_for(hang_up(), 60))
    finally:
        server.close()


def test_the_policy_must_play_one_agent(loops: Path) -> None:
    env = {"taskset": {"id": "letters_tasks"}, "left": {}, "right": {}}
    with raises_with(RolloutError, "letters_tasks"):
        VerifiersServer(env, folder=str(loops.parent), python=sys.executable).start()


def test_tasks_become_rows(loops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--loops", str(loops), "--out", str(tmp_path / "new"), "--test-size", "1"])
    train, test = (pd.read_parquet(tmp_path / "new" / f"{split}.parquet") for split in ("train", "test"))
    assert [row[0]["content"] for row in train["prompt"]] == ["Write a.", "Write b."] and len(test) == 1
    assert json.loads(test["verifiers_task"][0])["letter"] == "c" and set(train["agent_name"]) == {"letters"}
    with pytest.raises(SystemExit):
        main(["--loops", str(loops), "--out", str(tmp_path), "--name", "other"])
    assert "it has letters" in capsys.readouterr().err.replace(f"{loops} has", "it has")
    row = rl_row({"prompt": [{"role": "user", "content": "Hi"}], "system_prompt": "Be kind."}, "x", "train", 0)
    assert [one["role"] for one in row["prompt"]] == ["system", "user"]


def test_data_without_tasks_are_refused(model: Path, loops: Path, tmp_path: Path) -> None:  # noqa: F811
    config = config_for(model, *settings(loops))
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)

    def agents_of(**columns: list[Any]) -> Any:
        rows = {"prompt": [[{"role": "user", "content": "Hi"}]] * 2, "data_source": ["x"] * 2, **columns}
        pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
        data = create_rl_dataset(str(tmp_path / "rows.parquet"), config.data, tokenizer)
        return create_agents(config, tokenizer, [data])

    words = r"loop letters need the column verifiers_task, and the data have, besides the prompt, data_source.*; add it"
    for columns in ({}, {"agent_name": ["single_turn_agent", "letters"]}, {"agent_name": ["single_turn_agent", None]}):
        with pytest.raises(RolloutError, match=words):
            agents_of(**columns)
    with raises_with(ConfigError, "default_agent_loop=letters"):
        agents_of(agent_name=["single_turn_agent"] * 2)  # none is answered by the loop that is set
    agents_of(verifiers_task=["{}"] * 2).close()
    create_agents(config, tokenizer, [OwnRows()]).close()  # which columns its rows have, only they can tell


class OwnRows:
    """A dataset of one's own without a list of columns."""


def test_what_cannot_work_is_refused(model: Path, loops: Path) -> None:  # noqa: F811
    for arguments, words in (({}, "env or address"), ({"colour": 1}, "colour"), ({"env": "x"}, "verifiers' block")):
        with pytest.raises(RolloutError, match=words):
            VerifiersServer.of(arguments)
    for more, words in (
        (["agent.function=x:y"], "agent.function=x:y"),
        (["server.enable=False"], "the loop letters"),
        (["agent.max_running=2000"], "server.max_connections="),
    ):
        config = config_for(model, *settings(loops), *(f"{ROLLOUT}.{one}" for one in more))
        with pytest.raises(RolloutError, match=words):
            create_agents(config, tokenizer_of(config.actor_rollout_ref.model), [])
    names = {line.partition("==")[0] for line in pinned_file("verifiers").read_text().splitlines()}
    assert {"verifiers", "uv", "uvicorn", "starlette"} <= names and "torch" not in names


def test_what_an_episode_says() -> None:
    """The bridge reads fields of verifiers' `Episode` and `Trace`."""
    file = Path(sys.modules[VerifiersServer.__module__].__file__ or "").with_name("bridges") / "verifiers_bridge.py"
    spec = importlib.util.spec_from_file_location("the_bridge", file)
    assert spec is not None and spec.loader is not None
    bridge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bridge)

    def trace(**given: Any) -> Any:
        rewards = {"share": SimpleNamespace(score=0.25, weight=2.0)}
        plain = {
            "errors": [],
            "is_timeout": False,
            "ok": True,
            "rewards": rewards,
            "reward": 0.5,
            "metrics": {"n": 4.0},
        }
        agent = SimpleNamespace(trainable=True)
        return SimpleNamespace(**{**plain, "agent": agent, "stop_condition": "done", **given})

    def outcome(*traces: Any, **given: Any) -> Any:
        return bridge.outcome(
            SimpleNamespace(**{"errors": [], "is_timeout": False, "ok": True, "traces": traces, **given})
        )

    extra = {"metric_n": 4.0, "reward_share": 0.25, "stop_condition": "done"}
    assert outcome(trace()) == {"score": 0.5, "extra": extra}
    other = trace(agent=SimpleNamespace(trainable=False), reward=9.0)
    assert outcome(other, trace())["score"] == 0.5
    fault = SimpleNamespace(type="TaskError", message="no such letter")
    assert outcome(trace(ok=False, errors=[fault])) == {"failed": "grading", "detail": "TaskError: no such letter"}
    fault = SimpleNamespace(type="HarnessError", message="x")
    assert outcome(trace(), ok=False, errors=[fault])["failed"] == "infra"
    assert outcome(trace(is_timeout=True))["failed"] == "timeout"
    assert (
        outcome(trace(), trace())["failed"] == "grading" and outcome(trace(rewards={"a": None}))["failed"] == "grading"
    )
