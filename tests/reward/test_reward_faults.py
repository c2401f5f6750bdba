"""Reward processes under fire: what a function, or what it starts, does to them costs no other sample anything."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reward_tools import alive, gone_within, scores

from hybridrl.reward import RewardError, RewardFunction, RewardPool, Sample
from hybridrl.reward.processes.reward_process import RewardProcess


def samples(count: int, **extra) -> list[Sample]:
    return [Sample("source", f"text {i}", f"truth {i}", {"i": i, **extra}) for i in range(count)]


def pool(path: str, workers: int = 1, timeout_s: float = 10.0) -> RewardPool:
    return RewardPool(RewardFunction(path), workers, timeout_s)


def waited_for(path: Path, seconds: float = 60) -> str:
    """The content of a file that a process renames into place."""
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.read_text()


LOADING = """
    import pathlib, time
    pathlib.Path({marker!r}).write_text("loading")
    time.sleep(0.5)
    def f(solution_str, ground_truth):
        return 1.0
"""


def test_a_run_that_ends_while_a_function_is_loaded_ends_without_a_traceback(user_file, tmp_path, capfd):
    marker = tmp_path / "loading"

    async def end_while_it_loads() -> str:
        function = RewardFunction(user_file(LOADING.format(marker=str(marker))))
        process = RewardProcess(function, 10.0, lambda process, message: None)
        await process.connect()
        while not marker.exists():
            await asyncio.sleep(0.01)
        process.child.connection.shutdown(socket.SHUT_RDWR)
        death = process.death()
        process.end()
        return death

    assert asyncio.run(end_while_it_loads()) == "ended with exit code 0"
    assert capfd.readouterr().err == ""


STUBBORN = """
    import asyncio, time
    async def f(solution_str, ground_truth, extra_info):
        while extra_info["i"] == 3:
            try:
                await asyncio.sleep({seconds})
            except BaseException:
                {then}
        return extra_info["i"]
"""


@pytest.mark.parametrize(("seconds", "then"), [(0.01, "pass"), (1000, "pass"), (1000, "time.sleep(1000)")])
def test_an_async_sample_that_swallows_its_cancellation_costs_no_other_score(user_file, seconds, then):
    """It goes on, waits again, or blocks the loop that the others need."""
    with pool(user_file(STUBBORN.format(seconds=seconds, then=then)), timeout_s=2.0) as p:
        futures = [p.submit(sample) for sample in samples(60)]
        outcomes = [future.result(timeout=120) for future in futures]
        assert [i for i, one in enumerate(outcomes) if one.timed_out] == [3]
        assert scores(outcomes) == [None if i == 3 else i for i in range(60)]
        later = [p.submit(sample).result(timeout=120).score for sample in samples(3)]
        assert later == [0, 1, 2]


def test_what_an_async_sample_leaves_behind_at_its_limit_costs_no_other_score(user_file, tmp_path):
    """A task of it blocks the loop, while others are being scored, when it has long been answered."""
    path = user_file(
        """
        import asyncio, os, time
        async def block(folder):
            while not os.path.exists(os.path.join(folder, "answered")):
                await asyncio.sleep(0.01)
            open(os.path.join(folder, "blocked"), "w").close()
            time.sleep(1000)
        async def compute_score(solution_str, ground_truth, extra_info):
            if extra_info["i"] == 0:
                extra_info["task"] = asyncio.create_task(block(extra_info["folder"]))
                await asyncio.sleep(1000)
            while not os.path.exists(os.path.join(extra_info["folder"], "blocked")):
                await asyncio.sleep(0.01)
            return extra_info["i"]
        """
    )
    first, *others = samples(21, folder=str(tmp_path))
    with pool(path, timeout_s=3.0) as p:
        assert p.submit(first).result(timeout=120).timed_out
        futures = [p.submit(sample) for sample in others]
        (tmp_path / "answered").touch()
        outcomes = [future.result(timeout=120) for future in futures]
    assert [one.score for one in outcomes] == list(range(1, 21))


PID = """
    import os
    def f(solution_str, ground_truth, extra_info):
        return {"score": extra_info["i"], "pid": os.getpid()}
"""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_stops_or_dies_before_its_chunk_costs_nothing(user_file, number):
    with pool(user_file(PID), timeout_s=1.0) as p:
        first = p.run(samples(40))  # it is known to be fast, so that a chunk holds many samples
        os.kill(first[0].extra["pid"], number)
        outcomes = p.run(samples(40))
    assert [one.score for one in outcomes] == list(range(40))
    assert not any(one.timed_out for one in outcomes)


def test_a_stopped_process_does_not_hold_up_the_pool(user_file):
    """Its chunk is larger than a socket takes, so that sending it waits until somebody reads."""
    path = user_file(PID)
    large = [Sample("", "x" * 1_000_000, "", {"i": i}) for i in range(8)]
    with pool(path, 2, timeout_s=2.0) as p:
        pids = set()
        while len(pids) < 2:
            pids |= {one.extra["pid"] for one in p.run(samples(40))}
        os.kill(min(pids), signal.SIGSTOP)
        assert [one.score for one in p.run(large)] == list(range(8))


@pytest.mark.parametrize("word", ["def", "async def"])
def test_a_process_that_was_killed_while_idle_is_replaced(user_file, word, capsys):
    with pool(user_file(PID.replace("def f", f"{word} f"))) as p:
        p.start(wait_for_one=True)
        pid = p.run(samples(1))[0].extra["pid"]
        for _ in range(5):  # as often as a sample may lose its process, and more
            os.kill(pid, signal.SIGKILL)
            pid, old = p.run(samples(1))[0].extra["pid"], pid
            assert pid != old
    assert "SIGKILL" in capsys.readouterr().err


def test_a_process_that_dies_before_every_sample_ends_the_run_by_its_own_cause(user_file):
    path = user_file(
        """
        import asyncio, os
        async def f(solution_str, ground_truth, extra_info):
            asyncio.get_running_loop().call_later(0.05, os._exit, 9)
            await asyncio.sleep(1000)
        """
    )
    with pool(path) as p, pytest.raises(RewardError, match="exit code 9 with the sample waiting in it"):
        p.run(samples(1), "the sample".format)


LEAVES_A_SESSION = """
    import os, subprocess, sys, time
    def f(solution_str, ground_truth, extra_info):
        # A program in a session of its own, whose parent ends at once: nothing leads from it to its origin.
        inner = (
            "from subprocess import DEVNULL, Popen;"
            "print(Popen(['sleep', '1000'], start_new_session=True, stdout=DEVNULL).pid)"
        )
        found = subprocess.run([sys.executable, "-c", inner], stdout=subprocess.PIPE, start_new_session=True)
        direct = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        note = extra_info["note"]
        with open(note + ".part", "w") as file:
            file.write(f"{int(found.stdout)} {direct.pid}")
        os.rename(note + ".part", note)
        if extra_info["end"] == "hang":
            time.sleep(1000)
        if extra_info["end"] == "die":
            os._exit(3)
        return 1
"""


@pytest.mark.parametrize("end", ["hang", "die", "close"])
def test_programs_in_sessions_of_their_own_end_with_their_process(user_file, tmp_path, end):
    note = tmp_path / "note"
    path = user_file(LEAVES_A_SESSION)
    with pool(path, timeout_s=5.0) as p:
        future = p.submit(Sample("", "", "", {"note": str(note), "end": end}))
        pids = [int(pid) for pid in waited_for(note).split()]
        if end == "die":
            with pytest.raises(RewardError, match="exit code 3"):
                future.result(timeout=120)
        else:
            assert future.result(timeout=120).timed_out == (end == "hang")
        assert end != "close" or all(map(alive, pids))
    assert all(gone_within(pid, 20) for pid in pids)


PARENT = """
import sys
from hybridrl.reward import RewardFunction, RewardPool, Sample
pool = RewardPool(RewardFunction(sys.argv[1]), 1, 1000.0)
pool.run([Sample("", "", "", {"note": sys.argv[2], "end": "hang"})])
"""


def test_programs_in_sessions_of_their_own_end_with_the_run(user_file, tmp_path):
    path, note = user_file(LEAVES_A_SESSION), tmp_path / "note"
    parent = subprocess.Popen([sys.executable, user_file(PARENT, "parent.py"), path, str(note)])
    try:
        pids = [int(pid) for pid in waited_for(note).split()]
        assert all(map(alive, pids))
    finally:
        parent.kill()
        parent.wait()
    assert all(gone_within(pid, 20) for pid in pids)


def test_orphans_are_adopted_and_the_function_still_sees_how_its_own_programs_end(user_file):
    """Orphans that end meanwhile are reaped by another process, never in place of a program of the function."""
    path = user_file(
        """
        import os, subprocess, sys
        def f(solution_str, ground_truth, extra_info):
            orphan = "import subprocess; subprocess.Popen(['sleep', '0.05'], start_new_session=True)"
            subprocess.run([sys.executable, "-c", orphan])
            codes = [subprocess.run(["sh", "-c", f"sleep 0.03; exit {code}"]).returncode for code in (3, 4)]
            codes.append(subprocess.run(["sh", "-c", "kill -9 $$"]).returncode)
            return {"score": 1, "codes": codes}
        """
    )
    with pool(path) as p:
        assert [one.extra["codes"] for one in p.run(samples(4))] == [[3, 4, -9]] * 4


def test_nothing_that_a_process_sends_is_executed(user_file, tmp_path):
    """A function that writes to the pool's socket itself, first a pickle and then JSON that is no result."""
    mark = tmp_path / "executed"
    path = user_file(
        f"""
        import os, pickle, socket, stat, struct
        class Evil:
            def __reduce__(self):
                return open, ({str(mark)!r}, "w")
        def f(solution_str, ground_truth, extra_info):
            data = (
                pickle.dumps(("results", [(0, "score", Evil(), 0.0)])),
                b'{{"answers": [[0, 0, [["score", "1", null, "", ""]]]]}}',
                b'{{"answers": [[77, 0, [["score", 1, null, "", ""]]]]}}',
            )[extra_info["i"] - 1]
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                try:
                    if extra_info["i"] and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                        os.write(descriptor, struct.pack("!Q", len(data)) + data)
                except OSError:
                    pass
            return 1
        """
    )
    with pool(path) as p:
        for sample in samples(4)[1:]:
            with pytest.raises(RewardError, match="sent what is no result"):
                p.submit(sample).result(timeout=120)
        assert p.submit(samples(1)[0]).result(timeout=120).score == 1
    assert not mark.exists()


def test_values_arrive_as_they_were(user_file):
    """Numbers of NumPy and torch, text with a lone surrogate, and NaN besides the score."""
    path = user_file(
        """
        import numpy, torch
        def f(solution_str, ground_truth):
            return {"score": torch.tensor(0.1, dtype=torch.float64), "half": numpy.float32(0.5), "flag": numpy.bool_(1),
                    "row": numpy.arange(3), "text": "\\udc80", "nan": float("nan"), "big": 2**63 - 1, "third": 1 / 3}
        """
    )
    with pool(path, timeout_s=60.0) as p:
        extra = p.run(samples(1))[0].extra
    assert extra.pop("nan") != 0
    assert extra == {
        "score": 0.1,
        "half": 0.5,
        "flag": True,
        "row": [0, 1, 2],
        "text": "\udc80",
        "big": 2**63 - 1,
        "third": 1 / 3,
    }
