"""Settings of the data: `data` of RL, of supervised fine-tuning, of generation and of evaluation."""

from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema import choices
from hybridrl.config.schema.conditions import (
    Need,
    above,
    among,
    any_of,
    entry,
    entry_has,
    is_not_set,
    is_set,
    off,
    on,
)
from hybridrl.config.schema.mappings import Unchecked
from hybridrl.config.schema.node import ConfigNode, group, key
from hybridrl.registry import CURRICULA, INFERENCE_ENGINES, OBJECTIVES

#: a model of the run generates; an endpoint renders and reads messages itself
_OWN_MODEL = entry_has("actor_rollout_ref.rollout.name", INFERENCE_ENGINES, "takes_weights")
_FILES = (
    "files (parquet, json, jsonl, csv, tsv), globs, addresses (s3://bucket/file), or data sets of the hub "
    "(org/name@config:split)"
)
#: the weights of sources follow their scores
_ADAPTS = Need(".name", lambda name: name != "fixed", "=mixed_groups or another curriculum")


@dataclass
class CustomClassConfig(ConfigNode):
    """`data.custom_cls`: a user's dataset class."""

    path: str | None = key(
        None, "Python file or importable module with the class; null: the library's class", place="code"
    )
    name: str | None = key(None, "name of the class", needs=is_set(".path"))


@dataclass
class SamplerConfig(ConfigNode):
    """`data.sampler`: the order of the training prompts."""

    class_path: str | None = key(None, "Python file or importable module; null: shuffle and seed decide", place="code")
    class_name: str | None = key(
        None,
        "name of the sampler class, built with (data_source=dataset, data_config=data)",
        needs=is_set(".class_path"),
    )


@dataclass
class MixtureConfig(ConfigNode):
    """`data.mixture`: batches that are mixed from the sources of the data with weights."""

    weights: dict[str, Any] = key(
        {},
        "{source: weight}, for every source of the data, of any sum; 0: its rows are left out. {}: each row once an "
        "epoch",
        read_by=Unchecked("hybridrl.config.checks.check_mixture, and hybridrl.data.source_mixture once there are data"),
    )
    column: str | None = key(
        "data_source",
        "column that names a row's source; null: its file does, by its name without the ending",
        needs=is_set(".weights"),
    )


@dataclass
class CurriculumConfig(ConfigNode):
    """`data.mixture.curriculum`: weights that follow the scores of the sources."""

    name: str = key(
        "fixed",
        "how useful a source is by the scores of its prompts; fixed: the weights do not change",
        choices=("fixed",),
        registry=CURRICULA,
        needs=is_set("..weights"),
    )
    floor: float = key(
        0.1,
        "share of its own weight that each source keeps, whatever its scores",
        gt=0,
        le=1,
        needs=_ADAPTS,
    )
    smoothing: float = key(
        0.9,
        "weight of a source's earlier scores when those of a step are added; 0: the last step alone counts",
        ge=0,
        lt=1,
        needs=_ADAPTS,
    )
    target: float = key(
        0.5,
        "target_pass_rate: the mean score at which a source is most useful",
        gt=0,
        lt=1,
        needs=(_ADAPTS, entry(".name", CURRICULA, "target_pass_rate")),
    )


@dataclass
class RLMixtureConfig(MixtureConfig):
    """`data.mixture` of `ppo_trainer`."""

    curriculum: CurriculumConfig = group(CurriculumConfig)


@dataclass
class PromptConfig(ConfigNode):
    """Settings that turn rows into prompts, for training and for generation."""

    prompt_key: str = key("prompt", "column of the prompts: chat messages, or text, which becomes a user message")
    system_prompt: str | None = key(None, "system message of conversations that have none; null: none is added")
    ground_truth_key: str | None = key(
        None, "column of the ground truth; null: reward_model holds it, as {style, ground_truth}"
    )
    last_assistant_turn: str = key(
        "error",
        "what a last turn of the assistant in a prompt is: error: refused; ground_truth: taken out of the prompt, and "
        "the ground truth of the reward; continue: the beginning of the response, which the model goes on with",
        choices=choices.LAST_ASSISTANT_TURN,
    )
    image_key: str = key("images", "column of the images, for a vision-language model; a row without any is text")
    video_key: str = key("videos", "column of the videos, likewise")
    mm_processor_kwargs: dict[str, Any] = key(
        {},
        "settings that replace those of the model's image processor, e.g. {max_pixels: 262144}, and of its video "
        "processor, e.g. {fps: 1, videos_kwargs: {max_pixels: 262144}}",
        needs=_OWN_MODEL,
        read_by="processor-fields",
    )
    max_prompt_length: int = key(512, "maximum tokens per prompt, those of images included", gt=0)
    max_response_length: int = key(512, "maximum tokens per response", gt=0)
    filter_overlong_prompts: bool = key(False, "drop prompts that are longer than max_prompt_length")
    filter_overlong_prompts_workers: int = key(
        1,
        "threads that tokenise prompts",
        gt=0,
        needs=any_of(on(".filter_overlong_prompts"), among(".truncation", "error")),
    )
    truncation: str = key(
        "error",
        "what happens to an overlong prompt that was not dropped",
        choices=choices.TRUNCATIONS,
        needs=off(".filter_overlong_prompts"),
    )
    shuffle: bool = key(
        False,
        "if the number of rows is limited: draw them at random; false: use the first ones",
        needs=above(".max_samples", -1),
    )
    seed: int | None = key(
        None,
        "seed of shuffling and drawing; null: 1",
        ge=0,
        needs=on(".shuffle"),
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "further arguments of the chat template", needs=_OWN_MODEL, read_by="template-variables"
    )
    custom_cls: CustomClassConfig = group(CustomClassConfig, "own dataset class")


@dataclass
class DataConfig(PromptConfig):
    """`data` of `ppo_trainer`."""

    train_files: list[str] = key([], f"training data: {_FILES}; must be set", place="data")
    val_files: list[str] = key([], f"validation data: {_FILES}; none: no validation", place="data")
    train_max_samples: int = key(-1, "number of training rows to use; -1: all", ge=-1)
    val_max_samples: int = key(-1, "number of validation rows to use; -1: all", ge=-1, needs=is_set(".val_files"))
    reward_fn_key: str = key("data_source", "column that selects the reward function")
    train_batch_size: int = key(1024, "prompts per step", gt=0)
    gen_batch_size: int | None = key(
        None, "prompts per generation batch, until a step has its prompts; null: train_batch_size", gt=0
    )
    val_batch_size: int | None = key(
        None, "prompts per validation batch; null: all at once", gt=0, needs=is_set(".val_files")
    )
    shuffle: bool = key(True, "shuffle training prompts each epoch")
    seed: int | None = key(
        None,
        "seed of shuffling and drawing; null: 1",
        ge=0,
        # a sampler of one's own gets it, too
        needs=any_of(on(".shuffle"), on(".validation_shuffle"), also=(is_set(".sampler.class_path"),)),
    )
    validation_shuffle: bool = key(False, "shuffle validation prompts", needs=is_set(".val_files"))
    dataloader_num_workers: int = key(0, "processes that read ahead; 0: the controller reads the data", ge=0)
    sampler: SamplerConfig = group(SamplerConfig)
    mixture: RLMixtureConfig = group(RLMixtureConfig)
    tool_config_path: str | None = key(
        None,
        "YAML file with the tools that prompts describe to the model; null: none",
        follows="${oc.select:actor_rollout_ref.rollout.multi_turn.tool_config_path,null}",
        place="file",
    )
    function_tool_path: str | None = key(
        None,
        "Python file or module with such tools; null: none",
        follows="${oc.select:actor_rollout_ref.rollout.multi_turn.function_tool_path,null}",
        place="code",
    )


@dataclass
class SupervisedDataConfig(ConfigNode):
    """Settings that `data` of `sft_trainer`, `dpo_trainer`, `kto_trainer` and `rm_trainer` share."""

    train_files: list[str] = key([], f"training data: {_FILES}; must be set", place="data")
    val_files: list[str] = key([], f"validation data: {_FILES}; none: no validation", place="data")
    train_max_samples: int = key(-1, "number of training rows to use; -1: all", ge=-1)
    val_max_samples: int = key(-1, "number of validation rows to use; -1: all", ge=-1, needs=is_set(".val_files"))
    system_prompt: str | None = key(None, "system message of conversations that have none; null: none is added")
    train_batch_size: int = key(256, "rows per optimizer step, counted over all processes", gt=0)
    micro_batch_size_per_gpu: int = key(8, "rows that a process computes at once", gt=0, needs=off(".use_dynamic_bsz"))
    use_dynamic_bsz: bool = key(False, "fill micro-batches by tokens, not by rows")
    max_token_len_per_gpu: int = key(8192, "most tokens per micro-batch", gt=0, needs=on(".use_dynamic_bsz"))
    image_key: str = key("images", "column of the images, for a vision-language model; a row without any is text")
    video_key: str = key("videos", "column of the videos, likewise")
    mm_processor_kwargs: dict[str, Any] = key(
        {},
        "settings that replace those of the model's image processor, e.g. {max_pixels: 262144}, and of its video "
        "processor, e.g. {fps: 1, videos_kwargs: {max_pixels: 262144}}",
        read_by="processor-fields",
    )
    max_length: int = key(1024, "maximum tokens per sequence, those of images included", gt=0)
    truncation: str = key("error", "what happens to an overlong sequence", choices=("error", "left", "right"))
    shuffle: bool = key(True, "shuffle training rows each epoch")
    seed: int | None = key(None, "seed of this shuffle; null: 1", ge=0, needs=on(".shuffle"))
    mixture: MixtureConfig = group(MixtureConfig)
    num_workers: int = key(0, "processes that read ahead; 0: the controller reads the data", ge=0)
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "further arguments of the chat template", read_by="template-variables"
    )
    tools_key: str = key("tools", "column of the tools that a row's template gets: a list of schemas, or that as JSON")
    enable_thinking_key: str = key("enable_thinking", "column of true or false, which a row's template gets")
    enable_thinking_default: bool | None = key(None, "what it gets for rows without a value; null: nothing")
    custom_cls: CustomClassConfig = group(CustomClassConfig, "own dataset class")


@dataclass
class SFTDataConfig(SupervisedDataConfig):
    """`data` of `sft_trainer`; a row is a conversation."""

    messages_key: str = key(
        "messages",
        "column of the chat messages; used unless prompt_key and response_key are set",
        needs=is_not_set(".prompt_key"),
    )
    prompt_key: str | None = key(None, "column of the prompt, if rows are prompt and response")
    response_key: str | None = key(None, "column of the response")
    prompt_dict_keys: list[str] = key(
        [], "names inside the column prompt_key, outermost first: prompt_key.a.b", needs=is_set(".prompt_key")
    )
    response_dict_keys: list[str] = key(
        [], "names inside the column response_key, outermost first", needs=is_set(".response_key")
    )


@dataclass
class PairsDataConfig(SupervisedDataConfig):
    """`data` of `dpo_trainer` and `rm_trainer`; a row is a pair of answers to one prompt."""

    prompt_key: str = key("prompt", "column of the prompt (text or messages), where answers do not begin with it")
    chosen_key: str = key("chosen", "column of the better answer: text, its messages, or the whole conversation")
    rejected_key: str = key("rejected", "column of the worse answer, in the same form")
    margin_key: str | None = key(
        None,
        "column of numbers by how much the chosen answer is better; null: none",
        needs=entry_has("dpo.loss_type|rm.loss_type", OBJECTIVES, "margins"),
    )
    filter_pairs: bool = key(
        False, "leave out pairs with an empty answer, two equal answers or too many tokens; false: refuse or cut them"
    )
    micro_batch_size_per_gpu: int = key(4, "pairs that a process computes at once", gt=0, needs=off(".use_dynamic_bsz"))


@dataclass
class LabelledDataConfig(SupervisedDataConfig):
    """`data` of `kto_trainer`; a row is an answer to a prompt with a label, or a pair of answers."""

    prompt_key: str = key("prompt", "column of the prompt (text or messages), where answers do not begin with it")
    completion_key: str = key("completion", "column of the answer: text, its messages, or the whole conversation")
    label_key: str = key("label", "column of true for desirable answers and false for undesirable ones")
    chosen_key: str = key(
        "chosen", "column of the better answer of a pair, which becomes two rows; read if there is no completion_key"
    )
    rejected_key: str = key("rejected", "column of the worse answer of a pair, likewise")
    filter_rows: bool = key(False, "leave out rows with an empty answer or too many tokens; false: refuse or cut them")


@dataclass
class GenerationDataConfig(PromptConfig):
    """`data` of `generation`."""

    path: list[str] = key([], f"prompts: {_FILES}; must be set", place="data")
    max_samples: int = key(-1, "number of rows to use; -1: all", ge=-1)
    n_samples: int = key(1, "responses per prompt", follows="${oc.select:actor_rollout_ref.rollout.n,1}", gt=0)
    batch_size: int = key(
        128, "prompts per part: each part is saved when it is complete, and an interrupted one is generated again", gt=0
    )
    output_path: str = key("", "parquet file to write: the rows with their responses; must be set", place="output")
    response_key: str = key("responses", "column of the responses")
    log_probs: bool = key(False, "keep the log-probability of each token, and the tokens")
    overwrite: bool = key(False, "replace an output_path, or parts of it, made with other settings")


@dataclass
class EvaluationDataConfig(ConfigNode):
    """`data` of `evaluation`."""

    path: list[str] = key([], f"responses: {_FILES}; must be set", place="data")
    max_samples: int = key(-1, "number of rows to score, from the first; -1: all", ge=-1)
    response_key: str = key("responses", "column of the responses, a list of texts")
    prompt_key: str = key("prompt", "column of the prompts, for functions that take them")
    data_source_key: str = key("data_source", "column that selects the reward function")
    reward_model_key: str = key(
        "reward_model", "column with {style, ground_truth}", needs=is_not_set(".ground_truth_key")
    )
    ground_truth_key: str | None = key(None, "column of the ground truth; null: reward_model_key holds it")
    extra_info_key: str = key("extra_info", "column of further information for the reward function")
    output_path: str | None = key(
        None, "JSON file to write; null: that of the first file, ending in .eval.json", place="output"
    )
