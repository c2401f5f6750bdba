"""Settings of the data: `data` of RL and of supervised fine-tuning."""

from dataclasses import dataclass
from typing import Any

from hybridrl.config.node import ConfigNode, group, key

_TRUNCATION = ("error", "left", "right", "middle")


@dataclass
class CustomClassConfig(ConfigNode):
    """A class of the user: `data.custom_cls`."""

    path: str | None = key(None, "Python file or importable module that holds it; null: the library's own")
    name: str | None = key(None, "name of the class")


@dataclass
class SamplerConfig(ConfigNode):
    """`data.sampler`: the order of the training prompts."""

    class_path: str | None = key(None, "Python file or importable module; null: shuffle and seed decide")
    class_name: str | None = key(None, "name of the sampler class, built with (data_source=dataset, data_config=data)")


@dataclass
class DataConfig(ConfigNode):
    """`data` of `ppo_trainer`."""

    train_files: list[str] = key([], "training files (parquet, json, jsonl), one or several; must be set")
    val_files: list[str] = key([], "validation files; none: no validation")
    train_max_samples: int = key(-1, "use so many training rows; -1: all", ge=-1)
    val_max_samples: int = key(-1, "use so many validation rows; -1: all", ge=-1)
    prompt_key: str = key("prompt", "column of the chat messages")
    reward_fn_key: str = key("data_source", "column that chooses the reward function")
    train_batch_size: int = key(1024, "prompts a step", gt=0)
    gen_batch_size: int | None = key(
        None, "prompts generated for at once, until a step has its prompts; null: train_batch_size", gt=0
    )
    val_batch_size: int | None = key(None, "prompts a validation batch; null: all at once", gt=0)
    max_prompt_length: int = key(512, "most tokens a prompt", gt=0)
    max_response_length: int = key(512, "most tokens a response", gt=0)
    filter_overlong_prompts: bool = key(False, "drop prompts over max_prompt_length")
    filter_overlong_prompts_workers: int = key(1, "threads that tokenise prompts", gt=0)
    truncation: str = key("error", "what happens to an overlong prompt that was not dropped", choices=_TRUNCATION)
    shuffle: bool = key(True, "shuffle training prompts each epoch")
    seed: int | None = key(None, "seed of that shuffle; null: 1", ge=0)
    validation_shuffle: bool = key(False, "shuffle validation prompts")
    dataloader_num_workers: int = key(0, "processes that read ahead; 0: the controller reads", ge=0)
    apply_chat_template_kwargs: dict[str, Any] = key({}, "further arguments of the chat template")
    custom_cls: CustomClassConfig = group(CustomClassConfig, "own dataset class")
    sampler: SamplerConfig = group(SamplerConfig)


@dataclass
class SFTDataConfig(ConfigNode):
    """`data` of `sft_trainer`."""

    train_files: list[str] = key([], "training files (parquet, json, jsonl), one or several; must be set")
    val_files: list[str] = key([], "validation files; none: no validation")
    train_max_samples: int = key(-1, "use so many training rows; -1: all", ge=-1)
    val_max_samples: int = key(-1, "use so many validation rows; -1: all", ge=-1)
    messages_key: str = key("messages", "column of the chat messages; used unless prompt_key and response_key are set")
    prompt_key: str | None = key(None, "column of the prompt, where rows are prompt and response")
    response_key: str | None = key(None, "column of the response")
    train_batch_size: int = key(256, "sequences an optimizer step, counted over all processes", gt=0)
    micro_batch_size_per_gpu: int = key(8, "sequences a process puts through at once", gt=0)
    use_dynamic_bsz: bool = key(False, "fill micro-batches by tokens, not by sequences")
    max_token_len_per_gpu: int = key(8192, "tokens a micro-batch with use_dynamic_bsz", gt=0)
    max_length: int = key(1024, "most tokens a sequence", gt=0)
    truncation: str = key("error", "what happens to an overlong sequence", choices=("error", "left", "right"))
    shuffle: bool = key(True, "shuffle training rows each epoch")
    seed: int | None = key(None, "seed of that shuffle; null: 1", ge=0)
    num_workers: int = key(0, "processes that read ahead; 0: the controller reads", ge=0)
    apply_chat_template_kwargs: dict[str, Any] = key({}, "further arguments of the chat template")
    custom_cls: CustomClassConfig = group(CustomClassConfig, "own dataset class")
