"""The program in docs/workers.md runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path


def test_dataflow_of_the_docs_runs(repository: Path, tmp_path: Path) -> None:
    text = (repository / "docs" / "workers.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (promised,) = re.findall(r"It prints `(.*?)`", text)
    (tmp_path / "dataflow.py").write_text(program)
    done = subprocess.run([sys.executable, "dataflow.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == promised
