"""Values that the configuration accepts and that algorithms know, which may not import it: both lists are the same."""

from hybridrl.algorithms import kl, pf_ppo
from hybridrl.algorithms.aggregation import LOSS_AGG_MODES
from hybridrl.algorithms.rollout_correction.apply import LOSS_TYPES
from hybridrl.config.schema import choices


def test_values_of_settings_are_those_that_algorithms_know() -> None:
    assert set(choices.LOSS_AGG_MODES) == set(LOSS_AGG_MODES)
    assert set(choices.BYPASS_LOSSES) == set(LOSS_TYPES)
    assert set(choices.PF_PPO_METHODS) == set(pf_ppo.PF_PPO_METHODS)
    plain = [name for name in kl.KL_PENALTIES if name != "full"]
    assert set(choices.KL_PENALTIES) == {*plain, *(f"{name}+" for name in plain), "full"}
