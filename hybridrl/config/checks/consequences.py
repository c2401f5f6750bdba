"""Valid settings with a consequence that the user may not expect; each is one notice before the run."""

import math
from collections.abc import Iterator

from hybridrl.config.checks.check_distillation import distillation_notices
from hybridrl.config.roles import active_roles, pool_of
from hybridrl.config.schema.root import GenerationConfig, PPOTrainerConfig, RootConfig, SupervisedConfig
from hybridrl.registry import ADV_ESTIMATORS, INFERENCE_ENGINES

_ROLLOUT = "actor_rollout_ref.rollout"


def consequences(config: RootConfig) -> Iterator[str]:
    """Yield the notices about a configuration without faults."""
    if isinstance(config, PPOTrainerConfig):
        yield from _of_training(config)
    if isinstance(config, PPOTrainerConfig | SupervisedConfig):
        yield from _of_validation(config)
    if isinstance(config, GenerationConfig):
        yield from _of_loading(config)


def _of_loading(config: GenerationConfig) -> Iterator[str]:
    """Name settings by which a model would be loaded for training, where an engine reads the checkpoint itself."""
    engine, group = config.actor_rollout_ref.rollout.name, "actor_rollout_ref.actor.fsdp_config."
    if not INFERENCE_ENGINES.is_builtin(engine) or INFERENCE_ENGINES.metadata(engine).in_place:
        return
    if names := sorted(key for key in config.set_keys if key.startswith(group)):
        yield f"no effect here, because {_ROLLOUT}.name={engine} loads the model itself: {', '.join(names)}"


def _of_validation(config: PPOTrainerConfig | SupervisedConfig) -> Iterator[str]:
    """Say that files for validation are not read."""
    trainer = config.trainer
    if not config.data.val_files or trainer.test_freq not in (-1, 0):
        return
    if isinstance(config, PPOTrainerConfig) and (trainer.val_before_train or trainer.val_only):
        return
    more = ", or trainer.val_before_train=True" if isinstance(config, PPOTrainerConfig) else ""
    yield (
        f"data.val_files with trainer.test_freq={trainer.test_freq}: there is no validation. Set trainer.test_freq to "
        f"the number of steps between validations{more}, or leave data.val_files out"
    )


def _of_training(config: PPOTrainerConfig) -> Iterator[str]:
    name, rollout = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout
    if ADV_ESTIMATORS.metadata(name).compares_samples and rollout.n == 1:
        yield (
            f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, and {_ROLLOUT}.n=1: "
            "without others to compare with, there is no baseline and each response is reinforced by its own score. "
            "Set n to 2 or more, 8 is usual"
        )
    check = rollout.val_kwargs
    if check.n > 1 and not check.do_sample:
        yield (
            f"{_ROLLOUT}.val_kwargs.n={check.n} with do_sample=False: greedy samples of a prompt are all alike, so "
            f"validation costs {check.n} times as much for the same result. Set val_kwargs.do_sample=True and a "
            "temperature, or n=1"
        )
    yield from _of_staleness(config)
    if config.trainer.replay is not None:
        yield (
            f"trainer.replay={config.trainer.replay}: responses are those of the recorded run. Where this run has "
            "other weights at a step, they are off-policy; algorithm.rollout_correction.rollout_is=token corrects for "
            "that, and rollout_corr/k3_kl measures it"
        )
    if config.skip.rollout.enable:
        yield (
            "skip.rollout.enable=True: responses and scores that an earlier run has stored take the place of new ones. "
            "The run measures how training gets on, and not what the policy has learnt"
        )
    yield from distillation_notices(config)
    used = {pool_of(spec, config) for spec in active_roles(config)}
    for pool, processes in config.placement.pools.items():
        roles = [role for role, name in config.placement.roles.items() if name == pool]
        if pool != "global" and roles and pool not in used:
            yield (
                f"placement.pools.{pool}={processes} stays idle: of its roles ({', '.join(roles)}) none takes part in "
                f"this run (algorithm.adv_estimator={name}). Give its devices to another pool, e.g. placement=colocated"
            )


def _of_staleness(config: PPOTrainerConfig) -> Iterator[str]:
    """Say how old responses may be, and what corrects for it."""
    mode, correction = config.trainer.v1, config.algorithm.rollout_correction
    if not mode.staleness:
        return
    if correction.bypass_mode:
        effect = "bypass_mode=True: the loss compares with the probabilities that tokens were sampled with"
    elif correction.rollout_is:
        effect = (
            f"rollout_is={correction.rollout_is}: importance weights correct for the weights that have changed since"
        )
    else:
        effect = "neither bypass_mode nor rollout_is: nothing corrects for the weights that have changed since"
    yield (
        f"trainer.v1.trainer_mode={mode.trainer_mode}: responses may be up to {math.ceil(mode.staleness)} updates old "
        f"when they are trained on. algorithm.rollout_correction.{effect}"
    )
