"""Which teacher each row has, and whether the teachers can read what the policy writes."""

from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.config import ModelConfig, PPOTrainerConfig
from hybridrl.config.roles import ROLES, TEACHER, pool_of, pools_of
from hybridrl.config.teachers import TEACHER_INDEX, teachers_of
from hybridrl.errors import DataError, ModelError
from hybridrl.models.info import check_files, check_same_tokenizer
from hybridrl.models.model_config import checked_source, config_of
from hybridrl.models.vision import is_vision_model
from hybridrl.protocol import DataProto
from hybridrl.trainer.startup import check_engine
from hybridrl.workers.distillation import check_distillation, check_vocabulary_sizes


def check_teachers(config: PPOTrainerConfig, tokenizer: Any) -> None:
    """Refuse teachers whose weights are missing, that a training engine cannot load, or that read other token ids.

    Args:
        tokenizer: the policy's.

    Raises:
        UserError: naming the teacher and what to change.
    """
    settings = config.distillation
    if not settings.enabled:
        return
    check_distillation(config)
    if is_vision_model(config_of(config.actor_rollout_ref.model)):
        raise ModelError(
            "distillation.enabled=True: teachers that see images are not built, and "
            f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path} is a vision-language model; leave "
            "distillation.enabled off, or choose a language model"
        )
    pool = pool_of(ROLES[TEACHER], config)
    for teacher in teachers_of(config).teachers:
        check_same_tokenizer(teacher.model, tokenizer, teacher.where, path="model_path")
        if ROLES[TEACHER].served(config):
            checked_source(teacher.model.path, f"{teacher.where}.model_path")
            check_files(teacher.model)
        elif pool is not None:  # without one, `resource_pools` refuses the role
            check_engine("distillation", settings, teacher.model, sum(pools_of(config)[pool]), None)
    check_vocabulary_sizes(config, _vocabulary_size)


def _vocabulary_size(model: ModelConfig) -> int:
    return int(config_of(model).get_text_config().vocab_size)


def check_rows(dataset: Any, config: PPOTrainerConfig) -> None:
    """Refuse data with rows that no teacher has.

    Args:
        dataset: the training data, with `column(name)` and `columns`; others are checked batch by batch.

    Raises:
        DataError: naming the values without a teacher.
    """
    numbers = teachers_of(config).numbers() if config.distillation.enabled else None
    key = config.distillation.teacher_key
    if numbers is None or not hasattr(dataset, "column"):
        return
    if key not in dataset.columns:
        raise DataError(
            f"distillation.teacher_key={key}: the training data has no such column; it has {', '.join(dataset.columns)}"
        )
    _check_values(dataset.column(key), numbers, key)


def _check_values(values: list[Any], numbers: Mapping[Any, int], key: str) -> None:
    missing = sorted({str(value) for value in values if value not in numbers})
    if missing:
        raise DataError(
            f"rows whose {key} is {', '.join(missing[:5])} have no teacher; teachers have the keys "
            f"{', '.join(map(str, numbers))}. Add one with distillation.teacher_models.NAME.key={missing[0]}"
        )


def add_teacher_index(batch: DataProto, config: PPOTrainerConfig) -> None:
    """Add the number of each row's teacher, if there are several.

    Raises:
        DataError: a row has none.
    """
    if not config.distillation.enabled:
        return
    numbers, key = teachers_of(config).numbers(), config.distillation.teacher_key
    if numbers is None:
        return
    if key not in batch.non_tensor_batch:
        raise DataError(
            f"distillation.teacher_key={key}: the batch has no such column; it has {', '.join(batch.non_tensor_batch)}"
        )
    values = batch.non_tensor_batch[key].tolist()
    _check_values(values, numbers, key)
    batch.batch[TEACHER_INDEX] = torch.tensor([numbers[value] for value in values])
