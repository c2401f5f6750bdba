"""Expert parallelism in two and four gloo processes against one process without it; one start for all checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from engine_helpers import (
    FAMILIES,
    HEADS,
    ROUTED,
    TEMPERATURE,
    check_shards,
    close,
    make_batch,
    make_engine,
    make_fields,
    policy_loss,
    save_model,
    value_loss,
    weights,
)
from raising import raises_with
from ranks import spawn
from transformers import AutoModelForCausalLM, Llama4TextConfig, Qwen2Config, Qwen3MoeConfig

from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.expert_parallel import check_expert_parallel, grouped_product, product_by_segment
from hybridrl.errors import ModelError
from hybridrl.forecast.fsdp_rank import forecast
from hybridrl.forecast.sizes import Workload
from hybridrl.layouts.slices import Cut, TensorSpec, slices_of
from hybridrl.utils import distributed
from hybridrl.utils.metrics import merge_metrics

FIELDS = make_fields(8)
CHOICES = torch.rand(*FIELDS["input_ids"].shape, 2, 4, generator=torch.Generator().manual_seed(6)).topk(2).indices
#: replayed experts of each token; in the second case no token uses experts 2 and 3 of 4
REPLAYED = {"replayed": CHOICES, "idle": CHOICES.new_tensor([0, 1]).expand_as(CHOICES).contiguous()}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", FAMILIES["Qwen3Moe"]),
    "mixtral": ("Mixtral", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek": ("DeepseekV3", FAMILIES["DeepseekV3"]),
    "glm": ("Glm4Moe", {**HEADS, **ROUTED, "head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}),
    # More ranks hold an expert than there are experts: each is cut.
    "gpt_oss": ("GptOss", {**HEADS, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}),
}
OPTIM = {"lr_warmup_steps": 0, "override_optimizer_config": {"eps": 1e-5}}
AUX = {"router_aux_loss_coef": 0.1}
LORA = {"lora_rank": 2, "target_modules": ["q_proj", "o_proj"]}
#: name -> model, batch, settings of the engine, of the model, and of the optimizer
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **{name: (name, "own", {}, {}, OPTIM) for name in MODELS},
    "replayed": ("qwen3", "replayed", AUX, {}, OPTIM),
    "idle": ("qwen3", "idle", {}, {"use_remove_padding": False}, OPTIM),
    "lora": ("qwen3", "own", {}, LORA, OPTIM),
    "muon": ("qwen3", "own", {}, {}, {"optimizer": "Muon", "lr_warmup_steps": 0}),
}
#: per number of ranks: case and settings of the engine on several ranks
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        *((name, {"expert_parallel_size": 2}) for name in CASES if name not in ("qwen3", "muon", "idle")),
        ("replayed", {"expert_parallel_size": 2, "param_offload": True, "optimizer_offload": True}),
        ("glm", {"expert_parallel_size": 2, "offload_policy": True, "reshard_after_forward": False}),
    ],
    4: [
        ("replayed", {"expert_parallel_size": 2}),
        ("idle", {"expert_parallel_size": 4}),
        ("gpt_oss", {"expert_parallel_size": 2}),
        ("glm", {"expert_parallel_size": 2, "fsdp_size": 2}),
        ("qwen3", {"expert_parallel_size": 2, "ulysses_sequence_parallel_size": 2}),
        ("muon", {"expert_parallel_size": 2}),
    ],
}
#: number of ranks that save and resume
RESUMED = {"replayed": 2, "gpt_oss": 4}
BEGINS = {2: [0, 6, 8], 4: [0, 3, 4, 7, 8]}  # rows of each rank


def batch_of(name: str, rows: slice) -> Any:
    fields = FIELDS if name == "own" else {**FIELDS, "routed_experts": REPLAYED[name]}
    return make_batch(fields, rows)


def train(engine: Any, batch: Any) -> dict[str, float]:
    own = engine.train_batch(batch, MicroBatching(size=1), policy_loss, TEMPERATURE, entropy=True)
    merged = merge_metrics(distributed.all_gather_object(own)[:: engine.geometry.cp_size])
    return {name: float(metric.value) for name, metric in merged.items()}


def engine_of(folder: Path, case: str, **settings: Any) -> Any:
    model, _, engine, of_model, optim = CASES[case]
    of_model = {"tokenizer_path": str(folder / "tokenizer"), **of_model}
    return make_engine(folder / MODELS[model][0], optim=optim, model=of_model, **{**engine, **settings})


def check_layout(rank: int, world: int, folder: Path, case: str, settings: dict[str, Any]) -> None:
    expected = torch.load(folder / f"{case}.pt", weights_only=True)
    sharers = settings.get("ulysses_sequence_parallel_size", 1)
    begins = BEGINS[world // sharers]
    rows = slice(begins[rank // sharers], begins[rank // sharers + 1])
    batch = batch_of(CASES[case][1], rows)
    engine = engine_of(folder, case, **settings)
    close(weights(engine), expected["before"], 0)
    computed = engine.infer(batch, MicroBatching(size=2), TEMPERATURE)["log_probs"]
    torch.testing.assert_close(computed, expected["log_probs"][rows], atol=2e-5, rtol=1e-4)
    assert train(engine, batch) == pytest.approx(expected["metrics"], rel=2e-4, abs=2e-6), (case, settings)
    after = weights(engine)
    if case != "muon":  # its products are in bfloat16
        close(after, expected["after"], 2e-5)
    if case != "lora":
        check_shards(engine, after)
    check_layout_of_experts(rank, engine)
    # Ranks call the whole model different numbers of times.
    with engine.whole_weights() as module, torch.no_grad():
        for _ in range(1 + rank):
            logits = module(input_ids=FIELDS["input_ids"][:2]).logits
    if case != "muon":
        torch.testing.assert_close(logits, expected["logits"], atol=2e-4, rtol=2e-3)
    if RESUMED.get(case) == world and settings == {"expert_parallel_size": 2}:
        check_resumed(folder, case, settings, engine, batch)


def check_layout_of_experts(rank: int, engine: Any) -> None:
    """The layout by which engines are placed says which experts a rank has."""
    layout = engine.training_layout
    for name, parameter in engine.module.named_parameters():
        if ".experts." in name and parameter.ndim == 3:
            spec = TensorSpec(name, tuple(parameter.shape), Cut(expert_dim=0))
            own, _ = engine.model_state.shard(parameter)
            assert slices_of(spec, layout, layout.coordinates(rank), 2) == (own,), name


def check_resumed(folder: Path, case: str, settings: dict[str, Any], engine: Any, batch: Any) -> None:
    """Another step straight, after a save and a load, and from the checkpoint of one rank without EP."""
    saved = folder / f"{case}_saved"
    engine.save(saved, ["model", "optimizer", "extra", "hf_model"])
    straight = train(engine, batch)
    resumed = engine_of(folder, case, **settings)
    resumed.load(saved, ["model", "optimizer", "extra"])
    assert train(resumed, batch) == straight
    close(weights(resumed), weights(engine), 0)
    moved = engine_of(folder, case, **settings)
    moved.load(folder / f"{case}_1", ["model", "optimizer", "extra"])
    train(moved, batch)
    close(weights(moved), torch.load(folder / f"{case}.pt", weights_only=True)["final"], 5e-5)


def train_critic(folder: Path, rows: slice, **settings: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The values of some rows, and the weights after a step."""
    model = {"tokenizer_path": str(folder / "tokenizer")}
    engine = make_engine(folder / MODELS["qwen3"][0], "value_model", optim=OPTIM, model=model, **settings)
    batch = batch_of("own", rows)
    values = engine.infer(batch, MicroBatching(size=2), outputs=("values",))["values"]
    engine.train_batch(batch, MicroBatching(size=1), value_loss)
    return values, weights(engine)


def body(rank: int, world: int, folder: Path) -> None:
    for case, settings in LAYOUTS[world]:
        check_layout(rank, world, folder, case, settings)
    if world == 2:
        rows = slice(*BEGINS[world][rank : rank + 2])
        values, after = train_critic(folder, rows, expert_parallel_size=2)
        expected, expected_after = torch.load(folder / "critic.pt", weights_only=True)
        torch.testing.assert_close(values, expected[rows], atol=2e-5, rtol=1e-4)
        close(after, expected_after, 2e-5)
    dist.barrier()


def save_expected(folder: Path, case: str) -> None:
    """The results of one rank without expert parallelism."""
    engine, batch = engine_of(folder, case), batch_of(CASES[case][1], slice(None))
    expected: dict[str, Any] = {"before": weights(engine)}
    expected["log_probs"] = engine.infer(batch, MicroBatching(), TEMPERATURE)["log_probs"]
    expected |= {"metrics": train(engine, batch), "after": weights(engine)}
    with engine.whole_weights() as module, torch.no_grad():
        expected["logits"] = module(input_ids=FIELDS["input_ids"][:2]).logits
    if case in RESUMED:
        engine.save(folder / f"{case}_1", ["model", "optimizer", "extra"])
        train(engine, batch)
        expected["final"] = weights(engine)
    torch.save(expected, folder / f"{case}.pt")


@pytest.mark.slow
def test_ranks_that_divide_the_experts_do_what_one_rank_does(tmp_path: Path, micro_model: Path) -> None:
    (tmp_path / "tokenizer").symlink_to(micro_model)
    for family, settings in MODELS.values():
        save_model(family, tmp_path, settings)
    for case in CASES:
        save_expected(tmp_path, case)
    torch.save(train_critic(tmp_path, slice(None)), tmp_path / "critic.pt")
    for world in LAYOUTS:
        spawn(body, world, world, tmp_path)
    # What they saved goes on on one rank without expert parallelism, and opens as a Hugging Face model.
    for case in RESUMED:
        saved, expected = tmp_path / f"{case}_saved", torch.load(tmp_path / f"{case}.pt", weights_only=True)
        back = engine_of(tmp_path, case)
        back.load(saved, ["model", "optimizer", "extra"])
        opened = AutoModelForCausalLM.from_pretrained(saved / "hf_model", dtype=torch.float32)
        assert "experts_implementation" not in (saved / "hf_model" / "config.json").read_text()
        close({name: p.detach() for name, p in opened.named_parameters()}, dict(back.module.named_parameters()), 0)
        train(back, batch_of(CASES[case][1], slice(None)))
        close(weights(back), expected["final"], 5e-5)


def test_products_by_segment_are_those_of_the_grouped_kernel() -> None:
    generator = torch.Generator().manual_seed(1)
    counts = torch.tensor([3, 0, 5, 0])
    sources = [torch.randn(8, 16, generator=generator), torch.randn(4, 16, 32, generator=generator)]
    gradients = []
    for product in (grouped_product, product_by_segment):
        rows, matrices = (source.clone().requires_grad_() for source in sources)
        output = product(rows, matrices, counts)
        output.square().sum().backward()
        gradients.append((output.detach(), rows.grad, matrices.grad))
    for grouped, segmented in zip(*gradients, strict=True):
        torch.testing.assert_close(grouped, segmented)
    assert not gradients[0][2][1].any()


def test_no_rows_give_gradients_of_zero() -> None:
    rows, matrices = torch.zeros(0, 16, requires_grad=True), torch.randn(2, 16, 32, requires_grad=True)
    grouped_product(rows, matrices, torch.tensor([0, 0])).sum().backward()
    assert matrices.grad is not None and not matrices.grad.any()
    assert rows.grad is not None and rows.grad.shape == (0, 16)


SMALL: dict[str, Any] = {**FAMILIES["Qwen3Moe"], "num_experts": 6}
LLAMA: dict[str, Any] = {**HEADS, "num_local_experts": 4, "head_dim": 8}
EIGHT_BIT = {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"}


@pytest.mark.parametrize(
    ("config", "ranks", "engine", "optim", "words"),
    [
        (
            Qwen3MoeConfig(**SMALL),
            8,
            {"expert_parallel_size": 4},
            {},
            ("expert_parallel_size=4", "6 experts", "[1, 2]"),
        ),
        (Qwen3MoeConfig(**SMALL), 4, {"expert_parallel_size": 3}, {}, ("expert_parallel_size=3", "4 ranks")),
        (Qwen3MoeConfig(**SMALL), 8, {"expert_parallel_size": 4, "fsdp_size": 2}, {}, ("2 ranks", "fsdp_size")),
        (Qwen3MoeConfig(**SMALL), 1, {"expert_parallel_size": 2}, {}, ("expert_parallel_size=2", "1 ranks")),
        (
            Qwen3MoeConfig(**{**SMALL, "moe_intermediate_size": 21}),
            20,
            {"expert_parallel_size": 2},
            {},
            ("[6, 42", "10"),
        ),
        (
            Qwen3MoeConfig(**SMALL),
            2,
            {"expert_parallel_size": 2, "use_torch_compile": True},
            {},
            ("use_torch_compile",),
        ),
        (Qwen3MoeConfig(**SMALL), 2, {"expert_parallel_size": 2}, EIGHT_BIT, ("AdamW8bit", "torch.optim")),
        (Qwen2Config(**HEADS), 2, {"expert_parallel_size": 2}, {}, ("Qwen2ForCausalLM", "no routed experts")),
        (Llama4TextConfig(**LLAMA), 2, {"expert_parallel_size": 2}, {}, ("Llama4ForCausalLM", "use_experts")),
    ],
    ids=["experts", "ranks", "fsdp_size", "one rank", "parts", "compile", "8 bits", "dense", "family"],
)
def test_what_cannot_be_divided_is_refused_before_the_weights_are_read(
    tmp_path: Path, config: Any, ranks: int, engine: dict[str, Any], optim: dict[str, Any], words: tuple[str, ...]
) -> None:
    config.save_pretrained(tmp_path)
    with raises_with(ModelError, "expert_parallel_size", *words):
        check_expert_parallel(ModelConfig(path=str(tmp_path)), FSDPConfig(**engine), ranks, OptimConfig(**optim))


@pytest.mark.parametrize("name", MODELS)
def test_families_whose_experts_can_be_divided_pass_the_check(tmp_path: Path, name: str) -> None:
    family, settings = MODELS[name]
    getattr(transformers, f"{family}Config")(**settings).save_pretrained(tmp_path)
    engine = FSDPConfig(expert_parallel_size=2)
    check_expert_parallel(ModelConfig(path=str(tmp_path)), engine, 4, OptimConfig())


def test_fewer_gathered_experts_take_less_memory(tmp_path: Path) -> None:
    """Weights, gradients and states stay as they are; a layer is gathered without 3/4 of its experts."""
    config = Qwen3MoeConfig(**{**FAMILIES["Qwen3Moe"], "moe_intermediate_size": 96})
    config.save_pretrained(tmp_path)
    work = Workload(16, 16, 4, MicroBatching(size=2), MicroBatching(size=2))
    without, divided = (
        forecast("language_model", ModelConfig(path=str(tmp_path)), FSDPConfig(**settings), OptimConfig(), 4, work)
        for settings in ({}, {"expert_parallel_size": 4})
    )
    held = ("weights", "states", "gradients", "logits")
    assert [getattr(divided, name) for name in held] == [getattr(without, name) for name in held]
    experts_of_layer = 4 * 3 * 96 * config.hidden_size * 4  # bytes in float32
    # Two layers that are gathered, the buffer of one, and that of its gradients in float32 and in their own dtype.
    assert without.gathered - divided.gathered == pytest.approx(5 * 0.75 * experts_of_layer)
    rows = 2 * 32 * 2  # tokens of a micro-batch, experts per token
    assert divided.activations - without.activations == 2 * rows * config.hidden_size * 4
    assert len(divided.notes) == len(without.notes) + 1
