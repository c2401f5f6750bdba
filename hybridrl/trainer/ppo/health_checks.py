"""Health checks (`trainer.health`): detect a run that goes wrong before its reward shows it, and act on it.

| check | value | wrong when |
|---|---|---|
| entropy_collapse | `actor/entropy` | below the threshold |
| kl_blowup | the largest of `actor/ref_kl`, `actor/reward_kl_penalty`, `actor/ppo_kl` | above |
| uniform_groups | `health/groups_uniform`: prompts whose samples all score the same | above |
| length_hacking | `health/length_reward_correlation` | above, while `health/length_growth` is above `growth` |
| logprob_mismatch | `rollout_corr/k3_kl`: sampler against trainer | above |
| dead_critic | `critic/vf_explained_var` | below |

A check that has no value in a step (no critic, one sample per prompt) keeps its state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.algorithms import group_health, length_reward_correlation
from hybridrl.config import HealthConfig
from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.protocol import DataProto

MISMATCH = "rollout_corr/k3_kl"  # divergence of sampler and trainer
USUAL_STEPS = 20  # time constant, in steps, of the exponential mean that gives the usual length


class HealthError(UserError):
    """A check with the action `stop` failed, or the run cannot go back."""


@dataclass(frozen=True)
class Check:
    """Where a check finds its value, which side of the threshold is wrong, and which actions are allowed.

    With `while_growing` the value is wrong only while responses also get longer.
    """

    metrics: tuple[str, ...]
    above: bool
    advice: str
    while_growing: bool = False


CHECKS: dict[str, Check] = {
    "entropy_collapse": Check(
        ("actor/entropy",),
        False,
        "the policy hardly explores any more: lower the learning rate, raise actor.clip_ratio_high, or add "
        "actor.entropy_coeff or policy_loss.loss_mode=clip_cov",
    ),
    "kl_blowup": Check(
        ("actor/ref_kl", "actor/reward_kl_penalty", "actor/ppo_kl"),
        True,
        "the policy runs away: lower the learning rate or actor.ppo_epochs, or raise the weight of the KL term",
    ),
    "uniform_groups": Check(
        ("health/groups_uniform",),
        True,
        "almost no prompt has samples of different reward, so nothing is learned: take easier or harder prompts, raise "
        "rollout.n, look at the reward function, or set algorithm.filter_groups.enable=True",
    ),
    "length_hacking": Check(
        ("health/length_reward_correlation",),
        True,
        "longer responses to a prompt earn more, and responses get longer: look at samples (trainer.dump_freq), and "
        "penalise length, for example with reward.reward_manager.name=dapo",
        while_growing=True,
    ),
    "logprob_mismatch": Check(
        (MISMATCH,),
        True,
        "sampler and trainer drift apart: compare their dtypes, or set algorithm.rollout_correction.rollout_is=token",
    ),
    "dead_critic": Check(
        ("critic/vf_explained_var",),
        False,
        "the critic is worse than a constant: raise critic.optim.lr or trainer.critic_warmup",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A check that failed for as many steps as its `patience`."""

    name: str
    action: str
    text: str


class HealthMonitor:
    """Measures each step's batch, counts for how many steps each check has failed, and records the good checkpoint.

    A step is measured before its update, so a checkpoint is good once a later step has passed every check that may send
    the run back. The monitor's state belongs in the checkpoint, so that a resumed run does what an uninterrupted run
    would have done.

    Attributes:
        saved: the newest checkpoint that the current models come from; set it with each save.
        good: the newest checkpoint that a later step found good; None if there is none, or if no check may go back.
    """

    def __init__(self, settings: HealthConfig) -> None:
        self.settings = settings
        self.streaks = dict.fromkeys(CHECKS, 0)
        self.rollbacks = 0
        self.usual_length: float | None = None
        self.saved: Path | None = None
        self.good: Path | None = None

    def measure(self, batch: DataProto) -> dict[str, float]:
        """Compute `health/*` of a trained batch: uniform groups, the length-reward correlation and the length growth.

        `health/length_growth` is L / U - 1, where L is the batch's mean response length and U the exponential mean of
        the steps before, U <- U + (L - U) / 20. If the length grows by a fraction g per step, it tends to 20 g.
        """
        scores, mask, uids = (
            batch.batch["token_level_scores"],
            batch.batch["response_mask"],
            batch.non_tensor_batch["uid"],
        )
        length = float(mask.bool().sum(-1).double().mean())
        usual = length if self.usual_length is None else self.usual_length
        self.usual_length = usual + (length - usual) / USUAL_STEPS
        several = len(set(uids)) < len(uids)
        metrics = {
            "health/length_reward_correlation": length_reward_correlation(scores, mask, uids if several else None),
            "health/length_growth": length / usual - 1.0 if usual > 0 else 0.0,
        }
        return metrics | (group_health(scores, mask, uids) if several else {})

    def check(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """Return the checks that have now failed for `patience` steps in a row, or for a multiple of it."""
        findings = []
        for name, check in CHECKS.items():
            settings = self.settings[name]
            values = [float(metrics[metric]) for metric in check.metrics if metric in metrics]
            if settings.action == "off" or not values:
                continue
            value = max(values) if check.above else min(values)
            wrong = value > settings.threshold if check.above else value < settings.threshold
            if check.while_growing:
                wrong = wrong and float(metrics.get("health/length_growth", 0.0)) > settings.growth
            self.streaks[name] = self.streaks[name] + 1 if wrong else 0
            if wrong and self.streaks[name] % settings.patience == 0:
                side = "above" if check.above else "below"
                text = (
                    f"trainer.health.{name}: {' or '.join(check.metrics)} is {value:.4g}, {side} the threshold "
                    f"{settings.threshold:g}, for {self.streaks[name]} steps: {check.advice}"
                )
                findings.append(Finding(name, settings.action, text))
        return findings

    def act(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Report what is wrong after a step, and return whether the run should go back to a checkpoint's models.

        Raises:
            HealthError: a failed check asks for a stop, or the run has gone back as often as allowed.
        """
        findings = self.check(metrics)
        for finding in findings:
            if finding.action == "stop":
                raise HealthError(f"stopped at step {step} by {finding.text}")
            notify(f"step {step}: {finding.text}", "warning")
        watched = [name for name in CHECKS if self.settings[name].action == "rollback"]
        if watched and not any(self.streaks[name] for name in watched):
            self.good = self.saved
        back = [finding for finding in findings if finding.action == "rollback"]
        if not back:
            return False
        if self.good is None:
            raise HealthError(
                f"stopped at step {step}: {back[0].name} asks for going back, and no checkpoint of this run has a good "
                f"step after it; set trainer.save_freq lower. {back[0].text}"
            )
        if self.rollbacks >= self.settings.max_rollbacks:
            raise HealthError(
                f"stopped at step {step}: the run went back trainer.health.max_rollbacks={self.settings.max_rollbacks} "
                f"times, and again {back[0].text}"
            )
        self.rollbacks += 1
        self.streaks = dict.fromkeys(CHECKS, 0)
        self.saved = self.good
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "streaks": dict(self.streaks),
            "rollbacks": self.rollbacks,
            "usual_length": self.usual_length,
            "good": self.good and str(self.good.resolve()),
        }

    def load_state_dict(self, state: Mapping[str, Any], folder: Path | None = None) -> None:
        """Continue from a state. `folder` is the checkpoint that the state and the models were read from."""
        self.streaks = {name: int(state["streaks"].get(name, 0)) for name in CHECKS}
        self.rollbacks = int(state["rollbacks"])
        self.usual_length = state.get("usual_length")  # older checkpoints have neither this nor `good`
        good = state.get("good")
        self.good = Path(good) if good and Path(good).is_dir() else None
        self.saved = folder
