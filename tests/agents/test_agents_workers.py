"""Sessions in worker processes: the same results, a bound on those that run at once, and processes that are killed."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from raising import raises_with
from rollout_stage import ECHO, ROLLOUT, config_for, prompts_of
from template_families import FAMILIES

from hybridrl.agents import create_agents
from hybridrl.agents.workers.agent_pool import SessionPool
from hybridrl.agents.workers.setup import setup_of
from hybridrl.config.checks.idle import check_idle
from hybridrl.errors import RolloutError
from hybridrl.models.info import tokenizer_of
from hybridrl.protocol import DataProto
from hybridrl.registry import import_external_lib
from hybridrl.scored import Reason

LOOPS = Path(__file__).with_name("worker_loops.py")


def settings(model: Path, workers: int, *more: str):
    import_external_lib(str(LOOPS))
    libraries = f"actor_rollout_ref.model.external_lib='{ECHO},{LOOPS}'"
    return config_for(model, FAMILIES["qwen"].template, f"{ROLLOUT}.agent.num_workers={workers}", libraries, *more)


LOOPS_OF_ROWS = ["tool_agent", "single_turn_agent", "tells_its_process", "dies", "unsendable", "counts_sessions"]
ROWS = SimpleNamespace(columns=["agent_name"], column=lambda name: LOOPS_OF_ROWS)


def same(one: DataProto, other: DataProto) -> None:
    assert one.batch.keys() == other.batch.keys()
    for name in one.batch.keys() - {"rollout_log_probs"}:
        assert torch.equal(one.batch[name], other.batch[name]), name
    # the model computes what waits at the same time as one batch, which changes roundings
    assert (one.batch["rollout_log_probs"] - other.batch["rollout_log_probs"]).abs().max() < 1e-4
    assert one.non_tensor_batch.keys() == other.non_tensor_batch.keys()
    for name in one.non_tensor_batch.keys() - {"session_log"}:
        np.testing.assert_equal(one.non_tensor_batch[name].tolist(), other.non_tensor_batch[name].tolist(), name)


def untimed(log) -> list:
    """The log of a session without its times."""
    events = [{k: v for k, v in event.items() if k not in ("at", "seconds")} for event in log["events"]]
    return [log["messages"], events]


def test_results_are_the_same_with_any_number_of_workers(started, ray_session, model) -> None:
    """Tools and single turns, in one batch; two samples that differ."""
    batches, metrics, told = [], [], []
    for workers in (0, 1, 2):
        rollout, _ = started(settings(model, workers), ROWS)
        seen: list[str] = []
        names = [None, "single_turn_agent", "tool_agent", None]
        prompts = prompts_of(rollout, 4, agent_name=names)
        prompts = DataProto.concat([prompts, prompts])
        prompts.non_tensor_batch["sample"][4:] = 1
        batches.append(rollout.generate(prompts, lambda rows, seen=seen: seen.extend(one.uid for one in rows)))
        metrics.append(rollout.metrics())
        told.append(sorted(seen))
        rollout.close()
    for number in (1, 2):
        same(batches[0], batches[number])
        logs = [batch.non_tensor_batch["session_log"].tolist() for batch in (batches[0], batches[number])]
        assert [untimed(log) for log in logs[0]] == [untimed(log) for log in logs[1]]
        assert told[number] == told[0] == sorted(batches[0].non_tensor_batch["uid"].tolist())
        counted = {name for name in metrics[0] if "sessions" in name or "faults" in name}
        assert {name: metrics[number][name] for name in counted} == {name: metrics[0][name] for name in counted}
    assert max(batches[0].non_tensor_batch["__num_turns__"]) > 3 and metrics[2]["agent_loop/workers_restarted"] == 0


def test_a_killed_process_spoils_its_own_sessions_and_starts_again(
    started, ray_session, model, tmp_path, capfd, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rollout, _ = started(settings(model, 2, f"{ROLLOUT}.agent.retries=0"), ROWS)
    prompts = prompts_of(rollout, 6, agent_name=["dies"] * 6, mark=[str(tmp_path)] * 6, most=[6] * 6)
    batch = rollout.generate(prompts)
    process_of = {uid: pid for uid, pid, _ in (file.name.split() for file in tmp_path.glob("0-* *"))}
    victims = {uid for uid, pid in process_of.items() if pid == process_of["0-0"]}
    assert len(victims) == 3 and set(batch.non_tensor_batch["uid"]) == process_of.keys() - victims
    lost = batch.meta_info["missing_samples"]
    assert {one.uid for one in lost} == victims and {one.unscored.reason for one in lost} == {Reason.INFRA}
    assert "process of the session died" in lost[0].unscored.detail
    metrics = rollout.metrics()
    assert metrics["agent_loop/workers_restarted"] == 1 and metrics["agent_loop/sessions_failed"] == 3
    assert f"process {process_of['0-0']} of 3 running sessions died" in capfd.readouterr().err
    pids: set[int] = set()
    while len(pids) < 2:  # until the process that was started for it has sessions
        again = rollout.generate(prompts_of(rollout, 6, agent_name=["tells_its_process"] * 6))
        pids |= set(again.non_tensor_batch["pid"].tolist())
        assert len(again) == 6 and int(process_of["0-0"]) not in pids
    processes = [psutil.Process(pid) for pid in pids]
    assert {process.cwd() for process in processes} == {str(tmp_path)}  # relative paths mean there what they mean here
    rollout.close()
    assert not psutil.wait_procs(processes, timeout=30)[1]


def test_sessions_of_a_killed_process_run_again_at_once(started, ray_session, model, tmp_path) -> None:
    rollout, _ = started(settings(model, 1, f"{ROLLOUT}.agent.retries=1"), ROWS)
    prompts = prompts_of(rollout, 3, agent_name=["dies"] * 3, mark=[str(tmp_path)] * 3, most=[3] * 3)
    batch = rollout.generate(prompts)
    assert batch.non_tensor_batch["uid"].tolist() == ["0-0", "0-1", "0-2"]
    assert [one.again for one in batch.meta_info["missing_samples"]] == [True] * 3


def test_what_cannot_leave_its_process_costs_its_own_session(started, ray_session, model) -> None:
    rollout, _ = started(settings(model, 1, f"{ROLLOUT}.agent.retries=0"), ROWS)
    ends = ["", "lock", "exits", "raises", "", "cancels"]
    batch = rollout.generate(prompts_of(rollout, 6, agent_name=["unsendable"] * 6, ends=ends))
    assert batch.non_tensor_batch["uid"].tolist() == ["0-0", "0-4"]
    details = [one.unscored.detail for one in batch.meta_info["missing_samples"]]
    assert "cannot be sent to the controller" in details[0] and "SystemExit: 3" in details[1]
    assert details[2] == "OwnError: the disk is full" and "cancelled itself" in details[3]
    rollout._config.agent.on_error = "raise"
    with pytest.raises(RolloutError, match="the disk is full") as caught:
        rollout.generate(prompts_of(rollout, 1, agent_name=["unsendable"], ends=["raises"]))
    assert "worker_loops.py" in str(caught.value.__cause__)  # where it was raised
    assert len(rollout.generate(prompts_of(rollout, 1, agent_name=["unsendable"], ends=[""]))) == 1


def test_generation_that_fails_ends_the_sessions_of_workers(started, ray_session, model) -> None:
    rollout, recorded = started(settings(model, 1), ROWS)
    recorded.client.close()
    with pytest.raises(RolloutError, match="the rollout was closed"):
        rollout.generate(prompts_of(rollout, 3))


@pytest.mark.parametrize("workers", [0, 2])
def test_so_many_sessions_run_at_once_as_max_running_says(started, ray_session, model, tmp_path, workers) -> None:
    rollout, _ = started(settings(model, workers, f"{ROLLOUT}.agent.max_running=3"), ROWS)
    columns = {"agent_name": ["counts_sessions"] * 12, "folder": [str(tmp_path)] * 12, "together": [3] * 12}
    assert len(rollout.generate(prompts_of(rollout, 12, **columns))) == 12
    assert max(int(file.name.split()[1]) for file in tmp_path.glob("most *")) == 3


def test_a_worker_that_cannot_start_ends_the_run_with_its_reason(ray_session, model, tmp_path) -> None:
    """The file of the tools is gone, as on another node."""
    tools = tmp_path / "tools.py"
    tools.write_text(ECHO.read_text().partition("@register_tool_parser")[0])
    config = settings(model, 1, f"{ROLLOUT}.multi_turn.function_tool_path={tools}")
    agents = create_agents(config, tokenizer_of(config.actor_rollout_ref.model), [])
    tools.unlink()
    pool = SessionPool(setup_of(agents), 1)
    try:
        from hybridrl.agents.session import Task
        from hybridrl.rollout.request import GREEDY_TOKEN

        future = pool.submit(Task({"agent_name": None}, "0-0", 0, GREEDY_TOKEN, {}), None)
        with raises_with(RolloutError, "function_tool_path=", "tools.py"):
            future.result(60)
    finally:
        pool.close()
        agents.close()


@pytest.mark.parametrize(("cores", "count"), [(2, 0), (3, 0), (4, 1), (11, 2), (64, 8)])
def test_the_default_number_of_workers_leaves_cores_to_the_controller(model, monkeypatch, cores, count) -> None:
    config = settings(model, 0)
    config.actor_rollout_ref.rollout.agent.num_workers = None
    monkeypatch.setattr("hybridrl.agents.agents.available_cores", lambda: cores)
    assert create_agents(config, tokenizer_of(config.actor_rollout_ref.model), []).workers == count


def test_workers_are_for_loops_that_need_them(model, capsys) -> None:
    config = settings(model, 2)
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    assert create_agents(config, tokenizer, []).workers == 2
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "single_turn_agent"
    assert create_agents(config, tokenizer, []) is None  # every row is answered once
    told = " ".join(check_idle(config)[1])
    assert f"{ROLLOUT}.multi_turn.enable=True" in told and f"{ROLLOUT}.agent.num_workers=2" in told
