"""The advantage estimators once more, from their papers: Python floats and loops, one token at a time.

Inputs are nested lists; a row's tokens are those with mask 1. Results are nested lists, 0 outside the mask.
"""

from __future__ import annotations

import math


def tokens_of(mask, i):
    return [t for t in range(len(mask[i])) if mask[i][t]]


def score(r, mask, i):
    return math.fsum(r[i][t] for t in tokens_of(mask, i))


def members(index, i):
    return [j for j in range(len(index)) if index[j] == index[i]]


def mean(xs):
    return math.fsum(xs) / len(xs)


def std(xs):
    m = mean(xs)
    return math.sqrt(math.fsum((x - m) ** 2 for x in xs) / (len(xs) - 1))


def on_tokens(per_row, mask):
    return [[per_row[i] if m else 0.0 for m in row] for i, row in enumerate(mask)]


def whiten(x, mask):
    flat = [x[i][t] for i in range(len(x)) for t in tokens_of(mask, i)]
    m, v = mean(flat), std(flat) ** 2
    return [
        [(x[i][t] - m) / math.sqrt(v + 1e-8) if mask[i][t] else 0.0 for t in range(len(x[i]))] for i in range(len(x))
    ]


def gae(r, v, mask, gamma, lam):
    adv = [[0.0] * len(row) for row in mask]
    ret = [[0.0] * len(row) for row in mask]
    for i in range(len(mask)):
        ts = tokens_of(mask, i)
        for a, t in enumerate(ts):
            total = 0.0
            # Equation 16 as the sum it is: (gamma lam)^l delta_{t+l}, l over the response tokens that follow.
            for step, s in enumerate(ts[a:]):
                later = ts[a + step + 1 :]
                delta = r[i][s] + gamma * (v[i][later[0]] if later else 0.0) - v[i][s]
                total += (gamma * lam) ** step * delta
            adv[i][t], ret[i][t] = total, total + v[i][t]
    return whiten(adv, mask), ret


def to_go(r, mask, gamma):
    out = [[0.0] * len(row) for row in mask]
    for i in range(len(mask)):
        ts = tokens_of(mask, i)
        for a, t in enumerate(ts):
            out[i][t] = math.fsum(gamma**k * r[i][s] for k, s in enumerate(ts[a:]))
    return out


def grpo(r, mask, index, epsilon=1e-6, by_std=True, scores=None):
    scores = scores or [score(r, mask, i) for i in range(len(mask))]
    rows = []
    for i in range(len(mask)):
        group = [scores[j] for j in members(index, i)]
        m, s = (mean(group), std(group)) if len(group) > 1 else (0.0, 1.0)
        rows.append((scores[i] - m) / (s + epsilon) if by_std else scores[i] - m)
    return on_tokens(rows, mask)


def maxrl(r, mask, index):
    rows = []
    for i in range(len(mask)):
        group = [score(r, mask, j) for j in members(index, i)]
        rows.append((score(r, mask, i) - mean(group)) / mean(group) if sum(group) else 0.0)
    return on_tokens(rows, mask)


def passk(r, mask, index, epsilon=1e-6, by_std=True):
    rows = []
    for i in range(len(mask)):
        group = members(index, i)
        scores = [score(r, mask, j) for j in group]
        ranked = sorted(scores, reverse=True)
        winner = group[scores.index(ranked[0])]
        gain = ranked[0] - ranked[1]
        rows.append((gain / (std(scores) + epsilon) if by_std else gain) if i == winner else 0.0)
    return on_tokens(rows, mask)


def gdpo(mask, index, components, weights, epsilon=1e-6):
    total = [[0.0] * len(row) for row in mask]
    for values, w in zip(components, weights, strict=True):
        a = grpo(None, mask, index, epsilon, True, list(values))
        total = [[x + w * y for x, y in zip(p, q, strict=True)] for p, q in zip(total, a, strict=True)]
    return whiten(total, mask)


def rloo(r, mask, index, alone_is_zero=False):
    rows = []
    for i in range(len(mask)):
        others = [score(r, mask, j) for j in members(index, i) if j != i]
        own = score(r, mask, i)
        rows.append(own - mean(others) if others else (0.0 if alone_is_zero else own))
    return on_tokens(rows, mask)


def prime(r, process, mask, index, gamma, of_process=1.0, of_outcome=1.0):
    result = [[0.0] * len(row) for row in mask]
    means = [score(process, mask, i) / max(len(tokens_of(mask, i)), 1) for i in range(len(mask))]
    for i in range(len(mask)):
        others, ts = [j for j in members(index, i) if j != i], tokens_of(mask, i)
        base = mean([means[j] for j in others]) if others else 0.0
        outcome = score(r, mask, i) - (mean([score(r, mask, j) for j in others]) if others else 0.0)
        for a, t in enumerate(ts):
            ahead = math.fsum(gamma**step * (process[i][s] - base) for step, s in enumerate(ts[a:]))
            result[i][t] = of_process * ahead + of_outcome * outcome
    return result


def turns_of(mask, i):
    """The tokens of each turn: runs without a hole."""
    turns = []
    for t in tokens_of(mask, i):
        if turns and turns[-1][-1] == t - 1:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def grpo_turns(r, mask, index):
    result = [[0.0] * len(row) for row in mask]
    for i in range(len(mask)):
        found = [math.fsum(r[j][t] for t in turn) for j in members(index, i) for turn in turns_of(mask, j)]
        ahead = 0.0
        for turn in reversed(turns_of(mask, i)):
            spread = std(found) if len(found) > 1 else 1.0
            ahead += (math.fsum(r[i][t] for t in turn) - mean(found)) / (spread + 1e-6)
            for t in turn:
                result[i][t] = ahead
    return result


def gigpo(r, mask, index, states, gamma, weight=1.0, by_std=False):
    def compared(value, values):
        if len(values) < 2:
            return 0.0
        return (value - mean(values)) / (std(values) + 1e-6 if by_std else 1.0)

    def to_go(j, k):
        turns = turns_of(mask, j)[k:]
        return math.fsum(gamma**n * r[j][t] for n, turn in enumerate(turns) for t in turn)

    result = [[0.0] * len(row) for row in mask]
    for i in range(len(mask)):
        group = members(index, i)
        whole = compared(score(r, mask, i), [score(r, mask, j) for j in group])
        for k, turn in enumerate(turns_of(mask, i)):
            state = states[i][turn[-1]]
            like = [
                to_go(j, n) for j in group for n, other in enumerate(turns_of(mask, j)) if states[j][other[-1]] == state
            ]
            for t in turn:
                result[i][t] = whole + (weight * compared(to_go(i, k), like) if state else 0.0)
    return result


def opo(r, mask, index):
    rows = []
    for i in range(len(mask)):
        group = members(index, i)
        lengths = [len(tokens_of(mask, j)) for j in group]
        b = 0.0
        if len(group) > 1 and sum(lengths):
            b = math.fsum(n * score(r, mask, j) for n, j in zip(lengths, group, strict=True)) / sum(lengths)
        rows.append(score(r, mask, i) - b)
    return on_tokens(rows, mask)


def sppo(r, mask, index, scale=None):
    def wins(own, other):
        if scale is not None:
            return 1 / (1 + math.exp(-scale * (own - other)))
        return 0.5 if math.isclose(own, other, rel_tol=1e-6, abs_tol=1e-9) else float(own > other)

    rows = []
    for i in range(len(mask)):
        group = [score(r, mask, j) for j in members(index, i)]
        rows.append(mean([wins(score(r, mask, i), other) for other in group]) - 0.5)
    return on_tokens(rows, mask)


def gpg(r, mask, index, f_norm=1.0):
    rows, without = [], 0
    for i in range(len(mask)):
        group = [score(r, mask, j) for j in members(index, i)]
        own = score(r, mask, i)
        rows.append((own - mean(group) if len(group) > 1 else own) / f_norm)
        without += all(x == group[0] for x in group) if len(group) > 1 else own == 0
    alpha = len(mask) / max(len(mask) - without, 1)
    return on_tokens([alpha * x for x in rows], mask)


def reinforce_pp_baseline(r, mask, index):
    rows = []
    for i in range(len(mask)):
        group = [score(r, mask, j) for j in members(index, i)]
        rows.append(score(r, mask, i) - (mean(group) if len(group) > 1 else 0.0))
    return whiten(on_tokens(rows, mask), mask)


def spo(r, mask, values):
    distances = [score(r, mask, i) - values[i] for i in range(len(mask))]
    samples = [d for d, row in zip(distances, mask, strict=True) if any(row)]
    centre, count = mean(samples), len(samples)
    std = (sum((d - centre) ** 2 for d in samples) / (count - 1)) ** 0.5 if count > 1 else 1.0
    return on_tokens([(d - centre) / (std + 1e-8) for d in distances], mask)


def flash_reinforce(r, mask):
    counted = [i for i in range(len(mask)) if tokens_of(mask, i)]
    baseline = mean([score(r, mask, i) for i in counted])
    scores = [score(r, mask, i) for i in range(len(mask))]
    return on_tokens([each - baseline for each in scores], mask), on_tokens(scores, mask)


def remax(r, mask, baselines):
    ret = to_go(r, mask, 1.0)
    adv = [[ret[i][t] - baselines[i] if mask[i][t] else 0.0 for t in range(len(mask[i]))] for i in range(len(mask))]
    return adv, ret


def otb(r, mask, index, logp, squares, weights=None, zero_tail=True, epsilon=1e-8, by_token=False):
    """by_token: positions are numbers of response tokens (tool-integrated), else columns."""
    ret = to_go(r, mask, 1.0)
    place = [
        {(a if by_token else t): t for a, t in enumerate(tokens_of(mask, i))} for i in range(len(mask))
    ]  # position -> column
    energy = []
    for i in range(len(mask)):
        total, row = 0.0, {}
        for position, t in sorted(place[i].items()):
            w = 1 - 2 * math.exp(logp[i][t]) + squares[i][t]
            total += w * (weights[i][t] ** 2 if weights else 1.0)
            row[position] = total
        energy.append(row)
    adv = [[0.0] * len(row) for row in mask]
    for i in range(len(mask)):
        group = [j for j in members(index, i) if place[j]]
        ends = sorted((max(place[j]) + 1 for j in group), reverse=True)
        longest = bool(place[i]) and max(place[i]) + 1 == ends[0]
        for position, t in place[i].items():
            at = [j for j in group if position in place[j]]
            b = math.fsum(ret[j][place[j][position]] * energy[j][position] for j in at)
            b /= math.fsum(energy[j][position] for j in at) + epsilon
            if len(group) < 2 or (zero_tail and longest and position >= ends[1]):
                b = 0.0
            adv[i][t] = ret[i][t] - b
    return adv, ret
