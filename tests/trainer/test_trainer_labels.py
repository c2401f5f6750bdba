"""KTO through Ray worker groups, against a plain loop with Hugging Face's models, and in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from test_trainer_pairs import (  # noqa: F401  (fixtures)
    PlainPairs,
    configured,
    curves,
    nothing_left,
    random_model,
    run,
)
from transformers import AutoModelForCausalLM

from hybridrl.config import validate
from hybridrl.data import create_labelled_dataset, create_labelled_loader
from hybridrl.errors import ConfigError, DataError
from hybridrl.trainer.supervised.prepare_supervised import prepare
from hybridrl.trainer.supervised.reference import FILE

pytestmark = pytest.mark.usefixtures("ray_session")

ROWS, BETA, DESIRED, UNDESIRED = 5, 0.3, 1.4, 0.9
SETTINGS = (
    f"kto.beta={BETA}",
    f"kto.desirable_weight={DESIRED}",
    f"kto.undesirable_weight={UNDESIRED}",
    f"data.train_batch_size={ROWS}",
)
MEASURED = tuple(
    f"{phase}/{name}"
    for phase in ("train", "val")
    for name in ("loss", "kl_baseline", "margin", "desirable_reward", "undesirable_reward", "desirable_log_prob")
)


class PlainLabels(PlainPairs):
    """KTO's quantities in one process, answer by answer; an answer is the number of its pair and its side."""

    def kto_loss(self, model: Any, reference: Any, answers: list[tuple[int, str]]) -> tuple[torch.Tensor, float]:
        """The loss, and z0."""
        kl = []
        for at, (number, _) in enumerate(answers):
            others = [answers[(at - shift) % len(answers)] for shift in range(1, len(answers))]
            other = next(each for each in others if each[0] != number)
            with torch.no_grad():
                now, before = (self.mismatched(each, number, other) for each in (model, reference))
            kl.append(float(now - before))
        z0 = max(0.0, sum(kl) / len(kl))
        losses = []
        for number, side in answers:
            with torch.no_grad():
                before = self.log_prob(reference, number, side)
            ratio = self.log_prob(model, number, side) - before
            if side == "chosen":
                losses.append(DESIRED * (1 - 1 / (1 + torch.exp(-BETA * (ratio - z0)))))
            else:
                losses.append(UNDESIRED * (1 - 1 / (1 + torch.exp(-BETA * (z0 - ratio)))))
        return torch.stack(losses).mean(), z0

    def mismatched(self, model: Any, prompt: int, answer: tuple[int, str]) -> torch.Tensor:
        """Log-probability of an answer to another prompt."""
        ids, start = self.encode(*answer)
        before, length = self.encode(prompt, "chosen")
        joined = torch.cat([before[:, :length], ids[:, start:]], 1)
        log_probs = model(input_ids=joined).logits.log_softmax(-1)[0, length - 1 : -1]
        return log_probs.gather(1, ids[0, start:, None]).sum()


def order_of(config: Any, tokenizer: Any) -> list[list[tuple[int, str]]]:
    """For each step its answers."""
    dataset = create_labelled_dataset(config.data.train_files, config.data, tokenizer)
    indices = [batch.non_tensor_batch["index"].tolist() for batch in create_labelled_loader(config.data, dataset, ROWS)]
    return [[(index // 2, "rejected" if index % 2 else "chosen") for index in step] for step in indices]


def test_kto_equals_a_plain_loop_in_every_layout(random_model: Path, sort_data: Path, tmp_path: Path) -> None:  # noqa: F811
    """One rank in micro-batches of two, and two ranks in micro-batches filled by tokens: the loop's curves."""
    arguments = ("kto", random_model, sort_data, tmp_path / "a", "optim.weight_decay=0.01", *SETTINGS)
    records = run(*arguments)
    plain = PlainLabels(sort_data, random_model)
    model, reference = (AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    steps = [record for record in records if "train/loss" in record]
    baselines = []
    for record, answers in zip(steps, order_of(configured(*arguments), plain.tokenizer), strict=False):
        loss, z0 = plain.kto_loss(model, reference, answers)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        baselines.append(z0)
        assert record["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert record["train/kl_baseline"] == pytest.approx(z0, rel=1e-3, abs=1e-5)
        assert record["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    assert max(baselines) > 0.1

    layout = ("trainer.n_gpus_per_node=2", "data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=1024")
    other = run("kto", random_model, sort_data, tmp_path / "b", "optim.weight_decay=0.01", *SETTINGS, *layout)
    for name in MEASURED:
        assert curves(other, name) == pytest.approx(curves(records, name), rel=2e-3, abs=1e-5), name
        assert len(curves(records, name)) == len(steps), name
    assert curves(records, "val/margin")[-1] > curves(records, "val/margin")[0]


def test_cached_reference_and_one_label(random_model: Path, sort_data: Path, tmp_path: Path) -> None:  # noqa: F811
    """APO-zero with the reference's log-probabilities kept; only desirable answers are legal, and have no margin."""
    import pandas as pd

    pairs = pd.read_parquet(sort_data / "pairs_train.parquet")
    pairs["completion"], pairs["label"] = pairs["chosen"], True
    pairs.drop(columns=["chosen", "rejected"]).to_parquet(tmp_path / "liked.parquet")
    files = (f"data.train_files={tmp_path / 'liked.parquet'}", "kto.loss_type=apo_zero_unpaired", "kto.reference=cache")
    records = run("kto", random_model, sort_data, tmp_path / "run", *files, *SETTINGS)
    losses = curves(records, "train/loss")
    assert losses[0] == pytest.approx(DESIRED / 2) and losses[-1] < losses[0]
    assert (tmp_path / "run" / FILE).is_file()
    assert not curves(records, "train/undesirable_reward", "train/margin", "train/kl_baseline")
    assert len(curves(records, "val/undesirable_reward")) == len(losses)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["kto.reference=cache"], ["kto.reference=cache", "kto.loss_type=kto", "kto.reference=model"]),
        (
            ["data.train_batch_size=1", "data.micro_batch_size_per_gpu=1"],
            ["data.train_batch_size=1", "kto.loss_type"],
        ),
        (["kto.loss_type=sigmoid"], ["kto.loss_type=sigmoid", "main_dpo"]),
        (["kto.reference=adapter"], ["kto.reference=adapter", "model.lora_rank"]),
    ],
)
def test_settings_that_cannot_work_are_refused(
    words: list[str],
    facts: list[str],
    random_model: Path,  # noqa: F811
    sort_data: Path,
    tmp_path: Path,
) -> None:
    with raises_with(ConfigError, *facts):
        validate(configured("kto", random_model, sort_data, tmp_path, *words))


def test_one_row_of_validation_has_no_other_answer(random_model: Path, sort_data: Path, tmp_path: Path) -> None:  # noqa: F811
    row = '{"prompt": "Sort: 21", "completion": "12", "label": true}\n'
    (tmp_path / "val.jsonl").write_text(row)
    config = configured("kto", random_model, sort_data, tmp_path, f"data.val_files={tmp_path / 'val.jsonl'}")
    with raises_with(DataError, "data.val_files", "kto.loss_type=kto"):
        prepare(config)
