"""Values that the configuration accepts and that algorithms know, which may not import it: both lists are the same."""

from hybridrl.algorithms import kl, pf_ppo
from hybridrl.algorithms.aggregation import LOSS_AGG_MODES
from hybridrl.algorithms.rollout_correction.apply import LOSS_TYPES
from hybridrl.config.schema import names


def test_values_of_settings_are_those_that_algorithms_know() -> None:
    assert set(names.LOSS_AGG_MODES) == set(LOSS_AGG_MODES)
    assert set(names.BYPASS_LOSSES) == set(LOSS_TYPES)
    assert set(names.PF_PPO_METHODS) == set(pf_ppo.PF_PPO_METHODS)
    plain = [name for name in kl.KL_PENALTIES if name != "full"]
    assert set(names.KL_PENALTIES) == {*plain, *(f"{name}+" for name in plain), "full"}
