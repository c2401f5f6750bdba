"""Several command lines of `main_ppo`, one after the other in one process that shares its imports and its Ray.

Reads a line of JSON a run, {"words", "log"}, and answers each with {"status", "left"}: the
exit status, and what of the run is still there after it.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import IO

import psutil
import ray

from hybridrl.programs import start
from hybridrl.single_controller.ray.start_ray import start_ray

sys.path.append(str(Path(__file__).parents[1]))
import forked_processes

CPUS = 4


def status_of(words: list[str]) -> int:
    """What the process would have ended with, had it been for this run alone."""
    try:
        start("ppo", "main_ppo", words)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def left_after(children: set[int]) -> list[str]:
    """Processes of the last run, and devices that it did not give back; it has a moment to end them."""
    deadline = time.monotonic() + 40
    while True:
        left = [child.name() for child in psutil.Process().children() if child.pid not in children]
        free = ray.available_resources().get("CPU", 0)
        if free < CPUS:
            left.append(f"{CPUS - free:g} CPUs in use")
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    with forked_processes.running(Path(os.environ["RAY_TMPDIR"])):
        answer_all(answers)


def answer_all(answers: IO[str]) -> None:
    start_ray(address="local", num_cpus=CPUS, num_gpus=0, include_dashboard=False, object_store_memory=128 * 1024**2)
    children = {child.pid for child in psutil.Process().children()}
    for line in sys.stdin:
        case = json.loads(line)
        log = os.open(case["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        status = status_of(case["words"])
        left = left_after(children)
        sys.stdout.flush()
        sys.stderr.flush()
        print(json.dumps({"status": status, "left": left}), file=answers, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
