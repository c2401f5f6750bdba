"""The prompts of a step: generating goes on until there are enough of them that teach something.

DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): a prompt whose samples all score the same has no advantage, so
it is dropped, and more is generated until the batch is full. What was generated beyond that waits for the next step.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from hybridrl.config import FilterGroupsConfig
from hybridrl.data import StatefulLoader
from hybridrl.errors import UserError
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.batching import join_generated, trim

SURPLUS_FILE = "surplus.safetensors"
SCORES = (None, "score", "seq_reward")  # filter_groups.metric that is the summed score


def endless(loader: StatefulLoader) -> Iterator[DataProto]:
    """The loader's batches, epoch after epoch, from where it stands."""
    while True:
        yield from loader


class PromptPool:
    """Gathers a step's batch out of scored generation batches.

    Args:
        settings: `algorithm.filter_groups`.
        prompts: of a step (`data.train_batch_size`).
        samples: of a prompt (`rollout.n`); a generation batch holds them row after row.
        prompts_in_data: in a pass over the training data; when none of a whole pass could be used the run is stopped.
        pad_token_id: fills what was generated to different widths.

    Attributes:
        surplus: scored rows that the next step begins with.
    """

    def __init__(
        self, settings: FilterGroupsConfig, prompts: int, samples: int, prompts_in_data: int, pad_token_id: int
    ) -> None:
        self.settings = settings
        self.prompts = prompts
        self.samples = samples
        self.prompts_in_data = prompts_in_data
        self.pad_token_id = pad_token_id
        self.surplus: DataProto | None = None

    def take(self, answered: Callable[[], DataProto]) -> tuple[DataProto, dict[str, float]]:
        """The batch of a step, its rows in generation order and numbered (`row`).

        Args:
            answered: generates and scores the next prompts.

        Returns:
            The batch, and where anything was filtered or kept back `filter_groups/*`: how many prompts were generated,
            discarded, carried over from the step before and left for the next; generation batches; the mean score of
            all that was generated (that of the batch hardly moves where only mixed groups are kept) and of the
            discarded.

        Raises:
            UserError: `max_num_gen_batches` did not fill the batch, or nothing of a pass over the data could be used.
        """
        parts = [] if self.surplus is None else [self.surplus]
        carried = have = sum(map(len, parts)) // self.samples
        batches = generated = unused = 0
        scores: list[torch.Tensor] = []
        dropped: list[torch.Tensor] = []
        while have < self.prompts:
            self._check_limits(batches, have, unused)
            made = answered()
            batches, prompts = batches + 1, len(made) // self.samples
            generated += prompts
            scores.append(made.batch["token_level_scores"].sum(dim=-1))
            kept = self._differing(made) if self.settings.enable else torch.ones(len(made), dtype=torch.bool)
            if not bool(kept.all()):
                dropped.append(scores[-1][~kept])
                made = made.select_idxs(kept.nonzero().squeeze(-1))
            found = len(made) // self.samples
            unused = 0 if found else unused + prompts
            have += found
            if found:
                parts.append(made)
        batch = join_generated(parts, self.pad_token_id)
        rows = self.prompts * self.samples
        self.surplus = trim(batch[rows:]) if len(batch) > rows else None
        batch = trim(batch[:rows]) if self.surplus is not None else batch
        batch.non_tensor_batch["row"] = np.arange(len(batch)).astype(object)
        if not self.settings.enable and not carried and self.surplus is None:
            return batch, {}
        discarded = torch.cat(dropped) if dropped else torch.zeros(0)
        metrics = {
            "filter_groups/generation_batches": float(batches),
            "filter_groups/generated": float(generated),
            "filter_groups/discarded": float(len(discarded) // self.samples),
            "filter_groups/carried_over": float(carried),
            "filter_groups/surplus": float(have - self.prompts),
        }
        if scores:
            metrics["filter_groups/generated_score/mean"] = float(torch.cat(scores).mean())
        if len(discarded):
            metrics["filter_groups/discarded_score/mean"] = float(discarded.mean())
        return batch, metrics

    def _check_limits(self, batches: int, have: int, unused: int) -> None:
        limit = self.settings.max_num_gen_batches
        if limit and batches >= limit:
            raise UserError(
                f"algorithm.filter_groups.max_num_gen_batches={limit} generation batches gave {have} of "
                f"data.train_batch_size={self.prompts} prompts whose samples differ in their reward. The data are too "
                "easy or too hard for the model: take other prompts, raise actor_rollout_ref.rollout.n or "
                "data.gen_batch_size, or set max_num_gen_batches=0 to go on generating."
            )
        if unused >= max(self.prompts_in_data, 1):
            raise UserError(
                f"algorithm.filter_groups: none of the last {unused} prompts, a whole pass over the data, had samples "
                f"that differ in {self.settings.metric or 'score'}, so there is nothing to learn from. Look at the "
                "reward function, take easier or harder prompts, or raise actor_rollout_ref.rollout.n."
            )

    def _differing(self, batch: DataProto) -> torch.Tensor:
        """Rows, [B] bool, of the prompts whose samples do not all have the same metric."""
        values = self._metric(batch).view(-1, self.samples)
        differs = values.amax(dim=1) > values.amin(dim=1)
        return differs.repeat_interleave(self.samples)

    def _metric(self, batch: DataProto) -> torch.Tensor:
        name = self.settings.metric
        if name in SCORES:
            return batch.batch["token_level_scores"].sum(dim=-1)
        if name not in batch.non_tensor_batch:
            known = sorted(batch.non_tensor_batch)
            raise UserError(
                f"algorithm.filter_groups.metric={name}: the reward function did not return it; use score, or one of "
                f"what the batch has: {', '.join(known)}"
            )
        try:
            return torch.tensor([float(value) for value in batch.non_tensor_batch[name]], dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"algorithm.filter_groups.metric={name}: not a number for every sample ({error})"
            ) from error

    def drop(self) -> int:
        """Forget the surplus; how many prompts it held."""
        prompts = 0 if self.surplus is None else len(self.surplus) // self.samples
        self.surplus = None
        return prompts

    # ------------------------------------------------------------------ checkpoint

    def save(self, folder: Path) -> None:
        """Write the surplus, if there is one."""
        if self.surplus is not None:
            self.surplus.save_to_disk(folder / SURPLUS_FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote.

        Raises:
            UserError: it has another number of samples a prompt.
        """
        path = folder / SURPLUS_FILE
        self.surplus = DataProto.load_from_disk(path) if path.exists() else None
        if self.surplus is None:
            return
        _, counts = np.unique(self.surplus.non_tensor_batch["uid"].astype(str), return_counts=True)
        if not (counts == self.samples).all():
            raise UserError(
                f"{path} holds {counts[0]} samples of each prompt that wait for the next step, and "
                f"actor_rollout_ref.rollout.n={self.samples}; resume with rollout.n={counts[0]}"
            )
