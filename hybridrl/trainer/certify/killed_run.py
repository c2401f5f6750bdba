"""A run that kills its own process when a step is complete: `-m hybridrl.trainer.certify.killed_run WORDS_AS_JSON`."""

import json
import os
import signal
import sys

from hybridrl.config import load_config
from hybridrl.trainer.callbacks import RunEvent, calling
from hybridrl.trainer.certify.certified_runs import KILLED_STEP


def kill(event: RunEvent) -> None:
    """End this process without any chance to store something."""
    if event.kind == "step" and event.step == KILLED_STEP:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the program with the settings of the first argument."""
    from hybridrl.trainer.ppo.run_ppo import run_ppo

    with calling([kill]):
        run_ppo(load_config("ppo_trainer", json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
