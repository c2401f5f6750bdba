"""The pool with real processes: limits, hangs, crashes, and no process left behind."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from raising import raises_with
from reward_tools import gone_within, scores

from hybridrl.reward import RewardError, RewardFunction, RewardPool
from hybridrl.reward.signature import Sample


def samples(count: int) -> list[Sample]:
    return [Sample("source", f"text {i}", f"truth {i}", {"i": i}) for i in range(count)]


def pool(path: str, workers: int = 1, timeout_s: float = 10.0, **settings) -> RewardPool:
    return RewardPool(RewardFunction(path, **settings), workers, timeout_s)


def test_exit_codes_of_programs_arrive_where_the_run_ignores_them(user_file):
    """A parent that ignores SIGCHLD, as Ray's processes do, hands that on to every program that it starts."""
    path = user_file(
        """
        import subprocess, time
        def f(solution_str, ground_truth, extra_info):
            if extra_info["i"] == 2:
                time.sleep(1000)
            return 10 * subprocess.run(["false"]).returncode + subprocess.run(["sh", "-c", "exit 7"]).returncode
        """
    )
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pool(path, timeout_s=5.0) as p:
            assert scores(p.run(samples(5))) == [17, 17, None, 17, 17]
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("form", ["solution_str, ground_truth", "solution_strs, ground_truths"])
def test_an_async_function_in_a_decorator_that_is_not(user_file, form):
    """Its call returns an awaitable all the same, which is no score."""
    result = "[0.5] * len(solution_strs)" if "strs" in form else "0.5"
    path = user_file(
        f"""
        import asyncio, functools
        def logged(call):
            @functools.wraps(call)
            def inner(*args, **kwargs):
                return call(*args, **kwargs)
            return inner
        @logged
        async def f({form}):
            await asyncio.sleep(0)
            return {result}
        """
    )
    with pool(path, name="f") as p:
        assert scores(p.run(samples(3))) == [0.5] * 3


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_every_sample_gets_its_own_score(user_file, workers, count):
    path = user_file(
        "def f(solution_str, ground_truth, extra_info): return {'score': extra_info['i'], 's': solution_str}"
    )
    with pool(path, workers) as p:
        for _ in range(2):
            outcomes = p.run(samples(count))
            assert [o.score for o in outcomes] == list(range(count))
            assert [o.extra["s"] for o in outcomes] == [f"text {i}" for i in range(count)]


def test_samples_run_at_the_same_time(user_file):
    """Two samples that wait for each other can only finish in two processes."""
    path = user_file(
        """
        import os, time
        def f(solution_str, ground_truth, extra_info):
            mine, other = (os.path.join(extra_info["folder"], str(i)) for i in (extra_info["i"], 1 - extra_info["i"]))
            open(mine, "w").close()
            while not os.path.exists(other):
                time.sleep(0.01)
            return 1
        """
    )
    folder = os.path.dirname(path)
    both = [Sample("", "", "", {"i": i, "folder": folder}) for i in range(2)]
    with pool(path, 2) as p:
        assert [o.score for o in p.run(both)] == [1.0, 1.0]


def test_a_hung_sample_costs_nobody_else_its_score(user_file, capsys):
    """The hang is a regular expression: it holds the interpreter lock, so nothing inside the process could stop it."""
    path = user_file(
        """
        import re
        def f(solution_str, ground_truth, extra_info):
            if extra_info["i"] in (7, 20):
                re.match("(a+)+$", "a" * 60 + "b")
            return extra_info["i"]
        """
    )
    with pool(path, 2, timeout_s=2.0) as p:
        outcomes = p.run(samples(40), "sample no. {}".format)
        assert [i for i, o in enumerate(outcomes) if o.timed_out] == [7, 20]
        assert scores(outcomes) == [None if i in (7, 20) else i for i in range(40)]
        told = capsys.readouterr().err
        assert "sample no. 7 took more than reward.timeout_s=2" in told and "no. 20" in told
        assert [o.score for o in p.run(samples(5))] == [0, 1, 2, 3, 4]


def test_a_function_that_answers_nothing_ends_the_run_but_one_that_answered_goes_on(user_file):
    path = user_file(
        """
        import time
        def f(solution_str, ground_truth, extra_info):
            time.sleep(1000 if extra_info["i"] >= extra_info["hangs_from"] else 0)
            return 1
        """
    )
    hung = [Sample("", "", "", {"i": i, "hangs_from": 0}) for i in range(10)]
    message = (
        "answered none of the first 3 samples within reward.timeout_s=0.3 seconds, the last of them sample 2: it hangs"
    )
    with pool(path, timeout_s=0.3) as p, pytest.raises(RewardError, match=message):
        p.run(hung)
    later = [Sample("", "", "", {"i": i, "hangs_from": 1}) for i in range(5)]
    with pool(path, timeout_s=1.0) as p:
        assert [outcome.timed_out for outcome in p.run(later)] == [False, True, True, True, True]


def test_programs_that_a_hung_function_started_end_with_it(user_file, tmp_path):
    path = user_file(
        """
        import subprocess
        def f(solution_str, ground_truth, extra_info):
            child = subprocess.Popen(["sleep", "1000"])
            open(extra_info["note"], "w").write(str(child.pid))
            child.wait()
        """
    )
    note = tmp_path / "pid"
    with pool(path, timeout_s=3.0) as p:
        (outcome,) = p.run([Sample("", "", "", {"note": str(note)})])
        assert outcome.timed_out and gone_within(int(note.read_text()), 5)


def test_an_exception_names_sample_and_line(user_file):
    path = user_file(
        """
        def f(solution_str, ground_truth, extra_info):
            if extra_info["i"] == 3:
                return helper(extra_info)
            return 1
        def helper(info):
            return info["missing"]
        """
    )
    with pool(path, 2, name="f") as p:
        with pytest.raises(RewardError) as caught:
            p.run(samples(8), "sample no. {}".format)
        message = str(caught.value)
        for part in ("f in ", "mine.py", "sample no. 3", "KeyError: 'missing'", "line 7, in helper", 'info["missing"]'):
            assert part in message
        assert "worker.py" not in message
        assert [o.score for o in p.run(samples(3))] == [1, 1, 1]  # the pool still works


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("return float('nan')", ["returned nan; a score must be finite", "sample no. 0"]),
        ("return 1e39", ["returned 1e+39; rewards have 32 bits", "sample no. 0"]),
        ("return None", ["returned NoneType", "sample no. 0"]),
        ("return {'points': 1}", ["without 'score'", "sample no. 0"]),
        ("raise SystemExit(3)", ["SystemExit: 3", "sample no. 0"]),
        ("import os; os._exit(5)", ["ended with exit code 5 while it scored sample no. 0"]),
        ("import os; os.kill(os.getpid(), 11)", ["was killed by SIGSEGV while it scored sample no. 0"]),
        ("import os; os.kill(os.getpid(), 9)", ["SIGKILL (out of memory?) while it scored sample no. 0"]),
    ],
)
def test_every_bad_end_names_the_sample(user_file, body, parts):
    with pool(user_file(f"def f(solution_str, ground_truth):\n    {body}")) as p:
        with pytest.raises(RewardError) as caught:
            p.run(samples(2), "sample no. {}".format)
        for part in (*parts, "mine.py"):
            assert part in str(caught.value)


def test_built_in_scorers_in_the_pool():
    with RewardPool(RewardFunction(), 1) as p:
        texts = [
            ("openai/gsm8k", "#### 5", "5", 1.0),
            ("lighteval/MATH", r"\boxed{\frac{2}{4}}", "0.5", 1.0),
            ("math", "x", "5", -1.0),
        ]
        outcomes = p.run([Sample(source, text, truth, {}) for source, text, truth, _ in texts])
        assert [o.score for o in outcomes] == [score for *_, score in texts]


def test_async_samples_wait_at_the_same_time_and_time_out_alone(user_file):
    path = user_file(
        """
        import asyncio
        started = 0
        async def f(solution_str, ground_truth, extra_info):
            global started
            started += 1
            while started < 50:  # all fifty must be under way in one process
                await asyncio.sleep(0.001)
            if extra_info["i"] == 4:
                await asyncio.sleep(1000)
            if extra_info["i"] == 5:
                await asyncio.gather(asyncio.sleep(0), asyncio.sleep(1000))
            return extra_info["i"]
        """
    )
    with pool(path, 1, timeout_s=2.0) as p:
        outcomes = p.run(samples(50))
        assert [i for i, o in enumerate(outcomes) if o.timed_out] == [4, 5]
        assert scores(outcomes) == [None if i in (4, 5) else i for i in range(50)]


@pytest.mark.parametrize("where", ["directly", "in a task"])
def test_an_async_sample_that_blocks_the_loop_is_found(user_file, where):
    path = user_file(
        f"""
        import asyncio, time
        async def block():
            time.sleep(1000)
        async def compute_score(solution_str, ground_truth, extra_info):
            await asyncio.sleep(0.01)
            if extra_info["i"] == 2:
                await {"block()" if where == "directly" else "asyncio.gather(asyncio.sleep(0), block())"}
            return extra_info["i"]
        """
    )
    with pool(path, 1, timeout_s=2.0) as p:
        outcomes = p.run(samples(6))
        assert [i for i, o in enumerate(outcomes) if o.timed_out] == [2]
        assert scores(outcomes) == [0, 1, None, 3, 4, 5]


def test_an_async_exception_names_the_sample(user_file):
    path = user_file(
        """
        import asyncio
        async def f(solution_str, ground_truth, extra_info):
            await asyncio.sleep(0)
            return 1 / (extra_info["i"] - 3)
        """
    )
    with (
        pool(path) as p,
        pytest.raises(RewardError, match=r"raised an exception for sample no. 3:\n(.|\n)*ZeroDivisionError"),
    ):
        p.run(samples(6), "sample no. {}".format)


def test_a_timeout_error_of_the_function_itself_is_no_time_limit(user_file):
    path = user_file("async def f(solution_str, ground_truth): raise TimeoutError('the judge is away')")
    with pool(path) as p, pytest.raises(RewardError, match="the judge is away"):
        p.run(samples(1))


@pytest.mark.parametrize("word", ["def", "async def"])
def test_a_batched_function_is_called_once_with_everything(user_file, word):
    path = user_file(
        f"""
        calls = 0
        {word} compute_reward(responses, ground_truths):
            global calls
            calls += 1
            return [{{"score": i, "calls": calls, "text": r + t}} for i, (r, t) in enumerate(zip(responses,
            ground_truths))]
        """
    )
    with pool(path, 3) as p:
        outcomes = p.run(samples(9))
        assert [o.score for o in outcomes] == list(range(9)) and {o.extra["calls"] for o in outcomes} == {1}
        assert outcomes[4].extra["text"] == "text 4truth 4"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1]", r"returned 1 scores for 3 responses. It was called for a batch of 3"),
        ("return [1, float('nan'), 1]", r"returned nan; a score must be finite for response 1 of 3"),
        ("return b'101'", r"returned bytes instead of a list of 3 scores"),
        ("return 1 / 0", r"raised an exception for a batch of 3(.|\n)*ZeroDivisionError"),
        ("import time; time.sleep(1000)", r"took more than reward.timeout_s=0.5 seconds for one call with 3 responses"),
        ("import os; os._exit(1)", r"ended with exit code 1 while it scored 3 responses"),
    ],
)
def test_every_bad_end_of_a_batched_function(user_file, body, message):
    path = user_file(f"def compute_reward(responses, ground_truths):\n    {body}")
    limit = 0.5 if "0.5" in message else 10.0
    with pool(path, timeout_s=limit) as p, pytest.raises(RewardError, match=message):
        p.run(samples(3))


def test_a_file_that_does_not_load(user_file):
    with pool(user_file("import not_there")) as p, raises_with(RewardError, "not_there", "mine.py", "line 1"):
        p.start(wait_for_one=True)
    path = user_file("import os; os._exit(4)", "b.py")
    with pool(path) as p, pytest.raises(RewardError, match="ended with exit code 4 while it loaded"):
        p.run(samples(1))


SLOW_IMPORT = """
import time
for _ in range(60):
    with open("/dev/null", "w") as file:
        file.write("x" * 9999)
    time.sleep(0.1)
def f(solution_str, ground_truth): return 1
"""


def test_an_import_is_waited_for_as_long_as_something_moves(user_file, monkeypatch):
    monkeypatch.setattr("hybridrl.utils.movement.USER_STILL_S", 3.0)
    with pool(user_file(SLOW_IMPORT)) as p:
        assert p.run(samples(1))[0].score == 1
    with (
        pool(user_file("import time; time.sleep(1000)", "still.py")) as p,
        raises_with(RewardError, "still.py"),
    ):
        p.start(wait_for_one=True)


def test_what_cannot_be_sent_is_refused(user_file):
    with pool(user_file("def f(solution_str, ground_truth): return 1")) as p:
        with pytest.raises(RewardError, match="must be plain values"):
            p.run([Sample("", "", lambda: 1, {})])
        assert p.run(samples(1))[0].score == 1


def test_ctrl_c_and_sigterm_do_not_reach_the_processes(user_file):
    """A run that is interrupted saves at the next step boundary, for which it needs its scores."""
    with pool(user_file("import os\ndef f(solution_str, ground_truth): return os.getpid()")) as p:
        (first,) = p.run(samples(1))
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(int(first.score), number)
        assert p.run(samples(1))[0].score == first.score


def test_close_ends_the_processes_and_run_starts_new_ones(user_file):
    p = pool(user_file("import os\ndef f(solution_str, ground_truth): return os.getpid()"))
    pid = int(p.run(samples(1))[0].score)
    p.close()
    assert gone_within(pid, 5)
    assert int(p.run(samples(1))[0].score) != pid
    p.close()


def test_calls_of_several_threads_get_their_own_scores(user_file):
    path = user_file("def f(solution_str, ground_truth, extra_info): return extra_info['i']")
    results: dict[int, list[float]] = {}
    with pool(path, 2) as p:

        def work(name: int) -> None:
            if name % 2:
                results[name] = [o.score for _ in range(5) for o in p.run(samples(20 + name))]
            else:
                futures = [p.submit(sample) for _ in range(5) for sample in samples(20 + name)]
                results[name] = [future.result().score for future in futures]

        threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {name: list(range(20 + name)) * 5 for name in range(6)}


WAITS_FOR_FILE = """
    import os, time
    {word} f(solution_str, ground_truth, extra_info):
        {imports}
        while extra_info.get("file") and not os.path.exists(extra_info["file"]):
            {sleep}
        return extra_info["i"]
"""
SYNC = {"word": "def", "imports": "", "sleep": "time.sleep(0.01)"}
ASYNC = {"word": "async def", "imports": "import asyncio", "sleep": "await asyncio.sleep(0.01)"}


@pytest.mark.parametrize(("words", "workers"), [(SYNC, 2), (ASYNC, 1)])
def test_a_sample_that_waits_delays_no_later_one(user_file, tmp_path, words, workers):
    """The second half is submitted while the first sample is being scored, and ends before it."""
    gate = tmp_path / "gate"
    with pool(user_file(WAITS_FOR_FILE.format(**words)), workers, timeout_s=600.0) as p:
        slow = p.submit(Sample("", "", "", {"i": 100, "file": str(gate)}))
        early = [p.submit(sample).result(timeout=120).score for sample in samples(10)]
        later = [future.result(timeout=120).score for future in [p.submit(sample) for sample in samples(10)]]
        assert early == later == list(range(10)) and not slow.done()
        gate.touch()
        assert slow.result(timeout=120).score == 100


def test_a_submitted_sample_that_hangs_has_unscored_and_the_others_get_their_scores(user_file, capsys):
    path = user_file(
        """
        import re
        def f(solution_str, ground_truth, extra_info):
            if extra_info["i"] == 3:
                re.match("(a+)+$", "a" * 60 + "b")
            return extra_info["i"]
        """
    )
    with pool(path, 2, timeout_s=2.0) as p:
        assert p.submit(samples(1)[0]).result().score == 0
        futures = [p.submit(sample, f"no. {number}") for number, sample in enumerate(samples(12))]
        outcomes = [future.result(timeout=120) for future in futures]
    assert [i for i, o in enumerate(outcomes) if o.timed_out] == [3]
    assert scores(outcomes) == [None if i == 3 else i for i in range(12)]
    assert "no. 3 took more than reward.timeout_s=2" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["raise ValueError('bad')", "return None", "import os; os._exit(5)"])
def test_a_submitted_sample_that_fails_fails_alone(user_file, fault):
    path = user_file(
        f"""
        def f(solution_str, ground_truth, extra_info):
            if extra_info["i"] == 2:
                {fault}
            return extra_info["i"]
        """
    )
    with pool(path, 1) as p:
        futures = [p.submit(sample, f"no. {number}") for number, sample in enumerate(samples(6))]
        with pytest.raises(RewardError, match=r"no\. 2"):
            futures.pop(2).result(timeout=120)
        assert [future.result(timeout=120).score for future in futures] == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("workers", [1, 2])
def test_samples_that_are_submitted_together_are_answered_one_by_one(user_file, tmp_path, workers):
    """In their order and by their names; one that is cancelled before its turn is not computed."""
    gate, seen = tmp_path / "gate", tmp_path / "seen"
    path = user_file(
        f"""
        import os, time
        def f(solution_str, ground_truth, extra_info):
            while not os.path.exists({str(gate)!r}):
                time.sleep(0.01)
            with open({str(seen)!r}, "a") as file:
                file.write(f"{{extra_info['i']}}\\n")
            if extra_info["i"] == 3:
                raise ValueError("bad")
            return extra_info["i"]
        """
    )
    with pool(path, workers, timeout_s=600.0) as p:
        p.start(wait_for_one=True)
        futures = p.submit_all(samples(9), "no. {}".format)
        assert futures[7].cancel() and not any(future.done() for future in futures[:7])
        gate.touch()
        with pytest.raises(RewardError, match=r"no\. 3"):
            futures[3].result(timeout=120)
        kept = [number for number in range(9) if number not in (3, 7)]
        assert [futures[number].result(timeout=120).score for number in kept] == kept
    assert sorted(map(int, seen.read_text().split())) == [0, 1, 2, 3, 4, 5, 6, 8]


def test_what_a_failed_run_left_hanging_ends_with_the_last_sample_that_is_waited_for(user_file, tmp_path):
    """The process also works for another caller when the run fails."""
    gate = tmp_path / "gate"
    path = user_file(
        """
        import asyncio, os
        async def f(solution_str, ground_truth, extra_info):
            if extra_info["file"] == "raises":
                raise ValueError("bad")
            while not os.path.exists(extra_info["file"]):
                await asyncio.sleep(0.01)
            return os.getpid()
        """
    )
    with pool(path, 1, timeout_s=600.0) as p:
        p.start(wait_for_one=True)
        other = p.submit(Sample("", "", "", {"file": str(gate)}))
        with pytest.raises(RewardError, match="bad"):
            p.run([Sample("", "", "", {"file": file}) for file in ("never", "raises")])
        assert not other.done()
        gate.touch()
        assert gone_within(int(other.result(timeout=120).score), 5)


def test_a_failed_run_ends_what_it_started_and_nothing_of_other_callers(user_file, tmp_path):
    gate, started = tmp_path / "gate", tmp_path / "started"
    path = user_file(
        """
        import os, time
        def f(solution_str, ground_truth, extra_info):
            if extra_info.get("raises"):
                while not os.path.exists(extra_info["raises"]):
                    time.sleep(0.01)
                raise ValueError
            if extra_info.get("started"):
                with open(extra_info["started"] + ".part", "w") as file:
                    file.write(str(os.getpid()))
                os.rename(extra_info["started"] + ".part", extra_info["started"])
            while extra_info.get("file") and not os.path.exists(extra_info["file"]):
                time.sleep(0.01)
            return 1
        """
    )
    with pool(path, 3, timeout_s=600.0) as p:
        other = p.submit(Sample("", "", "", {"file": str(gate)}))
        hangs = Sample("", "", "", {"file": str(tmp_path / "never"), "started": str(started)})
        with pytest.raises(RewardError, match="ValueError"):
            p.run([hangs, Sample("", "", "", {"raises": str(started)})])
        assert gone_within(int(started.read_text()), 60) and not other.done()
        gate.touch()
        assert other.result(timeout=120).score == 1


def test_a_cancelled_sample_is_not_scored(user_file, tmp_path):
    gate = tmp_path / "gate"
    with pool(user_file(WAITS_FOR_FILE.format(**SYNC)), 1, timeout_s=600.0) as p:
        slow = p.submit(Sample("", "", "", {"i": 0, "file": str(gate)}))
        never = p.submit(Sample("", "", "", {"i": 1, "file": str(tmp_path / "never")}))
        after = p.submit(samples(3)[2])
        assert never.cancel()
        gate.touch()
        assert slow.result(timeout=120).score == 0 and after.result(timeout=120).score == 2


def test_submitting_to_a_function_that_takes_a_batch_is_refused(user_file):
    with pool(user_file("def compute_reward(responses, ground_truths): return [1 for _ in responses]")) as p:
        with pytest.raises(RewardError, match="takes a whole batch"):
            p.submit(samples(1)[0]).result(timeout=120)
        assert [o.score for o in p.run(samples(3))] == [1, 1, 1]


def test_a_closed_pool_fails_what_it_has_not_scored(user_file, tmp_path):
    p = pool(user_file(WAITS_FOR_FILE.format(**SYNC)), 1, timeout_s=600.0)
    futures = [p.submit(Sample("", "", "", {"i": i, "file": str(tmp_path / "never")})) for i in range(3)]
    p.close()
    for future in futures:
        with pytest.raises(RewardError, match="closed"):
            future.result(timeout=120)
    assert p.submit(samples(2)[1]).result(timeout=120).score == 1
    p.close()


def test_a_file_that_does_not_load_fails_every_submitted_sample(user_file):
    with pool(user_file("import not_there")) as p:
        for future in [p.submit(sample) for sample in samples(3)]:
            with raises_with(RewardError, "not_there"):
                future.result(timeout=120)


def test_a_stopped_supervisor_leaves_no_process(user_file, tmp_path, monkeypatch):
    """The pool does its work: what a reward process started ends, too."""
    monkeypatch.setattr("hybridrl.processes.child.END_S", 0.5)
    path = user_file(
        """
        import os, subprocess
        def f(solution_str, ground_truth, extra_info):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            with open(extra_info["folder"] + "/pids", "w") as file:
                file.write(f"{os.getppid()} {os.getpid()} {child.pid}")
            return 1
        """
    )
    with pool(path, 1) as p:
        p.run([Sample("", "", "", {"folder": str(tmp_path)})])
        supervisor, *others = map(int, (tmp_path / "pids").read_text().split())
        os.kill(supervisor, signal.SIGSTOP)
    assert all(gone_within(pid, 60) for pid in (supervisor, *others))
