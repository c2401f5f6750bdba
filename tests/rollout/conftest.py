"""What several files of these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_stage import Stage


@pytest.fixture(scope="module")
def stage(micro_model: Path) -> Iterator[Stage]:
    stage = Stage(micro_model)
    yield stage
    stage.close()
