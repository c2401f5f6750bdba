"""DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): groups whose samples differ, and limits of generation.

A prompt whose samples all have the same score has no advantage, so it is dropped, and more prompts are generated until
the batch is full.
"""

import torch

from hybridrl.algorithms.functional import rounding_of
from hybridrl.algorithms.groups import Groups
from hybridrl.config import FilterGroupsConfig
from hybridrl.config.schema.choices import SCORES
from hybridrl.errors import RolloutError, UserError
from hybridrl.protocol import DataProto
from hybridrl.protocol.sample_names import sample_names

_CPU = torch.device("cpu")


def differing_groups(settings: FilterGroupsConfig, batch: DataProto, groups: Groups) -> torch.Tensor:
    """Return for each group `[G]` whether its samples differ in `settings.metric`.

    Args:
        settings: `algorithm.filter_groups`. A score is summed over the rows of a sample.
        batch: needs `token_level_scores` [B, T].
        groups: of its rows, by `uid`.

    Raises:
        UserError: the metric is not a column of the batch, or not a number for every row.
    """
    if settings.metric in SCORES:
        samples = Groups(sample_names(batch), _CPU)
        scores = batch.batch["token_level_scores"].sum(dim=-1)
        values = samples.sum(scores.double())[samples.ids]
    else:
        values = _column(batch, str(settings.metric))
    lowest, largest = groups.extremes(groups.levelled(values, rounding_of(values, torch.float32)))
    return largest > lowest


def _column(batch: DataProto, name: str) -> torch.Tensor:
    if name not in batch.non_tensor_batch:
        columns = sorted(batch.non_tensor_batch)
        raise UserError(
            f"algorithm.filter_groups.metric={name}: the reward function did not return it; use score, or one of "
            f"the batch's columns: {', '.join(columns)}"
        )
    try:
        return torch.tensor([float(value) for value in batch.non_tensor_batch[name]], dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"algorithm.filter_groups.metric={name}: not a number for every sample ({error})") from error


class GenerationLimits:
    """Ends a run that would generate for ever, because too few prompts can be trained on.

    Args:
        settings: `algorithm.filter_groups`.
        prompts: number of prompts per step (`data.train_batch_size`).
        prompts_in_data: number of prompts in one pass over the training data.
    """

    def __init__(self, settings: FilterGroupsConfig, prompts: int, prompts_in_data: int) -> None:
        self.settings = settings
        self.prompts = prompts
        self.prompts_in_data = max(prompts_in_data, 1)
        self._without_scores = 0
        self.start_step()

    def start_step(self) -> None:
        """Begin to count the generation batches of a step."""
        self._batches = self._unused = 0

    def add(self, prompts: int, scored: int, usable: int) -> None:
        """Count the prompts of a generation batch that has ended.

        Args:
            prompts: that were drawn.
            scored: those with scored samples, enough of them.
            usable: those of them that are trained on.
        """
        self._without_scores = 0 if scored else self._without_scores + prompts
        if scored:
            self._batches += 1
            self._unused = 0 if usable else self._unused + scored

    def check(self, ready: int) -> None:
        """Check before a further generation batch is drawn.

        Args:
            ready: number of prompts that wait to be trained on.

        Raises:
            UserError: `max_num_gen_batches` batches did not fill the step, or no prompt of a whole pass over the data
                was usable.
            RolloutError: no prompt of a whole pass over the data has a score.
        """
        limit = self.settings.max_num_gen_batches
        if limit and self._batches >= limit and ready < self.prompts:
            raise UserError(
                f"algorithm.filter_groups.max_num_gen_batches={limit} generation batches gave {ready} of "
                f"data.train_batch_size={self.prompts} prompts whose samples differ in their reward. The data are too "
                "easy or too hard for the model: take other prompts, raise actor_rollout_ref.rollout.n or "
                "data.gen_batch_size, or set max_num_gen_batches=0 to go on generating."
            )
        if self._unused >= self.prompts_in_data:
            raise UserError(
                f"algorithm.filter_groups: none of the last {self._unused} prompts, a whole pass over the data, had "
                f"samples that differ in {self.settings.metric or 'score'}, so there is nothing to learn from. Look at "
                "the reward function, take easier or harder prompts, or raise actor_rollout_ref.rollout.n."
            )
        if self._without_scores >= self.prompts_in_data:
            raise RolloutError(
                f"none of the last {self._without_scores} prompts, a whole pass over the data, has samples with a "
                "reward (enough of them for algorithm.adv_estimator): all were left out. The warnings and missing/* "
                "say why"
            )
