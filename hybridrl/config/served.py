"""Fixed models that inference engines serve in replicas: a reward model, a judge, and teachers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.rollout import EngineKwargsConfig, RolloutConfig
from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.config.schema.serving import ServingConfig
from hybridrl.config.teachers import teachers_of

#: settings that a served model takes from those of the rollout
_SHARED = ("start_timeout_s", "stuck_timeout_s", "max_restarts", "seed")
#: tokens that another tokenizer or chat template may need more than the policy's, for a reward model
_LONGER, _MORE_TOKENS = 2, 256
#: characters of the question that a judge is asked without a template of the user's
QUESTION_CHARACTERS = 400


@dataclass(frozen=True)
class ServedModel:
    """A model that replicas serve.

    Attributes:
        where: the group of the engine's settings.
        engine: the engine's name.
        model: what it loads.
        rollout: the engine's settings, in the form in which engines read them.
        task: what is asked of it: `score`, `read` or `generate`.
        replicas: how many; 0: as many as there is room for.
        top: with the task `read`, how many of the likeliest tokens are asked for.
        temperature: with the task `read`, what logits are divided by.
        arguments: `engine_kwargs` as it was given; `rollout` has what is below the names of engines.
        needs: tokens that a text may have, with what is generated of it; `rollout.max_model_len` is None where the
            model's own limit may be less.
    """

    where: str
    engine: str
    model: ModelConfig
    rollout: RolloutConfig
    task: Literal["score", "read", "generate"]
    needs: int
    replicas: int = 0
    top: int = 0
    temperature: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Devices of a replica."""
        return self.rollout.tensor_model_parallel_size * self.rollout.pipeline_model_parallel_size


def served_reward_model(config: PPOTrainerConfig) -> tuple[ServedModel, ...]:
    """Return the reward model if an inference engine serves it."""
    part = config.reward.reward_model
    if part.rollout.name is None:
        return ()
    where = "reward.reward_model.rollout"
    needs = part.rollout.max_model_len or part.max_length or _LONGER * _tokens(config) + _MORE_TOKENS
    rollout = _rollout(part.rollout, config, part.rollout.max_model_len or part.max_length)
    arguments = part.rollout.engine_kwargs
    return (ServedModel(where, part.rollout.name, part.model, rollout, "score", needs, arguments=arguments),)


def served_judge(config: PPOTrainerConfig) -> tuple[ServedModel, ...]:
    """Return the judge, which an inference engine serves."""
    part = config.reward.reward_model
    judge, serving = part.judge, part.rollout
    if serving.name is None:
        return ()  # checked: it has one
    # a question holds the prompt, the response, a ground truth, and the words of the template: a token each at most
    words = len(_text_of(judge.template)) + len(judge.system_prompt or "")
    needs = serving.max_model_len or _LONGER * _tokens(config) + _MORE_TOKENS + words + judge.max_tokens
    rollout = _rollout(serving, config, serving.max_model_len)
    sampled = judge.temperature > 0
    rollout = replace(rollout, do_sample=sampled, temperature=judge.temperature if sampled else 1.0)
    where, arguments = "reward.reward_model.rollout", serving.engine_kwargs
    return (ServedModel(where, serving.name, part.model, rollout, "generate", needs, arguments=arguments),)


def _text_of(template: str | None) -> str:
    """The text of a template, as far as it can be read: what cannot be is refused elsewhere."""
    try:
        return (
            QUESTION_CHARACTERS * " " if template is None else Path(template).expanduser().read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return ""


def served_teachers(config: PPOTrainerConfig) -> tuple[ServedModel, ...]:
    """Return the teachers if inference engines serve them, in their order.

    Raises:
        ConfigError: a setting of a teacher is unknown or does not fit.
    """
    distillation, models = config.distillation, []
    for teacher in teachers_of(config).teachers:
        inference = teacher.settings.inference
        if inference.name is None:
            return ()  # checked: all of them or none
        needs = max(inference.max_model_len or 0, _tokens(config) + 1)  # an engine generates a token more
        models.append(
            ServedModel(
                where=f"{teacher.where}.inference",
                engine=inference.name,
                model=teacher.model,
                rollout=_rollout(inference, config, needs),
                task="read",
                needs=needs,
                replicas=teacher.settings.num_replicas,
                top=distillation.distillation_loss.topk if distillation.reads == "top" else 0,
                temperature=inference.temperature or config.actor_rollout_ref.rollout.temperature,
                arguments=inference.engine_kwargs,
            )
        )
    return tuple(models)


def divide(
    models: Sequence[ServedModel], nodes: Sequence[int], shared: bool
) -> tuple[list[tuple[int, int]], list[str]]:
    """Divide the devices of a pool between models: for each the first device and the number of replicas, and faults.

    On shared devices every model is on all of them, or on those of its `replicas`. In a pool of their own the models
    follow each other, with equal shares where `replicas` says nothing.

    Args:
        nodes: devices of the pool on each node.
        shared: whether another role has them too.
    """
    shares: list[tuple[int, int]] = []
    faults: list[str] = []
    total, first = sum(nodes), 0
    share = total if shared else total // max(len(models), 1)
    for model in models:
        size, count = model.devices, model.replicas or share // model.devices
        begin = 0 if shared else first
        if any(node % size for node in nodes) or not count or begin + count * size > total:
            faults.append(
                f"{model.where}: {count or 'its'} replicas of tensor_model_parallel_size * "
                f"pipeline_model_parallel_size = {size} devices do not fit into a pool of "
                f"{' + '.join(map(str, nodes))} devices for {len(models)} models; change these sizes, the number of "
                "replicas (num_replicas), or the pool"
            )
        elif begin % size:
            faults.append(
                f"{model.where}: its replicas of {size} devices would begin at device {begin} of the pool; name models "
                "with larger replicas first"
            )
        shares.append((begin, count))
        first += count * size
    if not shared and first < total and not faults:
        faults.append(
            f"{', '.join(model.where for model in models)}: {total - first} of the pool's {total} devices would be "
            "idle; change the number of replicas (num_replicas), or the pool"
        )
    return shares, faults


def _tokens(config: PPOTrainerConfig) -> int:
    rollout = config.actor_rollout_ref.rollout
    return rollout.prompt_length + rollout.response_length


def _rollout(serving: ServingConfig, config: PPOTrainerConfig, longest: int | None) -> RolloutConfig:
    values = {name: getattr(config.actor_rollout_ref.rollout, name) for name in _SHARED}
    values |= {name: getattr(serving, name) for name in ServingConfig().keys()}
    engine_arguments = {name: dict(serving.engine_kwargs.get(name) or {}) for name in EngineKwargsConfig().keys()}
    values |= {"engine_kwargs": EngineKwargsConfig(**engine_arguments), "load_format": "auto"}
    values |= {"dtype": serving.dtype or "auto", "max_model_len": longest}
    return RolloutConfig(**values)
