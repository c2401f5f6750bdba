"""What makes a folder of weights a reward model: a sequence classifier with one label, whose head is called `score`."""

from transformers import PreTrainedConfig

from hybridrl.config import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.models.loading import check_weights, checked_source
from hybridrl.models.value import HEAD_NAME, LAST_TOKEN, SCORED_AT, head_shapes

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
            f"{where}: {generative[0]} generates text, and {_WANTED}. For a judge that writes its verdict, "
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
        raise ModelError(f"{where}: its head has {labels} labels, and {_WANTED}")


def scored_length(ids: list[int], config: PreTrainedConfig) -> int:
    """Return how many tokens a sequence classifier reads for its score.

    transformers takes the output at the last token that is not `pad_token_id`, also where that token ends a turn. A
    model that was trained here reads all of them.
    """
    if getattr(config, SCORED_AT, None) == LAST_TOKEN:
        return len(ids)
    pad = config.get_text_config().pad_token_id
    return next((number for number in range(len(ids), 0, -1) if ids[number - 1] != pad), len(ids))
