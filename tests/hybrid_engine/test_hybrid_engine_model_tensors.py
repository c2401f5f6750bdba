"""The cut of every tensor of real model families, and the command that prints a plan."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises_with
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from hybridrl.errors import ConfigError
from hybridrl.hybrid_engine.plan import compared, plan
from hybridrl.hybrid_engine.print_plan import main, parse_training
from hybridrl.layouts.model_tensors import model_tensors
from hybridrl.layouts.slices import Cut, slices_of
from hybridrl.layouts.topology import GenerationLayout, MegatronLayout, ShardedLayout
from hybridrl.models.model_config import load_model_config
from hybridrl.registry import TRAIN_ENGINES
from hybridrl.utils.entry_metadata import TrainMetadata

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
STATE = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, head_dim=16),
    "deepseek_v3": DeepseekV3Config(**{**SIZES, **MLA}),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **STATE, head_dim=16),
    "qwen3_next": Qwen3NextConfig(**SIZES, **STATE, **MOE, head_dim=16, shared_expert_intermediate_size=32),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_held_once_per_copy(family: str) -> None:
    specs, layers = model_tensors(FAMILIES[family])
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(FAMILIES[family]).parameters())
    biases = sum(spec.elements for spec in specs if spec.name.endswith("e_score_correction_bias"))
    assert sum(spec.elements for spec in specs) == parameters + biases, "tied weights count once, as in parameters()"
    layout = MegatronLayout(tp=2, pp=2)
    for spec in specs:
        seen = np.zeros(spec.shape, dtype=int)
        for device in range(layout.devices):
            for tensor_slice in slices_of(spec, layout, layout.coordinates(device), layers):
                seen[tuple(map(slice, tensor_slice.start, tensor_slice.stop))] += 1
        copies = (1 if spec.cut.dim is not None else 2) * (2 if spec.first and spec.last else 1)
        assert set(np.unique(seen)) == {copies}, spec.name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "generation", [GenerationLayout(tp=2, replicas=2), GenerationLayout(tp=4, ep=4), GenerationLayout(pp=2, replicas=2)]
)
@pytest.mark.parametrize(
    "training",
    [MegatronLayout(tp=2, pp=2), MegatronLayout(tp=2, dp=2, ep=2, etp=1), ShardedLayout(4), ShardedLayout(4, expert=2)],
)
def test_a_transition_keeps_and_receives_the_whole_generation_shard(
    family: str, training: MegatronLayout | ShardedLayout, generation: GenerationLayout
) -> None:
    specs, layers = model_tensors(FAMILIES[family])
    made = plan(specs, training, generation, layers)
    assert list(made.reused + made.received) == list(made.needed)
    volumes = compared(made)
    assert volumes["this plan"].received <= volumes["gather in the training group"].received
    if isinstance(training, MegatronLayout) and training.pp == 2 and generation.tp == 2:
        assert volumes["this plan"].redundant == 0


def test_a_tensor_without_a_rule_is_named() -> None:
    with raises_with(ConfigError, "transformer.wte.weight", "GPT2Config"):
        model_tensors(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))


def test_layers_with_a_state_are_cut_by_their_heads() -> None:
    """4 heads of 8 keys and 8 heads of 16 values: queries, keys and values are cut one by one."""
    cuts = {spec.name: spec.cut for spec in model_tensors(FAMILIES["qwen3_5"])[0]}
    layer = "model.layers.0.linear_attn."
    assert cuts[layer + "in_proj_qkv.weight"] == cuts[layer + "conv1d.weight"] == Cut(dim=0, sections=(32, 32, 128))
    assert cuts[layer + "A_log"] == cuts[layer + "in_proj_z.weight"] == Cut(dim=0)
    assert (cuts[layer + "out_proj.weight"], cuts[layer + "norm.weight"]) == (Cut(dim=1), Cut())
    (grouped,) = {
        spec.cut
        for spec in model_tensors(FAMILIES["qwen3_next"])[0]
        if spec.name.endswith(("in_proj_qkvz.weight", "ba.weight"))
    }
    assert grouped == Cut(dim=0, heads=4)


def test_vision_towers_are_cut_like_the_rest(vision_models: dict[str, Path]) -> None:
    for folder in vision_models.values():
        config = load_model_config(folder)
        specs, _ = model_tensors(config)
        tower = {spec.name: spec for spec in specs if "visual." in spec.name}
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        assert tower.keys() == {name for name, _ in model.named_parameters() if "visual." in name}
        assert all(spec.first and not spec.last for spec in tower.values())
        assert tower["model.visual.blocks.0.attn.qkv.weight"].cut == Cut(dim=0, sections=(16, 16, 16))
        assert tower["model.visual.blocks.0.attn.proj.weight"].cut == Cut(dim=1)
        assert tower["model.visual.patch_embed.proj.weight"].cut == Cut()


def save(config: PreTrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def test_the_command_counts_what_the_plan_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(FAMILIES["qwen3_moe"], tmp_path)
    layouts = ["--training", "megatron:tp=2,pp=2,dp=2", "--generation", "tp=2,replicas=4"]
    assert main([model + "/config.json", *layouts, "--bytes", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    specs, layers = model_tensors(FAMILIES["qwen3_moe"])
    made = plan(specs, MegatronLayout(tp=2, pp=2, dp=2), GenerationLayout(tp=2, replicas=4), layers)
    assert printed["bytes"]["received"] == (made.received * 4).tolist()
    assert printed["model_bytes"] == 4 * made.elements
    assert main([model, *layouts, "--per-device"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("computed from the shapes" in line for line in lines)
    assert [line.split()[0] for line in lines[-8:]] == [str(device) for device in range(8)]


@pytest.mark.parametrize(
    ("training", "generation", "says"),
    [
        ("fsdp:shard=2", "tp=2", "'fsdp:shard=2'.*fsdp2, megatron"),
        ("megatron:tpp=2", "tp=2", "'tpp=2'.*tp, pp, dp"),
        ("megatron:tp=2", "tp=4", "2 devices"),
        ("megatron:tp=4", "tp=4", r"k_proj.*2 KV heads"),
    ],
)
def test_the_command_refuses_layouts_in_a_line(
    training: str, generation: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(FAMILIES["llama"], tmp_path)
    assert main([model, "--training", training, "--generation", generation]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(says, error)


def test_tensors_do_not_depend_on_the_attention_kernel() -> None:
    """The driver need not have the package of the training workers' kernel."""
    config = copy.deepcopy(FAMILIES["qwen3"])
    config._attn_implementation = "flash_attention_2"
    assert model_tensors(config) == model_tensors(FAMILIES["qwen3"])
    assert config._attn_implementation == "flash_attention_2"


#: docs/resharding.md shows what the command prints for these.
LARGE: dict[str, tuple[PreTrainedConfig, str, str]] = {
    "llama-70b": (
        LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        ),
        "megatron:tp=8,pp=8,dp=2",
        "tp=8,replicas=16",
    ),
    "qwen3-235b-a22b": (
        Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        "megatron:tp=4,pp=8,dp=4,ep=8,etp=1,first_layers=11,last_layers=11",
        "tp=8,ep=8,replicas=16",
    ),
    "deepseek-v3-671b": (
        DeepseekV3Config(),
        "megatron:tp=8,pp=12,ep=8,etp=1,last_layers=6",
        "tp=8,dp=4,ep=32,replicas=3",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_docs_show_what_the_command_prints(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, training, generation = LARGE[name]
    assert main([save(config, tmp_path), "--training", training, "--generation", generation]) == 0
    page = (Path(__file__).parents[2] / "docs" / "resharding.md").read_text()
    assert f"MODEL --training {training} --generation {generation}\n{capsys.readouterr().out.strip()}" in page


def test_the_command_as_a_user_types_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hybridrl.hybrid_engine.print_plan", save(FAMILIES["llama"], tmp_path)]
    layouts = ["--training", "fsdp2:shard=2", "--generation", "tp=2"]
    done = subprocess.run([*command, *layouts], capture_output=True, text=True, timeout=600)
    assert (done.returncode, "received per device" in done.stdout) == (0, True), done.stderr


def test_fsdp_of_512_devices() -> None:
    """The largest plan that the docs speak of is exact in its sums."""
    specs, layers = model_tensors(LARGE["llama-70b"][0])
    made = plan(specs, ShardedLayout(512), GenerationLayout(tp=8, replicas=64), layers)
    assert list(made.reused + made.received) == list(made.needed)
    assert made.sent.sum() == made.received.sum()


def test_the_command_knows_the_layouts_of_registered_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_training("fsdp2:shard=4") == ShardedLayout(shard=4)
    with raises_with(ConfigError, "'own:shard=4'", "fsdp2"):
        parse_training("own:shard=4")
    monkeypatch.setitem(TRAIN_ENGINES.objects, "own", object())
    monkeypatch.setitem(TRAIN_ENGINES._metadata, "own", TrainMetadata(layout=ShardedLayout))
    assert parse_training("own:shard=4") == ShardedLayout(shard=4)
