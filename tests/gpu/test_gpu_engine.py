"""The engine on a GPU: offloading, FSDP2 on a mesh of one rank, generation in place, determinism."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HALF_BILLION
from gpu_helpers import batch_of, free_gib, lognormal, seconds

from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.engine.fsdp.offload import plain_parts
from hybridrl.utils import device

pytestmark = pytest.mark.timeout(300)
MICRO = MicroBatching(size=4)
OFFLOAD = {"param_offload": True, "optimizer_offload": True}
OPTIM = {"lr": 1e-4, "lr_warmup_steps": 0, "lr_scheduler_type": "constant", "total_training_steps": 8}


class Sharded(FSDPEngine):
    """Under FSDP2, though there is one rank: all of its CUDA code runs but NCCL between ranks."""

    def _is_sharded(self) -> bool:
        return True


def built(
    kind: type[FSDPEngine],
    model: Path,
    optim: dict[str, Any] | None = None,
    activations: dict[str, Any] | None = None,
    **engine: Any,
) -> Any:
    """An engine with settings of the optimizer, of the model and of the engine."""
    settings = OptimConfig(**{**OPTIM, **(optim or {})})
    made: Any = kind(
        "language_model", ModelConfig(path=str(model), **(activations or {})), FSDPConfig(**engine), settings
    )
    made.initialize()
    return made


def step(engine: Any, batch: Any) -> dict[str, float]:
    from engine_helpers import policy_loss

    with engine.loaded(optimizer=True):
        metrics = engine.train_batch(batch, MICRO, policy_loss)
    return {name: float(metric.value) for name, metric in metrics.items()}


def infer(engine: Any, batch: Any) -> torch.Tensor:
    with engine.loaded():
        found: torch.Tensor = engine.infer(batch, MICRO)["log_probs"]
    return found


def exported(engine: Any, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    with engine.loaded():
        return {name: tensor.cpu().clone() for name, tensor in engine.export_weights(dtype)}


@pytest.mark.parametrize("kind", [FSDPEngine, Sharded], ids=["one rank", "FSDP2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_changes_nothing(world_of_one, tiny_model: Path, tmp_path: Path, kind, dtype: str) -> None:
    batch = batch_of(lognormal(12, 20, 40), 200)
    resident, offloaded = built(kind, tiny_model, dtype=dtype), built(kind, tiny_model, dtype=dtype, **OFFLOAD)
    for _ in range(2):
        assert step(offloaded, batch) == pytest.approx(step(resident, batch), rel=1e-3, abs=1e-5)
        torch.testing.assert_close(infer(offloaded, batch), infer(resident, batch), atol=1e-2, rtol=0)
    assert not any(_local(parameter).is_cuda for parameter in offloaded.module.parameters())
    states = [value for state in offloaded.model_state.optimizer.state.values() for value in state.values()]
    assert states and not any(_local(value).is_cuda for value in states if isinstance(value, torch.Tensor))
    for cast in (None, torch.bfloat16):
        expected = exported(offloaded, cast)
        offloaded.save(tmp_path / "saved", ["model", "optimizer", "extra", "hf_model"])
        assert all(torch.equal(tensor, expected[name]) for name, tensor in exported(offloaded, cast).items())
    after = infer(offloaded, batch)
    step(offloaded, batch)
    offloaded.load(tmp_path / "saved", ["model", "optimizer", "extra"])
    assert torch.equal(infer(offloaded, batch), after)


@pytest.mark.parametrize("kind", [FSDPEngine, Sharded], ids=["one rank", "FSDP2"])
@pytest.mark.parametrize("settings", [{"param_offload": True}, {"optimizer_offload": True}, OFFLOAD, {}], ids=str)
def test_training_goes_on_after_a_checkpoint_is_loaded(
    world_of_one, tiny_model: Path, tmp_path: Path, kind, settings: dict[str, Any]
) -> None:
    batch = batch_of(lognormal(12, 20, 40), 200)
    engine = built(kind, tiny_model, **settings)
    step(engine, batch)
    engine.save(tmp_path / "saved", ["model", "optimizer", "extra"])
    expected = step(engine, batch)
    for resumed in (engine, built(kind, tiny_model, **settings)):  # a rollback, and a new process
        resumed.load(tmp_path / "saved", ["model", "optimizer", "extra"])
        assert step(resumed, batch) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", [FSDPEngine, Sharded], ids=["one rank", "FSDP2"])
@pytest.mark.parametrize("settings", [{"optimizer_offload": True}, {"offload_policy": True}, OFFLOAD, {}], ids=str)
def test_moments_in_8_bits_are_those_of_the_checkpoint(
    world_of_one, tiny_model: Path, tmp_path: Path, kind, settings: dict[str, Any]
) -> None:
    pytest.importorskip("torchao", reason="the extra torchao is not installed")
    optim = {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"}
    batch = batch_of(lognormal(12, 20, 40), 200)
    engine, resumed = (built(kind, tiny_model, optim, **settings) for _ in range(2))
    step(engine, batch)
    engine.save(tmp_path / "saved", ["model", "optimizer", "extra"])
    resumed.load(tmp_path / "saved", ["model", "optimizer", "extra"])
    places = {"cpu"} if resumed.keeps_state_in_main_memory else {"cpu", "cuda"}  # step counters stay in main memory
    expected, found = _state(engine), _state(resumed)
    assert found.keys() == expected.keys() and {tensor.device.type for tensor in found.values()} == places
    assert sum(tensor.dtype == torch.uint8 and bool(tensor.any()) for tensor in expected.values()) > 10
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert step(resumed, batch) == pytest.approx(step(engine, batch), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", [FSDPEngine, Sharded], ids=["one rank", "FSDP2"])
def test_an_error_in_the_middle_of_an_update(world_of_one, tiny_model: Path, kind) -> None:
    """There are gradients on the device when the parameters leave it."""
    from engine_helpers import policy_loss

    batch, calls = batch_of(lognormal(12, 20, 40), 200), itertools.count()
    plain, engine = built(kind, tiny_model), built(kind, tiny_model, param_offload=True)

    def failing(outputs: Any, micro: Any) -> Any:
        if next(calls) == 1:
            raise ZeroDivisionError("in the loss")
        return policy_loss(outputs, micro)

    with pytest.raises(ZeroDivisionError, match="in the loss"), engine.loaded(optimizer=True):
        engine.train_batch(batch, MICRO, failing)
    assert step(engine, batch) == pytest.approx(step(plain, batch), rel=1e-3, abs=1e-5)


def test_cpu_offload_of_fsdp2(world_of_one, tiny_model: Path) -> None:
    """Clipping, the fused optimizer and checkpoints work on shards in main memory."""
    batch = batch_of(lognormal(12, 20, 40), 200)
    plain, moved = (
        built(Sharded, tiny_model, dtype="float32"),
        built(Sharded, tiny_model, dtype="float32", offload_policy=True),
    )
    for _ in range(2):
        assert step(moved, batch) == pytest.approx(step(plain, batch), rel=1e-3, abs=1e-5)
    for name, tensor in exported(plain).items():
        torch.testing.assert_close(exported(moved)[name], tensor, atol=1e-4, rtol=1e-3)


def test_cpu_offload_of_fsdp2_with_buffers(world_of_one, tmp_path: Path) -> None:
    """Routers of DeepSeek-V3 have a bias that is a buffer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=263, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, moe_intermediate_size=32, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    batch = batch_of(lognormal(12, 20, 40), 200)
    plain, moved = built(Sharded, tmp_path), built(Sharded, tmp_path, offload_policy=True)
    assert not any(_local(parameter).is_cuda for parameter in moved.module.parameters())
    assert step(moved, batch)["loss"] == pytest.approx(step(plain, batch)["loss"], rel=2e-2, abs=2e-3)


def test_sharded_equals_plain(world_of_one, tiny_model: Path) -> None:
    batch = batch_of(lognormal(12, 20, 40), 200)
    plain, sharded = built(FSDPEngine, tiny_model), built(Sharded, tiny_model)
    for _ in range(2):
        found, expected = step(sharded, batch), step(plain, batch)
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2, abs=2e-3)
    with sharded.whole_weights() as module, torch.no_grad():
        ids = batch.batch["input_ids"][:2].cuda()
        assert module(input_ids=ids).logits.isfinite().all()


def test_speed_of_offloading(half_billion: Path, figures) -> None:
    engine = built(FSDPEngine, half_billion, **OFFLOAD)
    step(engine, batch_of([(32, 32)] * 4, HALF_BILLION["vocab_size"]))

    def there_and_back(optimizer: bool) -> None:
        with engine.loaded(optimizer=optimizer):
            pass

    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    # bfloat16 weights, float32 master weights and two moments; all of it goes both ways for an update
    both = 2 * (2 + 4 + 8) * parameters / seconds(lambda: there_and_back(True)) / 1e9
    once = 2 * parameters / seconds(lambda: there_and_back(False)) / 1e9
    figures(offload_gb_per_s=both, load_weights_gb_per_s=once, parameters_b=parameters / 1e9)


def test_offloaded_memory_is_free(half_billion: Path) -> None:
    before = free_gib()
    engine = built(FSDPEngine, half_billion, **OFFLOAD)
    step(engine, batch_of([(32, 32)] * 4, HALF_BILLION["vocab_size"]))
    assert free_gib() > before - 0.7  # libraries keep some


def test_memory_of_the_optimizer_is_known_before_the_first_step(half_billion: Path) -> None:
    engine = built(FSDPEngine, half_billion)
    expected = engine.first_step_bytes() / 2**30
    before = device.memory_stats()["free_gb"]
    step(engine, batch_of([(32, 32)] * 4, HALF_BILLION["vocab_size"]))
    assert before - free_gib() == pytest.approx(expected, abs=0.7)


def test_generation_in_place(half_billion: Path, figures) -> None:
    from hybridrl.config import RolloutConfig
    from hybridrl.protocol import DataProto
    from hybridrl.rollout.hf.rollout import HFRollout

    rows, width = 64, 64
    engine = built(FSDPEngine, half_billion)
    ids = torch.randint(10, HALF_BILLION["vocab_size"], (rows, 32))
    mask = torch.ones_like(ids)
    prompts = DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1},
        non_tensors={"uid": [f"0-{i}" for i in range(rows)]},
        meta_info={"global_steps": 1, "ignore_eos": True},
    )
    config = RolloutConfig(prompt_length=32, response_length=width)
    rollout = HFRollout(config, engine=engine, eos_token_ids=(2,), pad_token_id=0)
    batch = rollout.generate(prompts)
    ours = infer(engine, batch)
    difference = (ours - batch.batch["rollout_log_probs"]).abs()
    assert float(difference.mean()) < 2e-2  # bfloat16 on both sides
    figures(hf_ms_per_token=seconds(lambda: rollout.generate(prompts), times=1) / width * 1000)


def test_deterministic_algorithms(tiny_model: Path) -> None:
    """Sampling raised here: PyTorch refuses cumulative sums of floats on a GPU then."""
    from hybridrl.rollout.sampling import SamplingParams, draw

    batch = batch_of(lognormal(12, 20, 40), 200)
    try:
        engines = [built(FSDPEngine, tiny_model, full_determinism=True) for _ in range(2)]
        assert torch.are_deterministic_algorithms_enabled()
        assert step(engines[0], batch) == step(engines[1], batch)
        params = SamplingParams(True, 1.0, 0.9, 50, 4)
        draw(torch.randn(8, 1000, device="cuda"), params, torch.rand(8, dtype=torch.float64))
    finally:
        torch.use_deterministic_algorithms(False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _state(engine: Any) -> dict[tuple[str, str, int], torch.Tensor]:
    """The plain tensors of the optimizer's state, by parameter, name and number."""
    return {
        (name, key, number): part
        for name, parameter in engine.model_state.trainable.items()
        for key, value in engine.model_state.optimizer.state[parameter].items()
        for number, part in enumerate(plain_parts(value))
    }
