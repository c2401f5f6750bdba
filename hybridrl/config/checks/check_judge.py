"""Cross-checks of a language model that judges: `reward.reward_model.judge`."""

from collections.abc import Iterator, Mapping

from hybridrl.config.schema.reward import JudgeConfig
from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.utils.json_client import is_address

_PART = "reward.reward_model"
#: fields of a request that a judge of the run takes
SERVED_FIELDS = ("top_p", "top_k", "seed", "chat_template_kwargs")


def check_judge(config: PPOTrainerConfig) -> Iterator[str]:
    """Check a judge that the run serves, or one behind an endpoint."""
    served = config.reward.reward_model.judge.enable
    yield from _check_served(config) if served else _check_endpoint(config)


def _check_endpoint(config: PPOTrainerConfig) -> Iterator[str]:
    part = config.reward.reward_model
    if not is_address(part.judge.url):
        yield f"{_PART}.judge.url={part.judge.url}: give an address such as http://HOST:8000/v1"


def _check_served(config: PPOTrainerConfig) -> Iterator[str]:
    part = config.reward.reward_model
    judge, where = part.judge, f"{_PART}.judge"
    if judge.url is not None:
        yield f"{where}.enable=True and {where}.url={judge.url}: the run serves the judge, or an endpoint; set one"
    if part.rollout.name is None:
        yield f"{where}.enable=True without {_PART}.rollout.name; set it to the engine that serves it: vllm or sglang"
    unknown = [name for name in judge.extra_body if name not in SERVED_FIELDS]
    if unknown:
        yield (
            f"{where}.extra_body.{unknown[0]}={judge.extra_body[unknown[0]]}: a judge that the run serves takes "
            f"{', '.join(SERVED_FIELDS)}; remove it"
        )
    yield from _check_fields(judge, f"{where}.extra_body")
    longest = part.rollout.max_model_len
    if longest is not None and longest <= judge.max_tokens:
        yield (
            f"{_PART}.rollout.max_model_len={longest} leaves no room for a question before {where}.max_tokens="
            f"{judge.max_tokens} tokens of an answer; raise the former or lower the latter"
        )


def _check_fields(judge: JudgeConfig, where: str) -> Iterator[str]:
    """Check the values of `extra_body` for a judge that the run serves."""
    fields = judge.extra_body
    if "top_p" in fields and not (_is_number(fields["top_p"]) and 0 < fields["top_p"] <= 1):
        yield f"{where}.top_p={fields['top_p']}: must lie in (0, 1]"
    if "top_k" in fields and not (_is_whole(fields["top_k"]) and (fields["top_k"] >= 1 or fields["top_k"] == -1)):
        yield f"{where}.top_k={fields['top_k']}: must be at least 1, or -1 for all tokens"
    if "seed" in fields and not _is_whole(fields["seed"]):
        yield f"{where}.seed={fields['seed']}: must be a whole number"
    if not isinstance(fields.get("chat_template_kwargs", {}), Mapping):
        yield f"{where}.chat_template_kwargs={fields['chat_template_kwargs']}: must be a mapping"
    drawn = [name for name in ("top_p", "top_k", "seed") if name in fields]
    if drawn and judge.temperature == 0:
        yield f"{where}.{drawn[0]} has no effect with temperature=0, which takes the most likely token; remove it"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
