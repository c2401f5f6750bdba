"""The configuration: a typed schema of every setting, the only source of defaults, with composition and checks.

```python
from hybridrl.config import load_config, validate

config = load_config("ppo_trainer", ["data.train_files=train.parquet", "actor_rollout_ref.model.path=MODEL"])
validate(config)
config.actor_rollout_ref.actor.optim.lr
```
"""

import importlib
from typing import TYPE_CHECKING, Any

from hybridrl.config.schema.actor import ActorConfig, PolicyLossConfig, RefConfig
from hybridrl.config.schema.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KLControlConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)
from hybridrl.config.schema.critic import CriticConfig
from hybridrl.config.schema.data import (
    CustomClassConfig,
    DataConfig,
    EvaluationDataConfig,
    GenerationDataConfig,
    LabelledDataConfig,
    PairsDataConfig,
    PromptConfig,
    SamplerConfig,
    SFTDataConfig,
    SupervisedDataConfig,
)
from hybridrl.config.schema.engine import CheckpointConfig, EngineConfig, FSDPConfig, OptimConfig, WrapPolicyConfig
from hybridrl.config.schema.megatron import MegatronConfig, SFTEngineConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.objective import DPOConfig, KTOConfig, ObjectiveConfig, RMConfig, SFTObjectiveConfig
from hybridrl.config.schema.reward import (
    CustomRewardConfig,
    RewardConfig,
    RewardManagerConfig,
    RewardModuleConfig,
    ScoringConfig,
)
from hybridrl.config.schema.rollout import OpenAIConfig, PrometheusConfig, RolloutConfig, SamplingConfig, ServerConfig
from hybridrl.config.schema.root import (
    ActorRolloutRefConfig,
    DPOTrainerConfig,
    EvaluationConfig,
    GenerationConfig,
    KTOTrainerConfig,
    PPOTrainerConfig,
    RMTrainerConfig,
    RootConfig,
    SFTTrainerConfig,
    SuiteEvaluationConfig,
    SupervisedConfig,
)
from hybridrl.config.schema.trainer import (
    HealthCheckConfig,
    HealthConfig,
    JobConfig,
    LengthCheckConfig,
    PlacementConfig,
    RayConfig,
    RunConfig,
    SFTRunConfig,
    TrainerConfig,
)
from hybridrl.errors import ConfigError
from hybridrl.settings import key

if TYPE_CHECKING:
    from hybridrl.config.checks.check_run import validate
    from hybridrl.config.command import cli
    from hybridrl.config.output import as_dict, to_yaml
    from hybridrl.config.typed_config import load_config

# Every process of a run imports the groups; the code that composes them (OmegaConf, YAML) is imported only when called.
_LATER = {
    "cli": "command",
    "load_config": "typed_config",
    "validate": "checks.check_run",
    "as_dict": "output",
    "to_yaml": "output",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value


__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ConfigError",
    "CriticConfig",
    "CustomClassConfig",
    "CustomRewardConfig",
    "DPOConfig",
    "DPOTrainerConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "EvaluationDataConfig",
    "FSDPConfig",
    "FilterGroupsConfig",
    "GenerationConfig",
    "GenerationDataConfig",
    "HealthCheckConfig",
    "HealthConfig",
    "JobConfig",
    "LengthCheckConfig",
    "KLControlConfig",
    "MegatronConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OpenAIConfig",
    "OptimConfig",
    "PFPPOConfig",
    "PPOTrainerConfig",
    "KTOConfig",
    "KTOTrainerConfig",
    "LabelledDataConfig",
    "PairsDataConfig",
    "PlacementConfig",
    "PolicyLossConfig",
    "PrometheusConfig",
    "PromptConfig",
    "RMConfig",
    "RMTrainerConfig",
    "RayConfig",
    "RefConfig",
    "RewardConfig",
    "RewardManagerConfig",
    "RewardModuleConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RootConfig",
    "RunConfig",
    "SFTDataConfig",
    "SFTEngineConfig",
    "SFTObjectiveConfig",
    "SFTRunConfig",
    "SFTTrainerConfig",
    "SamplerConfig",
    "SamplingConfig",
    "ScoringConfig",
    "ServerConfig",
    "SuiteEvaluationConfig",
    "SupervisedConfig",
    "SupervisedDataConfig",
    "TrainerConfig",
    "WrapPolicyConfig",
    "as_dict",
    "cli",
    "key",
    "load_config",
    "to_yaml",
    "validate",
]
