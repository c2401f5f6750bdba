"""Starts the included sandbox server as a program of its own."""

import contextlib
import os
import subprocess
import sys


@contextlib.contextmanager
def started_server(*options, env=None):
    """The address of a server that listens."""
    command = [sys.executable, "-m", "hybridrl.sandbox.server", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            assert process.wait(60) == 0
