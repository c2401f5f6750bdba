"""Validation: answers to held-out prompts, scored and summarised by data source."""

from collections.abc import Iterable

from hybridrl.algorithms.sessions import split_sessions
from hybridrl.config import RolloutConfig
from hybridrl.observe.metrics import validation_metrics
from hybridrl.protocol import DataProto
from hybridrl.reward import RewardManager
from hybridrl.rollout import Rollout
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.batching import repeat_for_sampling
from hybridrl.trainer.ppo.role_scores import Scorer
from hybridrl.trainer.ppo.sampler import respond
from hybridrl.trainer.ppo.samples import Samples


def validate(
    prompts: Iterable[DataProto],
    rollout: Rollout,
    reward_fn: RewardManager,
    settings: RolloutConfig,
    step: int,
    samples: Samples,
    scorer: Scorer | None = None,
) -> dict[str, float]:
    """Generate `val_kwargs.n` answers to every validation prompt and score them.

    Args:
        prompts: batches of validation prompts.
        rollout: generates the answers, with its current weights.
        reward_fn: scores the answers.
        settings: `actor_rollout_ref.rollout`.
        step: number of training steps that the weights have had.
        samples: every answer is added to it.
        scorer: adds the scores of roles; None: there are none.

    Returns:
        `val-core/*` and `val-aux/*`; see `hybridrl.observe.validation_metrics`.
    """
    scorer = scorer or Scorer({})
    for batch in prompts:
        asked = repeat_for_sampling(batch, settings.val_kwargs.n)
        answered = respond(rollout, asked, settings.temperature, global_steps=step, validate=True)
        result = scorer(reward_fn, answered, PhaseTimer())
        scores, extra = result["reward_tensor"].sum(dim=-1), result["reward_extra_info"]
        sessions = split_sessions(answered.non_tensor_batch, len(answered))
        if sessions is not None:  # one answer a session: its last trajectory, with the reward of all of them
            answered, scores = answered.select_idxs(sessions.last), sessions.sum(scores)
            extra = {name: sessions.pick(values).tolist() for name, values in extra.items()}
        samples.add(answered, scores.tolist(), extra)
    return validation_metrics(samples.sources, samples.uids, {"reward": samples.scores, **samples.extra})
