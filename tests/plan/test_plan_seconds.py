"""Seconds of phases: limits that have a formula of their own, and directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybridrl.plan.devices import DEVICES
from hybridrl.plan.published import read_models
from hybridrl.plan.seconds import (
    CostFactors,
    StepSize,
    TrainingLayout,
    cache_tokens,
    decode_step,
    generation,
    refit,
    training,
)

MODELS = read_models(Path(__file__).with_name("public_models.json"))
#: hardware at its data sheet's rates, without any floor
IDEAL = CostFactors(
    mfu=1,
    layer_s=0,
    expert_layer_s=0,
    all_to_all=1,
    tensor=1,
    decode_flops=1,
    decode_memory=1,
    decode_layer_s=0,
    decode_expert_layer_s=0,
    reduce_s=0,
    network_reduce_s=0,
    sequence_s=0,
    sigma=0.01,
    imbalance=1,
    fixed_s=0,
    pass_factor=1,
)
STEP = StepSize(512, 8, 1024, 2048, 4096, 4, 5120)
DENSE, SPARSE, LATENT = MODELS["qwen2.5-7b"], MODELS["qwen3-30b-a3b"], MODELS["deepseek-v3"]
H100 = DEVICES["H100"]


def test_one_sequence_is_decoded_at_the_rate_of_memory() -> None:
    cached = 2 * 28 * 2 * 4 * 128  # bytes of a token's keys and values: 28 layers, 4 heads of 128
    expected = (2 * (DENSE.parameters - DENSE.embedding) + 1000 * cached) / 3.35e12
    assert decode_step(DENSE, H100, IDEAL, 1, 1, 1000) == pytest.approx(expected)


def test_a_large_batch_is_decoded_at_the_rate_of_products() -> None:
    batch = 20_000
    expected = batch * 2 * (DENSE.active + DENSE.embedding) / 989e12
    assert decode_step(DENSE, H100, IDEAL, 1, batch, 0) == pytest.approx(expected)


def test_few_sequences_read_few_experts() -> None:
    one, many = SPARSE.read_bytes(1), SPARSE.read_bytes(10_000)
    assert one == pytest.approx(2 * (SPARSE.active + SPARSE.embedding))
    assert many == pytest.approx(2 * (SPARSE.parameters - SPARSE.embedding))


def test_latent_keys_are_on_every_device_of_a_replica() -> None:
    assert LATENT.kv_bytes == 2 * 61 * (512 + 64)
    assert (LATENT.kv_shards(8), DENSE.kv_shards(8), DENSE.kv_shards(2)) == (1, 4, 2)
    room = 8 * 80e9 * 0.9 - 2 * DENSE.parameters
    assert cache_tokens(DENSE, H100, 8, 0.9) == pytest.approx(room / (2 * DENSE.kv_bytes)), "4 heads on 8 devices"


def test_training_is_flops_over_peak_when_nothing_else_costs() -> None:
    layout = TrainingLayout(True, micro_tokens=10**9, recompute=0)
    tokens = STEP.samples * STEP.length
    attention = 4 * 28 * 128 * 28 * STEP.length / 2  # per token: scores and values over half of the sequence
    flops = 3 * tokens * (2 * (DENSE.active + DENSE.embedding) + attention)
    assert float(training(DENSE, H100, IDEAL, 1, layout, STEP, True)) == pytest.approx(flops / 989e12)
    recomputed = replace(layout, recompute=1)
    assert float(training(DENSE, H100, IDEAL, 1, recomputed, STEP, True)) == pytest.approx(flops / 989e12 * 4 / 3)
    assert float(training(DENSE, H100, IDEAL, 1, layout, STEP, False)) == pytest.approx(flops / 989e12 / 3)


def test_a_pipeline_has_its_bubble() -> None:
    """p stages and m micro-batches take (m + p - 1) / m times as long."""
    step = replace(STEP, updates=1, samples=64)
    one = TrainingLayout(False, micro_tokens=2 * step.length, recompute=0)
    four = replace(one, pipeline=4)
    whole = float(training(DENSE, H100, IDEAL, 1, one, step, False))
    assert float(training(DENSE, H100, IDEAL, 4, four, step, False)) == pytest.approx(whole / 4 * (32 + 3) / 32)


def test_candidates_as_arrays_are_the_candidates_one_by_one() -> None:
    table = TrainingLayout(
        False,
        tensor=np.array([1, 2, 4]),
        context=np.array([1, 2, 1]),
        expert=np.array([8, 1, 4]),
        pipeline=np.array([1, 4, 2]),
        micro_tokens=np.array([8192, 16384, 16384]),
        recompute=np.array([0, 1, 1]),
        fused=np.array([0, 1, 0]),
        offload=np.array([0, 1, 2]),
        shards=np.array([1, 1, 1]),
    )
    for backward in (True, False):
        together = training(SPARSE, H100, CostFactors(), 32, table, STEP, backward)
        apart = [float(training(SPARSE, H100, CostFactors(), 32, table.at(n), STEP, backward)) for n in range(3)]
        assert list(together) == pytest.approx(apart)


def test_sharded_weights_cost_where_links_are_slow() -> None:
    layout = TrainingLayout(True, shards=64, micro_tokens=5120, recompute=0)
    fast, slow = H100, replace(H100, network_gb_s=1)
    gathers = STEP.samples * STEP.length / 64 / STEP.length * 2 * 2 * DENSE.parameters * 63 / 64
    quick, long = (float(training(DENSE, device, IDEAL, 64, layout, STEP, True)) for device in (fast, slow))
    assert quick < long
    assert long >= gathers / (1e9 * 0.7)


def test_divided_experts_are_reduced_in_part() -> None:
    """Half of a reduction of float32 gradients adds to an update: of dense weights, and of a share of the experts."""
    step, slow = replace(STEP, samples=64), replace(H100, network_gb_s=1e-3)
    for size in (2, 8):
        layout = TrainingLayout(True, shards=8, expert=size, micro_tokens=5120, recompute=0)
        seconds = [float(training(SPARSE, device, IDEAL, 64, layout, step, True)) for device in (H100, slow)]
        held = SPARSE.parameters - SPARSE.expert_parameters * (1 - 1 / size)
        reduced = [step.updates * 2 * 4 * held / (rate * 1e9 * 0.7) / 2 for rate in (H100.network_gb_s, 1e-3)]
        assert seconds[1] - seconds[0] == pytest.approx(reduced[1] - reduced[0])


def test_generation_waits_for_places() -> None:
    few = generation(DENSE, H100, CostFactors(), 8, 1, STEP, 0.9, 16)
    many = generation(DENSE, H100, CostFactors(), 8, 1, STEP, 0.9, 256)
    assert many < few
    assert generation(MODELS["llama3-70b"], H100, CostFactors(), 8, 1, STEP, 0.9) == float("inf"), "140 GB on 80"


def test_refit_is_bytes_over_rate() -> None:
    assert refit(DENSE, CostFactors(refit_bytes_s=1e9)) == pytest.approx(15.23, rel=1e-3)
