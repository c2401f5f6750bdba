"""The program in docs/workers.md runs as it stands there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_dataflow_of_the_docs_runs(repository: Path, tmp_path: Path, finish: Callable[..., Any], forked: str) -> None:
    text = (repository / "docs" / "workers.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (promised,) = re.findall(r"It prints `(.*?)`", text)
    (tmp_path / "dataflow.py").write_text(program)
    done = finish([forked, "dataflow.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == promised
