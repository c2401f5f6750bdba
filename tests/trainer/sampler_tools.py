"""A rollout, data and rewards of the tests' own, for samplers without processes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hybridrl.config import load_config
from hybridrl.data import PromptLoader
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.sample_names import request_names
from hybridrl.rollout import Rollout
from hybridrl.rollout.batch import batch_of, prompt_ids_of
from hybridrl.rollout.rollout import OnFinished
from hybridrl.rollout.trajectory import Trajectory
from hybridrl.trainer.ppo.sampler import Sampler

PAD = 0
WIDTH = 4


def prompts_of(uids: list[str], samples: int = 1) -> DataProto:
    rows = len(uids) * samples
    ids = torch.arange(1, rows + 1)[:, None].expand(-1, 2).clone()
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(2).expand(rows, 2).clone(),
        },
        non_tensors={
            "uid": np.repeat(np.array(uids, dtype=object), samples),
            "sample": np.tile(np.arange(samples), len(uids)).astype(object),
            "raw_prompt": object_array([[{"role": "user", "content": str(row)}] for row in range(rows)]),
            "extra_info": np.array([{"row": row} for row in range(rows)], dtype=object),
        },
    )


class OwnRollout(Rollout):
    """Answers with what `change` makes of the plain answer, and remembers what it was asked.

    Args:
        change: gets the plain answer (row by row, with `uid` and `sample`) and the prompts.
    """

    def __init__(self, change: Callable[[DataProto, DataProto], DataProto]) -> None:
        self.change = change
        self.asked: list[DataProto] = []

    def generate(self, prompts: DataProto, on_finished: OnFinished | None = None) -> DataProto:
        self.asked.append(prompts)
        trajectories = []
        for row, (ids, (uid, sample)) in enumerate(zip(prompt_ids_of(prompts), request_names(prompts), strict=True)):
            tokens = [row + 10] * (row % WIDTH + 1)
            zeros = [0.0] * len(tokens)
            trajectories.append(Trajectory(uid, sample, ids, tokens, [1] * len(tokens), zeros, [(0, len(tokens))]))
        return self.change(batch_of(trajectories, PAD, response_width=WIDTH), prompts)

    def client(self) -> Any:
        raise NotImplementedError("no test asks for single requests")

    def update_weights(self, version: int) -> dict[str, float]:
        return {}


def same(answer: DataProto, prompts: DataProto) -> DataProto:
    return answer


class Rows:
    """A data set of prompts `[index + 1] * 2`."""

    pad_token_id = PAD

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": [index + 1] * 2, "index": index, "extra_info": {"index": index}}


def reward(batch: DataProto, return_dict: bool = False):
    """The prompt's id plus a hundredth of the sample's number, on the last token. Metrics: a timeout per call, rows."""
    scores = torch.zeros(batch.batch["responses"].shape)
    samples = [int(sample) for sample in batch.non_tensor_batch["sample"]]
    scores[:, 0] = batch.batch["prompts"][:, -1] + torch.tensor(samples) / 100
    if not return_dict:
        return scores
    metrics = {"reward/timeouts": 1.0, "reward/rows": float(len(samples))}
    return {"reward_tensor": scores, "reward_extra_info": {"acc": samples}, "metrics": metrics}


def sampler_of(rollout: Rollout, *words: str, kind: type[Sampler] = Sampler) -> Sampler:
    config = load_config(
        "ppo_trainer",
        ["algorithm.adv_estimator=grpo", "data.train_batch_size=3", "actor_rollout_ref.rollout.n=2", *words],
    )
    loader = PromptLoader(Rows(), config.data.gen_batch_size or 3)
    return kind(config, rollout, reward, loader, PAD)  # type: ignore[arg-type]
