"""Cross-checks of a classifier of steps: `reward.reward_model.steps`."""

from collections.abc import Iterator

from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.registry import TRAIN_ENGINES

_PART = "reward.reward_model"


def check_step_scores(config: PPOTrainerConfig) -> Iterator[str]:
    """Check settings of steps, and refuse what a classifier of steps cannot do."""
    part = config.reward.reward_model
    steps, where = part.steps, f"{_PART}.steps"
    if not steps.enable or part.is_judge:
        return
    for name in ("separator", "mark"):
        if steps[name] == "":
            yield f"{where}.{name} is empty; give the text {'between two steps' if name == 'separator' else 'itself'}"
    if part.rollout.name is not None:
        yield (
            f"{_PART}.rollout.name={part.rollout.name} with {where}.enable=True: inference engines score whole "
            "responses; leave it out, and a training engine computes the model"
        )
    if part.max_length is not None:
        yield (
            f"{_PART}.max_length={part.max_length} with {where}.enable=True: steps that are cut off would have no "
            "score; remove it, and bound responses by data.max_response_length"
        )
    if TRAIN_ENGINES.knows(part.strategy) and "step_model" not in TRAIN_ENGINES.metadata(part.strategy).model_types:
        able = [name for name in TRAIN_ENGINES.names() if "step_model" in TRAIN_ENGINES.metadata(name).model_types]
        yield (
            f"{_PART}.strategy={part.strategy} with {where}.enable=True: this engine computes no classifiers of steps; "
            f"set it to {' or '.join(able)}"
        )
