"""Reward models in files: a sequence classifier with one label, whose head is called `score`."""

from transformers import PreTrainedConfig

from hybridrl.config import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.models.loading import check_weights
from hybridrl.models.model_config import checked_source
from hybridrl.models.value import HEAD_NAME, LAST_TOKEN, SCORED_AT, head_shapes

_STEPS = "reward.reward_model.steps.enable"
#: tensors of a head of two linear maps
_DEEP = ("0.weight", "0.bias", "2.weight", "2.bias")
_STEP_MODELS = ("ForTokenClassification", "ForProcessRewardModel")
_WANTED_STEPS = (
    "a classifier of steps is a causal model with a head of one or two labels, such as "
    "AutoModelForTokenClassification saves"
)
_WANTED = "a reward model is a causal model with a head of one label, such as AutoModelForSequenceClassification saves"


def check_reward_model(model: ModelConfig, config: PreTrainedConfig, key: str) -> None:
    """Refuse weights that score nothing: of a language model, without a head, or with several labels.

    Args:
        model: its group.
        config: its Hugging Face configuration.
        key: the group's name in the configuration.

    Raises:
        ModelError: names the key, what was found and what is needed.
    """
    where = f"{key}.path={model.path}"
    generative = [name for name in config.architectures or () if name.endswith(("LMHeadModel", "ForCausalLM"))]
    generative += [name for name in config.architectures or () if name.endswith("ForConditionalGeneration")]
    if generative:
        raise ModelError(
            f"{where}: {generative[0]} generates text, and {_WANTED}. For a judge that writes its score, "
            "set reward.reward_model.judge.enable=True and reward.reward_model.rollout.name (vllm or sglang)"
        )
    check_weights(checked_source(model.path))
    shapes = head_shapes(model.path)
    if f"{HEAD_NAME}.weight" not in shapes:
        raise ModelError(
            f"{where}: its safetensors files hold no head ({HEAD_NAME}.weight), and {_WANTED}; its class is "
            f"{', '.join(config.architectures or ()) or 'not recorded'}"
        )
    labels = shapes[f"{HEAD_NAME}.weight"][0]
    if labels != 1:
        steps = f". A classifier of tokens scores single steps with {_STEPS}=True" * _of_steps(config)
        raise ModelError(f"{where}: its head has {labels} labels, and {_WANTED}{steps}")


def check_step_model(model: ModelConfig, config: PreTrainedConfig, key: str) -> int:
    """Return the number of labels of a classifier of steps, and refuse other weights.

    The head is one linear map, or two with a ReLU between them.

    Args:
        model: its group.
        config: its Hugging Face configuration.
        key: the group's name in the configuration.

    Raises:
        ModelError: names the key, what was found and what is needed.
    """
    where, classes = f"{key}.path={model.path}", ", ".join(config.architectures or ()) or "not recorded"
    if not _of_steps(config):
        raise ModelError(
            f"{where}: its class is {classes}, and {_WANTED_STEPS}; set {_STEPS}=False for other classifiers"
        )
    check_weights(checked_source(model.path))
    shapes = head_shapes(model.path)
    plain, deep = {f"{HEAD_NAME}.weight"}, {f"{HEAD_NAME}.{name}" for name in _DEEP}
    if not (plain <= set(shapes) <= plain | {f"{HEAD_NAME}.bias"} or set(shapes) == deep):
        head = ", ".join(sorted(shapes)) or f"no {HEAD_NAME}.weight"
        raise ModelError(f"{where}: its head is {head}, and {_WANTED_STEPS}")
    labels = shapes[f"{HEAD_NAME}.2.weight" if set(shapes) == deep else f"{HEAD_NAME}.weight"][0]
    if labels not in (1, 2):
        raise ModelError(f"{where}: its head has {labels} labels, and {_WANTED_STEPS}")
    return labels


def _of_steps(config: PreTrainedConfig) -> bool:
    return any(name.endswith(_STEP_MODELS) for name in config.architectures or ())


def scored_length(ids: list[int], config: PreTrainedConfig) -> int:
    """Return how many tokens a sequence classifier reads for its score.

    transformers takes the output at the last token that is not `pad_token_id`, also where that token ends a turn. A
    model that was trained here reads all of them.
    """
    if getattr(config, SCORED_AT, None) == LAST_TOKEN:
        return len(ids)
    pad = config.get_text_config().pad_token_id
    return next((number for number in range(len(ids), 0, -1) if ids[number - 1] != pad), len(ids))
