"""Divergence from the reference policy: per-token estimates, the penalty in the reward, and its coefficient.

Legend: B sequences, T response tokens, V vocabulary; d = log pi(a|s) - log pi_ref(a|s).
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from hybridrl.algorithms.config_access import number, setting
from hybridrl.algorithms.functional import full_kl_from_logits, keep, masked_mean
from hybridrl.errors import AlgorithmError

KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(pi || pi_ref) from log-probabilities of the sampled tokens (Schulman 2020, joschu.net).

    | name            | value                                                            |
    |-----------------|------------------------------------------------------------------|
    | kl, k1          | d                                                                |
    | abs             | |d|                                                              |
    | mse, k2         | d^2 / 2                                                          |
    | low_var_kl, k3  | exp(-d) - 1 + d, with d clamped to [-20, 20] and k3 to [-10, 10]  |
    | full            | sum_v pi_v (log pi_v - log pi_ref_v), over the vocabulary         |

    Args:
        logprob, ref_logprob: [B, T]; for `full` the logits or log-probabilities of every token, [B, T, V].
        kl_penalty: a name from the table.

    Returns:
        [B, T]; its gradient is the plain derivative of the value.

    Raises:
        AlgorithmError: the name is unknown, or `full` is used without a vocabulary dimension.
    """
    if kl_penalty in ("kl", "k1"):
        return logprob - ref_logprob
    if kl_penalty == "abs":
        return (logprob - ref_logprob).abs()
    if kl_penalty in ("mse", "k2"):
        return 0.5 * (logprob - ref_logprob).square()
    if kl_penalty in ("low_var_kl", "k3"):
        minus_d = (ref_logprob - logprob).clamp(-20.0, 20.0)
        return (minus_d.exp() - minus_d - 1.0).clamp(-10.0, 10.0)
    if kl_penalty == "full":
        if logprob.dim() < 3 or logprob.shape != ref_logprob.shape:
            raise AlgorithmError(
                "KL form 'full' needs logits of both policies over the vocabulary, [B, T, V]; found shapes "
                f"{tuple(logprob.shape)} and {tuple(ref_logprob.shape)}. With the sampled tokens' "
                "log-probabilities alone use k1, k2 or k3."
            )
        return full_kl_from_logits(logprob, ref_logprob)
    names = ", ".join(KL_PENALTIES)
    raise AlgorithmError(
        f"KL form is {kl_penalty!r}; choose from {names}, and each with a '+' after it for the "
        "straight-through gradient of k2 (algorithm.kl_penalty, actor.kl_loss_type)."
    )


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Compute `kl_penalty_forward`; a trailing `+` keeps its value but takes the gradient of k2 (straight-through).

    The gradient of k1 has expectation zero and that of k3 is biased; d/dtheta of k2, d * grad log pi, is the unbiased
    gradient of the KL when samples come from pi. `k3+` therefore reports k3 and minimises k2. `full+` is `full`:
    its own gradient is exact.
    """
    form = kl_penalty.removesuffix("+")
    value = kl_penalty_forward(logprob, ref_logprob, form)
    if form == kl_penalty or form in ("mse", "k2", "full"):
        return value
    descended = 0.5 * (logprob - ref_logprob).square()
    return descended - descended.detach() + value.detach()


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """score_t - kl_ratio * (log pi_old - log pi_ref)_t, [B, T]: InstructGPT's reward (arXiv 2203.02155, eq. 2)."""
    return token_level_scores - (old_log_prob - ref_log_prob) * kl_ratio


def penalise_rewards(
    token_level_scores: Tensor,
    old_log_prob: Tensor | None,
    ref_log_prob: Tensor | None,
    response_mask: Tensor,
    kl_coef: float,
    form: str = "kl",
    ref_kl: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the KL penalty to the reward: r_t = score_t - beta * kl_t on response tokens.

    Args:
        token_level_scores, old_log_prob, ref_log_prob, response_mask: [B, T].
        kl_coef: beta, from the controller.
        form: `algorithm.kl_penalty`, see `kl_penalty_forward`.
        ref_kl: [B, T], the divergence itself if a model computed it (`full`). The log-probabilities are not read then.

    Returns:
        (token_level_rewards [B, T], current_kl scalar): current_kl is the mean over sequences of each sequence's token
        mean. It is the adaptive controller's input and is reported as `actor/reward_kl_penalty`.
    """
    if ref_kl is None:
        assert old_log_prob is not None and ref_log_prob is not None
        ref_kl = kl_penalty(keep(old_log_prob, response_mask), keep(ref_log_prob, response_mask), form)
    kl = keep(ref_kl, response_mask)
    return token_level_scores - kl_coef * kl, masked_mean(kl, response_mask, axis=-1).mean()


class KLController(Protocol):
    """The coefficient of the KL penalty; its state belongs in the checkpoint."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Update the coefficient with the KL that was measured over `n_steps` samples."""

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""


class FixedKLController:
    """A controller whose beta never changes."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore the state: a fixed coefficient comes from the configuration, even if that changed before a resume."""


class AdaptiveKLController:
    """beta <- beta max(1 + clip(kl / target - 1, -0.2, 0.2) n / horizon, 0.1) (Ziegler et al. 2019, arXiv 1909.08593).

    The paper's factor has no lower bound; from n = 5 horizon on, it could make beta, and thus the penalty, 0 or
    negative.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if not target_kl > 0 or not horizon > 0:
            raise AlgorithmError(
                f"algorithm.kl_ctrl has target_kl={target_kl} and horizon={horizon}; the adaptive "
                "controller needs both greater than 0."
            )
        self.value = float(init_kl_coef)
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adjust beta by the error measured over `n_steps` samples.

        Raises:
            AlgorithmError: the KL is not finite.
        """
        kl = float(current_kl)
        if kl != kl or kl in (float("inf"), float("-inf")):
            raise AlgorithmError(f"the measured KL is {kl}; the log-probabilities of this batch are broken.")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= max(1.0 + error * n_steps / self.horizon, 0.1)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """Make the controller for `algorithm.kl_ctrl` (`type` fixed or adaptive, `kl_coef`, `target_kl`, `horizon`).

    Raises:
        AlgorithmError: the type is unknown, or the target or horizon is not positive.
    """
    who, root = "the KL controller", "algorithm.kl_ctrl"
    kind = setting(kl_ctrl, "type", who=who, root=root)
    coef = number(kl_ctrl, "kl_coef", who=who, root=root)
    if kind == "fixed":
        return FixedKLController(coef)
    if kind == "adaptive":
        return AdaptiveKLController(
            coef, number(kl_ctrl, "target_kl", who=who, root=root), number(kl_ctrl, "horizon", who=who, root=root)
        )
    raise AlgorithmError(f"algorithm.kl_ctrl.type is {kind!r}; choose from fixed and adaptive.")
