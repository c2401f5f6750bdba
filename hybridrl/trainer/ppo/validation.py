"""Validation: answers to held-out prompts, scored and summarised by data source."""

from collections.abc import Iterable

from hybridrl.algorithms.sessions import sessions_of
from hybridrl.config import RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.observe.step_metrics import validation_metrics
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import ATTEMPT
from hybridrl.reward import RewardManager
from hybridrl.rollout import Rollout
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.batching import repeat_for_sampling
from hybridrl.trainer.ppo.early_scores import scored_early
from hybridrl.trainer.ppo.episode import EpisodeBatch
from hybridrl.trainer.ppo.missing import MissingPolicy
from hybridrl.trainer.ppo.responses import respond
from hybridrl.trainer.ppo.role_scores import Scorer
from hybridrl.trainer.ppo.samples import Samples


def validate(
    prompts: Iterable[DataProto],
    rollout: Rollout,
    reward_fn: RewardManager,
    settings: RolloutConfig,
    step: int,
    samples: Samples,
    missing: MissingPolicy,
    scorer: Scorer | None = None,
) -> dict[str, float]:
    """Generate `val_kwargs.n` answers to every validation prompt and score them.

    Samples without a score are generated again, as in training; those that still have none are in no mean.

    Args:
        prompts: batches of validation prompts.
        rollout: generates the answers, with its current weights.
        reward_fn: scores the answers.
        settings: `actor_rollout_ref.rollout`.
        step: number of training steps that the weights have had.
        samples: every answer is added to it.
        missing: says what becomes of samples without a score.
        scorer: adds the scores of roles; None: there are none.

    Raises:
        RolloutError: no sample has a reward, or the answers have tokens of several versions of the weights.

    Returns:
        `val-core/*` and `val-aux/*`, see `hybridrl.observe.validation_metrics`; and `val-aux/missing`, the share of
        samples without a score, if there are any.
    """
    scorer = scorer or Scorer({})
    columns: dict[str, None] = {}
    versions: set[int] = set()
    count = left_out = 0
    for batch in prompts:
        episodes = EpisodeBatch(missing, repeat_for_sampling(batch, settings.val_kwargs.n))
        while (rows := episodes.rows) is not None:
            meta = {"global_steps": step, "validate": True}
            if episodes.attempt:
                meta[ATTEMPT] = episodes.attempt
            with scored_early(reward_fn, rows) as scores:
                answer = respond(rollout, rows, settings.temperature, scores.on_finished, **meta)
                versions |= _versions_in(answer)
                if len(versions) > 1:
                    raise RolloutError(
                        f"the validation of step {step} has tokens of the versions {sorted(versions)} of the weights, "
                        "and measures none of them: no weights may be sent while it runs"
                    )
            episodes.add(answer, scorer(scores, answer, PhaseTimer()) if len(answer) else None)
        columns |= dict.fromkeys(episodes.columns)
        count, left_out = count + len(episodes.prompts), left_out + episodes.left_out
        if (answers := episodes.batch) is not None:
            objects = answers.non_tensor_batch
            extra = {name: objects[name].tolist() for name in columns if name in objects}
            rewards = answers.batch["token_level_scores"].sum(dim=-1)
            sessions = sessions_of(answers)
            if sessions is not None:  # one answer per session: its last trajectory, with the reward of all of them
                answers, rewards = answers.select_idxs(sessions.last), sessions.sum(rewards)
                extra = {name: sessions.pick(values).tolist() for name, values in extra.items()}
            samples.add(answers, rewards.tolist(), extra)
    if left_out == count > 0:
        raise RolloutError(f"validation: none of {count} samples has a reward; the warnings say why")
    metrics = validation_metrics(samples.sources, samples.uids, {**samples.extra, "reward": samples.scores})
    return metrics | ({"val-aux/missing": left_out / count} if left_out else {})


def _versions_in(answer: DataProto) -> set[int]:
    """The versions of the weights that generated the tokens of an answer; none if it does not tell."""
    if not len(answer) or "weight_versions" not in answer.batch.keys():
        return set()
    return set(answer.batch["weight_versions"][answer.batch["response_mask"].bool()].unique().tolist())
