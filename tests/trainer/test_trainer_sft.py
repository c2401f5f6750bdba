"""Supervised fine-tuning through Ray worker groups against a plain loop with Hugging Face's own loss."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import SFTTrainerConfig, load_config
from hybridrl.data import create_sft_dataset, create_sft_loader
from hybridrl.protocol import DataProto
from hybridrl.single_controller import WorkerError
from hybridrl.trainer.supervised.objective_rows import as_responses
from hybridrl.trainer.supervised.run_supervised import run_supervised

pytestmark = pytest.mark.usefixtures("ray_session")

BATCH, STEPS, LR = 6, 3, 1e-2


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 training and 5 validation conversations of very different lengths, one with two turns."""
    draw = random.Random(0)
    rows = []
    for number in range(25):
        digits = "".join(draw.choices("0123456789", k=1 + draw.randrange(12)))
        messages = [{"role": "user", "content": f"Sort: {digits}"}]
        messages.append({"role": "assistant", "content": "#### " + "".join(sorted(digits))})
        if number == 3:
            messages += [{"role": "user", "content": "Again"}, {"role": "assistant", "content": "####"}]
        rows.append({"messages": messages})
    folder = tmp_path_factory.mktemp("conversations")
    pd.DataFrame(rows[:20]).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[20:]).to_parquet(folder / "val.parquet")
    return folder


def configured(model: Path, data: Path, folder: Path, ranks: int, *more: str) -> SFTTrainerConfig:
    config = load_config(
        "sft_trainer",
        [
            f"model.path={model}",
            f"data.train_files={data / 'train.parquet'}",
            f"data.val_files={data / 'val.parquet'}",
            f"data.train_batch_size={BATCH}",
            "data.micro_batch_size_per_gpu=2",
            "engine.dtype=float32",
            f"optim.lr={LR}",
            "optim.lr_scheduler_type=linear",
            "optim.clip_grad=0.5",
            f"trainer.total_training_steps={STEPS}",
            "trainer.device=cpu",
            f"trainer.n_gpus_per_node={ranks}",
            "trainer.threads_per_worker=1",
            "trainer.logger=[]",
            "trainer.report=False",
            f"trainer.default_local_dir={folder}",
            *more,
        ],
    )
    assert isinstance(config, SFTTrainerConfig)
    return config


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class PlainLoop:
    """The same training in one process, without a line of the library's mathematics."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01)

    def encode(self, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        """Token ids, and labels that are -100 outside of the assistant's turns (end of turn included)."""
        ids: list[int] = []
        labels: list[int] = []
        for message in messages:
            opening = f"<|im_start|>{message['role']}\n"
            for text, learnt in (
                (opening, False),
                (message["content"] + "<|im_end|>", message["role"] == "assistant"),
                ("\n", False),
            ):
                tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += tokens
                labels += tokens if learnt else [-100] * len(tokens)
        return ids, labels

    def loss(self, rows: list[list[dict[str, str]]]) -> torch.Tensor:
        encoded = [self.encode(messages) for messages in rows]
        width = max(len(ids) for ids, _ in encoded)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in encoded])
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in encoded])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in encoded])
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss

    def step(self, rows: list[list[dict[str, str]]], factor: float) -> tuple[float, float]:
        loss = self.loss(rows)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = LR * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()


@pytest.mark.parametrize(("ranks", "sharing"), [(1, 1), (2, 1), (2, 2)])
def test_training_equals_a_plain_loop(
    micro_model: Path, conversations: Path, tmp_path: Path, ranks: int, sharing: int
) -> None:
    settings = [
        f"engine.ulysses_sequence_parallel_size={sharing}",
        "trainer.test_freq=1",
        f"trainer.save_freq={STEPS}",
        "checkpoint.save_contents=[hf_model]",
        "trainer.resume_mode=disable",
    ]
    config = configured(micro_model, conversations, tmp_path / "run", ranks, *settings)
    run_supervised(config)

    plain = PlainLoop(micro_model)
    dataset = create_sft_dataset(config.data.train_files, config.data, plain.tokenizer)
    order = [batch.non_tensor_batch["index"].tolist() for batch in create_sft_loader(config.data, dataset, BATCH)]
    train = [[dict(m) for m in row] for row in pd.read_parquet(conversations / "train.parquet")["messages"]]
    val = [[dict(m) for m in row] for row in pd.read_parquet(conversations / "val.parquet")["messages"]]

    found = records(tmp_path / "run")
    steps = [record for record in found if "train/loss" in record]
    validations = [record["val/loss"] for record in found if "val/loss" in record]
    assert len(steps) == len(validations) == STEPS
    peaks = [{name for name in record if name.startswith("perf/memory_gb/")} for record in found]
    assert peaks == [{"perf/memory_gb/update_model"}, {"perf/memory_gb/testing"}] * STEPS
    for number, (record, indices) in enumerate(zip(steps, order, strict=False)):
        loss, norm = plain.step([train[index] for index in indices], factor=record["train/lr"] / LR)
        assert record["train/loss"] == pytest.approx(loss, rel=1e-5)
        assert record["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
        learnt = sum(label != -100 for index in indices for label in plain.encode(train[index])[1])
        assert record["train/global_tokens"] == learnt
        with torch.no_grad():
            assert validations[number] == pytest.approx(plain.loss(val).item(), rel=1e-5)
    assert [record["train/lr"] for record in steps] == pytest.approx([LR, LR * 2 / 3, LR / 3])

    # Adam turns rounding of gradients near zero into whole steps, so what is compared is what the weights compute.
    saved = PlainLoop(tmp_path / "run" / f"global_step_{STEPS}" / "model" / "hf_model")
    with torch.no_grad():
        assert saved.loss(val).item() == pytest.approx(validations[-1], rel=1e-6)


def test_batch_of_a_failed_update_is_kept(micro_model: Path, conversations: Path, tmp_path: Path) -> None:
    """A model whose loss is NaN: the run stops with the reason, and the batch can be looked at."""
    model = tmp_path / "model"
    model.mkdir()
    for file in micro_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(WorkerError) as caught:
        run_supervised(configured(model, conversations, tmp_path / "run", 1))
    assert "loss" in str(caught.value)
    kept = tmp_path / "run" / "failed_batch_step_1"
    assert str(kept) in "".join(caught.value.__notes__)
    batch = DataProto.load_from_disk(str(kept))
    assert len(batch) == BATCH
    assert {"input_ids", "attention_mask", "response_mask"} <= set(batch.batch.keys())


def test_every_token_but_the_first_is_a_response() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 1, 0, 0]])
    batch = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "position_ids": torch.arange(4).expand(2, 4).contiguous(),
            "loss_mask": torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]]),
        }
    )
    converted = as_responses(batch)
    assert converted.batch["response_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert torch.equal(converted.batch["input_ids"], ids)
