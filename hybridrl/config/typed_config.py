"""`load_config`: a configuration that is composed in Python, with its type."""

import os
from collections.abc import Sequence
from typing import Any, Literal, overload

from hybridrl.config.compose import compose_config, print_notices
from hybridrl.config.schema.root import (
    DPOTrainerConfig,
    EvaluationConfig,
    GenerationConfig,
    KTOTrainerConfig,
    PPOTrainerConfig,
    RMTrainerConfig,
    SFTTrainerConfig,
    SuiteEvaluationConfig,
)


@overload
def load_config(
    name: Literal["ppo_trainer"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> PPOTrainerConfig: ...
@overload
def load_config(
    name: Literal["sft_trainer"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> SFTTrainerConfig: ...
@overload
def load_config(
    name: Literal["dpo_trainer"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> DPOTrainerConfig: ...
@overload
def load_config(
    name: Literal["kto_trainer"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> KTOTrainerConfig: ...
@overload
def load_config(
    name: Literal["rm_trainer"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> RMTrainerConfig: ...
@overload
def load_config(
    name: Literal["generation"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> GenerationConfig: ...
@overload
def load_config(
    name: Literal["evaluation"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> EvaluationConfig: ...
@overload
def load_config(
    name: Literal["suite_evaluation"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> SuiteEvaluationConfig: ...
def load_config(
    name: str,
    overrides: Sequence[str] = (),
    config_dir: str | os.PathLike[str] | None = None,
    config_name: str | None = None,
) -> Any:
    """Compose a configuration and return it typed, with interpolations resolved.

    Args:
        name: `ppo_trainer`, `sft_trainer`, `dpo_trainer`, `kto_trainer`, `rm_trainer`, `generation`, `evaluation` or
            `suite_evaluation`.
        overrides: words as on the command line, e.g. `["data.train_batch_size=64", "+trainer.report=false"]`.
        config_dir: folder with the user's YAML file, relative to the working directory.
        config_name: that file's name without `.yaml`; by default `name`. The file may be partial and needs no defaults
            list.

    Raises:
        ConfigError: there are unknown keys, unsupported settings or values of a wrong type; the message lists all of
            them. `validate` finds settings that contradict each other.
    """
    composed = compose_config(name, overrides, config_dir, config_name)
    print_notices(composed.notices)
    return composed.config
