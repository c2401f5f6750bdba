"""Validation: answers to held-out prompts, scored and summarised by data source."""

from collections.abc import Iterable

from hybridrl.algorithms.sessions import split_sessions
from hybridrl.config import RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.observe.step_metrics import validation_metrics
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import ATTEMPT
from hybridrl.reward import RewardManager
from hybridrl.rollout import Rollout
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.attempts import Attempts
from hybridrl.trainer.ppo.batching import repeat_for_sampling
from hybridrl.trainer.ppo.early_scores import scored_early
from hybridrl.trainer.ppo.missing import MissingSamples
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
    missing: MissingSamples,
    scorer: Scorer | None = None,
) -> dict[str, float]:
    """Generate `val_kwargs.n` answers to every validation prompt and score them.

    Samples without a verdict are generated again, as in training; those that still have none are in no mean.

    Args:
        prompts: batches of validation prompts.
        rollout: generates the answers, with its current weights.
        reward_fn: scores the answers.
        settings: `actor_rollout_ref.rollout`.
        step: number of training steps that the weights have had.
        samples: every answer is added to it.
        missing: says what becomes of samples without a verdict.
        scorer: adds the scores of roles; None: there are none.

    Returns:
        `val-core/*` and `val-aux/*`, see `hybridrl.observe.validation_metrics`; and `val-aux/missing`, the share of
        samples without a verdict, if there are any.
    """
    scorer = scorer or Scorer({})
    columns: dict[str, None] = {}

    asked_for = left_out = 0
    for batch in prompts:
        attempts = Attempts(missing, repeat_for_sampling(batch, settings.val_kwargs.n))
        while (rows := attempts.rows) is not None:
            again = {ATTEMPT: attempts.number} if attempts.number else {}
            with scored_early(reward_fn, rollout, rows) as scores_of:
                answer = respond(rollout, rows, settings.temperature, global_steps=step, validate=True, **again)
            attempts.add(answer, scorer(scores_of, answer, PhaseTimer()) if len(answer) else None)
        judged = attempts.judged
        columns |= dict.fromkeys(judged.columns)
        asked_for, left_out = asked_for + judged.asked, left_out + len(judged.left_out)
        if (found := judged.batch) is not None:
            extra = {name: found.non_tensor_batch[name].tolist() for name in columns if name in found.non_tensor_batch}
            scores = found.batch["token_level_scores"].sum(dim=-1)
            sessions = split_sessions(found.non_tensor_batch, len(found))
            if sessions is not None:  # one answer per session: its last trajectory, with the reward of all of them
                found, scores = found.select_idxs(sessions.last), sessions.sum(scores)
                extra = {name: sessions.pick(values).tolist() for name, values in extra.items()}
            samples.add(found, scores.tolist(), extra)
    if left_out == asked_for > 0:
        raise RolloutError(f"validation: none of {asked_for} samples has a reward; the warnings say why")
    metrics = validation_metrics(samples.sources, samples.uids, {**samples.extra, "reward": samples.scores})
    return metrics | ({"val-aux/missing": left_out / asked_for} if left_out else {})
