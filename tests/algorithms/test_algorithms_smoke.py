"""Every public name of `hybridrl.algorithms` can be imported, and the room stands alone."""

from __future__ import annotations

import subprocess
import sys

import hybridrl.algorithms as algorithms


def test_all_names_exist() -> None:
    assert [name for name in algorithms.__all__ if not hasattr(algorithms, name)] == []
    assert len(set(algorithms.__all__)) == len(algorithms.__all__)


def test_imports_neither_ray_nor_the_config_tree_nor_transformers() -> None:
    code = (
        "import sys, hybridrl.algorithms; "
        "heavy = 'ray omegaconf hydra transformers tensordict hybridrl.protocol hybridrl.config'.split(); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
