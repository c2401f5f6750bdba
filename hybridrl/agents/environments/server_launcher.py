"""Serves an ASGI application: `python server_launcher.py MODULE:NAME FD`. It ends when its standard input does.

It runs with the Python of the server's own environment, so it imports nothing of hybridrl. The standard input is a pipe
from the trainer, which closes however the trainer ends.
"""

import os
import sys
import threading


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Serve."""
    here = os.path.dirname(os.path.abspath(__file__))
    # Modules next to this file have the names of packages.
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if os.path.abspath(path or ".") != here)]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import uvicorn

    uvicorn.run(sys.argv[1], fd=int(sys.argv[2]), log_level="warning", ws="auto")


if __name__ == "__main__":
    main()
