"""The whole program on one GPU: the paths that a CPU does not have (CUDA, bfloat16 by default, packing, offload)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridrl.config import load_config
from hybridrl.engine.train_engine import MicroBatching, create_train_engine
from hybridrl.protocol import DataProto
from hybridrl.utils import device


def random_batch(rows: int = 12, prompt: int = 10, response: int = 14) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, response + 1, (rows,), generator=generator)
    prompts = torch.randint(1, prompt + 1, (rows,), generator=generator)
    prompt_mask = (torch.arange(prompt)[None] >= prompt - prompts[:, None]).long()
    response_mask = (torch.arange(response)[None] < lengths[:, None]).long()
    ids = torch.randint(8, 200, (rows, prompt + response), generator=generator)
    return DataProto.from_dict(
        tensors={
            "responses": ids[:, prompt:],
            "input_ids": ids,
            "attention_mask": torch.cat([prompt_mask, response_mask], 1),
            "response_mask": response_mask,
        }
    )


def engine_of(model: Path, *overrides: str):
    config = load_config(
        "ppo_trainer",
        [f"actor_rollout_ref.model.path={model}", "data.train_files=x", *overrides],
    ).actor_rollout_ref
    engine = create_train_engine(
        "language_model", "fsdp2", model=config.model, engine=config.actor.fsdp_config, optim=config.actor.optim
    )
    engine.initialize()
    return engine


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_log_probs_agree_with_the_cpu(tiny_model, dtype, tolerance) -> None:
    from transformers import AutoModelForCausalLM

    engine = engine_of(tiny_model, f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}")
    batch = random_batch()
    found = engine.infer(batch, MicroBatching(size=5), outputs=("log_probs",))["log_probs"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tensors = batch.batch
    for row in range(len(batch)):
        ids = tensors["input_ids"][row][tensors["attention_mask"][row].bool()]
        length = int(tensors["response_mask"][row].sum())
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        expected = log_probs[:-1].gather(-1, ids[1:, None])[:, 0][-length:] if len(ids) > length else None
        if expected is not None:
            torch.testing.assert_close(found[row, :length], expected, atol=tolerance, rtol=0)


def test_offloaded_state_leaves_the_device_between_uses(tiny_model) -> None:
    engine = engine_of(
        tiny_model,
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
    )
    batch = random_batch()
    batch.meta_info = {"batch_num_tokens": int(batch.batch["response_mask"].sum())}

    def loss_fn(outputs, part):
        return -outputs["log_probs"].sum() / part.meta_info["batch_num_tokens"], {}

    with engine.loaded(optimizer=True):
        engine.train_batch(batch, MicroBatching(size=4), loss_fn)
        assert all(parameter.is_cuda for parameter in engine.module.parameters())
    assert not any(parameter.is_cuda for parameter in engine.module.parameters())
    states = [value for state in engine.model_state.optimizer.state.values() for value in state.values() if value.ndim]
    assert states and not any(value.is_cuda for value in states)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("auto", 5e-2)])
def test_grpo_trains_on_the_device(tiny_model, sort_data, tmp_path, finish, dtype, limit) -> None:
    command = [
        sys.executable,
        "-m",
        "hybridrl.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={tiny_model}",
        f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}",
        "actor_rollout_ref.rollout.name=hf",  # an engine samples in bfloat16
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"data.train_files={sort_data / 'train.parquet'}",
        "data.train_batch_size=16",
        "data.max_response_length=8",
        "trainer.device=cuda",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir={tmp_path}",
    ]
    ended: subprocess.CompletedProcess[str] = finish(command, limit=240)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 3 and all(record["training/rollout_probs_diff_max"] < limit for record in records)
    assert device.is_gpu()
