"""The policy losses once more, from their papers: Python floats and loops.

``sg`` is the log-probability wherever a formula stops the gradient: a finite difference in ``lp`` with ``sg`` held is
then the gradient that training follows. ``cfg`` is a SimpleNamespace with the settings already resolved.
"""

from __future__ import annotations

import math


def clip(x, low, high):
    return min(max(x, low), high)


def sign(x):
    return (x > 0) - (x < 0)


def each(fn, mask):
    """A loss a token: fn(i, t) where the mask is set."""
    return [[fn(i, t) if m else 0.0 for t, m in enumerate(row)] for i, row in enumerate(mask)]


def vanilla(old, lp, sg, adv, mask, cfg):
    def loss(i, t):
        rho, a = math.exp(lp[i][t] - old[i][t]), adv[i][t]
        surrogate = min(rho * a, clip(rho, 1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high) * a)
        return -(surrogate if a >= 0 else max(surrogate, cfg.clip_ratio_c * a))

    return each(loss, mask)


def gspo(old, lp, sg, adv, mask, cfg):
    def loss(i, t):
        tokens = [s for s, m in enumerate(mask[i]) if m]
        log_s = sum(sg[i][s] - old[i][s] for s in tokens) / len(tokens)
        s_t = math.exp(min(log_s, 10)) * math.exp(lp[i][t] - sg[i][t])
        return -min(s_t * adv[i][t], clip(s_t, 1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high) * adv[i][t])

    return each(loss, mask)


def geo_mean(old, lp, sg, adv, mask, cfg, weights=None):
    def loss(i, _):
        tokens = [s for s, m in enumerate(mask[i]) if m]
        total = 0.0
        for s in tokens:
            k, sgn = lp[i][s] - old[i][s], sign(adv[i][s])
            total += sgn * min(sgn * k, sgn * clip(k, -cfg.clip_ratio_low, cfg.clip_ratio_high))
        a = sum(adv[i][s] for s in tokens) / len(tokens)
        w = math.prod(weights[i][s] + 1e-10 for s in tokens) ** (1 / len(tokens)) if weights else 1.0
        return -a * math.exp(total / len(tokens)) * w

    return each(loss, mask)


def sppo(old, lp, sg, adv, mask, cfg):
    def loss(i, _):
        tokens = [s for s, m in enumerate(mask[i]) if m]
        preference = sum(adv[i][s] for s in tokens) / len(tokens)
        return (sum(lp[i][s] - old[i][s] for s in tokens) - cfg.policy_loss.sppo_eta * preference) ** 2

    return each(loss, mask)


def gpg(old, lp, sg, adv, mask, cfg):
    return each(lambda i, t: -adv[i][t] * lp[i][t], mask)


reinforce = gpg


def cispo(old, lp, sg, adv, mask, cfg):
    def loss(i, t):
        w = clip(math.exp(sg[i][t] - old[i][t]), 1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high)
        return -w * adv[i][t] * lp[i][t]

    return each(loss, mask)


def sapo(old, lp, sg, adv, mask, cfg):
    def loss(i, t):
        tau = cfg.tau_pos if adv[i][t] > 0 else cfg.tau_neg
        gate = 4 / tau / (1 + math.exp(-tau * (math.exp(lp[i][t] - old[i][t]) - 1)))
        return -adv[i][t] * gate

    return each(loss, mask)


def dro(old, lp, sg, adv, mask, cfg):
    beta = cfg.policy_loss.dro_beta
    return each(lambda i, t: -(adv[i][t] * lp[i][t] - beta / 2 * (lp[i][t] - old[i][t]) ** 2), mask)


def _dppo(old, lp, sg, adv, cfg, i, t, valid):
    w = min(math.exp(sg[i][t] - old[i][t]), cfg.clip_ratio_c)
    return -adv[i][t] * w * lp[i][t] if valid else 0.0


def dppo_tv(old, lp, sg, adv, mask, cfg):
    def loss(i, t):
        moved = math.exp(sg[i][t]) - math.exp(old[i][t])
        valid = moved <= cfg.clip_ratio_high if adv[i][t] > 0 else moved >= -cfg.clip_ratio_low
        return _dppo(old, lp, sg, adv, cfg, i, t, valid)

    return each(loss, mask)


def dppo_kl(old, lp, sg, adv, mask, cfg):
    def loss(i, t):
        p, q = math.exp(sg[i][t]), math.exp(old[i][t])
        d = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        if adv[i][t] > 0:
            valid = d <= cfg.clip_ratio_high or p <= q
        else:
            valid = d <= cfg.clip_ratio_low or p >= q
        return _dppo(old, lp, sg, adv, cfg, i, t, valid)

    return each(loss, mask)


def clip_cov(old, lp, sg, adv, mask, cfg, chosen=None):
    def loss(i, t):
        rho, a = math.exp(lp[i][t] - old[i][t]), adv[i][t]
        return -min(rho * a, clip(rho, 1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high) * a) * (not chosen[i][t])

    return each(loss, mask)


def kl_cov(old, lp, sg, adv, mask, cfg, chosen=None):
    def loss(i, t):
        k = lp[i][t] - old[i][t]
        return -adv[i][t] * math.exp(k) + (cfg.policy_loss.ppo_kl_coef * abs(k) if chosen[i][t] else 0.0)

    return each(loss, mask)


def m2po(old, lp, sg, adv, mask, cfg, chosen=None):
    return each(lambda i, t: -adv[i][t] * math.exp(lp[i][t] - old[i][t]) * (not chosen[i][t]), mask)


def gvpo(old, lp, sg, adv, mask, cfg, chosen=None):
    """`chosen` are the weights; what they are is in test_algorithms_group_variance."""
    return each(lambda i, t: -chosen[i][t] * lp[i][t], mask)


gvpo_ref = flowrl_vargrad = online_dpo = gvpo


def aggregate(loss, mask, mode, counts=None, factor=None):
    """counts: (tokens, sequences) of the whole mini-batch."""
    per_row = [(sum(x for x, m in zip(r, mm, strict=True) if m), sum(mm)) for r, mm in zip(loss, mask, strict=True)]
    tokens, rows = counts or (sum(n for _, n in per_row), sum(n > 0 for _, n in per_row))
    if mode == "token-mean":
        return sum(s for s, _ in per_row) / tokens
    if mode == "token-sum":
        return sum(s for s, _ in per_row)
    if mode == "seq-mean-token-mean":
        return sum(s / n for s, n in per_row if n) / rows
    total = sum(s for s, _ in per_row) / rows
    return total / (factor or len(mask[0])) if mode == "seq-mean-token-sum-norm" else total
