"""The memory that `MegatronEngine` takes, against what a step allocates when it is run on gloo processes."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import policy_loss, value_loss
from megatron_helpers import make_megatron, save_model
from megatron_models import tiny_config
from ranks import spawn
from safetensors import safe_open

from hybridrl.config.schema.engine import OptimConfig
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.errors import ModelError
from hybridrl.forecast import megatron_process
from hybridrl.forecast.megatron_rank import ForecastDevice, ForecastRequest, compute, forecast, request_for
from hybridrl.forecast.meta_tensors import peak_of
from hybridrl.forecast.sizes import Forecast, Workload
from hybridrl.protocol import DataProto
from hybridrl.utils import distributed

PROMPT, RESPONSE, ROWS = 60, 90, 6
MICRO = MicroBatching(max_tokens=320)  # two sequences
MODELS = {"untied": "language_model", "experts": "language_model", "critic": "value_model"}
PLAIN = {"enable_gradient_checkpointing": False}
FUSED = {"use_fused_kernels": True}
#: by the number of processes: a model, its settings and those of the engine
CASES: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    1: [
        ("untied", {}, {}),
        ("untied", PLAIN, {"dtype": "bfloat16"}),
        ("untied", FUSED, {"dtype": "bfloat16", "override_ddp_config": {"grad_reduce_in_fp32": False}}),
        ("untied", {}, {"override_transformer_config": {"recompute_granularity": "selective"}}),
        ("experts", PLAIN, {}),
        ("critic", {}, {"grad_offload": True}),
    ],
    2: [
        ("untied", PLAIN, {"tp": 2}),
        ("untied", FUSED, {"tp": 2, "sequence_parallel": False}),
        ("untied", PLAIN, {"pp": 2, "dtype": "bfloat16"}),
        ("untied", {}, {"dtype": "bfloat16"}),
        ("untied", {}, {"use_distributed_optimizer": False}),
        ("critic", {}, {"cp": 2}),
        ("experts", {}, {"ep": 2}),
    ],
    4: [
        ("untied", PLAIN, {"tp": 2, "pp": 2}),
        ("untied", PLAIN, {"pp": 2, "vpp": 2, "dtype": "bfloat16"}),
        ("critic", PLAIN, {"pp": 2}),
        ("experts", {}, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    ],
}


def full_batch(rows: int) -> DataProto:
    ids = torch.randint(10, 200, (rows, PROMPT + RESPONSE))
    ones = torch.ones_like(ids)
    values = torch.randn(rows, RESPONSE)
    fields = {"input_ids": ids, "attention_mask": ones, "response_mask": ones[:, PROMPT:].clone()}
    return DataProto.from_dict(
        {**fields, "advantages": values, "returns": values.clone()}, meta_info={"batch_num_tokens": rows * RESPONSE}
    )


def measured(engine: Any, language: bool) -> tuple[int, int, int]:
    """Bytes of what this rank holds, and the peaks of an update and of a pass."""
    batch, loss = full_batch(ROWS), policy_loss if language else value_loss
    outputs = ("log_probs", "entropy") if language else ("values",)

    def step() -> None:
        with engine.loaded(optimizer=True):
            engine.train_batch(batch, MICRO, loss, 1.0, entropy=language)

    def infer() -> None:
        with engine.loaded():
            engine.infer(batch, MICRO, 1.0, outputs)

    step()  # makes the optimizer's state
    parameters = [one for chunk in engine.chunks for one in chunk.parameters()]
    gradients, optimizer = engine.optimizer.gradient_buffers(), engine.optimizer
    others = [*optimizer.separate_masters(), *optimizer.state_tensors()]
    existing = [*parameters, *gradients, *others]
    with engine.loaded(optimizer=True):
        held = stored(existing)
    return held, held + peak_of(step, *existing), stored(existing) + peak_of(infer, *existing)


def stored(tensors: list[torch.Tensor]) -> int:
    """Bytes of memory that the tensors have together."""
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})


def measure(rank: int, folder: Path, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    """Write for each case what to forecast, and what each rank took."""
    ranks, found = distributed.get_world_size(), []
    for name, model, settings in cases:
        engine = make_megatron(folder / name, MODELS[name], model=model, **settings)
        of_ranks = distributed.all_gather_object(measured(engine, MODELS[name] == "language_model"))
        work = Workload(PROMPT, RESPONSE, ROWS * engine.geometry.dp_size // ranks, MICRO, MICRO)
        parts = engine.model_config, engine.engine_config, engine.optim_config
        found.append((request_for(MODELS[name], *parts, ranks, work), of_ranks))
    if rank == 0:
        (folder / "measured").write_bytes(pickle.dumps(found))


def logits_of_one_micro_batch_are_held(rank: int, folder: Path) -> None:
    """The peak of a pass over three micro-batches is that over one."""
    engine = make_megatron(folder / "untied", "language_model", model=PLAIN)

    def peak(rows: int) -> int:
        batch = full_batch(rows)
        return peak_of(lambda: engine.infer(batch, MICRO, 1.0, ("log_probs",)), *engine.chunks[0].parameters())

    peak(2)
    logits = 2 * RESPONSE * 2000 * 4
    assert peak(6) - peak(2) < 0.1 * logits


def compare(rank: int, folder: Path, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    distributed.destroy_process_group()  # a forecast is that of a rank of a group that does not exist
    wrong = []
    for case, (request, of_ranks) in zip(cases, pickle.loads((folder / "measured").read_bytes()), strict=True):
        one = compute(request)
        assert one is not None
        held, update, infer = (max(sizes) for sizes in zip(*of_ranks, strict=True))
        own = one.weights + one.masters + one.states + one.gradients
        errors = [own / held - 1, one.update / update - 1, one.without_gradients / infer - 1]
        print(request.ranks, case, " ".join(f"{error:+.3f}" for error in errors), flush=True)
        if abs(errors[0]) > 0.01 or max(map(abs, errors)) > 0.1:
            wrong.append((case, errors))
        kept = stored_between_uses(one, request.engine)
        assert one.resident == kept and one.parameters == elements(folder / case[0])
    assert not wrong


def stored_between_uses(one: Forecast, engine: Any) -> int:
    return one.weights + one.masters + one.states + (0 if engine.grad_offload else one.gradients)


def elements(folder: Path) -> int:
    """Those of a saved model, whose head of a value model is counted by its configuration."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose activations, logits and states are of similar size."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save_model(folder / name, name, vocabulary=2000)
    return folder


@pytest.mark.slow(20)
@pytest.mark.parametrize("ranks", CASES)
def test_a_step_takes_what_was_forecast(models: Path, ranks: int) -> None:
    spawn(measure, ranks, models, CASES[ranks], preload="megatron_preload")
    spawn(compare, 1, models, CASES[ranks], preload="megatron_preload")


@pytest.mark.slow(5)
def test_a_pass_holds_the_logits_of_one_micro_batch(models: Path) -> None:
    spawn(logits_of_one_micro_batch_are_held, 1, models, preload="megatron_preload")


def compute_families(rank: int, folder: Path) -> None:
    """Models of other families, also as they would be on a GPU, where sequences are packed; nothing to compare with."""
    distributed.destroy_process_group()
    on_gpu = ForecastDevice("cuda", triton=True, engine=True, packed=True)
    for case in ("gemma3", "deepseek-v3", "qwen2-moe"):
        tiny_config(case).save_pretrained(folder / case)
        experts: dict[str, Any] = (
            {} if case == "gemma3" else {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
        )
        engine = MegatronConfig(dtype="bfloat16", tensor_model_parallel_size=2, **experts)
        model, work = ModelConfig(path=str(folder / case)), Workload(PROMPT, RESPONSE, 3, MICRO, MICRO)
        apart = ForecastRequest(
            "language_model", model, engine, OptimConfig(), 8, work, ForecastDevice("cpu", False, False, False)
        )
        here, there = compute(apart), compute(replace(apart, target=on_gpu))
        without = compute(replace(apart, target=replace(on_gpu, engine=False)))
        assert here is not None and there is not None and without is not None
        assert here.weights == there.weights and here.states == there.states
        # The same tokens; the activation functions and experts of Transformer Engine keep less.
        assert 0.4 * here.activations < there.activations <= 1.05 * without.activations


@pytest.mark.slow(20)
def test_other_families_and_gpus_have_a_forecast(tmp_path: Path) -> None:
    spawn(compute_families, 1, tmp_path, preload="megatron_preload")


@pytest.mark.slow(20)
@pytest.mark.usefixtures("forked_children")
def test_another_process_computes_it(models: Path) -> None:
    def of(ranks: int = 1, response: int = RESPONSE, **engine: Any) -> Forecast:
        work = Workload(PROMPT, response, ROWS, MICRO, MICRO)
        model, settings = ModelConfig(path=str(models / "untied")), MegatronConfig(**engine)
        found = forecast("language_model", model, settings, OptimConfig(), ranks, work)
        assert found is not None
        return found

    one, two = of(), of(2)
    assert (two.weights, two.gradients) == (one.weights, one.gradients)
    assert two.states == pytest.approx(one.states / 2, rel=0.01)
    assert of(2, use_distributed_optimizer=False).states == pytest.approx(one.states, rel=0.01)
    offloaded = of(param_offload=True, grad_offload=True, optimizer_offload=True)
    assert offloaded.resident == 0 and offloaded.update == one.update
    assert one.without_gradients == offloaded.without_gradients + one.states + one.gradients
    reduced = of(response=1, dtype="bfloat16", override_ddp_config={"grad_reduce_in_fp32": False})
    assert reduced.activations + reduced.logits == reduced.masters  # of so many elements a step copies the gradients
    only = of(forward_only=True)
    assert only.states == only.gradients == only.activations == 0 < only.pass_activations
    with pytest.raises(ModelError, match="tensor_model_parallel_size=3 does not divide"):
        of(3, tensor_model_parallel_size=3)
    process = megatron_process._process._process
    assert process is not None
    process.kill()
    process.wait()
    assert of() == one  # a new one is started
