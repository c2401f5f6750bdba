"""Chooses the prompts of a step: which scored groups are trained on, and which wait for the next step.

DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): a prompt whose samples all have the same score has no
advantage, so it is dropped, and more prompts are generated until the batch is full. Surplus prompts wait for the next
step.

A group is the rows of one `uid`: any number of rows, in any order. Rows that also share `sample` are one sample of the
prompt (a session in several turns).
"""

from pathlib import Path

import torch

from hybridrl.algorithms.functional import rounding_of
from hybridrl.algorithms.groups import Groups
from hybridrl.config import FilterGroupsConfig
from hybridrl.config.schema.choices import SCORES
from hybridrl.errors import UserError
from hybridrl.protocol import DataProto
from hybridrl.protocol.sample_names import sample_names
from hybridrl.trainer.ppo.batching import join_generated, trim

SURPLUS_FILE = "surplus.safetensors"
_CPU = torch.device("cpu")
_SAMPLES = "samples_per_prompt"  # in the meta_info of the file


class PromptPool:
    """Collects scored groups until there are enough for a step: `add` while `needed`, then `take`.

    Args:
        settings: `algorithm.filter_groups`.
        prompts: number of prompts per step (`data.train_batch_size`).
        samples: number of samples per prompt (`rollout.n`). A checkpoint with another number is refused.
        prompts_in_data: number of prompts in one pass over the training data. If no prompt of a whole pass is usable,
            the run stops.
        pad_token_id: pads rows that were generated to different widths.
    """

    def __init__(
        self, settings: FilterGroupsConfig, prompts: int, samples: int, prompts_in_data: int, pad_token_id: int
    ) -> None:
        self.settings = settings
        self.prompts = prompts
        self.samples = samples
        self.prompts_in_data = prompts_in_data
        self.pad_token_id = pad_token_id
        self._waiting: list[DataProto] = []
        self._uids: dict[str, None] = {}  # uids of the waiting groups, in the order of their first rows
        self._start_step()

    def _start_step(self) -> None:
        self._carried = len(self._uids)
        self._batches = self._generated = self._unused = self._discarded = 0
        self._scores: list[torch.Tensor] = []
        self._dropped: list[torch.Tensor] = []

    @property
    def waiting(self) -> int:
        """The number of prompts that are ready to be taken."""
        return len(self._uids)

    @property
    def needed(self) -> int:
        """The number of prompts that the next step still needs."""
        return max(self.prompts - self.waiting, 0)

    def add(self, batch: DataProto) -> None:
        """Keep the groups of a scored generation batch. With `filter_groups.enable`, keep those whose samples differ.

        Args:
            batch: complete groups: all rows of a `uid` are added at once. Needs `token_level_scores` [B, T].

        Raises:
            UserError: a `uid` is already waiting, `max_num_gen_batches` batches did not fill the step, or no prompt of
                a whole pass over the data was usable.
        """
        uids = batch.non_tensor_batch["uid"]
        groups = Groups(uids, _CPU)
        twice = [str(uid) for uid in dict.fromkeys(uids.tolist()) if str(uid) in self._uids]
        if twice:
            raise UserError(
                f"the prompt with uid {twice[0]!r} was generated twice for one step: two generation batches hold it. "
                "Let the data sampler (data.sampler) draw a row at most once per epoch, or give prompts unique uids."
            )
        scores = batch.batch["token_level_scores"].sum(dim=-1)
        self._batches += 1
        self._generated += groups.count
        self._scores.append(scores)
        usable = torch.ones(groups.count, dtype=torch.bool)
        if self.settings.enable:
            usable = self._differs(batch, groups, scores)
        count = int(usable.sum())
        if count < groups.count:
            rows = usable[groups.ids]
            self._dropped.append(scores[~rows])
            self._discarded += groups.count - count
            batch = batch.select_idxs(rows.nonzero().squeeze(-1))
        if count:
            self._waiting.append(batch)
            self._uids |= dict.fromkeys(map(str, batch.non_tensor_batch["uid"]))
        self._unused = 0 if count else self._unused + groups.count
        if self.needed:
            self._check_limits()

    def take(self) -> tuple[DataProto, dict[str, float]]:
        """Take the groups of a step, oldest first, with their rows in the order in which they were added.

        Returns:
            The batch, and `filter_groups/*` if anything was filtered or carried over. These metrics are the number of
            generation batches; the numbers of prompts generated, discarded, carried over from the previous step and
            left for the next; and the mean scores of all generated samples (the mean of the batch hardly moves if only
            mixed groups are kept) and of the discarded ones.

        Raises:
            ValueError: there are not enough prompts; see `needed`.
        """
        if self.needed:
            raise ValueError(f"take: {self.waiting} of {self.prompts} prompts are there; add more first")
        batch, surplus = join_generated(self._waiting, self.pad_token_id), self.waiting - self.prompts
        self._waiting = []
        if surplus:
            of_step = Groups(batch.non_tensor_batch["uid"], _CPU).ids < self.prompts
            self._waiting = [trim(batch.select_idxs((~of_step).nonzero().squeeze(-1)))]
            batch = trim(batch.select_idxs(of_step.nonzero().squeeze(-1)))
        metrics = self._metrics(surplus) if self.settings.enable or self._carried or surplus else {}
        self._uids = dict.fromkeys(list(self._uids)[self.prompts :])
        self._start_step()
        return batch, metrics

    def _metrics(self, surplus: int) -> dict[str, float]:
        metrics = {
            "filter_groups/generation_batches": float(self._batches),
            "filter_groups/generated": float(self._generated),
            "filter_groups/discarded": float(self._discarded),
            "filter_groups/carried_over": float(self._carried),
            "filter_groups/surplus": float(surplus),
        }
        if self._scores:
            metrics["filter_groups/generated_score/mean"] = float(torch.cat(self._scores).mean())
        if self._dropped:
            metrics["filter_groups/discarded_score/mean"] = float(torch.cat(self._dropped).mean())
        return metrics

    def _check_limits(self) -> None:
        limit = self.settings.max_num_gen_batches
        if limit and self._batches >= limit:
            raise UserError(
                f"algorithm.filter_groups.max_num_gen_batches={limit} generation batches gave {self.waiting} of "
                f"data.train_batch_size={self.prompts} prompts whose samples differ in their reward. The data are too "
                "easy or too hard for the model: take other prompts, raise actor_rollout_ref.rollout.n or "
                "data.gen_batch_size, or set max_num_gen_batches=0 to go on generating."
            )
        if self._unused >= max(self.prompts_in_data, 1):
            raise UserError(
                f"algorithm.filter_groups: none of the last {self._unused} prompts, a whole pass over the data, had "
                f"samples that differ in {self.settings.metric or 'score'}, so there is nothing to learn from. Look at "
                "the reward function, take easier or harder prompts, or raise actor_rollout_ref.rollout.n."
            )

    def _differs(self, batch: DataProto, groups: Groups, scores: torch.Tensor) -> torch.Tensor:
        """Return for each group whether its samples differ in a column, or in their score summed over their rows."""
        if self.settings.metric in SCORES:
            samples = Groups(sample_names(batch), _CPU)
            values = samples.sum(scores.double())[samples.ids]
        else:
            values = self._column(batch, str(self.settings.metric))
        lowest, largest = groups.extremes(groups.levelled(values, rounding_of(values, torch.float32)))
        return largest > lowest

    def _column(self, batch: DataProto, name: str) -> torch.Tensor:
        if name not in batch.non_tensor_batch:
            columns = sorted(batch.non_tensor_batch)
            raise UserError(
                f"algorithm.filter_groups.metric={name}: the reward function did not return it; use score, or one of "
                f"the batch's columns: {', '.join(columns)}"
            )
        try:
            return torch.tensor([float(value) for value in batch.non_tensor_batch[name]], dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"algorithm.filter_groups.metric={name}: not a number for every sample ({error})"
            ) from error

    def drop(self) -> int:
        """Discard the waiting prompts and return how many there were."""
        prompts = self.waiting
        self._waiting, self._uids = [], {}
        self._start_step()
        return prompts

    # ------------------------------------------------------------------ checkpoint

    def position(self) -> tuple[list[DataProto], dict[str, None]]:
        """Return the waiting prompts, for `rewind`."""
        return list(self._waiting), dict(self._uids)

    def rewind(self, position: tuple[list[DataProto], dict[str, None]]) -> None:
        """Go back to the waiting prompts of an earlier moment."""
        self._waiting, self._uids = list(position[0]), dict(position[1])
        self._start_step()

    def save(self, folder: Path) -> None:
        """Write the waiting prompts, if there are any."""
        if self._waiting:
            batch = join_generated(self._waiting, self.pad_token_id)
            meta = {**batch.meta_info, _SAMPLES: self.samples}
            DataProto(batch.batch, batch.non_tensor_batch, meta).save_to_disk(folder / SURPLUS_FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote.

        Raises:
            UserError: the prompts were saved with another number of samples per prompt.
        """
        path = folder / SURPLUS_FILE
        self.drop()
        if not path.exists():
            return
        surplus = DataProto.load_from_disk(path)
        uids = {str(uid): None for uid in surplus.non_tensor_batch["uid"]}
        # Groups may have less, down to all of them, where samples were dropped (reward.on_error=drop).
        largest = max(len(set(sample_names(surplus.select_idxs(rows)))) for rows in _rows_of_groups(surplus))
        # Files of earlier versions do not say how many there were.
        samples = int(surplus.meta_info.pop(_SAMPLES, max(largest, self.samples)))
        if samples != self.samples:
            raise UserError(
                f"{path} holds {samples} samples of each prompt that waits for the next step, and "
                f"actor_rollout_ref.rollout.n={self.samples}; resume with rollout.n={samples}"
            )
        self._waiting, self._uids = [surplus], uids
        self._start_step()


def _rows_of_groups(batch: DataProto) -> list[torch.Tensor]:
    """Return the row numbers of each group."""
    groups = Groups(batch.non_tensor_batch["uid"], _CPU)
    return [(groups.ids == number).nonzero().squeeze(-1) for number in range(groups.count)]
