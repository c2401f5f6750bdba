"""Settings of PRIME's process reward model: `roles.prime`."""

from dataclasses import dataclass, replace

from hybridrl.config.schema.actor import MICRO_BATCH_SIZE
from hybridrl.config.schema.conditions import off, on
from hybridrl.config.schema.engine import CheckpointConfig, FSDPConfig, OptimConfig, strategy_key
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.node import ConfigNode, group, key


@dataclass
class PrimeConfig(ConfigNode):
    """`roles.prime`: the model whose log-probabilities against a frozen copy are the process rewards."""

    model: ModelConfig = group(ModelConfig)
    ref_path: str | None = key(None, "weights of the frozen copy; null: the first weights of the model", place="model")
    beta_train: float = key(0.05, "factor of the log-ratio in the process rewards", gt=0)
    update: str = key(
        "after",
        "when the model learns from a batch; after: once it has scored the batch; before: and scores it then",
        choices=("after", "before"),
    )
    correct_above: float = key(0.0, "a response counts as right if its score is above this")
    strategy: str = strategy_key()
    optim: OptimConfig = group(OptimConfig, lr=1e-6, clip_grad=10.0)
    ppo_mini_batch_size: int = key(
        256,
        "prompts per optimizer step, counted over all processes; 256, or the whole batch where it has fewer",
        follows="${at_most:256,${oc.select:data.train_batch_size,256}}",
        gt=0,
    )
    ppo_micro_batch_size_per_gpu: int = key(
        MICRO_BATCH_SIZE, "sequences that a process computes at once", gt=0, needs=off(".use_dynamic_bsz")
    )
    use_dynamic_bsz: bool = key(False, "fill micro-batches by tokens, not by sequences")
    ppo_max_token_len_per_gpu: int = key(16384, "most tokens per micro-batch", gt=0, needs=on(".use_dynamic_bsz"))
    ppo_epochs: int = key(1, "passes over a batch", gt=0)
    shuffle: bool = key(False, "shuffle the batch before it is split into mini-batches")
    data_loader_seed: int = key(42, "seed of this shuffle", ge=0, needs=on(".shuffle"))
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    fsdp_config: FSDPConfig = group(FSDPConfig)
    megatron: MegatronConfig = group(MegatronConfig)

    @property
    def frozen(self) -> ModelConfig:
        """The frozen copy: the weights of `ref_path`, or those that the model starts with, an adapter included."""
        adapter = None if self.ref_path else self.model.lora_adapter_path
        return replace(self.model, path=self.ref_path or self.model.path, lora_rank=0, lora_adapter_path=adapter)
