"""Cross-checks of `distillation`: teachers and losses that cannot work together, and settings without effect."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hybridrl.config.checks.paths import check_model
from hybridrl.config.entry_settings import engine_group, engine_settings, other_places
from hybridrl.config.roles import POLICY, ROLES, TEACHER, pool_of
from hybridrl.config.schema.distillation import DistillationLossConfig
from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.config.teachers import Teachers, teachers_of, unread_keys
from hybridrl.errors import ConfigError
from hybridrl.registry import DISTILLATION_LOSSES, POLICY_LOSSES, Registry

_LOSS, _TEACHERS, _ACTOR = "distillation.distillation_loss", "distillation.teacher_models", "actor_rollout_ref.actor"


def chosen_by_name(config: PPOTrainerConfig) -> dict[str, tuple[Registry[Any], str]]:
    """Return what distillation chooses by name: for each key, the registry and the name."""
    loss = config.distillation.distillation_loss
    if not config.distillation.enabled:
        return {}
    return {
        f"{_LOSS}.loss_mode": (DISTILLATION_LOSSES, loss.loss_mode),
        f"{_LOSS}.policy_loss_mode": (POLICY_LOSSES, loss.policy_loss_mode),
    }


def check_distillation(config: PPOTrainerConfig) -> Iterator[str]:
    """Check the teachers, the loss and where both are computed."""
    if not config.distillation.enabled:
        return
    try:
        teachers = teachers_of(config)
    except ConfigError as error:
        yield from error.faults
        return
    yield from _check_teachers(config, teachers)
    yield from _check_loss(config.distillation.distillation_loss)
    if config.distillation.reads == "vocabulary":
        yield from _check_same_process(config, teachers)
    placed = config.placement.roles.get(TEACHER)
    if config.distillation.nnodes and placed is not None:
        yield (
            f"placement.roles.teacher={placed} and distillation.nnodes={config.distillation.nnodes} both say where "
            "teachers run; remove one of them"
        )


def _check_teachers(config: PPOTrainerConfig, teachers: Teachers) -> Iterator[str]:
    if not teachers.teachers:
        yield (
            f"distillation.enabled=True without a teacher; set {_TEACHERS}.NAME.model_path to a directory in Hugging "
            "Face format or a hub id, NAME as you like"
        )
    several, rollout = len(teachers.teachers) > 1, config.actor_rollout_ref.rollout
    tokens = rollout.prompt_length + rollout.response_length
    for teacher in teachers.teachers:
        settings = teacher.settings
        if settings.model_path is None:
            yield f"{teacher.where} has no model_path; set {teacher.where}.model_path, or remove the teacher"
        else:
            for fault in check_model(teacher.where, teacher.model, config.trainer.device):
                yield fault.replace(f"{teacher.where}.path", f"{teacher.where}.model_path")
        if several and settings.key is None:
            yield (
                f"{teacher.where}.key is not set, and there are {len(teachers.teachers)} teachers; set it to the value "
                f"of the column {config.distillation.teacher_key} (distillation.teacher_key) of its rows"
            )
        limit = settings.inference.max_model_len
        if limit is not None and limit < tokens:
            yield (
                f"{teacher.where}.inference.max_model_len={limit} is less than the {tokens} tokens of prompt and "
                "response (data.max_prompt_length, data.max_response_length); the teacher reads both"
            )
        for name in ("prompt_length", "response_length"):
            length, own = getattr(rollout, name), getattr(settings.inference, name)
            if own not in (None, length):
                yield (
                    f"{teacher.where}.inference.{name}={own} and data.max_{name}={length} are the same thing; remove "
                    "the former"
                )
    for key, count in Counter(teacher.settings.key for teacher in teachers.teachers).items():
        if key is not None and count > 1:
            yield f"{_TEACHERS}: {count} teachers have key={key}; a row has one teacher"


def _check_loss(loss: DistillationLossConfig) -> Iterator[str]:
    name = loss.loss_mode
    if not DISTILLATION_LOSSES.metadata(name).direct and not loss.use_policy_gradient:
        yield (
            f"{_LOSS}.loss_mode={name} with use_policy_gradient=False: its gradient does not depend on the teacher; "
            f"set {_LOSS}.use_policy_gradient=True, or loss_mode=k2, k3 or forward_kl_topk"
        )
    metadata = POLICY_LOSSES.metadata(loss.policy_loss_mode)
    if loss.use_policy_gradient and (metadata.needs or metadata.requires):
        missing = ", ".join((*metadata.needs, *metadata.requires))
        yield f"{_LOSS}.policy_loss_mode={loss.policy_loss_mode} needs {missing}, which it does not get; use vanilla"


def _check_same_process(config: PPOTrainerConfig, teachers: Teachers) -> Iterator[str]:
    """A loss over the vocabulary compares logits, which are too large to send between processes."""
    name, actor = config.distillation.distillation_loss.loss_mode, config.actor_rollout_ref.actor
    why = f"{_LOSS}.loss_mode={name} compares the logits of both models, too large to send between processes"
    instead = "or use a loss over the teacher's most likely tokens, such as forward_kl_topk_tail"
    if len(teachers.teachers) > 1:
        yield f"{why}, so it takes one teacher, and {_TEACHERS} has {len(teachers.teachers)}; leave one, {instead}"
    teacher, policy = pool_of(ROLES[TEACHER], config), pool_of(ROLES[POLICY], config)
    if teacher != policy:
        yield (
            f"{why}, and the teacher's pool {teacher} is not the actor's {policy}; set distillation.nnodes=0 and "
            f"remove placement.roles.teacher, {instead}"
        )
    if actor.strategy != config.distillation.strategy:
        yield f"distillation.strategy={config.distillation.strategy}: {why}, so it must be {actor.strategy}, {instead}"
        return
    own, other, group = engine_settings(actor), engine_settings(config.distillation), engine_group(actor)
    for key in other_places(own, other):
        yield (
            f"distillation.{group}.{key}={getattr(other, key)}: {why}, so it must be "
            f"{_ACTOR}.{group}.{key}={getattr(own, key)}; set them alike, {instead}"
        )
    for served in teachers.teachers:
        dtype = served.settings.inference.dtype or other.dtype
        if dtype != own.dtype:
            where = f"{served.where}.inference" if served.settings.inference.dtype else f"distillation.{group}"
            yield (
                f"{where}.dtype={dtype}: {why}, so it must be {_ACTOR}.{group}.dtype={own.dtype}; set them alike, "
                f"{instead}"
            )


def distillation_notices(config: PPOTrainerConfig) -> Iterator[str]:
    """Yield a notice for settings of verl's teachers without effect."""
    if config.distillation.enabled and (unread := list(unread_keys(config))):
        yield f"no effect here, the library decides how inference engines compute teachers: {', '.join(unread)}"
