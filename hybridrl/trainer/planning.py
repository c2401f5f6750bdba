"""Has the planner choose settings of a run, where the planner is installed."""

import importlib
import importlib.util

from hybridrl.config import PPOTrainerConfig
from hybridrl.errors import ConfigError

#: `module:function` that is called with the settings of a run and returns them with those that were planned
PLANNER = "hybridrl.plan.planned_run:planned"


def with_plan(config: PPOTrainerConfig) -> PPOTrainerConfig:
    """Call `PLANNER` for a run with `placement.auto`; other settings are returned as they are.

    Raises:
        UserError: the run cannot be planned.
    """
    if not config.placement.auto:
        return config
    module, _, name = PLANNER.partition(":")
    if importlib.util.find_spec(module.rpartition(".")[0]) is None:
        raise ConfigError(f"placement.auto=True needs {module}, which is not installed; leave it out")
    planned: PPOTrainerConfig = getattr(importlib.import_module(module), name)(config)
    return planned
