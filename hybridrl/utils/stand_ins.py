"""Stand-ins for packages of a GPU: a distribution of their own, `packages/hybridrl-testing` of the repository."""

from __future__ import annotations

import importlib

from hybridrl.errors import RolloutError

PACKAGE = "hybridrl_testing"


def gpu_packages(setting: str, extra: str) -> str:
    """Return the folder whose packages stand in for those of a GPU, an entry for `sys.path`.

    Args:
        setting: the setting that needs them, for the message.
        extra: the word of `scripts/install.sh` that installs them.

    Raises:
        RolloutError: the distribution is not installed.
    """
    try:
        return str(importlib.import_module(PACKAGE).GPU_PACKAGES)
    except ModuleNotFoundError as error:
        raise RolloutError(
            f"{setting} on a machine without a GPU needs {PACKAGE}, which is not installed here; from a checkout of "
            f"hybridrl, `bash scripts/install.sh cpu {extra}` or `pip install packages/hybridrl-testing` installs it"
        ) from error
