"""`model.use_fused_kernels`: training without logits equals training with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import (
    TEMPERATURE,
    full_kl_loss,
    make_batch,
    make_engine,
    make_fields,
    policy_loss,
    value_loss,
    weights,
)
from ranks import spawn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, PhiConfig

from hybridrl.algorithms import linear_statistics
from hybridrl.engine import MicroBatching
from hybridrl.engine.chunked_function import Hidden, chunked_function
from hybridrl.engine.logits_functions import FullKL, LogitsFunction, LogProbsAt, TopTokens

FIELDS = make_fields()
FUSED = {"use_fused_kernels": True}
OUTPUTS = ("log_probs", "entropy", "sum_pi_squared")
VOCABULARY = 210
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "plain": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "soft cap": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0),
    "scaled": CohereConfig(**SIZES, logit_scale=0.3),
    "divided": GraniteConfig(**SIZES, logits_scaling=2.5),
    "biased": PhiConfig(**SIZES, partial_rotary_factor=0.5),
}
CHANGED = ("soft cap", "scaled", "divided")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear_statistics.CHUNK_ELEMENTS, "cpu", 7 * VOCABULARY)


def trained(path: Path, fused: bool, **settings: object) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Metrics of three steps, the outputs before them, and the log-probabilities after them."""
    engine = make_engine(path, optim={"lr_warmup_steps": 0}, model={"use_fused_kernels": fused}, **settings)
    batch, metrics = make_batch(FIELDS), []
    before = engine.infer(batch, MicroBatching(size=5), TEMPERATURE, OUTPUTS)
    for _ in range(3):
        found = engine.train_batch(batch, MicroBatching(size=5), policy_loss, TEMPERATURE, entropy=True)
        metrics += [float(found[name].value) for name in ("loss", "grad_norm")]
    return metrics, before, engine.infer(batch, MicroBatching(size=4), TEMPERATURE)["log_probs"]


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_the_results_are_those_of_whole_logits(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(tmp_path)
    metrics, before, after = trained(tmp_path, fused=True)
    assert "use_fused_kernels has no effect" not in capfd.readouterr().err
    expected_metrics, expected, expected_after = trained(tmp_path, fused=False)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)
    for name in OUTPUTS:
        torch.testing.assert_close(before[name], expected[name], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, expected_after, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", [*CHANGED, "plain"])
def test_another_change_of_logits_than_the_configuration_says_keeps_them(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """A hook changes them once more; the plain model's configuration says something that it does not do."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(tmp_path)

    def once_more(module: torch.nn.Module, arguments: tuple, output: Any) -> Any:
        output.logits = output.logits + 0.01 * output.logits.abs()
        return output

    found = []
    for fused in (True, False):
        engine: Any = make_engine(tmp_path, model={"use_fused_kernels": fused})
        engine.config.final_logit_softcapping = engine.config.to_dict().get("final_logit_softcapping", 2.0)
        engine.module.register_forward_hook(once_more)
        found.append(engine.infer(make_batch(FIELDS), MicroBatching(), TEMPERATURE, OUTPUTS))
        assert ("changes its logits after its output layer" in capfd.readouterr().err) == fused
    for name in OUTPUTS:
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-6, rtol=1e-6)


def test_a_soft_cap_that_the_model_does_not_compute_is_none(micro_model: Path) -> None:
    """Some configurations have the field, and their model does not read it."""
    found = []
    for cap in (2.0, None):
        engine: Any = make_engine(micro_model, model=FUSED)
        engine.config.final_logit_softcapping = cap
        found.append(engine.infer(make_batch(FIELDS), MicroBatching(), TEMPERATURE)["log_probs"])
    assert torch.equal(*found)


def test_words_that_the_model_leaves_out_do_not_count(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Some models cut the padding of their vocabulary off after their output layer."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "vocab_size": VOCABULARY + 5})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def cut(module: torch.nn.Module, arguments: tuple, output: Any) -> Any:
        output.logits = output.logits[..., :VOCABULARY]
        return output

    found = []
    for fused in (True, False):
        engine = make_engine(tmp_path, model={"use_fused_kernels": fused})
        engine.module.register_forward_hook(cut)
        found.append(engine.infer(make_batch(FIELDS), MicroBatching(), TEMPERATURE, OUTPUTS))
        assert ("use_fused_kernels has no effect" in capfd.readouterr().err) == fused
    for name in OUTPUTS:
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-6, rtol=1e-6)


def test_in_bfloat16(micro_model: Path) -> None:
    metrics, before, _ = trained(micro_model, fused=True, dtype="bfloat16")
    expected_metrics, expected, _ = trained(micro_model, fused=False, dtype="bfloat16")
    assert metrics[:2] == pytest.approx(expected_metrics[:2], rel=3e-2, abs=1e-3)
    torch.testing.assert_close(before["log_probs"], expected["log_probs"], atol=5e-2, rtol=1e-2)


class Rows(TorchFunctionMode):
    """The most rows of logits that an output layer returns at once."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.most = vocabulary, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func in (torch.nn.functional.linear, torch.mm, torch.addmm) and result.shape[-1] == self.vocabulary:
            self.most = max(self.most, result.numel() // self.vocabulary)
        return result


@pytest.mark.parametrize("kind", ["plain", "soft cap"])
def test_logits_never_exist_as_a_whole(kind: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(tmp_path)
    most = {}
    for fused in (True, False):
        with Rows(VOCABULARY) as rows:
            trained(tmp_path, fused)
        most[fused] = rows.most
    assert most[True] == 4
    assert most[False] > 30


class Softmaxes(TorchFunctionMode):
    """The most tokens whose log-probabilities are computed at once."""

    most = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func in (torch.log_softmax, torch.softmax):
            self.most = max(self.most, len(result))
        return result


class Tiles(TorchFunctionMode):
    """The elements of the largest tile of logits."""

    largest = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func is torch.mm:
            self.largest = max(self.largest, result.numel())
        return result


def test_the_tokens_of_whole_logits_at_a_time_have_a_limit(micro_model: Path) -> None:
    """`entropy_from_logits_with_chunking` bounds the copies in float32; what is computed stays."""
    found, most = [], []
    for settings in ({}, {"entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 3}):
        with Softmaxes() as softmaxes:
            found.append(trained(micro_model, fused=False, **settings))
        most.append(softmaxes.most)
    assert most[0] > 30 and most[1] == 3
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for name in OUTPUTS:
        torch.testing.assert_close(found[1][1][name], found[0][1][name], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found[1][2], found[0][2], atol=1e-6, rtol=1e-6)


def test_the_limit_holds_for_tiles(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["plain"]).save_pretrained(tmp_path)
    settings = {"entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 2}
    found, largest = [], []
    for limited in (settings, {}):
        with Tiles() as tiles:
            found.append(trained(tmp_path, True, **limited))
        largest.append(tiles.largest)
    assert 0 < largest[0] <= 2 * VOCABULARY < largest[1]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for name in OUTPUTS:
        torch.testing.assert_close(found[0][1][name], found[1][1][name], atol=1e-6, rtol=1e-6)


def compared(path: Path, fused: bool, **reference: Any) -> tuple[torch.Tensor, list[float], dict[str, torch.Tensor]]:
    """The KL over the vocabulary to a reference before two steps, the metrics of the steps, and the weights after."""
    optim = {"optimizer": "SGD", "lr": 0.3, "lr_warmup_steps": 0}  # AdamW would enlarge the rounding of small gradients
    engine = make_engine(path, optim=optim, model={"use_fused_kernels": fused})
    engine.train_batch(make_batch(FIELDS), MicroBatching(), policy_loss)
    engine.compare_with(make_engine(path, forward_only=True, **reference))
    wanted = ("ref_kl", "log_probs")
    before, metrics = engine.infer(make_batch(FIELDS), MicroBatching(size=4), TEMPERATURE, wanted)["ref_kl"], []
    for _ in range(2):
        found = engine.train_batch(make_batch(FIELDS), MicroBatching(size=5), full_kl_loss, TEMPERATURE, ref_kl=True)
        metrics += [float(found[name].value) for name in ("loss", "grad_norm")]
    return before, metrics, weights(engine)


@pytest.mark.parametrize("kind", ["plain", "tied", *CHANGED])
def test_full_kl_is_that_of_whole_logits(kind: str, tmp_path: Path) -> None:
    """Also where only the policy was asked to leave logits out."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(tmp_path)
    before, metrics, after = compared(tmp_path, fused=True, model={"use_fused_kernels": False})
    expected = compared(tmp_path, fused=False)
    assert before.abs().max() > 1e-5
    torch.testing.assert_close(before, expected[0], atol=1e-6, rtol=1e-4)
    assert metrics == pytest.approx(expected[1], rel=1e-4, abs=1e-6)
    for name, tensor in expected[2].items():
        torch.testing.assert_close(after[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("function", [FullKL(None), TopTokens(3), LogProbsAt("ids")], ids=lambda one: one.outputs[0])
@pytest.mark.parametrize("chunk", [1, 4, 30])
def test_functions_of_logits_with_a_bias_by_chunks(function: LogitsFunction, chunk: int) -> None:
    """Of several values per token, also whole numbers; against the function of whole logits."""
    draw = torch.Generator().manual_seed(0)
    inputs = {"ids": torch.randint(17, (11, 2), generator=draw)}
    sizes = ((11, 6), (17, 6), (17,))
    models = [[torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes] for _ in range(2)]
    other = models[1] if isinstance(function, FullKL) else None
    results = []
    for whole in (True, False):
        own = [tensor.clone().requires_grad_() for tensor in models[0]]
        if whole:
            compared = None if other is None else torch.nn.functional.linear(*other)
            found = function(torch.nn.functional.linear(*own), inputs, TEMPERATURE, compared)
        else:
            hidden = None if other is None else Hidden(*other)
            found = chunked_function(function, Hidden(*own), inputs, TEMPERATURE, hidden, chunk_size=chunk)
        found[function.outputs[0]].square().sum().backward()
        results.append([*found.values(), *(tensor.grad for tensor in own)])
    for chunked, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(chunked, expected, rtol=1e-10, atol=1e-12)


def test_logits_of_neither_policy_exist_as_a_whole(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["plain"]).save_pretrained(tmp_path)
    most = {}
    for fused in (True, False):
        with Rows(VOCABULARY) as rows:
            compared(tmp_path, fused)
        most[fused] = rows.most
    assert most[True] == 7
    assert most[False] > 30


def test_a_value_model_says_that_it_has_no_logits(micro_model: Path, capfd: pytest.CaptureFixture) -> None:
    engine = make_engine(micro_model, "value_model", model=FUSED, entropy_from_logits_with_chunking=True)
    told = capfd.readouterr().err
    assert "use_fused_kernels has no effect" in told and "entropy_from_logits_with_chunking has no effect" in told
    engine.train_batch(make_batch(FIELDS), MicroBatching(), value_loss)


def test_generation_in_place_still_has_logits(micro_model: Path) -> None:
    engine = make_engine(micro_model, model=FUSED)
    engine.infer(make_batch(FIELDS), MicroBatching())
    with engine.whole_weights() as module, torch.no_grad():  # type: ignore[attr-defined]
        ids = FIELDS["input_ids"][:2]
        assert module(input_ids=ids).logits.shape[:2] == ids.shape


def steps(folder: Path, fused: bool, rows: slice) -> dict[str, torch.Tensor]:
    """The weights after two steps."""
    optim = {"lr_warmup_steps": 0, "override_optimizer_config": {"eps": 1e-4}}  # less would magnify rounding errors
    engine = make_engine(folder, optim=optim, model={"use_fused_kernels": fused})
    for _ in range(2):
        engine.train_batch(make_batch(FIELDS, rows), MicroBatching(size=2), policy_loss, TEMPERATURE, entropy=True)
    return weights(engine)


def on_two_ranks(rank: int, folder: Path) -> None:
    linear_statistics.CHUNK_ELEMENTS["cpu"] = 7 * VOCABULARY
    for kind in ("plain", "tied"):
        expected = torch.load(folder / f"{kind}.pt", weights_only=True)
        for name, tensor in steps(folder / kind, True, slice(rank * 6, rank * 6 + 6)).items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_two_ranks_with_shards(tmp_path: Path) -> None:
    """FSDP2 gathers the output layer for the forward pass, and reduces its gradient, as with whole logits."""
    torch.manual_seed(0)
    for kind in ("plain", "tied"):
        AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(tmp_path / kind)
        torch.save(steps(tmp_path / kind, False, slice(None)), tmp_path / f"{kind}.pt")
    spawn(on_two_ranks, 2, tmp_path)
