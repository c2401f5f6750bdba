"""Cross-checks of fixed models that inference engines serve: reward models and teachers."""

from collections.abc import Iterator, Mapping

from hybridrl.config.checks.check_algorithm import check_names
from hybridrl.config.roles import ROLES, pool_of, pools_of, shares_pool
from hybridrl.config.schema.rollout import EngineKwargsConfig
from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.config.served import ServedModel, divide
from hybridrl.config.teachers import teachers_of
from hybridrl.errors import ConfigError
from hybridrl.registry import INFERENCE_ENGINES

_LOSS = "distillation.distillation_loss.loss_mode"


def check_served(config: PPOTrainerConfig) -> Iterator[str]:
    """Check which engines serve models, and that their replicas fit into their pools."""
    yield from _check_teachers(config)
    for spec in ROLES.values():
        try:
            models = spec.served(config) if spec.needed(config) else ()
            shared = shares_pool(spec, config) if models else False
        except ConfigError:
            return  # another check reports it
        for model in models:
            yield from check_names(
                "actor_rollout_ref.", None, {f"{model.where}.name": (INFERENCE_ENGINES, model.engine)}
            )
            yield from _check_arguments(model)
        pool = pool_of(spec, config)
        all_registered = all(INFERENCE_ENGINES.knows(model.engine) for model in models)
        if models and all_registered and pool in pools_of(config):
            yield from divide(models, pools_of(config)[str(pool)], shared)[1]


def _check_arguments(model: ServedModel) -> Iterator[str]:
    """Check `engine_kwargs`, whose settings are below the name of an engine."""
    engines = EngineKwargsConfig().keys()
    for name, arguments in model.arguments.items():
        if name not in engines or not isinstance(arguments, Mapping):
            names = ", ".join(f"engine_kwargs.{engine}" for engine in EngineKwargsConfig().keys())
            yield f"{model.where}.engine_kwargs.{name}={arguments}: arguments of an engine are below {names}"


def _check_teachers(config: PPOTrainerConfig) -> Iterator[str]:
    if not config.distillation.enabled:
        return
    try:
        teachers = teachers_of(config).teachers
    except ConfigError:
        return
    served = [teacher for teacher in teachers if teacher.settings.inference.name is not None]
    if served and len(served) < len(teachers):
        others = ", ".join(f"{teacher.where}.inference.name" for teacher in teachers if teacher not in served)
        yield (
            f"{served[0].where}.inference.name={served[0].settings.inference.name} and not {others}: an inference "
            "engine serves all teachers or none; set it for all of them"
        )
    for teacher in [teacher for teacher in teachers if teacher not in served]:
        if teacher.settings.inference.dtype in ("auto", "float16"):
            yield (
                f"{teacher.where}.inference.dtype={teacher.settings.inference.dtype} is of inference engines; set "
                f"{teacher.where}.inference.name, or dtype to float32 or bfloat16"
            )
    if served and config.distillation.reads == "vocabulary":
        yield (
            f"{served[0].where}.inference.name={served[0].settings.inference.name}: "
            f"{_LOSS}={config.distillation.distillation_loss.loss_mode} compares whole vocabularies, and an inference "
            "engine returns its most likely tokens; leave name out, or use a loss over these, such as "
            "forward_kl_topk_tail"
        )
