"""DPO and reward models through Ray worker groups, against a plain loop with Hugging Face's models.

The trainer's own runs are compared with each other where a layout must not matter: ranks, micro-batches, where the
reference comes from, a kill.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybridrl.config import load_config
from hybridrl.data import create_pair_loader, create_preference_dataset
from hybridrl.errors import DataError
from hybridrl.models.tiny import build_tiny_model
from hybridrl.trainer.supervised.reference import FILE
from hybridrl.trainer.supervised.run_supervised import run_supervised

pytestmark = pytest.mark.usefixtures("ray_session")

BATCH, STEPS, BETA = 6, 3, 0.3


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    """A run in this process gives its devices back: no worker and no placement group is left after it."""
    yield
    import ray
    from ray.util import placement_group_table

    assert [group for group in placement_group_table().values() if group["state"] != "REMOVED"] == []
    deadline = time.monotonic() + 30  # a worker that was ended frees its CPU a moment later
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers have clearly different probabilities; deterministic."""
    return build_tiny_model(tmp_path_factory.mktemp("random_model"), hidden=32, heads=2, kv_heads=1)


def configured(program: str, model: Path, data: Path, folder: Path, *more: str) -> Any:
    return load_config(
        f"{program}_trainer",  # type: ignore[call-overload]
        [
            f"model.path={model}",
            f"data.train_files={data / 'pairs_train.parquet'}",
            f"data.val_files={data / 'pairs_val.parquet'}",
            f"data.train_batch_size={BATCH}",
            "data.micro_batch_size_per_gpu=2",
            "engine.dtype=float32",
            "optim.lr=1e-2",
            "optim.clip_grad=0.5",
            f"trainer.total_training_steps={STEPS}",
            "trainer.test_freq=1",
            "trainer.device=cpu",
            "trainer.threads_per_worker=1",
            "trainer.logger=[]",
            "trainer.report=False",
            f"trainer.default_local_dir={folder}",
            *more,
        ],
    )


def run(*arguments: Any) -> list[dict[str, Any]]:
    config = configured(*arguments)
    run_supervised(config)
    lines = (Path(config.trainer.default_local_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def curves(records: list[dict[str, Any]], *names: str) -> list[float]:
    """The values of metrics, without what measures time and memory."""
    return [record[name] for name in names for record in records if name in record]


MEASURED = ("train/loss", "train/margin", "train/accuracy", "train/grad_norm", "val/loss", "val/margin", "val/accuracy")


class PlainPairs:
    """The same quantities in one process, pair by pair, without a line of the library's mathematics."""

    def __init__(self, data: Path, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        import pandas as pd

        rows = pd.read_parquet(data / "pairs_train.parquet")
        self.rows = rows.to_dict("records")

    def encode(self, number: int, side: str) -> tuple[torch.Tensor, int]:
        """The token ids of prompt and answer, and the number of the prompt's."""
        row = self.rows[number]
        prompt = f"<|im_start|>user\n{row['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        answer = f"{row[side][0]['content']}<|im_end|>"
        before, after = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        return torch.tensor([before + after]), len(before)

    def log_prob(self, model: Any, number: int, side: str) -> torch.Tensor:
        ids, start = self.encode(number, side)
        log_probs = model(input_ids=ids).logits.log_softmax(-1)[0, start - 1 : -1]
        return log_probs.gather(1, ids[0, start:, None]).sum()

    def dpo_loss(self, model: Any, reference: Any, numbers: list[int]) -> torch.Tensor:
        losses = []
        for number in numbers:
            with torch.no_grad():
                before = {side: self.log_prob(reference, number, side) for side in ("chosen", "rejected")}
            now = {side: self.log_prob(model, number, side) for side in ("chosen", "rejected")}
            ratio = {side: now[side] - before[side] for side in now}
            losses.append(-torch.log(1 / (1 + torch.exp(-BETA * (ratio["chosen"] - ratio["rejected"])))))
        return torch.stack(losses).mean()


def order_of(config: Any, tokenizer: Any) -> list[list[int]]:
    dataset = create_preference_dataset(config.data.train_files, config.data, tokenizer)
    loader = create_pair_loader(config.data, dataset, BATCH)
    return [[int(index) for index in batch.non_tensor_batch["index"][::2]] for batch in loader]


def test_dpo_equals_a_plain_loop(random_model: Path, sort_data: Path, tmp_path: Path) -> None:
    arguments = ("dpo", random_model, sort_data, tmp_path / "run", f"dpo.beta={BETA}", "optim.weight_decay=0.01")
    records = run(*arguments)
    plain = PlainPairs(sort_data, random_model)
    model, reference = (AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    order = order_of(configured(*arguments), plain.tokenizer)
    steps = [record for record in records if "train/loss" in record]
    assert len(steps) == STEPS
    for record, numbers in zip(steps, order, strict=False):
        loss = plain.dpo_loss(model, reference, numbers)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert record["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert record["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    assert steps[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert steps[0]["train/accuracy"] == 0  # equal rewards are no preference
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 2**30
    validations = [record for record in records if "val/loss" in record]
    for phase, found in (("update_model", steps), ("reference", steps), ("testing", validations)):
        assert all(record[f"perf/memory_gb/{phase}"] > weights for record in found)


def test_layouts_and_references_change_nothing(random_model: Path, sort_data: Path, tmp_path: Path) -> None:
    """Two ranks, other micro-batches, prompts computed once, and a reference from the cache: the same curves."""
    base = ("dpo", random_model, sort_data)
    whole = run(*base, tmp_path / "a", "dpo.sft_coef=0.5")
    for name, more in (
        ("ranks", ["trainer.n_gpus_per_node=2", "data.micro_batch_size_per_gpu=1", "model.share_prefixes=True"]),
        ("cache", ["dpo.reference=cache", "data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=2048"]),
    ):
        other = run(*base, tmp_path / name, "dpo.sft_coef=0.5", *more)
        assert curves(other, *MEASURED) == pytest.approx(curves(whole, *MEASURED), rel=2e-3, abs=1e-5), name
        assert name != "ranks" or min(curves(other, "train/shared_prefix_frac")) > 0.1
    assert len(curves(whole, "train/nll_loss")) == STEPS
    kept = load_file(tmp_path / "cache" / FILE)
    assert kept["train.log_probs"].shape == (64, 2) and kept["val.log_probs"].shape == (16, 2)


@pytest.mark.parametrize("program", ["dpo", "rm"])
def test_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(
    program: str, random_model: Path, sort_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ["dpo.reference=cache"] if program == "dpo" else ["data.margin_key=margin"]
    weights = []
    for name, parts in (("whole", [STEPS]), ("parts", [2, STEPS])):
        for steps in parts:
            more_steps = f"trainer.total_training_steps={steps}"
            records = run(program, random_model, sort_data, tmp_path / name, *more, more_steps, "optim.lr=1e-3")
            if name == "parts" and steps == 2 and program == "dpo":
                before = (tmp_path / name / FILE).stat().st_mtime_ns
        weights.append(load_file(tmp_path / name / f"global_step_{STEPS}" / "model" / "hf_model" / "model.safetensors"))
        assert len(curves(records, "train/loss")) == STEPS
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    if program == "dpo":  # read, not computed again with weights that were trained
        assert (tmp_path / "parts" / FILE).stat().st_mtime_ns == before


def test_objectives_learn_to_prefer(random_model: Path, sort_data: Path, tmp_path: Path) -> None:
    """Each loss of pairs raises the share of pairs whose chosen answer it prefers, and the margin between them."""
    for loss, more in (("ipo", []), ("hinge", []), ("simpo", ["dpo.beta=2"]), ("orpo", [f"dpo.beta={BETA}"])):
        records = run(
            *("dpo", random_model, sort_data, tmp_path / loss, f"dpo.loss_type={loss}", *more),
            *("trainer.total_training_steps=4", "trainer.test_freq=-1", "optim.lr=3e-3", "data.train_batch_size=8"),
            *("data.train_max_samples=8", "data.micro_batch_size_per_gpu=8", "trainer.save_last=False"),
        )
        margins = curves(records, "train/margin")
        assert margins[-1] > margins[0], loss
        assert curves(records, "train/loss")[-1] < curves(records, "train/loss")[0], loss
    # The first loss of ORPO, which is the last of them: the whole of the paper's, by a plain model.
    plain, model = PlainPairs(sort_data, random_model), AutoModelForCausalLM.from_pretrained(random_model)
    odds, likelihoods, tokens = [], [], []
    data = configured("dpo", random_model, sort_data, tmp_path / "orpo").data
    dataset = create_preference_dataset(data.train_files, data, plain.tokenizer, 8)
    for number in [dataset[row]["index"] for row in range(8)]:
        logits = []
        for side in ("chosen", "rejected"):
            with torch.no_grad():
                total = plain.log_prob(model, number, side)
            ids, start = plain.encode(number, side)
            p = torch.exp(total / (ids.shape[1] - start))
            logits.append(torch.log(p / (1 - p)))
            if side == "chosen":
                likelihoods.append(float(total))
                tokens.append(ids.shape[1] - start)
        odds.append(float(-torch.log(torch.sigmoid(logits[0] - logits[1]))))
    expected = BETA * sum(odds) / 8 - sum(likelihoods) / sum(tokens)
    assert curves(records, "train/loss")[0] == pytest.approx(expected, rel=1e-4)


def test_a_reward_model_is_what_transformers_loads(random_model: Path, sort_data: Path, tmp_path: Path) -> None:
    """It learns to prefer, and the saved classifier gives the rewards whose loss was measured last."""
    settings = ["trainer.total_training_steps=12", "trainer.test_freq=12", "optim.lr=3e-3", "data.train_batch_size=32"]
    arguments = ("rm", random_model, sort_data, tmp_path / "rm", "rm.centering_coef=0.01", *settings)
    records = run(*arguments, "trainer.n_gpus_per_node=2")
    accuracies = curves(records, "train/accuracy")
    assert accuracies[0] == 0 and min(accuracies[-3:]) > 0.9
    assert curves(records, "train/loss")[0] == pytest.approx(math.log(2), rel=1e-6)  # the head begins at 0

    folder = tmp_path / "rm" / "global_step_12" / "model" / "hf_model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dataset = create_preference_dataset(
        configured(*arguments).data.val_files, configured(*arguments).data, tokenizer, key="data.val_files"
    )
    losses, right = [], 0
    for number in range(len(dataset)):
        sides = [dataset[number][side]["input_ids"] for side in ("chosen", "rejected")]
        padded = tokenizer.pad({"input_ids": sides}, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            chosen, rejected = model(**padded).logits[:, 0].double()
        losses.append(torch.log1p(torch.exp(rejected - chosen)) + 0.01 * (chosen + rejected) ** 2)
        right += int(chosen > rejected)
    assert curves(records, "val/loss") == pytest.approx([float(torch.stack(losses).mean())], rel=1e-4)
    assert curves(records, "val/accuracy") == [right / len(dataset)]


def test_a_run_that_fails_gives_its_devices_back(random_model: Path, tmp_path: Path) -> None:
    """`nothing_left` looks for what it might leave."""
    (tmp_path / "pairs_train.parquet").write_bytes(b"")
    rows = [{"prompt": "Sort: 21", "chosen": "12", "rejected": "12"}] * 8
    for name in ("train", "val"):
        (tmp_path / f"pairs_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"data.{name}_files={tmp_path / f'pairs_{name}.jsonl'}" for name in ("train", "val")]
    with pytest.raises(DataError, match="the same answer"):
        run("dpo", random_model, tmp_path, tmp_path / "run", *files)


def test_the_reference_of_an_adapter_is_its_base(random_model: Path, sort_data: Path, tmp_path: Path) -> None:
    """LoRA without a second model gives what log-probabilities of before training give; a reward model trains too."""
    lora = ("model.lora_rank=4", "model.lora_alpha=32")
    own = run("dpo", random_model, sort_data, tmp_path / "own", *lora)
    kept = run("dpo", random_model, sort_data, tmp_path / "kept", *lora, "dpo.reference=cache")
    assert curves(own, *MEASURED) == pytest.approx(curves(kept, *MEASURED), rel=1e-4, abs=1e-6)
    assert curves(own, "train/margin")[-1] != 0

    rewards = run("rm", random_model, sort_data, tmp_path / "rm", *lora, "data.train_batch_size=32")
    folder = tmp_path / "rm" / f"global_step_{STEPS}" / "model" / "hf_model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.score.weight.abs().max() > 0 and curves(rewards, "train/loss")[-1] < math.log(2)
