"""The process that starts agents: `main` in a process of its own, which has loaded the user's code once.

Each agent runs in a process that is forked from it, so an agent that blocks, ends its process or has to be ended takes
no other with it. All that an agent starts ends with it, and with the run.
"""

import asyncio
import contextlib
import gc
import inspect
import json
import math
import numbers
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.errors import RolloutError
from hybridrl.processes import untrusted_results as plain_results
from hybridrl.processes.forked import default_in_children, restore_defaults
from hybridrl.processes.frames import FrameConnection
from hybridrl.processes.supervisor import split_off
from hybridrl.processes.template import serve_forks
from hybridrl.scored import Reason, Scored, Unscored, UnscoredError
from hybridrl.utils.user_code import load_object

KEY = "actor_rollout_ref.rollout.agent"
_SCORE_FORM = 'a number, {"reward": NUMBER, "extra": {...}} or {"unscored": REASON, "detail": TEXT}'
_LEAST_SIGNAL_STATUS, _MOST_SIGNAL_STATUS = 129, 192  # a shell's: 128 and the signal that ended its program
_MOST_TEXT = 20_000  # characters of the begin and of the end of a traceback
Result = float | Scored | Unscored | None


class AgentBroken(RolloutError):
    """An agent was ended from outside, or returned what is no score: how it ended says nothing about its session."""


@dataclass(frozen=True)
class AgentProgram:
    """The user's agent: one of the two.

    Attributes:
        function: where it is, `module:function` or `FILE.py:function`.
        command: words of a command line.
    """

    function: str | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentJob:
    """A session's agent.

    Attributes:
        base_url: for OpenAI's clients; those of Anthropic take it without `/v1`.
        api_key: the session's id.
        model: the name of the policy.
        row: columns of the data.
    """

    base_url: str
    api_key: str
    model: str
    row: Mapping[str, Any] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Return the variables of the agent's environment."""
        root = self.base_url.removesuffix("/v1")
        direct = _without_proxy(urllib.parse.urlsplit(self.base_url).hostname or "")
        return {
            "NO_PROXY": direct,
            "no_proxy": direct,
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }


def _without_proxy(host: str) -> str:
    """Return the value of `NO_PROXY` with a machine of this run added."""
    listed = ",".join(os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")).split(",")
    names = dict.fromkeys(name.strip() for name in listed if name.strip())
    return "*" if "*" in names else ",".join(dict.fromkeys([*names, host]))  # next to other names, * means nothing


def main(connection_fd: int, life_fd: int) -> None:
    """Load the program, and start agents until the run ends."""
    os.close(life_fd)  # it ends with its connection, and each agent has a supervisor of its own
    serve_forks(connection_fd, _load)


def _load(setup: bytes) -> Callable[[int, int], None]:
    program: AgentProgram = pickle.loads(setup)
    run = _loaded(program)
    _prepare_clients()
    gc.freeze()  # agents need not look at what they share, which would also copy it
    return partial(_run_agent, run)


def _prepare_clients() -> None:
    """Import what the clients that the program has imported import when they are first used; agents find it done."""
    openai, anthropic = (sys.modules.get(name) for name in ("openai", "anthropic"))
    with contextlib.suppress(Exception):  # a client that cannot be made here says so in the agent that makes it
        if openai is not None:
            client = openai.OpenAI(base_url="http://localhost/v1", api_key="none")
            _ = client.chat.completions, client.responses
    with contextlib.suppress(Exception):
        if anthropic is not None:
            _ = anthropic.Anthropic(base_url="http://localhost", api_key="none").messages


def _run_agent(run: Callable[[AgentJob, Path], Result], connection_fd: int, life_fd: int) -> None:
    """The life of one agent's process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = Path(tempfile.gettempdir(), f"hybridrl-agent-{uuid.uuid4().hex}")
    # the agent's process may be ended at any moment, and the supervisor is not
    split_off(life_fd, close=(connection_fd,), after=lambda: shutil.rmtree(folder, ignore_errors=True))
    restore_defaults((signal.SIGTERM, signal.SIGHUP))
    default_in_children((signal.SIGINT,))
    connection = FrameConnection(connection_fd)
    job: AgentJob = pickle.loads(connection.receive())
    os.environ.update(job.variables())
    answer = _answer(run, job, folder)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the agent may have closed it
            stream.flush()
    with contextlib.suppress(OSError):  # the run waits for it no longer
        connection.send(answer)


def _answer(run: Callable[[AgentJob, Path], Result], job: AgentJob, folder: Path) -> bytes:
    """Run the agent; its result as bytes. The run reads it with `agent_result`, and nothing else."""
    try:
        return plain_results.encode_result(_as_plain(checked(run(job, folder))))
    except UnscoredError as error:
        result = _as_plain(error.unscored)
    except (AgentBroken, MemoryError) as error:
        result = plain_results.Result("bad", text=str(error) or "the agent ran out of memory")
    except BaseException as error:  # sys.exit() of an agent ends the agent
        text = "".join(traceback.format_exception(error)).rstrip()
        if len(text) > 2 * _MOST_TEXT:
            text = f"{text[:_MOST_TEXT]}\n... {len(text) - 2 * _MOST_TEXT} characters ...\n{text[-_MOST_TEXT:]}"
        result = plain_results.Result("raised", text=text)
    return plain_results.encode_result(result)


def checked(value: Any) -> Result:
    """Return the result of an agent as numbers and records, or refuse it.

    Raises:
        AgentBroken: it is something else.
    """
    if value is None or isinstance(value, Unscored):
        return value
    reward = _finite(value.reward if isinstance(value, Scored) else value)
    if reward is not None:
        if not isinstance(value, Scored):
            return reward
        scored = Scored(reward, value.extra)
        try:
            plain_results.encode_result(_as_plain(scored))
        except (ValueError, TypeError, RecursionError) as error:
            raise AgentBroken(
                f"an agent returned a Scored whose extra cannot be sent to the run ({error}); it may hold numbers, "
                "text, lists and dicts"
            ) from error
        return scored
    try:
        excerpt = f"{value!r:.200}"
    except Exception:  # of the user's class, or nested too deeply
        excerpt = f"a {type(value).__name__} that cannot be shown"
    raise AgentBroken(
        f"an agent returned {excerpt}; it must return a finite number, a hybridrl.scored.Scored or Unscored, "
        "or None, which leaves the score to the reward function"
    )


def _finite(value: Any) -> float | None:
    """A number as a finite float; None where it is none."""
    try:
        return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None
    except OverflowError:  # an integer that no float can hold
        return None


def _as_plain(result: Result) -> plain_results.Result:
    if isinstance(result, Unscored):
        return plain_results.Result("missing", text=result.detail, reason=result.reason.value)
    if isinstance(result, Scored):
        return plain_results.Result("score", result.reward, dict(result.extra))
    return plain_results.Result("score", result)


def agent_result(result: plain_results.Result) -> Result:
    """Return the value that the agent returned, of a result of kind `score` or `missing`."""
    if result.kind == "missing":
        return Unscored(Reason(result.reason), result.text)
    if result.score is None:
        return None
    return result.score if result.extra is None else Scored(result.score, result.extra)


def _loaded(program: AgentProgram) -> Callable[[AgentJob, Path], Result]:
    """Return what runs the agent of a job; it may make the folder, which is removed with the agent."""
    if program.function is None:
        return lambda job, folder: _run_command(program.command, job, folder)
    key = f"{KEY}.function"
    function = load_object(program.function, None, key, key, RolloutError)
    if not callable(function):
        raise RolloutError(f"{key}={program.function}: it is {function!r}, and no function")
    try:
        inspect.signature(function).bind("url", "key", {})
    except (TypeError, ValueError) as error:
        raise RolloutError(
            f"{key}={program.function} cannot be called with (base_url, api_key, row): {error}"
        ) from error

    def call(job: AgentJob, folder: Path) -> Any:
        result = function(job.base_url, job.api_key, dict(job.row))
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

    return call


async def _awaited(result: Any) -> Any:
    return await result


def _run_command(command: tuple[str, ...], job: AgentJob, folder: Path) -> Result:
    """Run a command; the row is a JSON file, and so is the score that it may write.

    Raises:
        AgentBroken: a signal has ended it, or it writes something else.
        RolloutError: it fails.
    """
    folder.mkdir(mode=0o700)
    row, score = folder / "row.json", folder / "score.json"
    row.write_text(json.dumps(job.row, default=_plain, ensure_ascii=False), encoding="utf-8")
    paths = {"HYBRIDRL_ROW": str(row), "HYBRIDRL_SCORE": str(score)}
    ended = subprocess.run(command, env={**os.environ, **paths}, stdin=subprocess.DEVNULL, check=False)
    if ended.returncode < 0 or _LEAST_SIGNAL_STATUS <= ended.returncode <= _MOST_SIGNAL_STATUS:
        number = -ended.returncode if ended.returncode < 0 else ended.returncode - 128
        raise AgentBroken(f"the agent's command {command[0]} was ended by signal {number}")
    if ended.returncode != 0:
        raise RolloutError(f"the agent's command {command[0]} ended with exit code {ended.returncode}")
    return _score_in(_content_of(score)) if os.path.lexists(score) else None


def _plain(value: Any) -> Any:
    """A value of a row as JSON can hold it."""
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    return str(value)


def _content_of(file: Path) -> bytes:
    """Return the bytes that a command has written.

    Raises:
        AgentBroken: it is no file, or too long.
    """
    if not file.is_file():
        raise AgentBroken("the agent made something else than a file of $HYBRIDRL_SCORE")
    with file.open("rb") as opened:
        data = opened.read(plain_results.LARGEST_RESULT + 1)
    if len(data) > plain_results.LARGEST_RESULT:
        raise AgentBroken(f"the agent wrote more than {plain_results.LARGEST_RESULT} bytes to $HYBRIDRL_SCORE")
    return data


def _score_in(data: bytes) -> Result:
    """The score that a command has written, or the reason why there is none."""
    text = data.decode("utf-8", "backslashreplace")
    try:
        answer = json.loads(text)
        if isinstance(answer, dict) and answer.get("unscored") is not None:
            return Unscored(Reason(answer["unscored"]), str(answer.get("detail", "")))
        if isinstance(answer, dict):
            return checked(Scored(float(answer["reward"]), answer.get("extra") or {}))
        return checked(answer)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise AgentBroken(f"the agent wrote {text!r:.200} to $HYBRIDRL_SCORE; it must be {_SCORE_FORM}") from error
