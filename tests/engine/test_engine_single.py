"""One rank: the engine against a plain PyTorch loop, and everything that must not change a result."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from engine_helpers import (
    PROMPT,
    RESPONSE,
    TEMPERATURE,
    full_kl_loss,
    make_batch,
    make_engine,
    make_fields,
    plain_logits,
    plain_outputs,
    policy_loss,
    value_loss,
    weights,
)
from raising import raises_with
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from hybridrl.engine import MicroBatching, NonFiniteError, create_train_engine
from hybridrl.errors import ModelError
from hybridrl.models.attention import takes_boundaries
from hybridrl.utils.metrics import merge_metrics

FIELDS = make_fields()


def test_infer_equals_textbook(micro_model: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32)
    with torch.no_grad():
        log_probs, entropies = plain_outputs(plain, FIELDS)
    engine = make_engine(micro_model)
    got = engine.infer(make_batch(FIELDS), MicroBatching(size=5), TEMPERATURE, ("log_probs", "entropy"))
    torch.testing.assert_close(got["log_probs"], log_probs, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got["entropy"], entropies, atol=2e-6, rtol=1e-5)
    assert set(engine.infer(make_batch(FIELDS), MicroBatching(), TEMPERATURE)) == {"log_probs"}


@pytest.mark.parametrize(
    "micro", [MicroBatching(size=1), MicroBatching(max_tokens=30), MicroBatching(size=4, max_tokens=64)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_and_packing_change_nothing(micro_model: Path, micro: MicroBatching, packed: bool) -> None:
    reference = make_engine(micro_model)
    engine = make_engine(micro_model)
    engine.packed = packed  # type: ignore[attr-defined]
    batch = make_batch(FIELDS)
    for _ in range(2):
        expected = merge_metrics(
            [reference.train_batch(batch, MicroBatching(), policy_loss, TEMPERATURE, entropy=True)]
        )
        got = merge_metrics([engine.train_batch(batch, micro, policy_loss, TEMPERATURE, entropy=True)])
        for name, metric in expected.items():
            assert float(got[name].value) == pytest.approx(float(metric.value), rel=2e-5, abs=1e-6), name
    for name, tensor in weights(reference).items():
        torch.testing.assert_close(weights(engine)[name], tensor, atol=2e-5, rtol=1e-4)
    before, after = (e.infer(batch, MicroBatching(size=3), TEMPERATURE)["log_probs"] for e in (reference, engine))
    torch.testing.assert_close(after, before, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_three_steps_equal_a_plain_loop(micro_model: Path, checkpointing: bool) -> None:
    plain = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-5, fused=False)
    # Gradients that are 0 but for rounding (a key's bias) would be blown up by Adam's default epsilon.
    optim = {"override_optimizer_config": {"eps": 1e-5}}
    engine = make_engine(micro_model, optim=optim, model={"enable_gradient_checkpointing": checkpointing})
    batch, mask = make_batch(FIELDS), FIELDS["response_mask"]
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step / 2 if step < 2 else 1 - (step - 2) / 6)
        log_probs, entropies = plain_outputs(plain, FIELDS)
        loss = -((log_probs * FIELDS["advantages"] + 0.01 * entropies) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        got = merge_metrics([engine.train_batch(batch, MicroBatching(size=3), policy_loss, TEMPERATURE, entropy=True)])
        assert got["loss"].value == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)  # terms of both signs cancel
        assert got["grad_norm"].value == pytest.approx(norm.item(), rel=1e-4)
        assert got["lr"].value == pytest.approx(optimizer.param_groups[0]["lr"])
        assert got["log_prob"].value == pytest.approx(((log_probs * mask).sum() / mask.sum()).item(), rel=1e-5)
    trained = dict(plain.named_parameters())
    for name, tensor in weights(engine).items():
        torch.testing.assert_close(tensor, trained[name].detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("micro", [MicroBatching(size=1), MicroBatching(size=5)])
def test_full_kl_equals_a_float64_loop(micro_model: Path, tmp_path: Path, micro: MicroBatching) -> None:
    torch.manual_seed(11)
    other = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32)
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    shutil.copytree(micro_model, tmp_path / "other")
    other.save_pretrained(tmp_path / "other")

    sgd = {"optimizer": "SGD", "lr": 0.1, "lr_warmup_steps": 0, "weight_decay": 0.0, "lr_scheduler_type": "constant"}
    engine = make_engine(micro_model, optim=sgd)
    engine.compare_with(make_engine(tmp_path / "other", forward_only=True))
    batch, mask = make_batch(FIELDS), FIELDS["response_mask"]
    found = engine.infer(batch, micro, TEMPERATURE, ("log_probs", "ref_kl"))

    plain = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float64)
    reference = other.double()
    log_probs, _ = plain_outputs(plain, FIELDS)
    rows = []
    for row in range(len(mask)):
        ids, attention = FIELDS["input_ids"][row], FIELDS["attention_mask"][row]
        log_p = (plain_logits(plain, ids, attention) / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            log_q = (plain_logits(reference, ids, attention) / TEMPERATURE).log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        start = int(attention[:PROMPT].sum()) - 1
        line = [kl[start + t] if mask[row, t] else torch.zeros((), dtype=torch.float64) for t in range(RESPONSE)]
        rows.append(torch.stack(line))
    kl = torch.stack(rows)
    assert kl[mask.bool()].mean() > 0.01
    torch.testing.assert_close(found["ref_kl"], kl.detach().float(), atol=2e-6, rtol=1e-4)

    loss = (-(log_probs * FIELDS["advantages"] * mask).sum() + 0.5 * (kl * mask).sum()) / mask.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    for parameter in plain.parameters():
        parameter.data -= 0.1 * parameter.grad
    metrics = merge_metrics([engine.train_batch(batch, micro, full_kl_loss, TEMPERATURE, ref_kl=True)])
    assert metrics["ref_kl"].value == pytest.approx(((kl * mask).sum() / mask.sum()).item(), rel=1e-5)
    trained = dict(plain.named_parameters())
    for name, tensor in weights(engine).items():
        torch.testing.assert_close(tensor, trained[name].detach().float(), atol=1e-6, rtol=1e-5)


def test_padding_of_the_batch_changes_nothing(micro_model: Path) -> None:
    wider = {}
    for name, tensor in FIELDS.items():
        left = 4 if tensor.shape[1] != RESPONSE and name != "responses" else 0
        right = 3 if name != "prompts" else 0
        wider[name] = torch.nn.functional.pad(tensor, (left, right))
    engine = make_engine(micro_model)
    expected = engine.infer(make_batch(FIELDS), MicroBatching(size=4), TEMPERATURE)["log_probs"]
    got = engine.infer(make_batch(wider), MicroBatching(size=7), TEMPERATURE)["log_probs"]
    torch.testing.assert_close(got[:, :RESPONSE], expected, atol=2e-6, rtol=1e-5)
    assert not got[:, RESPONSE:].any()


def test_loss_sees_trimmed_rows(micro_model: Path) -> None:
    seen = []

    def loss_fn(outputs, micro):  # type: ignore[no-untyped-def]
        width = outputs["log_probs"].shape[1]
        for name in ("response_mask", "responses", "advantages"):
            assert micro.batch[name].shape == outputs["log_probs"].shape
        assert torch.equal(micro.batch["input_ids"][:, -width:], micro.batch["responses"])
        assert micro.batch["attention_mask"][:, 0].any()
        assert micro.batch["response_mask"][:, -1].any()
        assert micro.meta_info["response_width"] == RESPONSE
        assert (micro.batch["response_mask"].sum(1) > 0).all()
        seen.append(len(micro))
        return policy_loss(outputs, micro)

    make_engine(micro_model).train_batch(make_batch(FIELDS), MicroBatching(size=2), loss_fn, TEMPERATURE)
    assert sum(seen) == len(FIELDS["input_ids"]) - 1 and max(seen) <= 2


def test_bf16_keeps_float32_masters(micro_model: Path) -> None:
    engine = make_engine(micro_model, dtype="bfloat16", optim={"lr": 1e-5, "lr_warmup_steps": 0})
    exact = make_engine(micro_model)
    before = weights(engine)
    batch = make_batch(FIELDS)
    expected = exact.infer(batch, MicroBatching(), TEMPERATURE)["log_probs"]
    got = engine.infer(batch, MicroBatching(), TEMPERATURE)["log_probs"]
    assert 0 < (got - expected).abs().max() < 0.05
    engine.train_batch(batch, MicroBatching(size=4), policy_loss, TEMPERATURE)
    for name, tensor in weights(engine).items():
        assert tensor.dtype == torch.float32
        # A bfloat16 weight of 0.02 could not move by 1e-5; a float32 master does.
        moved = (tensor - before[name]).abs().max()
        assert 0 < moved < 2e-5, name
    with engine.whole_weights() as module:
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_value_is_of_the_state_before_the_token(micro_model: Path, tmp_path: Path) -> None:
    engine = make_engine(micro_model, "value_model")
    batch = make_batch(FIELDS)
    assert not engine.infer(batch, MicroBatching(), outputs=("values",))["values"].any()
    losses = [float(engine.train_batch(batch, MicroBatching(size=5), value_loss)["loss"].value) for _ in range(4)]
    assert losses[-1] < losses[0]
    values = engine.infer(batch, MicroBatching(size=5), outputs=("values",))["values"]
    engine.save(tmp_path, ["hf_model"])
    classifier = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf_model", dtype=torch.float32).eval()
    for row in (1, 4):
        attention = FIELDS["attention_mask"][row].bool()
        with torch.no_grad():
            scores = classifier(input_ids=FIELDS["input_ids"][row][attention][None]).logits[0, :, 0]
        start, count = int(attention[:PROMPT].sum()), int(FIELDS["response_mask"][row].sum())
        torch.testing.assert_close(values[row, :count], scores[start - 1 : start - 1 + count], atol=1e-5, rtol=1e-4)
    again = make_engine(tmp_path / "hf_model", "value_model")
    torch.testing.assert_close(
        again.infer(batch, MicroBatching(), outputs=("values",))["values"], values, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_nan_is_refused_and_nothing_changes(micro_model: Path, place: str) -> None:
    batch = make_batch(FIELDS)
    engine, untouched = make_engine(micro_model), make_engine(micro_model)
    for other in (engine, untouched):
        other.train_batch(batch, MicroBatching(size=3), policy_loss, TEMPERATURE)

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient * float("nan")

    def broken(outputs, micro):  # type: ignore[no-untyped-def]
        loss, metrics = policy_loss(outputs, micro)
        if (micro.batch["responses"] == FIELDS["responses"][3][: micro.batch["responses"].shape[1]]).all(1).any():
            loss = loss * float("nan") if place == "loss" else Poison.apply(loss)
        return loss, metrics

    before = weights(engine)
    with raises_with(NonFiniteError, place) as caught:
        engine.train_batch(batch, MicroBatching(size=3), broken, TEMPERATURE)
    assert caught.value.quantity == place
    assert (3 in caught.value.rows[0]) == (place == "loss") and caught.value.parameters
    metrics = engine.train_batch(batch, MicroBatching(size=3), broken, TEMPERATURE, on_nonfinite="skip")
    assert metrics["skipped_steps"].value == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    for other in (engine, untouched):
        other.train_batch(batch, MicroBatching(size=3), policy_loss, TEMPERATURE)
    expected = weights(untouched)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(engine).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_bitwise_after_a_load(micro_model: Path, tmp_path: Path, dtype: str) -> None:
    batch = make_batch(FIELDS)

    def train(engine, steps):  # type: ignore[no-untyped-def]
        return [engine.train_batch(batch, MicroBatching(size=3), policy_loss, TEMPERATURE) for _ in range(steps)]

    straight = make_engine(micro_model, dtype=dtype)
    expected = train(straight, 4)
    broken = make_engine(micro_model, dtype=dtype)
    train(broken, 2)
    broken.save(tmp_path, ["model", "optimizer", "extra"])
    drawn = torch.rand(3)
    resumed = make_engine(micro_model, dtype=dtype)
    resumed.load(tmp_path, ["model", "optimizer", "extra"])
    assert torch.equal(torch.rand(3), drawn)
    assert train(resumed, 2) == expected[2:]
    final = weights(straight)
    assert all(torch.equal(tensor, final[name]) for name, tensor in weights(resumed).items())
    for parameter, state in zip(
        resumed.model_state.trainable.values(), straight.model_state.optimizer.state.values(), strict=True
    ):  # type: ignore[attr-defined]
        for key, tensor in resumed.model_state.optimizer.state[parameter].items():  # type: ignore[attr-defined]
            assert torch.equal(tensor, state[key]), key


def test_hf_export_has_the_same_logits(micro_model: Path, tmp_path: Path) -> None:
    engine = make_engine(micro_model)
    for _ in range(2):
        engine.train_batch(make_batch(FIELDS), MicroBatching(), policy_loss, TEMPERATURE)
    engine.save(tmp_path, ["hf_model"])
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf_model", dtype=torch.float32).eval()
    ids = FIELDS["input_ids"][:2]
    with engine.whole_weights() as module, torch.no_grad():
        torch.testing.assert_close(opened(input_ids=ids).logits, module(input_ids=ids).logits, atol=0, rtol=0)
    from hybridrl.models.tokenizer import load_tokenizer

    assert load_tokenizer(tmp_path / "hf_model").decode([60, 61]) == load_tokenizer(micro_model).decode([60, 61])


def test_checkpoint_of_another_model_is_refused(micro_model: Path, tiny_model: Path, tmp_path: Path) -> None:
    make_engine(tiny_model).save(tmp_path, ["model"])
    engine = make_engine(micro_model)
    before = weights(engine)
    with pytest.raises(ModelError, match=r"model.*has shape"):
        engine.load(tmp_path, ["model"])
    with raises_with(ModelError, "optimizer/", "checkpoint.load_contents"):
        engine.load(tmp_path, ["optimizer"])
    with pytest.raises(ModelError, match="are missing"):
        make_engine(micro_model, "value_model").load(tmp_path, ["model"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    with pytest.raises(ModelError, match="contents everything"):
        engine.save(tmp_path, ["everything"])


def test_a_torn_checkpoint_is_refused(micro_model: Path, tmp_path: Path) -> None:
    engine = make_engine(micro_model)
    engine.save(tmp_path, ["model"])
    file = next((tmp_path / "model").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        engine.load(tmp_path, ["model"])


def test_engine_without_optimizer_only_computes(micro_model: Path) -> None:
    from hybridrl.config.schema.engine import FSDPConfig
    from hybridrl.config.schema.model import ModelConfig

    engine = create_train_engine(
        "language_model", "fsdp2", model=ModelConfig(path=str(micro_model)), engine=FSDPConfig()
    )
    engine.initialize()
    assert engine.infer(make_batch(FIELDS), MicroBatching())["log_probs"].shape == (len(FIELDS["input_ids"]), RESPONSE)
    with pytest.raises(RuntimeError, match="without an optimizer"):
        engine.train_batch(make_batch(FIELDS), MicroBatching(), policy_loss)
    with pytest.raises(ValueError, match="asked for values"):
        engine.infer(make_batch(FIELDS), MicroBatching(), outputs=("values",))
    with raises_with(ModelError, "strategy", "'other'", "fsdp2"):
        create_train_engine("language_model", "other", model=None, engine=None)


def test_faulty_batches_are_named(micro_model: Path) -> None:
    engine = make_engine(micro_model)
    unattended = {**FIELDS, "response_mask": torch.ones_like(FIELDS["response_mask"])}
    with pytest.raises(ValueError, match=r"sequence \d+: response column \d+ .* attention_mask 0"):
        engine.infer(make_batch(unattended), MicroBatching())
    with raises_with(ValueError, "attention_mask"):
        engine.infer(make_batch({k: v for k, v in FIELDS.items() if k != "attention_mask"}), MicroBatching())
    with pytest.raises(ValueError, match="at least 1"):
        MicroBatching(size=0)


def test_a_batch_of_nothing_but_padding(micro_model: Path) -> None:
    empty = {**FIELDS, "response_mask": torch.zeros_like(FIELDS["response_mask"])}
    engine = make_engine(micro_model)
    assert not engine.infer(make_batch(empty), MicroBatching())["log_probs"].any()
    assert engine.train_batch(make_batch(empty), MicroBatching(), policy_loss)["grad_norm"].value == 0


@pytest.mark.parametrize("flash", ["flash_attention_2", "flash_attention_4", "kernels-community/flash-attn3"])
def test_generation_in_place_uses_no_flash_attention(micro_model: Path, flash: str) -> None:
    """For padded rows transformers copies the whole cache to call it, in each layer and for each token."""
    assert takes_boundaries(flash)
    engine = make_engine(micro_model)
    layer = engine.module.model.layers[0].self_attn  # type: ignore[attr-defined]
    assert layer.config._attn_implementation == "sdpa"
    layer.config._attn_implementation = flash
    with engine.whole_weights() as module, torch.no_grad():
        assert layer.config._attn_implementation == "sdpa"
        module(input_ids=FIELDS["input_ids"][:2])
    assert layer.config._attn_implementation == flash


def test_full_determinism_is_asked_of_pytorch(micro_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    try:
        make_engine(micro_model)
        assert not torch.are_deterministic_algorithms_enabled()
        make_engine(micro_model, full_determinism=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    finally:
        torch.use_deterministic_algorithms(False)
