"""Settings of a training engine: sharding, precision, optimizer, what its checkpoint holds."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hybridrl.config.schema import choices
from hybridrl.config.schema.conditions import LEARNS, Conditions, Need, above, among, any_of, is_not_set, not_among, on
from hybridrl.config.schema.node import ConfigNode, group, key
from hybridrl.registry import TRAIN_ENGINES


def strategy_key(follows: str | None = None, needs: Conditions | None = None) -> Any:
    """Declare the choice of a training engine."""
    return key(
        "fsdp2",
        "training engine; fsdp means fsdp2",
        follows=follows,
        registry=TRAIN_ENGINES,
        later=choices.STRATEGIES_LATER,
        synonyms=choices.STRATEGY_SYNONYMS,
        needs=needs,
    )


def compile_key(follows: str | None = None) -> Any:
    """Declare whether a model is compiled, for all training engines that can."""

    def compiles(strategy: Any) -> bool:
        settings = TRAIN_ENGINES.settings(strategy) if TRAIN_ENGINES.knows(strategy) else None
        return settings is None or hasattr(settings, "use_torch_compile")

    needs = Need(".strategy", compiles, "=fsdp2")
    return key(False, "compile the model with torch.compile", follows=follows, needs=needs)


def chunking_key(follows: str | None = None) -> Any:
    """Declare whether the temporary memory of log-probabilities and entropy has a limit."""
    return key(
        False,
        "compute log-probabilities and entropy of at most entropy_from_logits_chunk_size tokens at a time; false: of "
        "as many as compute fast on the device",
        follows=follows,
    )


def chunk_size_key(follows: str | None = None, needs: Conditions | None = None) -> Any:
    """Declare that limit."""
    return key(
        2048,
        "with entropy_from_logits_with_chunking: most tokens whose logits are in float32 at the same time; kernels for "
        "GPUs need no such copy of whole logits",
        follows=follows,
        gt=0,
        needs=needs,
    )


@dataclass
class WrapPolicyConfig(ConfigNode):
    """`fsdp_config.wrap_policy`."""

    min_num_params: int = key(
        0, "shard modules with at least this many parameters; 0: one unit per transformer block", ge=0
    )


@dataclass
class EngineConfig(ConfigNode):
    """Settings of every training engine."""

    #: the setting that says how many ranks share each sequence
    sequence_shared_by: ClassVar[str]

    strategy: str = strategy_key()
    param_offload: bool = key(False, "keep parameters in host memory between uses")
    optimizer_offload: bool = key(False, "keep optimizer state in host memory between updates", needs=LEARNS)
    dtype: str = key(
        "auto",
        "dtype of the computation; auto: bfloat16 on a GPU (float16 on one that lacks it), float32 on a CPU. Training "
        "in float16 scales the loss (strategy=fsdp2)",
        choices=(*choices.DTYPES, "float16"),
        synonyms=choices.DTYPE_SYNONYMS,
    )
    forward_only: bool = key(False, "no gradients, no optimizer")
    seed: int = key(42, "seed of each rank's random numbers", ge=0)
    entropy_from_logits_with_chunking: bool = chunking_key()
    entropy_from_logits_chunk_size: int = chunk_size_key(needs=on(".entropy_from_logits_with_chunking"))

    @property
    def most_tokens(self) -> int | None:
        """Most tokens whose statistics are computed at a time; None: as many as compute fast."""
        return self.entropy_from_logits_chunk_size if self.entropy_from_logits_with_chunking else None


@dataclass
class FSDPConfig(EngineConfig):
    """`actor.fsdp_config`, `ref.fsdp_config`, `critic.fsdp`, and `engine` of supervised fine-tuning."""

    sequence_shared_by: ClassVar[str] = "ulysses_sequence_parallel_size"

    wrap_policy: WrapPolicyConfig = group(WrapPolicyConfig)
    fsdp_size: int = key(-1, "ranks that share one copy of the weights; -1: all (smaller: HSDP)", ge=-1)
    ulysses_sequence_parallel_size: int = key(
        1, "ranks that share each sequence (Ulysses), for long ones; 1: none", ge=1
    )
    expert_parallel_size: int = key(
        1,
        "mixture of experts: ranks among which the experts of each layer are divided, and to which tokens are sent; "
        "it divides fsdp_size; 1: none",
        ge=1,
    )
    offload_policy: bool = key(False, "let FSDP2 itself keep parameters, gradients and optimizer state in host memory")
    reshard_after_forward: bool = key(True, "free gathered weights after the forward pass and gather them again")
    forward_prefetch: bool = key(False, "gather the next block's weights while the current one computes")
    model_dtype: str = key(
        "float32", "dtype of the master weights", choices=choices.DTYPES, synonyms=choices.DTYPE_SYNONYMS
    )
    router_aux_loss_coef: float = key(
        0.0,
        "mixture of experts: weight of the routers' load-balancing loss, that of transformers, in an update; 0: none",
        ge=0,
        needs=LEARNS,
    )
    freeze_vision_tower: bool = key(False, "train a vision-language model without its vision tower", needs=LEARNS)
    use_torch_compile: bool = key(False, "compile the model with torch.compile")
    full_determinism: bool = key(False, "use deterministic kernels only; slower")


#: optimizers of torch.optim without decay rates of Adam
_WITHOUT_BETAS = ("SGD", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD", "LBFGS", "Adafactor")


@dataclass
class OptimConfig(ConfigNode):
    """`actor.optim`, `critic.optim`, and `optim` of supervised fine-tuning."""

    optimizer: str = key(
        "AdamW",
        "class name in `optimizer_impl`; Muon: with AdamW for everything but hidden matrices; adam means AdamW",
        synonyms=choices.OPTIMIZER_SYNONYMS,
    )
    optimizer_impl: str = key(
        "torch.optim",
        "module or Python file that holds the optimizer class; torchao.optim: AdamW8bit, Adam8bit",
        place="code",
    )
    lr: float = key(1e-6, "peak learning rate", ge=0)
    betas: list[float] = key(
        [0.9, 0.999],
        "Adam's decay rates",
        ge=0,
        lt=1,
        needs=any_of(not_among(".optimizer", *_WITHOUT_BETAS), not_among(".optimizer_impl", "torch.optim")),
    )
    weight_decay: float = key(0.01, "decoupled weight decay", ge=0)
    clip_grad: float = key(1.0, "maximum global gradient norm", gt=0)
    lr_scheduler_type: str = key("constant", "shape of the schedule after warm-up", choices=choices.LR_SCHEDULERS)
    lr_warmup_steps: int = key(
        -1, "training steps of linear warm-up; 0 or less, or null: lr_warmup_steps_ratio decides", means=((None, -1),)
    )
    lr_warmup_steps_ratio: float = key(
        0.0,
        "warm-up as a share of all steps",
        ge=0,
        le=1,
        needs=Need(".lr_warmup_steps", lambda steps: steps <= 0, "=-1"),
    )
    min_lr_ratio: float = key(
        0.0,
        "learning rate at the end of linear or cosine decay, as a share of lr",
        ge=0,
        le=1,
        needs=(not_among(".lr_scheduler_type", "constant"), is_not_set(".min_lr")),
    )
    min_lr: float | None = key(
        None,
        "the same as a learning rate; null: min_lr_ratio decides",
        ge=0,
        needs=not_among(".lr_scheduler_type", "constant"),
    )
    num_cycles: float = key(
        0.5, "periods of the cosine; 0.5 decays once", gt=0, needs=among(".lr_scheduler_type", "cosine")
    )
    total_training_steps: int = key(
        -1,
        "length of the schedule in steps; negative: set by the trainer",
        needs=any_of(not_among(".lr_scheduler_type", "constant"), above(".lr_warmup_steps_ratio")),
    )
    override_optimizer_config: dict[str, Any] | None = key(
        None,
        "further arguments of the optimizer class; with Muon, adamw_* are those of its AdamW",
        read_by="optimizer-arguments",
    )


@dataclass
class CheckpointConfig(ConfigNode):
    """`actor.checkpoint`, `critic.checkpoint`, and `checkpoint` of supervised fine-tuning."""

    save_contents: list[str] = key(
        ["model", "optimizer", "extra", "hf_model"], "content of a checkpoint", choices=choices.CHECKPOINT_CONTENTS
    )
    load_contents: list[str] = key(
        ["model", "optimizer", "extra", "hf_model"],
        "content that is loaded on resume; hf_model is for other programs and is never loaded",
        follows="${.save_contents}",
        choices=choices.CHECKPOINT_CONTENTS,
    )
    async_save: bool = key(
        False, "copy the state to main memory and write it while training goes on; the next save waits for it"
    )
