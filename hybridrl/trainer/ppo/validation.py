"""Validation: answers to held-out prompts, scored and summarised by data source."""

from typing import TYPE_CHECKING

from hybridrl.observe.metrics import validation_metrics
from hybridrl.trainer.ppo.batching import repeat_for_sampling
from hybridrl.trainer.ppo.samples import Samples

if TYPE_CHECKING:
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer


def validate(trainer: "RayPPOTrainer") -> dict[str, float]:
    """Generate `rollout.val_kwargs.n` answers to every validation prompt, score them and keep them in `validation/`.

    Returns:
        `val-core/*` and `val-aux/*` (see `hybridrl.observe.validation_metrics`) and `timing_s/testing`.
    """
    run, settings = trainer.run, trainer.config.trainer
    n = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
    samples = Samples(trainer.tokenizer)
    assert trainer.val_loader is not None
    with run.phase("testing"):
        for prompts in trainer.val_loader:
            batch = trainer.sample(repeat_for_sampling(prompts, n), validate=True)
            result = trainer.val_reward_fn(batch, return_dict=True)
            samples.add(batch, result["reward_tensor"].sum(dim=-1).tolist(), result["reward_extra_info"])
        metrics = validation_metrics(samples.sources, samples.uids, {"reward": samples.scores, **samples.extra})
    samples.write(run.validation_folder, run.step)
    run.tracking.log_generations(samples.rows(settings.log_val_generations), step=run.step)
    return metrics | {"timing_s/testing": run.timing.pop("testing")}
