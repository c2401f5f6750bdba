"""`python -m hybridrl.checkpoint.merge`: checkpoints of one rank, of a critic, of a run's folder, and of verl."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hybridrl.checkpoint.merge import main
from hybridrl.config.roles import ROLES
from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import create_train_engine
from hybridrl.models.tiny import build_tokenizer

IDS = torch.arange(10, 40).view(2, 15)


def _engine(path: Path, model_type: str = "language_model") -> Any:
    made = create_train_engine(
        model_type, "fsdp2", model=ModelConfig(path=str(path)), engine=FSDPConfig(), optim=OptimConfig()
    )
    made.initialize()
    with torch.no_grad():  # as training would
        for parameter in made.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    return made


def _logits(path: Path, kind: Any = AutoModelForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = kind.from_pretrained(path, dtype=torch.float32).eval()(input_ids=IDS).logits
    return logits


def test_a_run_merges_into_what_transformers_computes_with(
    micro_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's `config.yaml` names the model; the weights are those of `hf_model`, of the actor and of the critic."""
    step = tmp_path / "run" / "global_step_3"
    _engine(micro_model).save(step / "actor", ["model", "hf_model"])
    _engine(micro_model, "value_model").save(step / "critic", ["model", "hf_model"])
    for role in ("actor", "critic"):
        shutil.move(step / role / "hf_model", tmp_path / f"hf_{role}")
    settings = {"path": str(micro_model), "hf_config_path": None, "trust_remote_code": False, "override_config": {}}
    text = yaml.safe_dump({"actor_rollout_ref": {"model": settings}, "critic": {"model": settings}})
    (tmp_path / "run" / "config.yaml").write_text(text)
    for role, kind in (("actor", AutoModelForCausalLM), ("critic", AutoModelForTokenClassification)):
        out = tmp_path / f"merged_{role}"
        assert main([str(step / role), "--out", str(out)]) == 0
        assert torch.equal(_logits(out, kind), _logits(tmp_path / f"hf_{role}", kind))
        assert AutoTokenizer.from_pretrained(out).decode([60, 61]) == AutoTokenizer.from_pretrained(micro_model).decode(
            [60, 61]
        )
    assert not torch.equal(_logits(tmp_path / "merged_actor"), _logits(micro_model))
    assert main([str(step), "--out", str(tmp_path / "none")]) == 2
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "none")]) == 2
    assert main([str(step / "actor"), "--out", str(tmp_path / "merged_actor")]) == 2
    (tmp_path / "run" / "config.yaml").unlink()
    assert main([str(step / "actor"), "--out", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err.splitlines()
    for line, part in zip(said, ("holds 2 models", "global_step_3", "holds weights already", "--model"), strict=True):
        assert part in line
    out = tmp_path / "half"
    assert main([str(step / "actor"), "--out", str(out), "--model", str(micro_model), "--dtype", "bfloat16"]) == 0
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


OWN_ROLE = """
from hybridrl.config.schema.prime import PrimeConfig
from hybridrl.trainer.ppo.role_groups import ROLES, RoleSpec, register_role

register_role(
    RoleSpec(
        name="umpire_of_merge",
        worker=None,
        settings=PrimeConfig,
        needed=lambda config: True,
        placement=("actor_rollout_ref",),
        mesh="umpire_of_merge",
        saved="umpire",
    )
)
"""


@pytest.mark.parametrize(("folder", "own"), [("prime", "prime"), ("umpire", "umpire_of_merge")])
def test_every_role_that_is_saved_is_merged(
    micro_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, own: str
) -> None:
    """Next to the policy, a role of the library and one that the run's `external_lib` registers."""
    step, module = tmp_path / "run" / "global_step_1", tmp_path / "role_of_merge.py"
    for saved in ("actor", folder):
        _engine(micro_model).save(step / saved, ["model"])
    settings = {
        "actor_rollout_ref": {"model": {"path": "/of/the/policy", "external_lib": str(module)}},
        "roles": {own: {"model": {"path": str(micro_model)}}},
    }
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main([str(step), "--out", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert f"{step / 'actor'}" in said and f"{step / folder}" in said
    out = tmp_path / "merged"
    asked = [str(step / folder), "--out", str(out)]
    try:
        if folder not in [spec.saved for spec in ROLES.values()]:
            assert main(asked) == 2 and "role_of_merge" in capsys.readouterr().err and not out.exists()
            module.write_text(OWN_ROLE)
        assert main(asked) == 0
    finally:
        ROLES.pop("umpire_of_merge", None)
    assert not torch.equal(_logits(out), _logits(micro_model))
    shutil.rmtree(step / "actor")
    assert main([str(step), "--out", str(tmp_path / "again"), "--model", str(micro_model)]) == 0
    assert torch.equal(_logits(tmp_path / "again"), _logits(out))


@contextmanager
def _rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _write_as_verl(model: Any, path: Path, folder: Path, shape: tuple[int, ...]) -> None:
    """Shards of each rank as DTensors, in `model_world_size_<W>_rank_<R>.pt`, and `huggingface/` next to them."""
    world = 1
    for size in shape:
        world *= size
    names = ("fsdp",) if len(shape) == 1 else ("ddp", "fsdp")
    folder.mkdir(parents=True)
    for rank in range(world):
        with _rank(rank, world):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            placements = [Shard(0)] if len(shape) == 1 else [Replicate(), Shard(0)]
            state = {}
            for name, tensor in model.state_dict().items():
                parts = tensor.chunk(shape[-1])
                part = rank % shape[-1]
                local = parts[part] if part < len(parts) else tensor[:0]
                state[name] = DTensor.from_local(
                    local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
            torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    model.config.save_pretrained(folder / "huggingface")
    AutoTokenizer.from_pretrained(path).save_pretrained(folder / "huggingface")


def _state_of_older_torch(mesh: DeviceMesh) -> dict[str, Any]:
    """What torch 2.6 to 2.8 pickles of a mesh: its ranks are an attribute, and there is no layout."""
    return {
        "device_type": mesh.device_type,
        "mesh": mesh.mesh.clone(),
        "mesh_dim_names": mesh.mesh_dim_names,
        "_flatten_mesh_list": tuple(mesh.mesh.flatten().tolist()),
        "_thread_id": None,
        "_coordinate_on_dim": mesh.get_coordinate(),
    }


@pytest.mark.parametrize(
    ("shape", "experts", "older"),
    [((3,), False, False), ((2, 2), False, False), ((2, 2), False, True), ((2,), True, False)],
)
def test_shards_of_verl_become_the_model_that_they_are(
    micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], experts, older
) -> None:
    """Ranks with uneven and with empty shards, replicas, a module that keeps all experts in one tensor, older torch."""
    path = micro_model
    if older:
        monkeypatch.setattr(DeviceMesh, "__getstate__", _state_of_older_torch)
    if experts:
        path = tmp_path / "experts"
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=263, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        )  # fmt: skip
        Qwen3MoeForCausalLM(config).save_pretrained(path)
        build_tokenizer().save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    _write_as_verl(model, path, tmp_path / "global_step_7" / "actor", shape)
    assert main([str(tmp_path / "global_step_7"), "--out", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    with torch.no_grad():
        assert torch.equal(_logits(tmp_path / "out"), model.eval()(input_ids=IDS).logits)


def test_shards_of_verl_that_cannot_be_read_are_refused(
    micro_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "actor"
    _write_as_verl(AutoModelForCausalLM.from_pretrained(micro_model), micro_model, folder, (2,))
    last = folder / "model_world_size_2_rank_1.pt"
    kept = last.read_bytes()
    last.unlink()
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 2
    last.write_bytes(b"broken")
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 2
    torch.save({"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(2, 2)}, last)
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 2
    with monkeypatch.context() as patch:
        patch.setattr(DeviceMesh, "__getstate__", lambda _: {"device_type": "cpu"})
        _write_as_verl(AutoModelForCausalLM.from_pretrained(micro_model), micro_model, tmp_path / "other", (2,))
    assert main([str(tmp_path / "other"), "--out", str(tmp_path / "out")]) == 2
    last.write_bytes(kept)
    (folder / "model_world_size_3_rank_2.pt").write_bytes(kept)
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 2
    (tmp_path / "mega" / "actor" / "dist_ckpt").mkdir(parents=True)
    assert main([str(tmp_path / "mega"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()
    parts = (
        "lacks model_world_size_2_rank_1.pt",
        "rank_1.pt cannot be read",
        "LoRA",
        "model_merger",
        "[2, 3] ranks",
        "Megatron",
    )
    for line, part in zip((one for one in said if one.startswith("error")), parts, strict=True):
        assert part in line
    assert not list((tmp_path).glob("out/*.safetensors"))
