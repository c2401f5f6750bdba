"""Objects of a program, written with cloudpickle for other processes: functions, lambdas, classes of a notebook."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from hybridrl.utils.files import write_bytes
from hybridrl.utils.user_code import OBJECT_SUFFIX


def write_object(value: Any, folder: str | Path, name: str) -> Path:
    """Write an object to `NAME-HASH.pkl` in a folder, which is created; `user_code.load_pickled` reads it.

    The file is named by its content, so that it replaces no object of another run.

    Raises:
        Exception: what an object raises that cannot be pickled.
    """
    import cloudpickle  # type: ignore[import-untyped]

    data = cloudpickle.dumps(value)
    file = Path(folder).absolute() / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}{OBJECT_SUFFIX}"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, data)
    return file
