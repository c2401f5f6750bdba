"""Whether an engine packs: by a trial, also with flash attention, for which a CPU has a stand-in with its rules."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_helpers import SIZES, TEMPERATURE, make_batch, make_engine, make_fields, policy_loss
from raising import raises_with
from ranks import spawn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import flash_attention
from transformers.modeling_flash_attention_utils import _is_packed_sequence, prepare_fa_kwargs_from_position_ids
from transformers.models.gptj import modeling_gptj

from hybridrl.config.schema.engine import FSDPConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching, train_engine_class
from hybridrl.errors import ModelError
from hybridrl.models import attention
from hybridrl.utils import device, distributed

FIELDS = make_fields()
MODELS: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "Mistral": {**SIZES, "num_key_value_heads": 2, "sliding_window": 5},
    "Nemotron": {**SIZES, "num_key_value_heads": 4},
    "GPTJ": {**SIZES, "rotary_dim": 8},
    "Moshi": SIZES,
    "Bart": {
        **{"vocab_size": 210, "d_model": 32, "decoder_layers": 2},
        **{"decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    },
    "Qwen2Moe": {
        **SIZES,
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"num_key_value_heads": 2, "shared_expert_intermediate_size": 24},
        **{"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    },
}
PADDED = "not packed (model.use_remove_padding)"


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**MODELS[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def packing(implementation: str = attention.VARLEN, **settings: Any) -> dict[str, Any]:
    return {"override_config": {"attn_implementation": implementation}, "share_prefixes": False, **settings}


def of_one_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: int | None) -> Any:
    length = q.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - (window or length))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True).transpose(1, 2)


def on_a_cpu(
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *_: Any,
    position_ids: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **__: Any,
) -> torch.Tensor:
    """`_flash_attention_forward` of transformers for rows without padding, with its rules of where sequences begin."""
    assert attention_mask is None
    ends = cu_seq_lens_q
    if ends is None and _is_packed_sequence(position_ids, len(query_states)):
        (ends, _), _ = prepare_fa_kwargs_from_position_ids(position_ids)
    cuts = [0, query_states.shape[1]] if ends is None else ends.tolist()
    states = (query_states, key_states, value_states)
    return torch.cat(
        [
            of_one_sequence(*(tensor[:, begin:end] for tensor in states), softmax_scale, sliding_window)
            for begin, end in itertools.pairwise(cuts)
        ],
        dim=1,
    )


@pytest.fixture
def flash_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """Flash attention can be chosen where its package is missing."""
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", on_a_cpu)
    monkeypatch.setattr(modeling_gptj, "_flash_attention_forward", on_a_cpu, raising=False)
    monkeypatch.setattr(modeling_gptj, "flash_attn_supports_top_left_mask", lambda: False)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", lambda *_, **__: None)
    return "flash_attention_2"


def log_probs(engine: Any, size: int) -> torch.Tensor:
    found: torch.Tensor = engine.infer(make_batch(FIELDS), MicroBatching(size=size), TEMPERATURE)["log_probs"]
    return found


@pytest.mark.parametrize(
    ("name", "implementation", "packs"),
    [
        ("Llama", attention.VARLEN, True),
        ("Nemotron", attention.VARLEN, False),
        ("Llama", "flash_attention_2", True),
        ("Mistral", "flash_attention_2", True),
        ("Moshi", "flash_attention_2", False),
        ("GPTJ", "flash_attention_2", False),
        ("Bart", "flash_attention_2", False),
    ],
)
def test_a_model_whose_attention_is_not_told_where_sequences_begin_is_not_packed(
    name: str,
    implementation: str,
    packs: bool,
    flash_on_a_cpu: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:
    engine: Any = make_engine(saved(name, tmp_path), model=packing(implementation), dtype="bfloat16")
    assert engine.packed == packs and engine.config._attn_implementation == implementation
    assert capfd.readouterr().err.count(PADDED) == (0 if packs else 1)
    if packs:  # the stand-in computes no padding, and a row alone has none
        torch.testing.assert_close(log_probs(engine, 5), log_probs(engine, 1), atol=5e-2, rtol=5e-2)


def test_a_model_that_is_not_packed_trains(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    model = saved("Nemotron", tmp_path)
    found, expected = (make_engine(model, model=one) for one in (packing(), {"share_prefixes": False}))
    assert "NemotronAttention does not pass on where packed sequences begin" in capfd.readouterr().err
    assert torch.equal(log_probs(found, 5), log_probs(expected, 5))
    norms = [
        engine.train_batch(make_batch(FIELDS), MicroBatching(size=5), policy_loss)["grad_norm"].value
        for engine in (found, expected)
    ]
    assert norms[0] == norms[1] > 0


def test_a_critic_is_tried_by_what_its_new_head_gets(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Its values are zero."""
    engine: Any = make_engine(saved("Nemotron", tmp_path), "value_model", model=packing())
    assert not engine.packed and PADDED in capfd.readouterr().err


def two_ranks(_: int, folder: Path) -> None:
    for name in ("Llama", "Nemotron"):
        engine: Any = make_engine(folder / name, model=packing())
        assert engine.packed == (name == "Llama")
        rows = slice(0, 6) if distributed.get_rank() == 0 else slice(6, None)
        metrics = engine.train_batch(make_batch(FIELDS, rows), MicroBatching(size=2), policy_loss)
        assert float(metrics["grad_norm"].value) > 0


def test_two_ranks_try_together(tmp_path: Path) -> None:
    for name in ("Llama", "Nemotron"):
        saved(name, tmp_path / name)
    spawn(two_ranks, 2, tmp_path)


def test_flash_attention_does_not_read_a_window_of_the_mask_alone(
    flash_on_a_cpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would attend to all tokens. By default such a model has an attention that reads the window."""
    model = saved("Qwen2Moe", tmp_path)
    with raises_with(ModelError, "Qwen2MoeAttention", "window", "flash_attention_2", "attn_implementation=sdpa"):
        make_engine(model, model=packing(flash_on_a_cpu), dtype="bfloat16")
    monkeypatch.setattr(device, "flash_attention", lambda: "flash_attention_2")
    monkeypatch.setattr(device, "supports_varlen_attention", lambda: True)
    engine: Any = make_engine(model, dtype="bfloat16")
    assert engine.config._attn_implementation == attention.VARLEN and engine.packed


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn3"])
def test_flash_attention_in_float32_is_refused_at_start_up(name: str, micro_model: Path) -> None:
    model = ModelConfig(path=str(micro_model), override_config={"attn_implementation": name})
    check = train_engine_class("language_model", "fsdp2").check
    for dtype in ("float32", "fp32"):
        with raises_with(ModelError, f"attn_implementation={name}", f"fsdp_config.dtype={dtype}", "bfloat16"):
            check(model, FSDPConfig(dtype=dtype), 1)
    check(model, FSDPConfig(dtype="bfloat16"), 1)
