"""Tests that need an accelerator; without one they say so and are skipped."""

import pytest

from hybridrl.utils import device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not device.is_gpu():
        for item in items:
            if "tests/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
