"""Fine-tuning and DPO on conversations with images, against a plain loop with transformers' own processor and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from transformers import AutoModelForImageTextToText
from vision_tools import PROMPTS, peer_processor, pictures, png

from hybridrl.config import load_config
from hybridrl.data import create_pair_loader, create_preference_dataset, create_sft_dataset, create_sft_loader
from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.errors import DataError, ModelError
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.models.vision import processor_of
from hybridrl.trainer.supervised.prepare_supervised import prepare
from hybridrl.trainer.supervised.run_supervised import run_supervised

STEPS, BATCH, LR, BETA = 2, 4, 1e-2, 0.3


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts of `PROMPTS` as conversations and as pairs; one conversation goes on with a further image."""
    folder = tmp_path_factory.mktemp("rows")
    talks, pairs = [], []
    for number, ((text, _), images) in enumerate(zip(PROMPTS, pictures(), strict=True)):
        user, answer = {"role": "user", "content": text}, {"role": "assistant", "content": f"It is {number}"}
        files = [{"bytes": png(image)} for image in images]
        more = [{"role": "user", "content": "And <image>?"}, {"role": "assistant", "content": "No"}]
        again = number == 3
        talks.append({"messages": [user, answer, *more * again], "images": files + files[:1] * again})
        worse = {"role": "assistant", "content": "Unclear" if number % 2 else "?"}
        pairs.append({"prompt": [user], "chosen": [answer], "rejected": [worse], "images": files})
    write_rows(folder / "talks.parquet", talks)
    write_rows(folder / "pairs.parquet", pairs)
    (folder / "talks.json").write_text(json.dumps([row["messages"] for row in talks]))
    return folder


class Peer:
    """transformers' own loss of conversations, one at a time."""

    def __init__(self, model: Path) -> None:
        self.processor = peer_processor(model)
        self.model = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01)

    def log_probs(self, messages: list[dict[str, str]], images: list[Any]) -> torch.Tensor:
        """Of each token of the assistant's turns."""
        text, spans = "", []
        for message in messages:
            text += f"<|im_start|>{message['role']}\n"
            body = message["content"].replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>") + "<|im_end|>"
            if message["role"] == "assistant":
                spans.append((self.length(text, images), self.length(text + body, images)))
            text += body + "\n"
        self.model.model.rope_deltas = None
        inputs = self.inputs(text, images)
        scores = self.model(**inputs).logits[0].log_softmax(-1)[:-1]
        every = scores.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        return torch.cat([every[first - 1 : last - 1] for first, last in spans])

    def inputs(self, text: str, images: list[Any]) -> dict[str, torch.Tensor]:
        shown = images[: text.count("<|image_pad|>")]
        return dict(self.processor(text=[text], images=[shown] if shown else None, return_tensors="pt"))

    def length(self, text: str, images: list[Any]) -> int:
        return int(self.inputs(text, images)["input_ids"].shape[1])

    def step(self, loss: torch.Tensor) -> float:
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def configured(program: str, model: Path, data: Path, folder: Path, *more: str) -> Any:
    return load_config(
        f"{program}_trainer",  # type: ignore[call-overload]
        [
            f"model.path={model}",
            f"data.train_files={data}",
            f"data.train_batch_size={BATCH}",
            "data.micro_batch_size_per_gpu=2",
            "data.shuffle=False",
            "engine.dtype=float32",
            f"optim.lr={LR}",
            "optim.lr_scheduler_type=constant",
            "optim.clip_grad=0.5",
            f"trainer.total_training_steps={STEPS}",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=2",
            "trainer.threads_per_worker=1",
            "trainer.logger=[]",
            "trainer.report=False",
            f"trainer.default_local_dir={folder}",
            *more,
        ],
    )


def steps_of(config: Any) -> list[dict[str, Any]]:
    run_supervised(config)
    lines = (Path(config.trainer.default_local_dir) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "train/loss" in record]


def images_of(talks: list[list[dict[str, str]]]) -> list[list[Any]]:
    """The images of each conversation of the fixture."""
    found = pictures()
    return [own + own[:1] * (len(talk) > 2) for own, talk in zip(found, talks, strict=True)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_fine_tuning_equals_a_plain_loop(
    ray_session: None, vision_models: dict[str, Path], rows: Path, tmp_path: Path, family: str
) -> None:
    """Two ranks; rows with images of mixed sizes and without any, in one batch."""
    model = vision_models[family]
    config = configured("sft", model, rows / "talks.parquet", tmp_path)
    found, peer = steps_of(config), Peer(model)
    talks = json.loads((rows / "talks.json").read_text())
    images = images_of(talks)
    processor = processor_of(config.model)
    dataset = create_sft_dataset(config.data.train_files, config.data, load_tokenizer(model), processor=processor)
    order = [batch.non_tensor_batch["index"].tolist() for batch in create_sft_loader(config.data, dataset, BATCH)]
    assert len(found) == STEPS and len(order) == 1
    for record in found:
        scores = torch.cat([peer.log_probs(talks[index], images[index]) for index in order[0]])
        assert record["train/global_tokens"] == len(scores)
        assert record["train/loss"] == pytest.approx(-float(scores.detach().mean()), rel=1e-5)
        assert record["train/grad_norm"] == pytest.approx(peer.step(-scores.mean()), rel=1e-4)


@pytest.mark.parametrize("reference", ["model", "cache"])
def test_dpo_equals_a_plain_loop(
    ray_session: None, vision_models: dict[str, Path], rows: Path, tmp_path: Path, reference: str
) -> None:
    model = vision_models["qwen3_vl"]
    config = configured(
        "dpo", model, rows / "pairs.parquet", tmp_path, f"dpo.beta={BETA}", f"dpo.reference={reference}"
    )
    found, peer, frozen = steps_of(config), Peer(model), Peer(model)
    processor = processor_of(config.model)
    dataset = create_preference_dataset(
        config.data.train_files, config.data, load_tokenizer(model), processor=processor
    )
    order = next(iter(create_pair_loader(config.data, dataset, BATCH))).non_tensor_batch["index"].tolist()[::2]
    for record in found:
        losses = []
        for index in order:
            user = {"role": "user", "content": PROMPTS[index][0]}
            margin = 0.0
            for sign, text in ((1, f"It is {index}"), (-1, "Unclear" if index % 2 else "?")):
                talk = [user, {"role": "assistant", "content": text}]
                ours = peer.log_probs(talk, pictures()[index]).sum()
                with torch.no_grad():
                    theirs = frozen.log_probs(talk, pictures()[index]).sum()
                margin = margin + sign * (ours - theirs)
            losses.append(-torch.nn.functional.logsigmoid(BETA * margin))
        loss = torch.stack(losses).mean()
        assert record["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert record["train/grad_norm"] == pytest.approx(peer.step(loss), rel=1e-4)


def test_no_token_of_an_image_is_trained_on_or_cut(vision_model: Path, rows: Path, tmp_path: Path) -> None:
    config = configured("sft", vision_model, rows / "talks.parquet", tmp_path)
    processor, tokenizer = processor_of(config.model), load_tokenizer(vision_model)
    dataset = create_sft_dataset(config.data.train_files, config.data, tokenizer, processor=processor)
    assert processor is not None
    for item in range(len(dataset)):
        row = dataset[item]
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])
        grid = row["multi_modal_inputs"].get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        assert int((ids == processor.media_tokens[0]).sum()) == int(grid.prod(dim=-1).sum()) // 4
        assert not mask[ids == processor.media_tokens[0]].any()
        assert row["position_ids"].shape == (4, len(ids))
    for truncation in ("error", "right"):
        config.data.max_length, config.data.truncation = 60, truncation
        with raises_with(DataError, "talks.parquet", "data.mm_processor_kwargs.max_pixels"):
            create_sft_dataset(config.data.train_files, config.data, tokenizer, processor=processor)


def test_what_reads_no_images_says_so(vision_models, micro_model, rows, tmp_path) -> None:
    with raises_with(DataError, "'images'"):
        prepare(configured("sft", micro_model, rows / "talks.parquet", tmp_path))
    with pytest.raises(ModelError, match="reward models of images are not built"):
        prepare(configured("rm", vision_models["qwen2_5_vl"], rows / "pairs.parquet", tmp_path))
