"""Agents of the user's own, trained through the run's server: a real model, a real server process, real agents."""

import asyncio
import contextlib
import http.server
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from serving_stage import Recorded, serving
from template_families import FAMILIES, write_model

from hybridrl.agents import AgentRollout, create_agents
from hybridrl.agents.gateway import AgentFailed, AgentHost, Closed
from hybridrl.config import load_config
from hybridrl.engine.microbatch import MicroBatching
from hybridrl.engine.train_engine import create_train_engine
from hybridrl.errors import RolloutError
from hybridrl.models.info import tokenizer_of
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.names import MISSING_SAMPLES
from hybridrl.rollout.trace import read_trace, trajectories_of
from hybridrl.scored import Reason, Scored, Unscored
from hybridrl.serve import RunServer
from hybridrl.trainer.ppo.run_ppo import started_trainer
from hybridrl.utils.agent_host import AgentJob, AgentProgram

AGENTS = Path(__file__).with_name("my_agents.py")
ROLLOUT = "actor_rollout_ref.rollout"
RESPONSE = 120


@pytest.fixture(scope="module")
def model(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(micro_model, tmp_path_factory.mktemp("families"))
    (folder / "chat_template.jinja").write_text(FAMILIES["qwen"].template)
    return folder


def config_for(model: Path, *more: str) -> Any:
    return load_config(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={model}",
            "data.max_prompt_length=700",
            f"data.max_response_length={RESPONSE}",
            f"{ROLLOUT}.name=hf",
            f"{ROLLOUT}.server.enable=True",
            f"{ROLLOUT}.server.host=127.0.0.1",
            f"{ROLLOUT}.agent.default_agent_loop=gateway_agent",
            f"{ROLLOUT}.agent.function={AGENTS}:by_kind",
            f"{ROLLOUT}.agent.timeout_s=20",
            f"{ROLLOUT}.agent.retries=0",
            *more,
        ],
    )


@pytest.fixture(scope="module")
def engine(model: Path) -> Any:
    settings = config_for(model).actor_rollout_ref
    engine = create_train_engine("language_model", "fsdp2", model=settings.model, engine=settings.actor.fsdp_config)
    engine.initialize()
    return engine


@pytest.fixture(scope="module")
def rollout(model: Path, engine: Any) -> Iterator[tuple[AgentRollout, Recorded]]:
    with serving(config_for(model, f"{ROLLOUT}.agent.trace_dir={model.parent / 'traces'}"), engine) as made:
        yield made


def generated(
    rollout: tuple[AgentRollout, Recorded],
    kinds: list[str],
    mark: str = "",
    more: Mapping[str, list[Any]] | None = None,
) -> DataProto:
    """The batch of one session per kind of agent; what the agents leave behind has the mark in its arguments."""
    made, recorded = rollout
    recorded.calls.clear()
    messages = [[{"role": "user", "content": f"Sort: {number} 2 1"}] for number in range(len(kinds))]
    ids = [made.agents.turns.prompt(one) for one in messages]
    assert len({len(one) for one in ids}) == 1
    tensor = torch.tensor(ids)
    columns = {"uid": [f"0-{n}" for n in range(len(kinds))], "sample": [0] * len(kinds), "raw_prompt": messages}
    columns |= {"kind": kinds, "mark": [mark] * len(kinds), **(more or {})}
    return made.generate(
        DataProto.from_dict(
            tensors={
                "input_ids": tensor,
                "attention_mask": torch.ones_like(tensor),
                "position_ids": torch.arange(tensor.shape[1]).expand_as(tensor).contiguous(),
            },
            non_tensors={name: object_array(values) for name, values in columns.items()},
            meta_info={"global_steps": 1},
        )
    )


def check_traces(folder: Path, batch: DataProto) -> None:
    """Each session has a file, which gives the rows of the batch again."""
    files = sorted(folder.glob("*.json"))
    assert [path.name[:6] for path in files] == ["0-0-0-", "0-1-0-"]
    fields, row = batch.batch, 0
    width = fields["prompts"].shape[1]
    for path in files:
        trace = read_trace(path)
        assert all(turn["request"]["messages"] for turn in trace["turns"])
        for one in trajectories_of(trace):
            count = len(one.token_ids)
            assert fields["attention_mask"][row].sum() == len(one.prompt_ids) + count
            assert fields["input_ids"][row, width - len(one.prompt_ids) : width + count].tolist() == [
                *one.prompt_ids,
                *one.token_ids,
            ]
            assert fields["response_mask"][row, :count].tolist() == list(one.mask)
            told = torch.tensor(one.log_probs) - fields["rollout_log_probs"][row, :count]
            assert told[torch.tensor(one.mask).bool()].abs().max() < 1e-6
            row += 1
    assert row == len(batch)


def test_an_unmodified_agent_is_trained_on_what_was_sampled(rollout: Any, engine: Any, model: Path) -> None:
    """Two conversations per session; all of their tokens, with the log-probabilities that training computes."""
    batch = generated(rollout, ["talks", "talks"])
    check_traces(model.parent / "traces", batch)
    fields, calls = batch.batch, rollout[1].calls
    assert len(batch) == 4 and len(calls) == 6
    assert batch.non_tensor_batch["trajectory_index"].tolist() == [0, 1, 0, 1]
    assert {request.priority for request, _ in calls} == {0}, "training comes before guests"
    assert {request.sampling.temperature for request, _ in calls} == {1.0}, "the agent asked for 0"
    assert len({request.sampling.seed for request, _ in calls} - {42, None}) == 6, "the agent asked for 42"
    sampled: dict[tuple[int, ...], list[tuple[int, float]]] = {}
    for request, completion in calls:
        for number, token in enumerate(completion.token_ids):
            place = (*request.prompt_ids, *completion.token_ids[:number])
            sampled.setdefault(place, []).append((token, float(np.float32(completion.log_probs[number]))))
    width = fields["prompts"].shape[1]
    for row in range(4):
        ids = fields["input_ids"][row].tolist()
        start = int((fields["attention_mask"][row] == 0)[:width].sum())
        for number in fields["response_mask"][row].nonzero().flatten().tolist():
            here = (ids[width + number], fields["rollout_log_probs"][row, number].item())
            sampled[tuple(ids[start : width + number])].remove(here)
    assert not any(sampled.values()), "every generated token is trained on"
    found = engine.infer(batch, MicroBatching(2, None), 1.0, {"log_probs"})["log_probs"]
    trained = fields["response_mask"].bool()
    assert (found - fields["rollout_log_probs"])[trained].abs().max() < 1e-5


def test_what_an_agent_returns_is_the_score(rollout: Any) -> None:
    batch = generated(rollout, ["judges", "fine", "talks"])
    columns = batch.non_tensor_batch
    tokens = batch.batch["response_mask"].sum(dim=1).tolist()
    assert columns["trajectory_reward"].tolist() == [tokens[0], 0.5, 0.0, None]  # the last: by the reward function
    assert columns["judged"].tolist() == ["yes", None, None, None]


@pytest.mark.slow  # it waits for agent.timeout_s
def test_an_agent_that_fails_takes_no_other_with_it(rollout: Any, capfd: pytest.CaptureFixture[str]) -> None:
    kinds = ["silent", "raises", "exits", "hangs", "sleeps", "abstains", "wrong", "long", "fine"]
    mark = f"{time.time_ns()}"
    batch = generated(rollout, kinds, mark)
    assert batch.non_tensor_batch["uid"].tolist() == ["0-7", "0-8"]
    assert batch.non_tensor_batch["trajectory_reward"].tolist() == [None, 0.5]
    assert batch.non_tensor_batch["agent_requests_too_long"].tolist() == [1, 0]
    missing = {kinds[int(one.uid[2:])]: one.unscored for one in batch.meta_info[MISSING_SAMPLES]}
    assert {kind: unscored.reason for kind, unscored in missing.items()} == {
        "silent": Reason.INFRA,
        "raises": Reason.INFRA,
        "exits": Reason.INFRA,
        "hangs": Reason.TIMEOUT,
        "sleeps": Reason.TIMEOUT,
        "abstains": Reason.GRADING,
        "wrong": Reason.INFRA,
    }
    for kind, words in (("raises", "a bug of the agent"), ("wrong", "'well done'"), ("hangs", "agent.timeout_s=20")):
        assert words in missing[kind].detail
    assert "without an answer" in missing["exits"].detail and "made no" not in missing["silent"].detail
    deadline = time.monotonic() + 60
    while left := running_with(mark):  # what an agent leaves behind is ended while its session is given up
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def running_with(mark: str) -> list[bytes]:
    """The commands of all processes that have the mark among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(path.read_bytes())
    return [words for words in found if mark.encode() in words]


def test_only_an_agent_that_gives_up_on_its_length_counts_as_cut(rollout: Any) -> None:
    """Not one that was killed after such a request, that returned nonsense, or that went on and failed later."""
    kinds = ["long", "long_then_killed", "long_then_wrong", "long_then_goes_on"]
    batch = generated(rollout, kinds)
    assert batch.non_tensor_batch["uid"].tolist() == ["0-0"]
    missing = {kinds[int(one.uid[2:])]: one.unscored.reason for one in batch.meta_info[MISSING_SAMPLES]}
    assert missing == dict.fromkeys(kinds[1:], Reason.INFRA)


def test_what_an_agent_returns_after_its_server_was_lost_is_no_score(rollout: Any) -> None:
    gateway, process = rollout[0].agents.gateways["gateway_agent"], rollout[0].server.process
    before = process.pid
    rollout[1].calls.clear()  # those of other tests
    lost = threading.Thread(target=_kill_once_used, args=(rollout[1], before))
    lost.start()
    batch = generated(rollout, ["shrugs"], mark=str(before))
    lost.join()
    assert len(batch) == 0
    assert [one.unscored.reason for one in batch.meta_info[MISSING_SAMPLES]] == [Reason.INFRA]
    deadline = time.monotonic() + 120
    while True:  # the next test finds a server
        with contextlib.suppress(RolloutError):
            asyncio.run(gateway._call("POST", "/sessions", {}))
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _kill_once_used(recorded: Recorded, pid: int) -> None:
    while not recorded.calls:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([500, 200], Closed(2, True, [])), ([404], Closed()), ([500, 404], Closed()), ([500, 500], None)],
)
def test_only_an_unknown_session_is_one_of_a_server_that_has_restarted(
    rollout: Any, monkeypatch: pytest.MonkeyPatch, statuses: list[int], expected: Closed | None
) -> None:
    left = list(statuses)

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            status = left.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(
                b'{"too_long": 2, "cut": true, "messages": []}' if status == 200 else b'{"error": {"message": "no"}}'
            )

        def log_message(self, *_: object) -> None:
            pass

    gateway = rollout[0].agents.gateways["gateway_agent"]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    access = replace(gateway._server.access, url=f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setattr(gateway, "_server", RunServer(gateway._server.process, access))
    try:
        if expected is None:
            with pytest.raises(RolloutError, match="DELETE"):
                asyncio.run(gateway._closed("session-a"))
        else:
            assert asyncio.run(gateway._closed("session-a")) == expected
    finally:
        server.shutdown()
        server.server_close()
    assert not left


# ------------------------------------------------------------------ commands, and what is refused


SCRIPT = """
import json, os, sys
row = json.load(open(os.environ["HYBRIDRL_ROW"]))
assert os.environ["OPENAI_BASE_URL"] == "http://x/sessions/i/v1" and os.environ["OPENAI_API_KEY"] == "i"
assert os.environ["ANTHROPIC_BASE_URL"] == "http://x/sessions/i"
assert {"x", "kept.example"} <= set(os.environ["NO_PROXY"].split(",")) == set(os.environ["no_proxy"].split(","))
if row["wanted"] == "wait":
    import time
    time.sleep(1000)
if (row["wanted"] or "").startswith("sh "):
    os.execv("/bin/sh", ["sh", "-c", row["wanted"][3:]])
if row["wanted"] == "exit":
    sys.exit(4)
if row["wanted"] is not None:
    open(os.environ["HYBRIDRL_SCORE"], "w").write(row["wanted"])
"""


def test_agents_find_their_clients_imported(tmp_path: Path) -> None:
    """What a client imports when it is first used costs each agent as much as a session, and is the same for all."""
    (tmp_path / "agent.py").write_text(
        "import sys\nimport anthropic\nimport openai\n\n\n"
        "def solve(base_url, api_key, row):\n"
        "    before = len(sys.modules)\n"
        "    openai.OpenAI().chat.completions, anthropic.Anthropic().messages\n"
        "    return len(sys.modules) - before\n"
    )
    host = AgentHost(AgentProgram(function=f"{tmp_path / 'agent.py'}:solve"))
    try:
        assert asyncio.run(host.run(AgentJob("http://x/sessions/i/v1", "i", "tiny", {}))) == 0
    finally:
        host.close()


def test_a_command_reads_its_row_and_writes_its_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text(SCRIPT)
    monkeypatch.setenv("NO_PROXY", "kept.example")
    monkeypatch.delenv("no_proxy", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    folders = (tmp_path / "temporary").glob
    host = AgentHost(AgentProgram(command=(sys.executable, str(tmp_path / "agent.py"))))

    def run(wanted: str | None) -> Any:
        return asyncio.run(host.run(AgentJob("http://x/sessions/i/v1", "i", "tiny", {"wanted": wanted})))

    try:
        assert run(None) is None and run("0.25") == 0.25
        assert run('{"reward": 1, "extra": {"a": 2}}') == Scored(1.0, {"a": 2})
        assert run('{"unscored": "infra", "detail": "no disk"}') == Unscored(Reason.INFRA, "no disk")
        for wanted, words in (
            ("exit", "exit code 4"),
            ("{", "HYBRIDRL_SCORE"),
            ('{"unscored": "x"}', "unscored"),
        ):
            with pytest.raises(AgentFailed, match=words):
                run(wanted)

        async def out_of_time() -> None:
            task = asyncio.ensure_future(host.run(AgentJob("http://x/sessions/i/v1", "i", "tiny", {"wanted": "wait"})))
            while not list(folders("hybridrl-agent-*/row.json")):
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])

        asyncio.run(out_of_time())
        deadline = time.monotonic() + 60
        while list(folders("hybridrl-agent-*")) and time.monotonic() < deadline:  # ended agents go side by side with us
            time.sleep(0.01)
        assert not list(folders("hybridrl-agent-*")), "nothing of an agent stays behind"
        for status, words in (("kill -9 $$", "signal 9"), ("exit 137", "signal 9"), ("exit 3", "exit code 3")):
            with pytest.raises(AgentFailed, match=words) as caught:
                run("sh " + status)
            assert caught.value.by_itself == (status == "exit 3")
    finally:
        host.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["server.enable=False"], "server.enable=False"),
        (["agent.function=null"], "neither"),
        (["agent.command=run"], "both"),
        (["agent.function=no_such_module:agent"], "no_such_module"),
        (["agent.default_agent_loop=mine"], "agent.default_agent_loop=gateway_agent"),
    ],
)
def test_what_cannot_work_is_refused_at_start_up(model: Path, settings: list[str], words: str, tmp_path: Path) -> None:
    listed = tmp_path / "loops.yaml"
    listed.write_text("[{name: mine, _target_: hybridrl.agents.loops.single_turn.SingleTurnAgentLoop}]")
    given = [f"agent.agent_loop_config_path={listed}", *settings]
    config = config_for(model, *(f"{ROLLOUT}.{setting}" for setting in given))
    with pytest.raises(RolloutError, match=words):
        create_agents(config, tokenizer_of(config.actor_rollout_ref.model), [])


# ------------------------------------------------------------------ a whole run


@pytest.mark.usefixtures("forked_children")
def test_a_run_trains_an_agent_behind_its_server(
    ray_session: Any, model: Path, sort_data: Path, tmp_path: Path
) -> None:
    rows = pd.read_parquet(sort_data / "train.parquet").head(4)
    rows["kind"] = ["talks", "judges"] * 2
    rows.to_parquet(tmp_path / "train.parquet")
    config = config_for(
        model,
        f"data.train_files={tmp_path / 'train.parquet'}",
        "data.train_batch_size=4",
        "data.shuffle=False",
        f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.agent.timeout_s=120",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.recompute_old_log_prob=always",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
        "trainer.save_last=False",
        "trainer.report=False",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )
    with started_trainer(config) as trainer:
        result = trainer.fit()
        access = json.loads(next(tmp_path.rglob("server.json")).read_text())
        assert access["base_url"].startswith("http://127.0.0.1:")
    fields, trained = result.batch.batch, result.batch.batch["response_mask"].bool()
    assert len(result.batch) == 12  # two conversations of each agent that talks
    assert (fields["old_log_probs"] - fields["rollout_log_probs"])[trained].abs().max() < 1e-5
    rewards = result.batch.non_tensor_batch["trajectory_reward"].tolist()
    assert sum(reward is None for reward in rewards) == 4 and max(reward or 0 for reward in rewards) > 0
    lines = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    (row,) = [row for row in lines if "agent_loop/sessions_failed" in row]
    assert row["agent_loop/sessions_failed"] == 0
