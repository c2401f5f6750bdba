"""Devices, layouts, batches and lengths of slime's runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridrl.compat.projects.project_settings import Ineffective, Meaning, ProjectValues
from hybridrl.config.short_names import RefusedValueError

_LAYOUT = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
)
_UNLIMITED_PROMPT = 512  # hybridrl's default, where slime has no limit


def has_critic(values: ProjectValues) -> bool:
    """Whether the run trains a critic."""
    return bool(values["advantage-estimator"] == "ppo")


def splits_model(values: ProjectValues) -> bool:
    """Whether a rank holds only a part of a layer, a stage or a sequence, which takes Megatron-core here."""
    return any(values[name] > 1 for name in _LAYOUT)


def engine_of(values: ProjectValues) -> str:
    """The group of the training engine."""
    return "{actor}.megatron" if splits_model(values) else "{engine}"


def layout(name: str) -> Any:
    """A translator of a size of Megatron's layout, which acts if the model is split at all."""

    def translate(value: int, values: ProjectValues) -> Meaning:
        if not splits_model(values):
            return {}
        critic = {f"critic.megatron.{name}": value} if has_critic(values) else {}
        return {"{actor}.strategy": "megatron", f"{{actor}}.megatron.{name}": value, **critic}

    return translate


def expert_tensor(value: int, values: ProjectValues) -> Meaning:
    """The ranks that share an expert."""
    if values["expert-model-parallel-size"] == 1:
        return Ineffective("the experts are not split")
    return {"{actor}.megatron.expert_tensor_parallel_size": value}


def in_engine(keys: Mapping[str, Any]) -> Any:
    """A translator of an option that sets keys of the training engine."""
    return lambda value, values: {f"{engine_of(values)}.{key}": each for key, each in keys.items()} if value else {}


def updates_of(values: ProjectValues) -> tuple[int, str]:
    """Prompts per update, and the sizes that they follow from.

    Raises:
        RefusedValueError: an update has no whole number of groups, or a rollout no whole number of updates.
    """
    prompts, n = values["rollout-batch-size"], values["n-samples-per-prompt"]
    batch, steps = values["global-batch-size"], values["num-steps-per-rollout"]
    if prompts is None:
        raise RefusedValueError("rollout-batch-size is missing")
    if batch is None:
        batch = prompts * n // (steps or 1)
    sizes = f"{prompts} prompts x {n} samples"
    if batch % n:
        raise RefusedValueError(f"{batch} samples are no whole number of groups of n-samples-per-prompt={n}; "
                                f"{math.ceil(batch / n) * n} are")  # fmt: skip
    if prompts * n % batch:
        raise RefusedValueError(f"{sizes} are no multiple of {batch} samples per update")
    return batch // n, sizes


def global_batch(value: int, values: ProjectValues) -> Meaning:
    """Samples per update."""
    return {"{actor}.ppo_mini_batch_size": updates_of(values)[0]}


def steps_per_rollout(value: int, values: ProjectValues) -> Meaning:
    """Updates per rollout."""
    if values["global-batch-size"] is not None:
        return Ineffective("global-batch-size is set")
    return {"{actor}.ppo_mini_batch_size": updates_of(values)[0]}


def longest(values: ProjectValues) -> int:
    """The tokens of the longest sequence, which a micro-batch must hold; a longer one is alone in slime."""
    context, response = values["rollout-max-context-len"], values["rollout-max-response-len"]
    prompt = values["rollout-max-prompt-len"]
    if context is not None and (prompt is None or response is None):
        return int(context)
    return int((prompt or _UNLIMITED_PROMPT) + (response or _UNLIMITED_PROMPT))


def by_tokens(key: str) -> Any:
    """A translator of a limit of tokens, which is read with `use-dynamic-batch-size` only."""

    def translate(value: int, values: ProjectValues) -> Meaning:
        if not values["use-dynamic-batch-size"]:
            return Ineffective("use-dynamic-batch-size is off")
        return {key: max(value, math.ceil(longest(values) / values["context-parallel-size"]))}

    return translate


def by_rows(key: str) -> Any:
    """A translator of a number of rows, which is not read with `use-dynamic-batch-size`."""

    def translate(value: int, values: ProjectValues) -> Meaning:
        if values["use-dynamic-batch-size"]:
            return Ineffective("use-dynamic-batch-size fills micro-batches")
        return {key: value}

    return translate


def _own_devices(values: ProjectValues) -> dict[str, Any]:
    """The devices of the engines, where they are not the policy's."""
    devices, per_node = values["rollout-num-gpus"], values["actor-num-gpus-per-node"]
    if values["colocate"] or not devices:
        return {}
    if devices > per_node and devices % per_node:
        raise RefusedValueError(f"{devices} GPUs of the engines are no whole number of nodes with {per_node} GPUs")
    return {"{rollout}.nnodes": max(1, devices // per_node), "{rollout}.n_gpus_per_node": min(devices, per_node)}


def engine_devices(value: int, values: ProjectValues) -> Meaning:
    """The number of GPUs of the engines."""
    if values["colocate"]:
        return Ineffective("colocate: the engines have the devices of the policy")
    if not value:
        raise RefusedValueError("the run starts its engines (docs/rollout.md)")
    return _own_devices(values)


def _continues(values: ProjectValues) -> bool:
    """Whether responses go on with new weights."""
    return bool(values["partial-rollout"] or "fully_async" in (values["rollout-function-path"] or ""))


def asynchronous(_: bool, values: ProjectValues) -> Meaning:
    """`train_async.py`, which generates ahead of training."""
    if values["colocate"]:
        return {"trainer.v1.trainer_mode": "colocate_async", "trainer.v1.drain": not _continues(values)}
    if not values["rollout-num-gpus"]:
        raise RefusedValueError("rollout-num-gpus is missing: generation needs devices of its own")
    return {"trainer.v1.trainer_mode": "separate_async", "trainer.v1.drain": not _continues(values)}


def partial_rollout(value: bool, values: ProjectValues) -> Meaning:
    """Whether responses go on after an update."""
    if value and not values.has("train_async.py"):
        raise RefusedValueError("a step waits for its responses; trainer.v1.trainer_mode=colocate_async continues them "
                                "over updates")  # fmt: skip
    return {}


def prompt_length(value: int, _: ProjectValues) -> Meaning:
    """The limit of prompts; slime leaves longer ones out."""
    return {"data.max_prompt_length": value, "data.filter_overlong_prompts": True}


def context_length(value: int, values: ProjectValues) -> Meaning:
    """The limit of prompt and response together."""
    response = values["rollout-max-response-len"]
    if values["rollout-max-prompt-len"] is not None and response is not None:
        return Ineffective("rollout-max-prompt-len and rollout-max-response-len are the limits")
    if response is None:
        prompt = values["rollout-max-prompt-len"] or value // 2
        return {"data.max_prompt_length": prompt, "data.max_response_length": value - prompt}
    if response >= value:
        raise RefusedValueError(f"{response} tokens of a response leave none of {value} for a prompt")
    return {"data.max_prompt_length": value - response}
