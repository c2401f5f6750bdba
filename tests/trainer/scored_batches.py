"""Scored generation batches of any scores, and a sampler whose lots they are."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from sampler_tools import OwnRollout, reward, same

from hybridrl.config import load_config
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.feeder import Lot
from hybridrl.trainer.ppo.lot_report import LotReport
from hybridrl.trainer.ppo.sampler import AnsweredLot, DrawnPrompts, Sampler

PAD = 99


def generated(uids: list[str], scores: list[list[float]], prompt_width: int = 3, width: int = 4) -> DataProto:
    """A scored generation batch: every id names its prompt and sample, prompts left-padded, responses right-padded."""
    samples = len(scores[0])
    rows = len(uids) * samples
    lengths = torch.arange(rows) % width + 1
    mask = (torch.arange(width)[None] < lengths[:, None]).long()
    prompts = torch.full((rows, prompt_width), PAD)
    prompts[:, -1] = torch.arange(rows) // samples
    responses = torch.where(mask.bool(), torch.arange(rows)[:, None] + 10, PAD)
    attention = torch.cat([(prompts != PAD).long(), mask], 1)
    token_scores = torch.zeros(rows, width)
    token_scores[torch.arange(rows), lengths - 1] = torch.tensor(scores, dtype=torch.float32).flatten()
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask,
            "token_level_scores": token_scores,
        },
        non_tensors={
            "uid": np.repeat(uids, samples).astype(object),
            "acc": np.array([score > 0 for group in scores for score in group], dtype=object),
        },
        meta_info={"temperature": 1.0},
    )


class GivenLoader:
    """Yields the prompts of given batches."""

    def __init__(self, batches: Iterable[DataProto], batch_size: int, prompts_in_data: int) -> None:
        self.batches = iter(batches)
        self.batch_size = batch_size
        self.lots = prompts_in_data // batch_size
        self.drawn: list[DataProto] = []

    def __len__(self) -> int:
        return self.lots

    def __iter__(self) -> Iterator[DataProto]:
        for batch in self.batches:
            self.drawn.append(batch)
            uids = np.array(list(dict.fromkeys(batch.non_tensor_batch["uid"].tolist())), dtype=object)
            yield DataProto.from_dict(tensors={"input_ids": torch.zeros(len(uids), 1)}, non_tensors={"uid": uids})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class GivenSampler(Sampler):
    """Answers its lots with the loader's batches."""

    loader: GivenLoader  # type: ignore[assignment]

    def answer_lot(self, lot: Lot[DrawnPrompts]) -> AnsweredLot:
        report, voided = LotReport(), dict[str, str]()
        return AnsweredLot(self.drop_uniform(self.loader.drawn[-1], report, voided), voided, report, frozenset())


def given_sampler(
    batches: Iterable[DataProto], prompts: int, *words: str, enable: bool = True, lot: int = 4, in_data: int = 8
) -> GivenSampler:
    """A sampler of steps of `prompts` groups.

    Args:
        enable: with dynamic sampling.
        lot: the most groups of a batch.
        in_data: prompts of one pass over the data.
    """
    filtering = [f"algorithm.filter_groups.enable={enable}", "algorithm.filter_groups.metric=score"]
    config = load_config(
        "ppo_trainer",
        [
            "algorithm.adv_estimator=grpo",
            f"data.train_batch_size={prompts}",
            "actor_rollout_ref.rollout.n=2",
            *filtering,
            *words,
        ],
    )
    return GivenSampler(config, OwnRollout(same), reward, GivenLoader(batches, lot, in_data), PAD)  # type: ignore[arg-type]
