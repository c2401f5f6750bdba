"""What the engine computes for distillation, and the policy's loss with it, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distillation_helpers import TOP as K
from distillation_helpers import distilled, taught
from engine_helpers import TEMPERATURE, make_engine, make_fields, plain_logits, related, weights
from transformers import AutoModelForCausalLM

from hybridrl.config.schema.actor import ActorConfig
from hybridrl.config.schema.distillation import DistillationLossConfig
from hybridrl.engine import MicroBatching
from hybridrl.errors import ModelError
from hybridrl.models.tiny import build_tiny_model
from hybridrl.registry import DISTILLATION_LOSSES
from hybridrl.workers.distillation import Distillation, computing

Fields = dict[str, torch.Tensor]
OVER_THE_VOCABULARY = [
    name for name in DISTILLATION_LOSSES.names() if DISTILLATION_LOSSES.metadata(name).reads == "vocabulary"
]


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than the policy, of the same vocabulary."""
    return build_tiny_model(tmp_path_factory.mktemp("teacher"), hidden=64, heads=2, kv_heads=1, seed=3)


def plain_distributions(path: Path, fields: Fields, temperature: float) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model in float64 and its log-probabilities `[N, V]` for each response token, row by row."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    rows = []
    for row in range(len(fields["input_ids"])):
        attention, mask = fields["attention_mask"][row], fields["response_mask"][row].bool()
        logits = plain_logits(module, fields["input_ids"][row], attention) / temperature
        width = attention.shape[0] - mask.shape[0]
        columns = mask.nonzero()[:, 0] + int(attention[:width].sum()) - 1
        rows.append(logits.log_softmax(-1)[columns])
    return module, torch.cat(rows)


def expected_loss(name: str, own: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each token by the textbook, of log-probabilities `[N, V]`."""
    if name == "k3":
        d = (teacher - own).gather(1, labels[:, None])[:, 0]
        return d.exp() - d - 1
    if name == "k1":
        return (own - teacher).gather(1, labels[:, None])[:, 0]
    if name == "forward_kl_topk":
        teacher, ids = teacher.topk(K, dim=1)
        own = own.gather(1, ids)
    p, q = (teacher, own) if name.startswith("forward") else (own, teacher)
    return (p.exp() * (p - q)).sum(1)


@pytest.mark.parametrize("fused", [False, True], ids=["whole logits", "no logits"])
def test_what_a_teacher_says_is_what_a_plain_model_computes(teacher_model: Path, fused: bool) -> None:
    fields = make_fields()
    found = taught(make_engine(teacher_model, model={"use_fused_kernels": fused}), fields)
    _, expected = plain_distributions(teacher_model, fields, TEMPERATURE)
    mask = fields["response_mask"].bool()
    labels = fields["responses"][mask]
    sampled = expected.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(found["teacher_log_probs"][mask].double(), sampled, atol=2e-5, rtol=1e-5)
    top = expected.topk(K, dim=1)
    torch.testing.assert_close(found["teacher_topk_log_probs"][mask].double(), top.values, atol=2e-5, rtol=1e-5)
    assert torch.equal(found["teacher_topk_ids"][mask].long(), top.indices)
    assert found["teacher_topk_ids"].dtype == torch.int32
    assert not found["teacher_topk_log_probs"][~mask].any() and not found["teacher_topk_ids"][~mask].any()


@pytest.mark.parametrize("fused", [False, True], ids=["whole logits", "no logits"])
@pytest.mark.parametrize("name", ["k3", "forward_kl_topk", "reverse_kl"])
def test_loss_and_gradient(name: str, fused: bool, micro_model: Path, teacher_model: Path) -> None:
    """They equal those of a plain PyTorch loop, in one micro-batch and in several, next to the loss on rewards."""
    fields = make_fields()
    teacher = make_engine(teacher_model)
    fields = taught(teacher, fields)
    module, own = plain_distributions(micro_model, fields, TEMPERATURE)
    _, other = plain_distributions(teacher_model, fields, TEMPERATURE)
    mask = fields["response_mask"].bool()
    labels, advantages = fields["responses"][mask], fields["advantages"][mask]
    tokens = expected_loss(name, own, other.detach(), labels)
    log_probs = own.gather(1, labels[:, None])[:, 0]
    task = -(advantages * (log_probs - log_probs.detach()).exp()).mean()  # on-policy: ratio 1, nothing clipped
    whole = task + 0.5 * tokens.mean()
    whole.backward()
    norm = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm().item()
    for micro in (MicroBatching(12), MicroBatching(2)):
        student = make_engine(micro_model, model={"use_fused_kernels": fused})
        found = distilled(student, teacher, fields, micro, loss_mode=name, distillation_loss_coef=0.5)
        assert found["actor/loss"] == pytest.approx(whole.item(), rel=1e-4)
        assert found["distillation/loss"] == pytest.approx(tokens.mean().item(), rel=1e-4)
        assert found["actor/pg_loss"] == pytest.approx(task.item(), rel=1e-4, abs=1e-6)
        assert found["distillation/loss_max"] == pytest.approx(tokens.max().item(), rel=1e-3)
        assert found["distillation/loss_min"] == pytest.approx(tokens.min().item(), rel=1e-3, abs=1e-5)
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-3)
    if name == "forward_kl_topk":
        mass = [x.gather(1, other.topk(K, dim=1).indices).exp().sum(1).mean().item() for x in (own, other)]
        assert [found[f"distillation/{who}_mass"] for who in ("student", "teacher")] == pytest.approx(mass, rel=1e-4)


@pytest.mark.parametrize("name", ["k1", "reverse_kl"])
def test_as_a_reward(name: str, micro_model: Path, teacher_model: Path) -> None:
    """The negative loss is the advantage; its own gradient takes no part, and neither does the reward."""
    teacher = make_engine(teacher_model)
    fields = taught(teacher, make_fields())
    module, own = plain_distributions(micro_model, fields, TEMPERATURE)
    _, other = plain_distributions(teacher_model, fields, TEMPERATURE)
    mask = fields["response_mask"].bool()
    labels = fields["responses"][mask]
    rewards = -expected_loss(name, own, other, labels).clamp(-2, 2).detach()
    log_probs = own.gather(1, labels[:, None])[:, 0]
    # Old log-probabilities of another policy, so that some ratios are clipped by the loss's own range.
    old = log_probs.detach() + torch.linspace(-0.4, 0.4, len(labels))
    ratio = (log_probs - old).exp()
    whole = torch.maximum(-rewards * ratio, -rewards * ratio.clamp(0.9, 1.3)).mean()
    whole.backward()
    norm = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm().item()
    fields["old_log_probs"] = torch.zeros(mask.shape).masked_scatter(mask, old.float())
    loss = {"loss_mode": name, "use_policy_gradient": True, "use_task_rewards": False, "loss_max_clamp": 2.0}
    loss |= {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "distillation_loss_coef": 7.0}
    actor = ActorConfig(clip_ratio=0.5, clip_ratio_low=0.5, clip_ratio_high=0.5, clip_ratio_c=100.0)
    results = []
    for scale in (1.0, -5.0):
        given = fields | {"advantages": scale * fields["advantages"]}
        results.append(distilled(make_engine(micro_model), teacher, given, MicroBatching(5), actor, **loss))
    assert results[0] == results[1]
    assert results[0]["actor/loss"] == results[0]["distillation/loss"] == pytest.approx(whole.item(), rel=1e-3)
    assert results[0]["grad_norm"] == pytest.approx(norm, rel=2e-3)
    assert results[0]["distillation/pg_clipfrac"] > 0 and "actor/pg_loss" not in results[0]


@pytest.mark.parametrize("name", ["k3", "k2", "abs", "forward_kl_topk_tail", "forward_kl", "jsd"])
def test_a_policy_that_is_its_teacher_stays(name: str, micro_model: Path) -> None:
    teacher = make_engine(micro_model)
    fields = taught(teacher, make_fields())
    found = distilled(
        make_engine(micro_model), teacher, fields, MicroBatching(5), loss_mode=name, use_task_rewards=False
    )
    assert abs(found["distillation/loss"]) < 1e-5
    assert found["grad_norm"] < 1e-4 or name == "abs"  # which has no derivative there


def test_without_task_rewards_outside_values_take_no_part(micro_model: Path, teacher_model: Path) -> None:
    """NaN where no response token is: in the teacher's fields, and in the advantages everywhere."""
    teacher = make_engine(teacher_model)
    fields = taught(teacher, make_fields())
    outside = ~fields["response_mask"].bool()
    spoilt = dict(fields) | {"advantages": torch.full_like(fields["advantages"], torch.nan)}
    for name in ("teacher_log_probs", "teacher_topk_log_probs"):
        spoilt[name] = fields[name].clone()
        spoilt[name][outside] = torch.nan
    for name in ("k3", "reverse_kl_topk"):
        loss = {"loss_mode": name, "use_task_rewards": False}
        expected, found = (
            distilled(make_engine(micro_model), teacher, given, MicroBatching(5), **loss) for given in (fields, spoilt)
        )
        assert found == expected and found["grad_norm"] > 0


@pytest.mark.parametrize("fused", [False, True], ids=["whole logits", "no logits"])
@pytest.mark.parametrize("name", OVER_THE_VOCABULARY)
def test_prefixes_that_rows_share(name: str, fused: bool, micro_model: Path, teacher_model: Path) -> None:
    """A policy and its teacher, which compute shared tokens once, compare them as in separate rows."""
    # The update is the gradient: plain SGD without a limit of its norm.
    optim = {"optimizer": "SGD", "lr": 1.0, "lr_warmup_steps": 0, "weight_decay": 0.0, "clip_grad": 1e9}
    fields, results = related(make_fields()), []
    for share in (False, True, None):
        model = {"share_prefixes": share, "use_fused_kernels": fused}
        student, teacher = make_engine(micro_model, optim=optim, model=model), make_engine(teacher_model, model=model)
        before = weights(student)
        found = distilled(student, teacher, fields, MicroBatching(5), loss_mode=name, use_task_rewards=False)
        assert (0 < found.pop("shared_prefix_frac", 0.0) < 1) == (share is not False)
        found.pop("shared_flops_frac", None)
        results.append((found, {key: tensor - before[key] for key, tensor in weights(student).items()}))
    expected, moved = results[0]
    assert expected["distillation/loss"] > 1e-3
    for metrics, changes in results[1:]:
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
        for key, change in changes.items():
            assert float((change - moved[key]).norm()) <= 1e-5 * float(moved[key].norm()) + 1e-6, key


def test_a_teacher_of_rows_and_prefixes_that_rows_share_exclude_each_other(micro_model: Path) -> None:
    student = make_engine(micro_model, model={"share_prefixes": True})
    top = Distillation(DistillationLossConfig(loss_mode="forward_kl_topk"), "top").function([])
    whole = Distillation(DistillationLossConfig(loss_mode="jsd"), "vocabulary").function([make_engine(micro_model)])
    for function, message in (
        (top, r"teacher_topk_ids belong to single rows, and model\.share_prefixes=True"),
        (whole, r"loss over the vocabulary compares both models on the same micro-batches"),
    ):
        with pytest.raises(ModelError, match=message), computing(student, function):
            pass
