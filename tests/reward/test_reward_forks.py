"""Reward functions that start processes and threads of their own, through the real pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from reward_tools import gone_within

from hybridrl.processes.supervisor import descendants
from hybridrl.reward import RewardFunction, RewardPool
from hybridrl.reward.signature import Sample
from hybridrl.trainer.interrupt import StopRequest

FUNCTIONS = {
    "process that is terminated": """
        import multiprocessing, time
        def f(solution_str, ground_truth):
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            process.start(); process.terminate(); process.join()
            return -process.exitcode
        """,
    "process that is interrupted": """
        import multiprocessing, os, signal, time
        def sleep(ready):
            try:
                os.write(ready, b".")
                for _ in range(100_000): time.sleep(0.01)  # a signal just before a sleep does not end it
            except KeyboardInterrupt: os._exit(15)
        def f(solution_str, ground_truth):
            read, write = os.pipe()
            process = multiprocessing.get_context("fork").Process(target=sleep, args=(write,))
            process.start(); os.read(read, 1); os.kill(process.pid, signal.SIGINT); process.join()
            return process.exitcode if process.exitcode == 15 else 0
        """,
    "pool": """
        import multiprocessing
        def double(x): return 2 * x
        def f(solution_str, ground_truth):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                return sum(pool.map(double, [3, 4])) + 1
        """,
    "executor": """
        import concurrent.futures
        def double(x): return 2 * x
        def f(solution_str, ground_truth):
            with concurrent.futures.ProcessPoolExecutor(2) as pool:
                return sum(pool.map(double, [3, 4])) + 1
        """,
    "program with a limit": """
        import subprocess
        def f(solution_str, ground_truth):
            try: subprocess.run(["sleep", "1000"], timeout=0.1)
            except subprocess.TimeoutExpired: return 15
        """,
    "program that is terminated": """
        import subprocess
        def f(solution_str, ground_truth):
            process = subprocess.Popen(["sleep", "1000"])
            process.terminate()
            return -process.wait()
        """,
    "program that is hung up": """
        import signal, subprocess
        def f(solution_str, ground_truth):
            process = subprocess.Popen(["sleep", "1000"])
            process.send_signal(signal.SIGHUP)
            return 14 - process.wait()
        """,
    "fork that returns": """
        import os
        def f(solution_str, ground_truth):
            child = os.fork()
            if child == 0:
                return 99
            return 15 + os.waitpid(child, 0)[1]
        """,
    "fork that exits": """
        import os, sys
        def f(solution_str, ground_truth):
            child = os.fork()
            if child == 0:
                sys.exit(15)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        """,
    "fork that raises": """
        import os, sys
        def f(solution_str, ground_truth):
            child = os.fork()
            if child == 0:
                raise ValueError("in the child")
            return 14 + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        """,
    "fork from a thread": """
        import concurrent.futures, multiprocessing, time
        def g():
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            process.start(); process.terminate(); process.join()
            return -process.exitcode
        def f(solution_str, ground_truth):
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                return sum(one.result() for one in [pool.submit(g) for _ in range(4)]) / 4
        """,
    "loop": """
        import asyncio
        async def g():
            process = await asyncio.create_subprocess_exec("sleep", "1000")
            process.terminate()
            return -await process.wait()
        def f(solution_str, ground_truth): return asyncio.run(g())
        """,
    "async program": """
        import asyncio
        async def f(solution_str, ground_truth):
            process = await asyncio.create_subprocess_exec("sleep", "1000")
            process.terminate()
            return -await process.wait()
        """,
    "async fork with a loop": """
        import asyncio, multiprocessing
        def g(): raise SystemExit(asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, 15)))
        async def f(solution_str, ground_truth):
            process = multiprocessing.get_context("fork").Process(target=g)
            process.start()
            await asyncio.to_thread(process.join)
            return process.exitcode
        """,
    "async fork that returns": """
        import os
        async def f(solution_str, ground_truth):
            child = os.fork()
            if child == 0:
                return 99
            return 15 + os.waitpid(child, 0)[1]
        """,
    "alarm": """
        import signal, time
        def stop(*_): raise TimeoutError
        def f(solution_str, ground_truth):
            signal.signal(signal.SIGALRM, stop); signal.setitimer(signal.ITIMER_REAL, 0.05)
            try: time.sleep(1000)
            except TimeoutError: return 15
        """,
    "alarm that is left": """
        import signal, time
        def f(solution_str, ground_truth):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            if ground_truth != "0": signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(0.4)
            return 15
        """,
    "timers of processor time that are left": """
        import signal, time
        def f(solution_str, ground_truth):
            begun = time.process_time()
            if ground_truth in "024":
                for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF): signal.setitimer(timer, 0.1)
                return 15
            while time.process_time() - begun < 0.3: pass
            return 15
        """,
    "state": """
        import os, signal
        def f(solution_str, ground_truth):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                defaults = all(signal.getsignal(n) == signal.SIG_DFL for n in (15, 1, 17))
                sockets = [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")
                           and os.readlink(f"/proc/self/fd/{n}").startswith("socket")]
                blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
                os._exit(15 if defaults and not sockets and not blocked else 1)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        """,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_reward_function_forks_is_as_in_a_program_of_its_own(user_file, name) -> None:
    path = user_file(FUNCTIONS[name])
    with RewardPool(RewardFunction(path, "f"), 1, timeout_s=20.0) as pool:
        outcomes = pool.run([Sample("source", "text", str(number), {}) for number in range(6)])
        assert [one.score for one in outcomes] == [15] * 6
        for pid in descendants(os.getpid()):  # they themselves go on: the run ends them
            if "hybridrl.reward.processes.reward_child" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGTERM)
        assert [one.score for one in pool.run([Sample("source", "text", "1", {})])] == [15]


def test_the_run_blocks_signals_and_reward_functions_do_not(user_file) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM})
    try:
        with RewardPool(RewardFunction(user_file(FUNCTIONS["program that is hung up"]), "f"), 1) as pool:
            assert pool.run([Sample("source", "text", "", {})])[0].score == 15
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_reward_processes_end_with_the_run_though_it_has_forked(user_file) -> None:
    """A process that the run has forked holds neither the pipe nor the socket by which they see that it is gone."""
    path = user_file("import os\ndef f(solution_str, ground_truth): return os.getpid()")
    script = textwrap.dedent(
        f"""
        import os, signal, time
        from hybridrl.reward import RewardFunction, RewardPool
        from hybridrl.reward.signature import Sample
        pool = RewardPool(RewardFunction({path!r}, "f"), 1)
        pid = int(pool.run([Sample("source", "text", "", {{}})])[0].score)
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        print(pid, child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, child = map(int, process.stdout.readline().split())
    process.wait()
    try:
        assert gone_within(pid, 20)
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_data_loaders_of_a_run_that_listens_for_signals_end(tmp_path) -> None:
    with StopRequest(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
