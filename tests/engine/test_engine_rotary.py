"""Rotary frequencies that transformers takes from the longest sequence of a call: no row depends on its neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import make_batch, make_engine, make_fields
from raising import raises_with
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from hybridrl.engine import MicroBatching
from hybridrl.errors import ModelError

SIZES: dict[str, Any] = {
    "vocab_size": 210,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
SHORT, LONG = [1.0] * 8, [4.0] * 8
LENGTHS = make_fields()["attention_mask"].sum(1)
#: between the lengths of the rows, so that some are longer
LIMIT = int(LENGTHS.median())


def saved(kind: str, folder: Path, limit: int) -> Path:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4}
    torch.manual_seed(0)
    if kind == "dynamic":
        config: Any = LlamaConfig(**SIZES, max_position_embeddings=limit, rope_parameters={**rope, "factor": 2.0})
    else:
        rope |= {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": limit}
        config = Phi3Config(
            **SIZES, max_position_embeddings=64, original_max_position_embeddings=limit, rope_parameters=rope
        )
    module = AutoModelForCausalLM.from_config(config)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    module.save_pretrained(folder)
    return folder


def log_probs(engine: Any, rows: int | None) -> torch.Tensor:
    found: torch.Tensor = engine.infer(make_batch(make_fields()), MicroBatching(size=rows))["log_probs"]
    return found


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_longer_sequences_than_those_of_fixed_frequencies_are_refused(kind: str, tmp_path: Path) -> None:
    engine = make_engine(saved(kind, tmp_path, LIMIT))
    with raises_with(ModelError, f"{int(LENGTHS.max())} tokens", f"rope_type={kind}", "Lower", LIMIT):
        engine.infer(make_batch(make_fields()), MicroBatching())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_up_to_that_length_rows_are_computed_as_each_alone(kind: str, tmp_path: Path) -> None:
    engine = make_engine(saved(kind, tmp_path, int(LENGTHS.max())))
    torch.testing.assert_close(log_probs(engine, None), log_probs(engine, 1), atol=1e-5, rtol=1e-5)


def test_long_factors_for_every_length_are_the_way_out(tmp_path: Path) -> None:
    """What the error says; long rows get what transformers computes for them."""
    path = saved("longrope", tmp_path, LIMIT)
    engine: Any = make_engine(path, model={"override_config": {"rope_parameters": {"short_factor": LONG}}})
    found = log_probs(engine, None)
    torch.testing.assert_close(found, log_probs(engine, 1), atol=1e-5, rtol=1e-5)
    module, fields, compared = AutoModelForCausalLM.from_pretrained(path), make_fields(), 0
    for row in (LENGTHS > LIMIT).nonzero().flatten().tolist():
        ids = fields["input_ids"][row][fields["attention_mask"][row].bool()]
        with torch.no_grad():
            expected = module(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mask = fields["response_mask"][row].bool()
        if mask.any() and bool(mask[0]):
            count = int(mask.sum())
            torch.testing.assert_close(found[row][mask], expected[-count:], atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared > 1
