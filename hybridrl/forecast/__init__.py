"""The device memory that a run will take, computed before any model is loaded. Nothing of the package needs it.

`sizes` has what is computed for one model, `role_models` computes it by the engine of each role (`engine_models`),
`ppo_run` and `supervised_run` add up the phases of a run (`run_forecast`), and `remedies` finds settings that make a
run fit.
"""

from typing import Any


def check_before_loading(config: Any, group: Any) -> Any:
    """Print what a run on GPUs will take of their memory, and refuse one that cannot fit.

    Nothing is done without GPUs: processes share a machine's memory, and nothing reserves a part of it.

    Args:
        config: the settings of the run.
        group: a worker group that has not loaded its model, on whose first rank the forecast is computed.

    Returns:
        The `MemoryForecast`, if there is one.

    Raises:
        PlacementError: it cannot fit; see `run_forecast.refuse_if_too_large`.
    """
    from hybridrl.config import PPOTrainerConfig
    from hybridrl.forecast import ppo_run, supervised_run

    run = ppo_run if isinstance(config, PPOTrainerConfig) else supervised_run
    return run.check_before_loading(config, group)
