"""Fine-tuning validates and saves after so many steps, or after each epoch."""

from pathlib import Path

import pytest

from hybridrl.config import load_config
from hybridrl.trainer.supervised.supervised_trainer import SupervisedTrainer


class Rows(list):
    """Nine conversations of three tokens."""

    pad_token_id = 0

    def __init__(self) -> None:
        super().__init__({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "index": index} for index in range(9))


@pytest.mark.parametrize(
    ("value", "due"),
    [("after_each_epoch", [4, 8, 12]), ("5", [5, 10, 12]), ("-1", []), ("False", [])],
)
def test_frequencies(tmp_path: Path, value: str, due: list[int]) -> None:
    config = load_config(
        "sft_trainer",
        [
            *(f"trainer.save_freq={value}", f"trainer.test_freq={value}", "trainer.total_epochs=3"),
            *("data.train_batch_size=2", f"trainer.default_local_dir={tmp_path}"),
        ],
    )
    run = SupervisedTrainer(config, train_dataset=Rows()).run  # 4 batches of 2, the incomplete one is left out
    found: dict[str, list[int]] = {"save_freq": [], "test_freq": []}
    for step in range(1, run.total_steps + 1):
        run.step = step
        for name, steps in found.items():
            if run.due(getattr(run.trainer, name)):
                steps.append(run.step)
    assert found == {"save_freq": due, "test_freq": due}
