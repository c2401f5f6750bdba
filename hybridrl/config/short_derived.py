"""Short names whose keys follow from several of them: batch sizes in TRL's way, steps as updates, and one seed."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hybridrl.config.checks.branches import branches, value_at
from hybridrl.config.checks.idle import acts
from hybridrl.config.convert import show
from hybridrl.config.schema.node import declared
from hybridrl.config.short_names import rows
from hybridrl.config.unread import unread_by
from hybridrl.config.verl.keys import Assignment

_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
_STEPS = ("max_steps", "save_steps", "eval_steps", "warmup_steps")
Derived = Mapping[str, tuple[Any, str]]
Values = Callable[[str], Any]


def derive(
    tree: str, derived: Derived, value_of: Values, explicit: Collection[str]
) -> tuple[list[Assignment], list[str]]:
    """Return the assignments of derived names, except the seed, and a sentence for each fault.

    Args:
        tree: the tree of settings.
        derived: values of the names that were given, with the origin of each.
        value_of: the value of a key so far.
        explicit: keys that were set by themselves.
    """
    assignments: list[Assignment] = []
    faults: list[str] = []
    numbers = {}
    for name in (*_BATCH, *_STEPS):
        value = derived.get(name, (None, ""))[0]
        if name in ("eval_steps", "save_steps") and isinstance(value, str | bool):
            continue  # a frequency such as after_each_epoch, or false
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            key = rows(tree)[name].key_in(tree) if name in rows(tree) else None
            faults.append(f"{key or name}={show(value)}{derived[name][1]}: must be a number")
        elif value is not None:
            numbers[name] = value
    if faults:
        return [], faults
    for name in ("adam_beta1", "adam_beta2"):
        if name in derived and (key := rows(tree)[name].key_in(tree)):
            betas = [derived[each][0] if each in derived else usual
                     for each, usual in zip(("adam_beta1", "adam_beta2"), value_of(key), strict=True)]  # fmt: skip
            if betas != list(value_of(key)):
                assignments.append(Assignment(key, betas, derived[name][1]))
            break
    repository = derived.get("hub_model_id", (None, ""))[0]
    pushes = derived.get("push_to_hub", (False, ""))[0]
    if pushes and repository:
        assignments.append(Assignment("trainer.hub.model_id", repository, derived["hub_model_id"][1]))
    elif pushes:
        faults.append(f"push_to_hub={show(pushes)}: where to? Add hub_model_id=ORG/NAME")
    elif repository:
        faults.append(f"hub_model_id={repository} alone uploads nothing: add push_to_hub=true, or leave it away")
    names = [name for name in _BATCH if name in numbers]
    policy = tree == "ppo_trainer"
    updates = 1
    if names:
        sizes, updates, fault = (_of_policy if policy else _of_rows)(numbers, value_of, explicit)
        origin = f" (from {', '.join(f'{name}={numbers[name]}' for name in names)})"
        assignments += [Assignment(key, value, origin) for key, value in sizes.items()]
        faults += [f"{', '.join(f'{name}={numbers[name]}' for name in names)}: {fault}"] if fault else []
    if policy and names:
        updates *= int(value_of("actor_rollout_ref.actor.ppo_epochs"))
    for name in _STEPS:
        assignments += _steps(tree, name, derived, updates)
    return assignments, faults


def _steps(tree: str, name: str, derived: Derived, updates: int) -> list[Assignment]:
    """A number of steps that TRL counts in updates, in steps of a run here."""
    value, origin = derived.get(name, (None, ""))
    key = rows(tree)[name].key_in(tree) if name in rows(tree) else None
    if value is None or key is None or (name == "max_steps" and value == -1):
        return []
    if isinstance(value, str | bool):
        return [Assignment(key, value, origin)]
    if name == "warmup_steps" and 0 < value < 1:
        return [Assignment(f"{key}_ratio", value, origin)]
    steps = math.ceil(value / updates) if value > 0 else int(value)
    return [Assignment(key, steps, origin)] if name != "warmup_steps" or value > 0 else []


def _of_policy(
    numbers: Mapping[str, Any], value_of: Values, explicit: Collection[str]
) -> tuple[dict[str, int], int, str | None]:
    """Sizes of the batches of a policy: TRL counts responses per process, and hybridrl prompts over all processes."""
    actor = "actor_rollout_ref.actor"
    micro, mini, batch = (
        f"{actor}.ppo_micro_batch_size_per_gpu",
        f"{actor}.ppo_mini_batch_size",
        "data.train_batch_size",
    )
    per_device = int(numbers.get("per_device_train_batch_size", 8))
    sizes = {micro: per_device} if "per_device_train_batch_size" in numbers else {}
    if set(numbers) & set(_BATCH) == {"per_device_train_batch_size"} and {mini, batch} & set(explicit):
        return sizes, 1, None
    n, processes = int(value_of("actor_rollout_ref.rollout.n")), _processes(value_of)
    accumulation = int(numbers.get("gradient_accumulation_steps", 1))
    updated = per_device * processes * accumulation
    generated = per_device * processes * int(numbers.get("steps_per_generation", accumulation))
    if "generation_batch_size" in numbers:
        if "steps_per_generation" in numbers:
            return {}, 1, "give generation_batch_size or steps_per_generation, not both"
        generated = int(numbers["generation_batch_size"])
    for responses, phase in ((updated, "update"), (generated, "generation")):
        if responses % n:
            fits = math.ceil(responses / n) * n
            return (
                {},
                1,
                (
                    f"{responses} responses per {phase} are no whole number of groups of num_generations={n}; a "
                    f"multiple such as {fits} is"
                ),
            )
    if generated % updated:
        return {}, 1, f"{generated} responses per generation are no multiple of {updated} per update"
    return {**sizes, mini: updated // n, batch: generated // n}, generated // updated, None


def _of_rows(
    numbers: Mapping[str, Any], value_of: Values, explicit: Collection[str]
) -> tuple[dict[str, int], int, str | None]:
    """Sizes of the batches of supervised training: rows per process and per update."""
    micro, batch = "data.micro_batch_size_per_gpu", "data.train_batch_size"
    per_device = int(numbers.get("per_device_train_batch_size", 8))
    sizes = {micro: per_device} if "per_device_train_batch_size" in numbers else {}
    if "gradient_accumulation_steps" in numbers or batch not in explicit:
        accumulation = int(numbers.get("gradient_accumulation_steps", 1))
        sizes[batch] = per_device * accumulation * _processes(value_of)
    return sizes, 1, None


def _processes(value_of: Values) -> int:
    return int(value_of("trainer.nnodes")) * int(value_of("trainer.n_gpus_per_node"))


def acting_seeds(config: Any, explicit: Collection[str]) -> list[str]:
    """The keys of a composed configuration that hold a seed which acts and was not set by itself."""
    root = next(iter(branches(config)))
    keys = [key for key in declared(type(config)) if key.rsplit(".", 1)[-1] in ("seed", "data_loader_seed")]
    return [
        key
        for key in keys
        if key not in explicit
        and value_at(config, key) is not ...
        and acts(root, config, key)
        and unread_by(config, key) is None
    ]
