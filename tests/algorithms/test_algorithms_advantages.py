"""Every estimator against the loops of `paper_advantages`, and what must not change its result."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import paper_advantages as paper
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from raising import raises_with

import hybridrl.algorithms as algorithms
from hybridrl.algorithms import AlgorithmError, estimate_advantages, get_adv_estimator_fn

torch.set_num_threads(1)
CONFIG = SimpleNamespace(gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=True, gdpo_reward_keys=["a", "b"],
                         gdpo_reward_weights=[0.3, 2.0])  # fmt: skip
NAMES = [e.value for e in algorithms.AdvantageEstimator]
REWARDS = "token_level_rewards"


@dataclass
class Batch:
    """Random tensors of one batch; ``tensors`` in float64."""

    tensors: dict[str, torch.Tensor]
    others: dict[str, np.ndarray]

    def lists(self, name: str) -> list:
        return self.tensors[name].tolist()

    def run(self, name: str, config: object = CONFIG) -> tuple[torch.Tensor, torch.Tensor]:
        return estimate_advantages(name, self.tensors | {REWARDS: self.rewards(name)}, self.others, config)

    def rewards(self, name: str) -> torch.Tensor:
        """The rewards that an estimator gets: `maxrl` refuses negative ones."""
        return self.tensors[REWARDS].abs() if name == "maxrl" else self.tensors[REWARDS]


def make(seed: int, rows: int, width: int, holes: bool, sparse: bool, least: int = 1) -> Batch:
    """``least`` samples a group at least; rewards are discrete so that ties and uniform groups occur."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((rows, width), dtype=np.int64)
    for i in range(rows):
        mask[i, : rng.integers(0 if i > 1 else 1, width + 1)] = 1
        if holes:
            mask[i] *= rng.random(width) > 0.3
    mask[0] = 1  # a batch of fewer than two tokens has no variance
    ids = np.sort(rng.integers(0, max(rows // max(least, 2), 1), rows)) if least < 2 else np.arange(rows) // least
    if least > 1:
        ids[rows - rows % least :] = 0
    rng.shuffle(ids)
    rewards = rng.integers(0, 3, (rows, width)) / 2.0 if sparse else rng.normal(size=(rows, width))
    tensors = {
        "token_level_rewards": rewards,
        "values": rng.normal(size=(rows, width)),
        "process_rewards": rng.normal(size=(rows, width)),
        "old_log_probs": -rng.exponential(size=(rows, width)),
        "sum_pi_squared": rng.random((rows, width)),
        "rollout_is_weights": rng.random((rows, width)) * 2,
        "reward_baselines": rng.normal(size=rows),
        "prompt_values": rng.random(rows),
    }
    batch = {name: torch.tensor(value, dtype=torch.float64) for name, value in tensors.items()}
    batch["response_mask"] = torch.tensor(mask)
    ends = mask * (1 - np.pad(mask[:, 1:], ((0, 0), (0, 1))))  # turns are runs of response tokens
    batch["turn_states"] = torch.tensor(ends * rng.integers(0, 4, (rows, width)) * 7)
    batch["turn_states"][0, int(ends[0].argmax())] = 7
    others = {"uid": np.array([f"prompt-{i}" for i in ids], dtype=object)}
    others |= {key: rng.normal(size=rows).astype(object) for key in "ab"}
    return Batch(batch, others)


shapes = st.builds(make, st.integers(0, 10**6), st.integers(2, 9), st.integers(2, 6), st.booleans(), st.booleans())
paired = st.builds(
    make, st.integers(0, 10**6), st.integers(2, 9), st.integers(2, 6), st.booleans(), st.booleans(), st.just(2)
)
many = settings(max_examples=40, derandomize=True)


def expected(name: str, b: Batch) -> tuple[list, list]:
    r, mask, index = b.rewards(name).tolist(), b.lists("response_mask"), list(b.others["uid"])
    if name == "gae":
        return paper.gae(r, b.lists("values"), mask, 0.9, 0.8)
    if name == "reinforce_plus_plus":
        ret = paper.to_go(r, mask, 0.9)
        return paper.whiten(ret, mask), ret
    if name == "prime":
        advantages = paper.prime(r, b.lists("process_rewards"), mask, index, 0.9)
        return advantages, advantages
    if name == "gigpo":
        advantages = paper.gigpo(r, mask, index, b.lists("turn_states"), 0.9)
        return advantages, advantages
    if name == "flash_reinforce":
        return paper.flash_reinforce(r, mask)
    if name == "spo":
        advantages = paper.spo(r, mask, b.lists("prompt_values"))
        return advantages, advantages
    if name == "remax":
        return paper.remax(r, mask, b.lists("reward_baselines"))
    if "optimal" in name:
        args = (r, mask, index, b.lists("old_log_probs"), b.lists("sum_pi_squared"), b.lists("rollout_is_weights"))
        return paper.otb(*args, by_token=name.startswith("tir"))
    by_group = {
        "grpo": lambda: paper.grpo(r, mask, index),
        "grpo_vectorized": lambda: paper.grpo(r, mask, index),
        "grpo_passk": lambda: paper.passk(r, mask, index),
        "gdpo": lambda: paper.gdpo(mask, index, [b.others["a"], b.others["b"]], [0.3, 2.0]),
        "rloo": lambda: paper.rloo(r, mask, index),
        "rloo_vectorized": lambda: paper.rloo(r, mask, index, alone_is_zero=True),
        "opo": lambda: paper.opo(r, mask, index),
        "gpg": lambda: paper.gpg(r, mask, index),
        "sppo": lambda: paper.sppo(r, mask, index),
        "maxrl": lambda: paper.maxrl(r, mask, index),
        "grpo_turns": lambda: paper.grpo_turns(r, mask, index),
        "reinforce_plus_plus_baseline": lambda: paper.reinforce_pp_baseline(r, mask, index),
    }
    advantages = by_group[name]()
    return advantages, advantages


def same(found: torch.Tensor, wanted: list | torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=found.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "grpo_passk"])
@many
@given(batch=shapes)
def test_equals_the_paper(name: str, batch: Batch) -> None:
    for found, wanted in zip(batch.run(name), expected(name, batch), strict=True):
        same(found, wanted)


@many
@given(batch=shapes)
def test_sppo_with_probabilities_equals_the_paper(batch: Batch) -> None:
    r, mask, index = batch.lists("token_level_rewards"), batch.lists("response_mask"), list(batch.others["uid"])
    same(batch.run("sppo", SimpleNamespace(sppo_preference_scale=0.7))[0], paper.sppo(r, mask, index, scale=0.7))


@pytest.mark.parametrize("samples", [2, 3, 4, 6])
@pytest.mark.parametrize("p", [0.03, 0.3, 0.8])
def test_the_gradient_of_maxrl_is_that_of_pass_at_k(samples: int, p: float) -> None:
    """Of one prompt with success probability p = sigmoid(theta), by complete enumeration of the outcomes."""
    gradient = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=samples):
        rewards = torch.tensor(outcome, dtype=torch.float64)[:, None]
        advantages, _ = get_adv_estimator_fn("maxrl")(rewards, torch.ones_like(rewards), np.zeros(samples, dtype=int))
        slopes = [(1 - p) if each else -p for each in outcome]  # of the log-probabilities, in theta
        probability = math.prod(p if each else 1 - p for each in outcome)
        gradient += probability * sum(a * s for a, s in zip(advantages[:, 0].tolist(), slopes, strict=True)) / samples
    pass_at_k = sum((1 - p) ** (k - 1) for k in range(1, samples))  # sum of (1 / k) d/dp (1 - (1 - p)^k)
    assert gradient == pytest.approx(pass_at_k * p * (1 - p), rel=1e-12)


def test_maxrl_refuses_negative_rewards() -> None:
    with raises_with(AlgorithmError, "maxrl", "rows [1]"):
        get_adv_estimator_fn("maxrl")(torch.tensor([[1.0], [-0.5]]), torch.ones(2, 1), np.array([0, 0]))


@many
@given(batch=paired)
def test_passk_equals_the_paper(batch: Batch) -> None:
    same(batch.run("grpo_passk")[0], expected("grpo_passk", batch)[0])
    without = SimpleNamespace(norm_adv_by_std_in_grpo=False)
    r, mask = batch.lists("token_level_rewards"), batch.lists("response_mask")
    same(batch.run("grpo_passk", without)[0], paper.passk(r, mask, list(batch.others["uid"]), by_std=False))


@many
@given(batch=shapes)
def test_dr_grpo_is_grpo_without_the_spread(batch: Batch) -> None:
    r, mask, index = batch.lists("token_level_rewards"), batch.lists("response_mask"), batch.others["uid"]
    wanted = paper.grpo(r, mask, list(index), by_std=False)
    tensors = (batch.tensors["token_level_rewards"], batch.tensors["response_mask"], index)
    for name in ("grpo", "grpo_vectorized"):
        fn = get_adv_estimator_fn(name)
        same(fn(*tensors, norm_adv_by_std_in_grpo=False)[0], wanted)
        # verl's vectorised form is handed the config alone and ignores the setting in it.
        same(fn(*tensors, config=SimpleNamespace(norm_adv_by_std_in_grpo=False))[0], wanted)


@many
@given(batch=shapes)
def test_otb_without_weights_and_without_the_zero_tail(batch: Batch) -> None:
    args = [batch.tensors[k] for k in ("token_level_rewards", "response_mask")] + [batch.others["uid"]]
    args += [batch.tensors[k] for k in ("old_log_probs", "sum_pi_squared")]
    lists = [x if isinstance(x, list) else x.tolist() for x in args]
    for tir in (False, True):
        fn = get_adv_estimator_fn("tir_optimal_token_baseline" if tir else "optimal_token_baseline")
        same(fn(*args, handle_zero_tail=False)[0], paper.otb(*lists, zero_tail=False, by_token=tir)[0])


@many
@given(batch=shapes)
def test_prime_with_weights_and_the_scales_of_its_authors(batch: Batch) -> None:
    r, mask, index = batch.lists("token_level_rewards"), batch.lists("response_mask"), list(batch.others["uid"])
    process = batch.lists("process_rewards")
    scales = SimpleNamespace(gamma=1.0, reward_dpo_coef=0.5, reward_gt_coef=3.0, prime_norm="batch_norm")
    largest = max(abs(x) for row in paper.to_go(process, mask, 1.0) for x in row) + 1e-6
    wanted = paper.prime(r, [[x / largest for x in row] for row in process], mask, index, 1.0, 0.5, 3.0)
    same(batch.run("prime", scales)[0], wanted)
    scales.prime_whiten = True
    advantages, returns = batch.run("prime", scales)
    same(advantages, paper.whiten(wanted, mask))
    same(returns, wanted)


@many
@given(batch=paired, by_std=st.booleans())
def test_gigpo_with_its_settings_equals_the_paper(batch: Batch, by_std: bool) -> None:
    r, mask, index = batch.lists("token_level_rewards"), batch.lists("response_mask"), list(batch.others["uid"])
    mode = "mean_std_norm" if by_std else "mean_norm"
    config = SimpleNamespace(gamma=0.5, gigpo_step_advantage_w=0.3, gigpo_mode=mode)
    wanted = paper.gigpo(r, mask, index, batch.lists("turn_states"), 0.5, 0.3, by_std)
    same(batch.run("gigpo", config)[0], wanted)
    config.gigpo_step_advantage_w = 0.0  # then it is GRPO
    same(batch.run("gigpo", config)[0], paper.grpo(r, mask, index, by_std=by_std))


@many
@given(batch=paired)
def test_how_many_turns_a_sample_has_does_not_matter_where_only_the_last_is_rewarded(batch: Batch) -> None:
    """GiGPO in situations that never repeat, and GAE with gamma = lambda = 1, whatever the holes between turns."""
    mask = batch.tensors["response_mask"].bool()
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    rewards = torch.where(last, batch.tensors["token_level_rewards"], 0.0)
    states = torch.arange(1, mask.numel() + 1).view_as(mask) * (batch.tensors["turn_states"] > 0)
    if not states.any():
        return
    tensors = batch.tensors | {"token_level_rewards": rewards, "turn_states": states}
    found = Batch(tensors, batch.others).run("gigpo")[0]
    same(found, paper.grpo(rewards.tolist(), mask.long().tolist(), list(batch.others["uid"]), by_std=False))
    packed = {"response_mask": torch.zeros_like(batch.tensors["response_mask"])}
    for name in ("token_level_rewards", "values"):
        packed[name] = torch.zeros_like(tensors[name])
    for row in range(len(mask)):  # the same tokens without holes: one turn
        count = int(mask[row].sum())
        packed["response_mask"][row, :count] = 1
        for name in ("token_level_rewards", "values"):
            packed[name][row, :count] = tensors[name][row, mask[row]]
    ones = SimpleNamespace(gamma=1.0, lam=1.0)
    merged = Batch(packed, batch.others).run("gae", ones)[0][packed["response_mask"].bool()]
    same(Batch(tensors, batch.others).run("gae", ones)[0][mask], merged)


@many
@given(batch=paired)
def test_turns_that_follow_each_other_without_a_hole_are_told_apart_by_their_states(batch: Batch) -> None:
    """As where the rows of a session are joined."""
    tensors = dict(batch.tensors)
    tensors["turn_states"] = torch.where(tensors["response_mask"].bool(), 5, 0)  # every token is a turn
    wide = {}
    for name in ("response_mask", "token_level_rewards", "turn_states"):
        wide[name] = torch.zeros(*tensors[name].shape, 2, dtype=tensors[name].dtype)
        wide[name][..., 0] = tensors[name]
        wide[name] = wide[name].flatten(1)  # a hole behind each token
    for name in ("grpo_turns", "gigpo"):
        same(Batch(wide, batch.others).run(name)[0][:, ::2], Batch(tensors, batch.others).run(name)[0])


def test_gigpo_without_states_is_refused() -> None:
    batch = make(1, 4, 5, True, True)
    batch.tensors["turn_states"].zero_()
    with pytest.raises(AlgorithmError, match="no turn of the batch has a state"):
        batch.run("gigpo")
    del batch.tensors["turn_states"]
    with pytest.raises(AlgorithmError, match="sessions on environments"):
        batch.run("gigpo")


def padded(batch: Batch, extra: int) -> Batch:
    """More columns, and garbage everywhere outside the mask."""
    mask = batch.tensors["response_mask"]
    tensors = {}
    for name, value in batch.tensors.items():
        if value.dim() == 2:
            value = torch.nn.functional.pad(value, (0, extra))
        if value.dim() == 2 and name != "response_mask":
            outside = torch.nn.functional.pad(mask, (0, extra)) == 0
            value = value.masked_fill(outside, torch.nan if value.is_floating_point() else 99)
        tensors[name] = value
    return Batch(tensors, batch.others)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, derandomize=True)
@given(batch=paired)
def test_padding_and_what_stands_in_it_change_nothing(name: str, batch: Batch) -> None:
    width = batch.tensors["response_mask"].shape[1]
    for found, wanted in zip(padded(batch, 3).run(name), batch.run(name), strict=True):
        same(found[:, :width], wanted)
        assert not found[:, width:].any()
        assert not found[:, :width][batch.tensors["response_mask"] == 0].any()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "grpo_passk"])
@settings(max_examples=10, derandomize=True)
@given(batch=shapes, seed=st.integers(0, 99))
def test_the_order_of_rows_changes_nothing(name: str, batch: Batch, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(batch.others["uid"]))
    moved = Batch(
        {k: v[torch.tensor(order)] for k, v in batch.tensors.items()}, {k: v[order] for k, v in batch.others.items()}
    )
    for found, wanted in zip(moved.run(name), batch.run(name), strict=True):
        same(found, wanted[torch.tensor(order)])


def test_passk_gives_the_first_of_equals() -> None:
    rewards = torch.tensor([[1.0], [3.0], [3.0], [0.0]])
    advantages, _ = get_adv_estimator_fn("grpo_passk")(rewards, torch.ones(4, 1), np.array([0, 0, 1, 1]), config=None)
    gain = (3 - 1) / (np.std([1, 3], ddof=1) + 1e-6), (3 - 0) / (np.std([3, 0], ddof=1) + 1e-6)
    same(advantages[:, 0], [0.0, gain[0], gain[1], 0.0], 1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg", "reinforce_plus_plus_baseline", "grpo_passk", "gae"])
@settings(max_examples=10, derandomize=True)
@given(batch=paired, shift=st.floats(-5, 5))
def test_a_constant_added_to_every_score_of_a_group_changes_nothing(name: str, batch: Batch, shift: float) -> None:
    if name == "gae":
        # For GAE it is the critic's baseline: shifting the last reward and all values at gamma = 1 leaves the deltas.
        config = SimpleNamespace(gamma=1.0, lam=0.8)
        rows = torch.arange(len(batch.others["uid"]))
        mask = batch.tensors["response_mask"]
        last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(-1)
        moved = dict(batch.tensors)
        moved["token_level_rewards"] = batch.tensors["token_level_rewards"].clone()
        moved["token_level_rewards"][rows, last] += shift
        moved["values"] = batch.tensors["values"] + shift
        same(Batch(moved, batch.others).run(name, config)[0], batch.run(name, config)[0], 1e-7)
        return
    mask = batch.tensors["response_mask"]
    first = mask.argmax(-1)
    rows = torch.arange(len(mask))
    if not bool(mask.any(-1).all()):
        return  # a sample without a token has no place for a score
    moved = dict(batch.tensors)
    moved["token_level_rewards"] = batch.tensors["token_level_rewards"].clone()
    moved["token_level_rewards"][rows, first] += shift
    if name == "gpg":  # equal scores stay equal, but only up to rounding: compare the direction
        base, other = batch.run(name)[0], Batch(moved, batch.others).run(name)[0]
        scale = base.abs().max().clamp(min=1e-12) / other.abs().max().clamp(min=1e-12)
        if float(base.abs().max()) > 1e-6:
            same(other * scale, base, 1e-6)
        return
    # Uniform groups divide rounding errors by epsilon = 1e-6.
    same(Batch(moved, batch.others).run(name)[0], batch.run(name)[0], 1e-6)


@settings(max_examples=20, derandomize=True)
@given(batch=paired, scale=st.floats(0.5, 20))
def test_grpo_does_not_feel_the_scale_of_rewards_and_dr_grpo_does(batch: Batch, scale: float) -> None:
    tensors = (batch.tensors["response_mask"], batch.others["uid"])
    fn = get_adv_estimator_fn("grpo")
    r = batch.tensors["token_level_rewards"]
    same(fn(r * scale, *tensors, epsilon=0.0 + 1e-12)[0], fn(r, *tensors, epsilon=1e-12)[0], 1e-5)
    same(fn(r * scale, *tensors, norm_adv_by_std_in_grpo=False)[0],
         fn(r, *tensors, norm_adv_by_std_in_grpo=False)[0] * scale, 1e-9)  # fmt: skip


def test_equal_rewards_give_exactly_zero_in_float32() -> None:
    rewards = torch.full((12, 1), 0.1)
    index = np.array(["x"] * 5 + ["y"] * 7, dtype=object)
    for name in ("grpo", "rloo", "rloo_vectorized", "grpo_passk", "gpg"):
        assert not get_adv_estimator_fn(name)(rewards, torch.ones(12, 1), index)[0].any()


def test_blocks_of_rows_do_not_show() -> None:
    # More rows than a block of the scan and of the row sums, in float32.
    rng = np.random.default_rng(0)
    rows, width = 4500, 70
    mask = torch.tensor((np.arange(width) < rng.integers(1, width + 1, (rows, 1))).astype(np.int64))
    mask[7, 3] = 0  # one hole, in the first block only
    rewards, values = (torch.tensor(rng.normal(size=(rows, width)), dtype=torch.float32) for _ in range(2))
    index = np.arange(rows) // 5
    advantages, returns = algorithms.compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    some = [0, 7, 2047, 2048, 4499]
    pick = [x[some].tolist() for x in (rewards, values, mask)]
    same(returns[some], paper.gae(*pick, 0.99, 0.95)[1], 1e-4)
    assert abs(float(advantages[mask.bool()].mean())) < 1e-5
    assert abs(float(advantages[mask.bool()].std()) - 1) < 1e-4
    grpo = algorithms.compute_grpo_outcome_advantage(rewards, mask, index)[0]
    same(grpo[:10], paper.grpo(rewards[:10].tolist(), mask[:10].tolist(), index[:10].tolist()), 1e-4)
    same(grpo[-5:], paper.grpo(rewards[-5:].tolist(), mask[-5:].tolist(), [0] * 5), 1e-4)


def sessions(batch: Batch) -> tuple[Batch, Batch, torch.Tensor, torch.Tensor]:
    """(rows of a session in one long row, the same cut into pieces and shuffled, where each piece came from)."""
    rows, width = batch.tensors["response_mask"].shape
    half = width // 2
    width = 2 * half
    order = torch.tensor(np.random.default_rng(0).permutation(2 * rows))
    origin, part = order % rows, order // rows
    pieces = {}
    for name, value in batch.tensors.items():
        if value.dim() == 1:
            pieces[name] = value[origin]
        else:
            pieces[name] = torch.stack([value[i, p * half : (p + 1) * half] for i, p in zip(origin, part, strict=True)])
    whole = {k: v[:, :width] if v.dim() == 2 else v for k, v in batch.tensors.items()}
    others = {k: v[origin.numpy()] for k, v in batch.others.items()}
    # Numbers that are only unique within a prompt, as an agent loop numbers its samples.
    numbers: dict[str, list[int]] = {}
    session = []
    for i in range(rows):
        peers = numbers.setdefault(batch.others["uid"][i], [])
        session.append(len(peers))
        peers.append(i)
    others["session_id"] = np.array(session, dtype=object)[origin.numpy()]
    others["trajectory_index"] = part.numpy()
    for name in CONFIG.gdpo_reward_keys:  # of a session's rows, both have a share of a component, or one has it all
        shares = [None if int(i) % 2 and p else 1.0 if int(i) % 2 else 0.5 for i, p in zip(origin, part, strict=True)]
        values = [share and share * value for share, value in zip(shares, others[name], strict=True)]
        others[name] = np.array(values, dtype=object)
    return Batch(whole, batch.others), Batch(pieces, others), origin, part


@pytest.mark.parametrize("name", [n for n in NAMES if n != "grpo_passk"])
@settings(max_examples=10, derandomize=True)
@given(batch=shapes)
def test_a_session_in_several_rows_counts_once_and_keeps_its_credit(name: str, batch: Batch) -> None:
    whole, pieces, origin, part = sessions(batch)
    assume(name != "gigpo" or (whole.tensors["turn_states"] * whole.tensors["response_mask"]).any())
    half = pieces.tensors["response_mask"].shape[1]
    for found, wanted in zip(pieces.run(name), whole.run(name), strict=True):
        same(found, torch.stack([wanted[i, p * half : (p + 1) * half] for i, p in zip(origin, part, strict=True)]))


def test_gpg_departs_from_verl_in_its_factor() -> None:
    # Three groups: right and wrong, all right, all wrong. The paper leaves out M = 4 of B = 6 samples: alpha = 3.
    # verl counts non-zero rewards, 3 of 6: alpha = 2.
    rewards = torch.tensor([[1.0], [0.0], [1.0], [1.0], [0.0], [0.0]])
    index = np.array([0, 0, 1, 1, 2, 2])
    advantages, _ = algorithms.compute_gpg_outcome_advantage(rewards, torch.ones(6, 1), index)
    same(advantages[:, 0], [1.5, -1.5, 0.0, 0.0, 0.0, 0.0])
    verl = torch.tensor([0.5, -0.5, 0, 0, 0, 0]) * 6 / 3
    assert not torch.allclose(advantages[:, 0], verl)
    same(algorithms.compute_gpg_outcome_advantage(rewards, torch.ones(6, 1), index, alpha=2 / 3)[0][:, 0], verl)


def test_rewards_outside_the_mask_do_not_count_as_they_do_in_verl() -> None:
    rewards, mask = torch.tensor([[1.0, 5.0], [0.0, 0.0]]), torch.tensor([[1, 0], [1, 1]])
    index = np.array([0, 0])
    same(algorithms.compute_rloo_outcome_advantage(rewards, mask, index)[0], [[1.0, 0.0], [-1.0, -1.0]])
    verl = rewards.sum(-1)[0] - rewards.sum(-1)[1]
    assert float(verl) == 6.0


@pytest.mark.parametrize("name", NAMES)
def test_rewards_that_are_not_finite_are_named_by_row(name: str) -> None:
    batch = make(3, 6, 4, holes=False, sparse=False, least=2)
    batch.tensors["token_level_rewards"] = batch.tensors["token_level_rewards"].clone()
    batch.tensors["token_level_rewards"][0, 1] = torch.nan
    with raises_with(AlgorithmError, "token_level_rewards", "NaN", "[0]"):
        batch.run(name)


def test_what_an_estimator_misses_is_named_with_the_setting_that_provides_it() -> None:
    for name, needed in {
        "gae": "critic", "remax": "greedy baseline", "optimal_token_baseline": "calculate_sum_pi_squared=True",
        "gdpo": "gdpo_reward_keys", "grpo": "uid",
    }.items():  # fmt: skip
        with pytest.raises(AlgorithmError, match=needed):
            algorithms.check_adv_inputs(name, ["token_level_rewards", "response_mask"], SimpleNamespace(gamma=1.0))
    algorithms.check_adv_inputs("gae", ["values"])


def test_bad_input_says_what_to_change() -> None:
    ones = torch.ones(2, 1)
    with raises_with(AlgorithmError, "gamma", "1.5", "[0, 1]"):
        algorithms.compute_gae_advantage_return(ones, ones, ones, 1.5, 1.0)
    with raises_with(AlgorithmError, "index", "3 entries", "2 rows"):
        algorithms.compute_grpo_outcome_advantage(ones, ones, np.arange(3))
    with raises_with(AlgorithmError, "[1]", "rollout.n"):
        algorithms.compute_grpo_passk_outcome_advantage(torch.ones(3, 1), torch.ones(3, 1), np.array([0, 1, 0]))
    with raises_with(AlgorithmError, "names ['b']", "['a']"):
        config = SimpleNamespace(gdpo_reward_keys=["a", "b"])
        algorithms.compute_gdpo_outcome_advantage(
            ones, ones, np.arange(2), config=config, non_tensor_batch={"a": [1, 2]}
        )
    with raises_with(AlgorithmError, "reward_baselines"):
        algorithms.compute_remax_outcome_advantage(ones, torch.ones(3), ones)
    with pytest.raises(AlgorithmError, match="single response token"):
        algorithms.compute_gae_advantage_return(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), 1.0, 1.0)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "NoneType"),
        (torch.ones(2, 3), r"shape \[2, 3\], which is not a pair"),
        ((torch.ones(2), torch.ones(2)), r"shape \[2\], a tensor of shape \[2\]"),
        ((torch.ones(2, 3),) * 3, r"a tensor of shape \[2, 3\], a tensor.* not a pair"),
        ((), "nothing"),
    ],
)
def test_an_estimator_with_another_result_is_told_the_form(monkeypatch, result, said):
    monkeypatch.setitem(algorithms.ADV_ESTIMATOR_REGISTRY, "odd", lambda token_level_rewards, response_mask: result)
    tensors = {"token_level_rewards": torch.ones(2, 3), "response_mask": torch.ones(2, 3)}
    with pytest.raises(AlgorithmError, match=rf"adv_estimator=odd returned .*{said}.*\(advantages, returns\)"):
        estimate_advantages("odd", tensors, {}, None)


def test_an_estimator_with_other_parameters_is_told_the_form(monkeypatch):
    monkeypatch.setitem(algorithms.ADV_ESTIMATOR_REGISTRY, "odd", lambda rewards, mask: (rewards, rewards))
    with raises_with(AlgorithmError, "misses rewards", "mask", "token_level_rewards, response_mask"):
        algorithms.check_adv_inputs("odd", {"uid"})
