"""Weights between Hugging Face and Megatron-core: exact round trips in several layouts, and equal outputs."""

from __future__ import annotations

import queue
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_helpers import make_batch, make_engine, make_fields, policy_loss
from megatron_helpers import make_megatron
from megatron_models import COMMON, MODELS, Built, checkpoint_tensors, tiny_config, tiny_model
from raising import raises_with
from ranks import spawn
from safetensors.torch import save_file
from transformers import AutoConfig

from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.megatron.first_weights import load_first_weights
from hybridrl.engine.megatron.hf_weights import InMemory, export_shards, load_hf, open_source
from hybridrl.engine.megatron.mapping import family_of, local_layers_name, padded_vocabulary
from hybridrl.errors import ModelError
from hybridrl.layouts.model_tensors import model_tensors
from hybridrl.layouts.slices import slices_of, whole
from hybridrl.layouts.topology import MegatronLayout
from hybridrl.registry import import_external_lib

DENSE = [name for name in MODELS if "moe" not in name and "mix" not in name and "deepseek" not in name]
OF_EXPERTS = [name for name in MODELS if name not in DENSE]
LAYOUTS: dict[str, list[dict[str, int]]] = {
    **{name: [{"tp": 2, "pp": 2}] for name in DENSE},
    **{name: [{"tp": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 1}] for name in OF_EXPERTS},
}
LAYOUTS["qwen2-tied"] += [{"tp": 4}, {"pp": 4}, {"pp": 2, "vpp": 2}, {"tp": 2, "cp": 2}]
LAYOUTS["qwen3-moe"] += [{"ep": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "ep": 4, "etp": 1}]


def _same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not different, different


def _check_case(case: str) -> None:
    config = tiny_config(case)
    model = tiny_model(config)
    wanted = checkpoint_tensors(model)
    ids = torch.randint(3, 290, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference = model(input_ids=ids).logits
    for sizes in LAYOUTS[case]:
        built = Built(config, **sizes)
        load_hf(built.map, InMemory(wanted))
        assert not any(tensor.isnan().any() for _, tensor, _ in built.map.parameters()), (case, sizes)
        _same(dict(built.exporter.export()), wanted)
        _check_shards(built, wanted, config, sizes)
        if "vpp" not in sizes and "cp" not in sizes:
            logits = built.logits(ids)
            if logits is not None:
                torch.testing.assert_close(logits[..., : config.vocab_size], reference, rtol=0, atol=1e-5)


def _check_shards(built: Built, wanted: dict[str, torch.Tensor], config: Any, sizes: dict[str, int]) -> None:
    """The parts that a rank exports are views of its parameters, and those that the plan of transfers expects."""
    shards = list(export_shards(built.map))
    storages = {tensor.untyped_storage().data_ptr() for _, tensor, _ in built.map.parameters()}
    assert all(shard.tensor.untyped_storage().data_ptr() in storages for shard in shards)
    held: dict[str, torch.Tensor] = {}
    for shard in shards:
        whole = wanted[shard.name]
        assert shard.shape == tuple(whole.shape)
        index = tuple(slice(a, a + n) for a, n in zip(shard.offsets, shard.tensor.shape, strict=True))
        assert torch.equal(shard.tensor, whole[index])
        held.setdefault(shard.name, torch.zeros(whole.shape, dtype=torch.bool))[index] = True
    expected = _expected(config, sizes, wanted)
    cut_here = re.compile(r"q_a_proj|kv_a_proj_with_mqa")  # replicated in Transformer Engine's layers, cut in these
    for name in wanted:
        if not cut_here.search(name):
            nothing = torch.zeros(wanted[name].shape, dtype=torch.bool)
            assert torch.equal(held.get(name, nothing), expected.get(name, nothing)), (name, sizes)


def _expected(config: Any, sizes: dict[str, int], wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The elements that this rank holds by the layouts of the hybrid engine, under the names of the checkpoint."""
    layout = MegatronLayout(dp=dist.get_world_size() // _ranks(sizes), **sizes)
    specs, layers = model_tensors(config)
    found: dict[str, torch.Tensor] = {}
    for spec in specs:
        held = torch.zeros(spec.shape, dtype=torch.bool)
        for tensor_slice in slices_of(spec, layout, layout.coordinates(dist.get_rank()), layers):
            held[tensor_slice.within(whole(spec.shape))] = True
        found |= dict(_checkpoint_parts(spec.name, held))
    if config.model_type == "mixtral":
        own = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", ".mlp.": ".block_sparse_moe."}
        for theirs, ours in own.items():
            found = {name.replace(theirs, ours): tensor for name, tensor in found.items()}
    assert found.keys() == wanted.keys()
    return found


def _ranks(sizes: dict[str, int]) -> int:
    return sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)


def _checkpoint_parts(name: str, held: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A tensor of the module, all experts in one, as the tensors of its checkpoint."""
    start, _, last = name.rpartition(".experts.")
    if not start:
        return [(name, held)]
    found = []
    for expert, own in enumerate(held):
        parts = {"gate_proj": own.chunk(2)[0], "up_proj": own.chunk(2)[1]} if last == "gate_up_proj" else {last: own}
        found += [(f"{start}.experts.{expert}.{part}.weight", tensor) for part, tensor in parts.items()]
    return found


def _check_value_head() -> None:
    config = tiny_config("qwen2")
    wanted = {name: t for name, t in checkpoint_tensors(tiny_model(config)).items() if name != "lm_head.weight"}
    built = Built(config, value=True, tp=2, pp=2)
    load_hf(built.map, InMemory(wanted))
    got = dict(built.exporter.export())
    zeros = {"score.weight": torch.zeros(1, config.hidden_size), "score.bias": torch.zeros(1)}
    _same(got, {**wanted, **zeros})  # a language model's checkpoint: values start at 0
    head = {"score.weight": torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(3))}
    head["score.bias"] = torch.tensor([0.5])
    load_hf(built.map, InMemory({**wanted, **head}))
    _same(dict(built.exporter.export()), {**wanted, **head})
    halves = dict(built.exporter.export(torch.bfloat16))
    assert all(torch.equal(halves[name], tensor.bfloat16()) for name, tensor in wanted.items())


def _check_files(folder: Path) -> None:
    """Safetensors in several files, PyTorch's format, experts in one tensor, and names without the head's prefix."""
    config = tiny_config("qwen3-moe")
    model = tiny_model(config)
    wanted = checkpoint_tensors(model)
    fused = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "several", max_shard_size="200KB")
        assert len(list((folder / "several").glob("*.safetensors"))) > 2
        for name in ("pytorch", "fused"):
            config.save_pretrained(folder / name)
        torch.save(wanted, folder / "pytorch" / "pytorch_model.bin")
        save_file(fused, folder / "fused" / "model.safetensors")
    dist.barrier()
    built = Built(config, tp=2, ep=2, etp=1)
    for name in ("several", "pytorch", "fused"):
        for _, tensor, _ in built.map.parameters():
            tensor.detach().fill_(float("nan"))
        with open_source(folder / name) as source:
            load_hf(built.map, source)
        _same(dict(built.exporter.export()), wanted)
    short = {name.removeprefix("model."): tensor for name, tensor in wanted.items() if name.startswith("model.")}
    load_hf(built.map, InMemory({**short, "lm_head.weight": wanted["lm_head.weight"]}))
    _same(dict(built.exporter.export()), wanted)


def _check_megatron_checkpoint(folder: Path) -> None:
    """A distributed checkpoint of Megatron-core, written in one layout, as the first weights of others."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # In place of a queue in a process of its own, which takes seconds to start: nothing is asynchronous.
    filesystem_async._results_queue = queue.SimpleQueue()
    for case, sizes in (("qwen3-moe", {"tp": 2, "ep": 2, "etp": 1}), ("qwen2-tied", {"tp": 2, "pp": 2})):
        config = tiny_config(case)
        wanted = checkpoint_tensors(tiny_model(config))
        written = Built(config, **sizes)
        load_hf(written.map, InMemory(wanted))
        path = folder / case / "dist_ckpt"
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
            config.save_pretrained(folder / case)
        dist.barrier()
        with written.state.activate():
            dist_checkpointing.save({"model": written.chunks[0].sharded_state_dict()}, str(path))
        for own in ({"pp": 4}, {"tp": 2, "cp": 2}):
            for keys in ({}, {"use_dist_checkpointing": True, "dist_checkpointing_path": str(path)}):
                settings = MegatronConfig(**keys)
                built = Built(config, **own)
                with built.state.activate():
                    load_first_weights(built.map, folder / case, settings)
                _same(dict(built.exporter.export()), wanted)
    other = Built(tiny_config("qwen3"), pp=4)
    with other.state.activate(), raises_with(ModelError, "dist_ckpt"):
        load_first_weights(other.map, folder / "qwen2-tied", MegatronConfig())
    value = Built(tiny_config("qwen2-tied"), value=True, pp=2)
    with value.state.activate():
        load_first_weights(value.map, folder / "qwen2-tied", MegatronConfig())
    got = dict(value.exporter.export())
    _same({name: tensor for name, tensor in got.items() if not name.startswith("score.")}, wanted)
    assert not got["score.weight"].any()
    for keys, match in (({}, "dist_checkpointing_path"), ({"dist_checkpointing_path": str(folder)}, "metadata.json")):
        with pytest.raises(ModelError, match=match):
            load_first_weights(value.map, folder, MegatronConfig(use_dist_checkpointing=True, **keys))


def _check_training(folder: Path) -> None:
    """What a family adds to Megatron's layers is also right in the backward pass, recomputed or not."""
    experts = {"tp": 2, "ep": 2, "etp": 1}
    for case, sizes, recompute in (
        ("gemma3", {"tp": 2}, True),
        ("gemma3", {"pp": 2}, False),
        ("qwen2-moe", experts, True),
    ):
        path = folder / f"{case}_trained"
        if dist.get_rank() == 0:
            tiny_model(tiny_config(case)).save_pretrained(path)
        dist.barrier()
        model = {"enable_gradient_checkpointing": recompute}
        got = _trained(make_megatron(path, model=model, optim={"optimizer": "SGD"}, **sizes))
        reference = _trained(make_engine(path, optim={"optimizer": "SGD"}))
        assert got.keys() == reference.keys()
        for name, tensor in reference.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=2e-5, msg=f"{case} {sizes} {name}")


def _trained(engine: Any) -> dict[str, torch.Tensor]:
    rows = 12 // engine.geometry.dp_size
    mine = slice(engine.geometry.dp_rank * rows, (engine.geometry.dp_rank + 1) * rows)
    for _ in range(2):
        with engine.loaded(optimizer=True):
            engine.train_batch(make_batch(make_fields(), mine), MicroBatching(size=3), policy_loss)
    with engine.loaded():
        return {name: tensor.clone() for name, tensor in engine.export_weights()}


def _check_documented_family(folder: Path) -> None:
    """The example of docs/megatron_models.md: a model that the library does not know, in a user's module."""
    page = (Path(__file__).parents[2] / "docs" / "megatron_models.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n# my_phi3\.py\n(.*?)```", page, re.DOTALL)
    folder.joinpath(f"my_phi3_{dist.get_rank()}.py").write_text(source)
    sys.path.insert(0, str(folder))
    config = AutoConfig.for_model("phi3", **{**COMMON, "sliding_window": None})
    with raises_with(ModelError, "model_type='phi3'"):
        family_of(config)
    import_external_lib(f"my_phi3_{dist.get_rank()}")
    model = tiny_model(config)
    wanted = checkpoint_tensors(model)
    assert "model.layers.0.self_attn.qkv_proj.weight" in wanted
    built = Built(config, tp=2, pp=2)
    load_hf(built.map, InMemory(wanted))
    _same(dict(built.exporter.export()), wanted)
    ids = torch.arange(3, 19).view(2, 8)
    logits = built.logits(ids)
    if logits is not None:
        with torch.no_grad():
            reference = model(input_ids=ids).logits
        torch.testing.assert_close(logits[..., : config.vocab_size], reference, rtol=0, atol=1e-5)


def _check_refused() -> None:
    config = tiny_config("qwen2")
    wanted = checkpoint_tensors(tiny_model(config))
    built = Built(config, pp=4)
    layer = f"model.layers.{dist.get_rank()}."
    missing = f"{layer}mlp.up_proj.weight"
    with pytest.raises(ModelError, match=re.escape(missing)):
        load_hf(built.map, InMemory({name: t for name, t in wanted.items() if name != missing}))
    surplus = {f"{layer}mlp.up_proj.bias": torch.zeros(96)}
    with pytest.raises(ModelError, match=re.escape(f"{layer}mlp.up_proj.bias")):
        load_hf(built.map, InMemory({**wanted, **surplus}))
    with pytest.raises(ModelError, match=re.escape(f"{layer}mlp.up_proj.weight") + r".*\[90, 64\].*\[96, 64\]"):
        load_hf(built.map, InMemory({**wanted, missing: torch.zeros(90, 64)}))
    load_hf(built.map, InMemory({**wanted, f"{layer}self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    for name in ("lm_head.bias", "model.embed_positions.weight", "prompt.weight", "model.norm.bias"):
        with pytest.raises(ModelError, match=re.escape(f"the first {name}")):
            load_hf(built.map, InMemory({**wanted, name: torch.zeros(4)}))
    left_out = {"model.rotary_emb.inv_freq": torch.zeros(4), "model.layers.4.eh_proj.weight": torch.zeros(4)}
    load_hf(built.map, InMemory({**wanted, **left_out, "score.weight": torch.zeros(1, 64)}))
    short = {name.removeprefix("model."): tensor for name, tensor in wanted.items()}
    with pytest.raises(ModelError, match=r"the first layers\.\d\.mlp\.up_proj\.bias"):
        load_hf(built.map, InMemory({**short, **{name.removeprefix("model."): t for name, t in surplus.items()}}))
    _check_tied_refused()
    with raises_with(ModelError, "tensor_model_parallel_size=4", "2 KV heads", "[1, 2]"):
        Built(tiny_config("qwen2", num_key_value_heads=2), tp=4)


def _check_tied_refused() -> None:
    """A tied model's checkpoint may have the output layer, too, if it is the embedding."""
    config = tiny_config("qwen2-tied")
    wanted = checkpoint_tensors(tiny_model(config))
    built = Built(config, tp=2)
    head = wanted["model.embed_tokens.weight"].clone()
    load_hf(built.map, InMemory({**wanted, "lm_head.weight": head}))
    _same(dict(built.exporter.export()), wanted)
    load_hf(Built(config, value=True).map, InMemory({**wanted, "lm_head.weight": head + 1}))
    head[torch.arange(0, len(head), 20)] += 1  # rows of every rank
    with raises_with(ModelError, "lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"):
        load_hf(built.map, InMemory({**wanted, "lm_head.weight": head}))


def _every_check(rank: int, folder: Path) -> None:
    for case in MODELS:
        _check_case(case)
    _check_value_head()
    _check_files(folder)
    _check_megatron_checkpoint(folder)
    _check_training(folder)
    _check_documented_family(folder)
    _check_refused()


@pytest.mark.slow
def test_weights_and_outputs_in_every_layout(tmp_path: Path) -> None:
    spawn(_every_check, 4, tmp_path, preload="megatron_preload")


@pytest.mark.parametrize(
    ("case", "changes", "match"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True.*false"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True.*false"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0.*null"),
        ("deepseek-v2", {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy'.*greedy"),
        ("deepseek-v3", {"topk_group": 1}, "topk_group=1"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob=False.*true"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rope_type.*yarn"),
        ("qwen2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_megatron_cannot_represent_is_refused(case: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        family_of(tiny_config(case, **changes))


def test_a_model_without_a_table_is_refused_and_those_with_one_are_listed() -> None:
    from transformers import Gemma2Config

    with raises_with(ModelError, "model_type='gemma2'", "deepseek_v3", "gemma3_text", "qwen3_moe", "fsdp2"):
        family_of(Gemma2Config())


@pytest.mark.parametrize(
    ("transformer_engine", "local"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.0.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.0.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.3.mlp.experts.linear_fc1.weight12",
            "decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight",
        ),
        (
            "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.1.self_attention.kv_layernorm.weight",
        ),
    ],
)
def test_names_of_transformer_engine(transformer_engine: str, local: str) -> None:
    assert local_layers_name(transformer_engine) == local
    assert local_layers_name(local) == local


def test_padding_of_the_vocabulary_is_that_of_the_plan() -> None:
    for size in (1, 127, 128, 300, 32000, 151936):
        for tensors in (1, 2, 4, 8):
            rows = padded_vocabulary(size, tensors)
            assert rows >= size
            assert rows % (MegatronLayout(tp=tensors).vocabulary_multiple) == 0
            assert rows - size < MegatronLayout(tp=tensors).vocabulary_multiple
