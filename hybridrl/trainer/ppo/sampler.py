"""From prompts to scored batches. `Sampler.next` draws prompts, generates responses and scores them.

Prompts are generated in lots, the batches of the data loader. A `Feeder` keeps lots in flight within the limits of a
`Ledger`; a step takes the oldest groups that are ready.

Shapes: B rows, T response width.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridrl.algorithms.groups import Groups
from hybridrl.config import PPOTrainerConfig
from hybridrl.data import StatefulLoader
from hybridrl.data.group_scores import GroupScore, group_scores
from hybridrl.errors import CheckpointError, RewardError
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import ROUTED_EXPERTS
from hybridrl.reward import RewardManager
from hybridrl.reward.columns import part_means
from hybridrl.rollout import Rollout
from hybridrl.rollout.replicas.replica_handle import ReplicaState
from hybridrl.rollout.rollout import OnFinished
from hybridrl.scored import Unscored
from hybridrl.trainer.failed_batches import FailedBatches
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.batching import repeat_for_sampling
from hybridrl.trainer.ppo.correction import UNTRUNCATED, is_untruncated, probe_prompts
from hybridrl.trainer.ppo.dynamic_sampling import GenerationLimits, differing_groups
from hybridrl.trainer.ppo.early_scores import EarlyScores, scored_early
from hybridrl.trainer.ppo.episode import EpisodeBatch, counts_of, merged
from hybridrl.trainer.ppo.feeder import Feeder, Lot, LotResult, TakenGroups
from hybridrl.trainer.ppo.ledger import AdmissionSchedule, Group, GroupState, Ledger
from hybridrl.trainer.ppo.ledger_journal import JOURNAL, LedgerJournal
from hybridrl.trainer.ppo.lot_report import LotReport, filter_metrics, merged_metrics, summed_seconds
from hybridrl.trainer.ppo.memory import memory_advice
from hybridrl.trainer.ppo.missing import MissingPolicy
from hybridrl.trainer.ppo.missing_statistics import MissingCounts, MissingStatistics
from hybridrl.trainer.ppo.ready_rows import ReadyRows
from hybridrl.trainer.ppo.responses import attempt_meta, respond
from hybridrl.trainer.ppo.role_scores import Scorer
from hybridrl.trainer.ppo.run_requirements import RunRequirements
from hybridrl.utils.background import BackgroundLoop, in_daemon_thread

_LOOK_AGAIN_S = 0.5
_STEP = "global_steps"  # in the meta_info of prompts: keys the sampling noise of their samples


@dataclass(frozen=True)
class ScoredBatch:
    """A scored batch and how it was made.

    Attributes:
        batch: `train_batch_size` prompts with all of their samples: prompts, responses, masks, the sampler's
            log-probabilities, `token_level_scores` [B, T], and the columns of the prompts, the rollout and the reward
            function.
        metrics: metrics of generation, scoring and dynamic sampling.
        timing: seconds per phase: `data`, `gen`, `reward`, `gen_max`, and those of roles that score.
        reward_columns: names of the columns that the reward function returned, which dumps show.
        groups: the scores of the prompts that were answered for the batch, those that it leaves out included.
        probe: responses sampled without top-p and top-k, on which the learner compares sampler and trainer. Set only
            with the first batch, and only if the batch itself was sampled otherwise.
    """

    batch: DataProto
    metrics: dict[str, float]
    timing: dict[str, float]
    reward_columns: tuple[str, ...] = ()
    probe: DataProto | None = None
    groups: tuple[GroupScore, ...] = ()


@dataclass(frozen=True)
class DrawnPrompts:
    """A batch of the data loader.

    Attributes:
        prompts: one row per prompt.
        seconds: time that reading it took.
    """

    prompts: DataProto
    seconds: float = 0.0


@dataclass(frozen=True)
class AnsweredLot:
    """The scored samples of a lot.

    Attributes:
        batch: the rows of the groups that can be trained on; None if there is none.
        voided: reasons of the other groups, by uid.
        report: metrics of the lot.
        columns: names of the columns of its prompts.
    """

    batch: DataProto | None
    voided: Mapping[str, str]
    report: LotReport
    columns: frozenset[str]


class Sampler:
    """Produces the batches of a run, one at a time.

    Args:
        config: the whole configuration.
        rollout: generates responses. The caller updates its weights between batches.
        reward_fn: scores a batch of responses.
        loader: yields batches of prompts.
        pad_token_id: pads rows that were generated to different widths.
        scorer: adds the scores of roles; None: there are none.
        failed_batches: keeps a batch that could not be scored; None: it is not kept.

    Attributes:
        is_out: a batch is being trained on.
        reward_columns: names of the columns that the reward function last returned.
        total_steps: the steps of the run, for which prompts are drawn; None: without end.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        rollout: Rollout,
        reward_fn: RewardManager,
        loader: StatefulLoader,
        pad_token_id: int,
        scorer: Scorer | None = None,
        failed_batches: FailedBatches | None = None,
    ) -> None:
        self.config = config
        self.rollout = rollout
        self.reward_fn = reward_fn
        self.loader = loader
        self.scorer = scorer or Scorer({})
        self.failed_batches = failed_batches
        self.needs = RunRequirements.of(config)
        self.reward_columns: tuple[str, ...] = ()
        self.missing = MissingPolicy(config, pad_token_id)
        settings, prompts = config.algorithm.missing, config.data.train_batch_size
        self.missing_statistics = MissingStatistics(settings.window, settings.significance)
        self.ready = ReadyRows(config.actor_rollout_ref.rollout.n, pad_token_id)
        self.limits = GenerationLimits(config.algorithm.filter_groups, prompts, len(loader) * loader.batch_size)
        mode = config.trainer.v1
        oldest = mode.sampler.max_off_policy_threshold
        schedule = AdmissionSchedule(
            prompts, mode.staleness, mode.window, loader.batch_size, max_age=None if oldest is None else oldest - 1
        )
        self.total_steps: int | None = None
        folder = Path(config.trainer.default_local_dir)
        self._journal = LedgerJournal(folder / JOURNAL) if config.trainer.journal else None
        self._feeder: Feeder[DrawnPrompts, None] = Feeder(
            Ledger(schedule, self._journal), self._draw, self._answer, mode.drain, self.awaits_weights, self.enough
        )
        self._loop = BackgroundLoop("sampler")  # of the feeder; lots are answered in threads of their own
        self.is_out = False
        self._taken: list[Group] = []
        self._prompts = _endless(loader)
        self._prompt_columns: frozenset[str] = frozenset()

    @property
    def step(self) -> int:
        """The number of batches that `next` returned. The sampling noise of a lot is keyed by the next one."""
        return self._feeder.ledger.version + self.is_out

    @step.setter
    def step(self, step: int) -> None:
        self._feeder.ledger.version = step

    def next(self) -> ScoredBatch:
        """Return the next scored batch: prompts are drawn, answered and scored until there are enough groups.

        The groups of the previous batch count as trained on.
        """
        if self.is_out:
            self.release()
        timer = PhaseTimer(memory_advice())
        with timer.phase("gen") if self.reads_ahead else nullcontext():
            step, metrics = self._loop.run(self._take())
        self._taken, self.is_out = step.groups, True
        batch = self.ready.rows_of([group.uid for group in step.groups])
        reports = list(step.reports.values())
        for report in reports:
            self.reward_columns = self.reward_columns if report.columns is None else report.columns
            for counts in report.counts:
                self.missing_statistics.add(counts)
        scored = merged_metrics(reports) | self.missing_statistics.end_step()
        scored |= part_means({name: batch.non_tensor_batch[name].tolist() for name in self.reward_columns})
        probe = self.probe(batch, self._prompt_columns) if self.step == 1 else None
        # Lots that are answered ahead overlap with training: a step only waits for them.
        timing = dict(timer.seconds) if self.reads_ahead else summed_seconds(reports)
        groups = tuple(group for report in reports for group in report.groups)
        return ScoredBatch(batch, scored | metrics, timing, self.reward_columns, probe, groups)

    async def _take(self) -> tuple[TakenGroups[None], dict[str, float]]:
        """Take the groups of a step; return them with the metrics of dynamic sampling and of the ledger."""
        ledger = self._feeder.ledger
        carried = ledger.count(GroupState.READY)
        step = await self._feeder.take()
        self.limits.start_step()
        surplus = ledger.count(GroupState.READY)
        metrics: dict[str, float] = {}
        if self.config.algorithm.filter_groups.enable or ((carried or surplus) and not self.reads_ahead):
            metrics = filter_metrics(list(step.reports.values()), carried, surplus)
        if self.reads_ahead:
            metrics |= {
                "ledger/occupancy": len(ledger.live) / ledger.schedule.slots,
                "ledger/inflight": float(ledger.count(GroupState.INFLIGHT)),
                "ledger/void": float(ledger.voided.total()),
            }
        return step, metrics

    @property
    def reads_ahead(self) -> bool:
        """Whether prompts are answered ahead of training."""
        return self._feeder.ledger.schedule.staleness > 0

    def settle(self) -> None:
        """Wait for everything in flight, where it could not end once training has the devices.

        Generation in the training processes themselves takes turns with training. On devices that both share, requests
        wait from here on until the next weights, so with `drain` they have to end before.
        """
        shares = self.config.trainer.v1.drain and not self.config.actor_rollout_ref.rollout.nnodes
        if self.reads_ahead and (self.rollout.in_place or shares):
            self._loop.run(self._feeder.settle())

    def before_publish(self) -> None:
        """Prepare for new weights: drop prompts that would be too old, and with `drain` wait for those in flight."""
        if self.reads_ahead:
            stale = self._loop.run(self._before_publish())
            self.ready.remove([group.uid for group in stale])

    async def _before_publish(self) -> list[Group]:
        async def look_again() -> None:
            while True:
                await asyncio.sleep(_LOOK_AGAIN_S)
                self._feeder.wake()

        looking = asyncio.ensure_future(look_again())  # replicas that are lost do not say so
        try:
            return await self._feeder.before_publish()
        finally:
            looking.cancel()

    def awaits_weights(self) -> bool:
        """Return whether every replica was lost since training began, and restarts without weights."""
        states = [] if self.rollout.in_place else self.rollout.health()
        return bool(states) and ReplicaState.READY.value not in states

    def release(self) -> None:
        """Forget the groups of the last batch: the rollout has the weights that were trained on it."""
        groups, self._taken, self.is_out = self._taken, [], False
        self.ready.remove([group.uid for group in groups])
        self._loop.call(self._feeder.release, groups)

    def give_back(self) -> None:
        """Keep the groups of the last batch for the next one, because it was not trained on."""
        self._taken, self.is_out = [], False
        self._loop.call(self._feeder.give_back)

    def drop(self, reason: str) -> int:
        """Drop the groups that were answered beforehand, and return how many there were."""
        dropped = self._loop.call(self._feeder.drop, reason)
        self.ready.clear()
        return dropped

    # ------------------------------------------------------------------ a lot

    def enough(self) -> bool:
        """Return whether no prompt is drawn ahead of the steps that need it: those of the whole run are."""
        ledger, prompts = self._feeder.ledger, self.config.data.train_batch_size
        return self.total_steps is not None and ledger.released + len(ledger.live) >= self.total_steps * prompts

    def _draw(self) -> tuple[Sequence[str], DrawnPrompts]:
        """Return the uids and the prompts of the next lot."""
        self.limits.check(self._feeder.ledger.count(GroupState.READY))
        timer = PhaseTimer()
        with timer.phase("data"):
            prompts = next(self._prompts)
        uids = [str(uid) for uid in prompts.non_tensor_batch["uid"].tolist()]
        return uids, DrawnPrompts(prompts, timer.seconds["data"])

    async def _answer(self, lot: Lot[DrawnPrompts]) -> LotResult[None]:
        """Generate and score the samples of a lot, and keep the rows of its groups."""
        answered = await in_daemon_thread(self.answer_lot, lot)
        self._prompt_columns, report = answered.columns, answered.report
        self.limits.add(len(lot.groups), report.scored, report.scored - report.discarded)
        uids: list[str] = []
        if answered.batch is not None:
            needed = {group.uid for group in lot.groups if group.state is GroupState.INFLIGHT}
            uids = list(dict.fromkeys(map(str, answered.batch.non_tensor_batch["uid"].tolist())))
            self.ready.add(lot.first_seq, answered.batch)
            self.ready.remove(set(uids) - needed)
        return LotResult(dict.fromkeys(uids), answered.voided, report)

    def answer_lot(self, lot: Lot[DrawnPrompts]) -> AnsweredLot:
        """Generate and score the samples of a lot."""
        timer = PhaseTimer(memory_advice())
        prompts = _of_groups(lot.prompts.prompts, {group.uid for group in lot.groups})
        prompts.meta_info = {**prompts.meta_info, _STEP: lot.key}
        samples = repeat_for_sampling(prompts, self.config.actor_rollout_ref.rollout.n)
        episodes = self.run_episodes(samples, timer, self.generate)
        report = LotReport(dict(episodes.metrics), counts=[MissingCounts.of(episodes)])
        if episodes.batch is not None:
            report.columns = episodes.columns
        voided = {
            uid: outcome.reason.value
            for uid, episode in episodes.episodes.items()
            if isinstance(outcome := episode.outcome, Unscored)
        }
        batch = episodes.trainable()
        if batch is not None and self.needs.reward_baselines:
            batch, metrics, counts = self.add_baselines(batch, prompts, timer)
            report.metrics = merged(report.metrics, metrics)
            report.counts.append(counts)
        if batch is not None:
            batch = self.drop_uniform(batch, report, voided)
        trained = set() if batch is None else set(map(str, batch.non_tensor_batch["uid"].tolist()))
        for group in lot.groups:
            if group.uid not in trained:
                voided.setdefault(group.uid, "without_baseline")
        report.seconds = {"data": lot.prompts.seconds, **timer.seconds}
        return AnsweredLot(batch, voided, report, frozenset(samples.non_tensor_batch))

    def drop_uniform(self, batch: DataProto, report: LotReport, voided: dict[str, str]) -> DataProto | None:
        """Drop groups as `filter_groups` says, and enter them into the report and the reasons."""
        groups = Groups(batch.non_tensor_batch["uid"], torch.device("cpu"))
        report.scored = groups.count
        report.scores = batch.batch["token_level_scores"].sum(dim=-1)
        report.groups = group_scores(batch)
        settings = self.config.algorithm.filter_groups
        if not settings.enable:
            return batch
        rows = differing_groups(settings, batch, groups)[groups.ids]
        if bool(rows.all()):
            return batch
        report.dropped_scores = report.scores[~rows]
        dropped = dict.fromkeys(map(str, batch.non_tensor_batch["uid"][(~rows).numpy()].tolist()))
        report.discarded = len(dropped)
        voided |= dict.fromkeys(dropped, "uniform")
        return batch.select_idxs(rows.nonzero().squeeze(-1)) if bool(rows.any()) else None

    def run_episodes(self, samples: DataProto, timer: PhaseTimer, generate: Callable[..., DataProto]) -> EpisodeBatch:
        """Generate and score samples, and those without a score again, as `algorithm.missing` says.

        Args:
            samples: a row per sample.
            timer: measures the phases.
            generate: answers rows: `generate` or `generate_greedy`.
        """
        episodes = EpisodeBatch(self.missing, samples)
        while (rows := episodes.rows) is not None:
            with scored_early(self.reward_fn, rows) as reward_fn:
                answer = generate(rows, timer, episodes.attempt, on_finished=reward_fn.on_finished)
            with self._keeping(answer, samples.meta_info.get(_STEP, self.step)):
                episodes.add(answer, self.score(answer, timer, reward_fn) if len(answer) else None)
        return episodes

    def _keeping(self, answer: DataProto, step: int) -> AbstractContextManager[None]:
        """Keep the answer if it cannot be scored inside the block."""
        if self.failed_batches is None:
            return nullcontext()
        return self.failed_batches.keeping(answer, step, RewardError)

    def generate(
        self, samples: DataProto, timer: PhaseTimer, attempt: int = 0, on_finished: OnFinished | None = None
    ) -> DataProto:
        """Generate a response to each row, with the sampler's log-probabilities.

        Args:
            samples: a row per sample.
            timer: measures `gen`.
            attempt: how often these samples were generated before; it changes the seeds.
            on_finished: begins to score samples that finish before others; see `Rollout.generate`.
        """
        with timer.phase("gen"):
            return self.respond(samples, on_finished, **self._recorded, **attempt_meta(attempt))

    def generate_greedy(
        self, samples: DataProto, timer: PhaseTimer, attempt: int = 0, on_finished: OnFinished | None = None
    ) -> DataProto:
        """Generate the most likely response to each row, for the baselines of ReMax; `gen_max` is measured."""
        with timer.phase("gen_max"):
            return self.respond(samples, on_finished, do_sample=False, **attempt_meta(attempt))

    def score(self, batch: DataProto, timer: PhaseTimer, reward_fn: RewardManager | EarlyScores) -> dict[str, Any]:
        """Score responses: by the reward function, and by the models of roles that score.

        Args:
            batch: the responses.
            timer: measures `reward`, and the phases of the roles.
            reward_fn: the reward manager of the run. It has begun with responses that finished before others.

        Returns:
            What `RewardManager.__call__` returns: `reward_tensor` [B, T], each response's reward on its last token;
            and, if there are any, `reward_extra_info` (columns of the batch), `metrics`, `failed` and `missing`.
        """
        return self.scorer(reward_fn, batch, timer)

    def add_baselines(
        self, batch: DataProto, prompts: DataProto, timer: PhaseTimer
    ) -> tuple[DataProto | None, dict[str, float], MissingCounts]:
        """Add `reward_baselines` [B]: the score of the greedy response to the row's prompt (ReMax).

        A greedy response without a score is asked for again, as other samples are. A prompt that has none in the end
        is left out, because its advantages would be whole scores.

        Returns:
            The batch, None where nothing of it is left; the mean of the baselines, with the counts of time-outs and
            errors; and the attempts at greedy samples.
        """
        uids = set(batch.non_tensor_batch["uid"].tolist())
        rows = [row for row, uid in enumerate(prompts.non_tensor_batch["uid"].tolist()) if uid in uids]
        samples = repeat_for_sampling(prompts.select_idxs(rows), 1)
        episodes = self.run_episodes(samples, timer, self.generate_greedy)
        counts = MissingCounts.of(episodes, scores=False)  # greedy samples are not those that training sees
        metrics = counts_of(episodes.metrics)
        if episodes.batch is None:
            return None, metrics, counts
        greedy_uids = episodes.batch.non_tensor_batch["uid"]
        sums = Groups(greedy_uids, torch.device("cpu")).sum(episodes.batch.batch["token_level_scores"].sum(dim=-1))
        baseline_of = dict(zip(dict.fromkeys(greedy_uids.tolist()), sums.tolist(), strict=True))
        rows = [row for row, uid in enumerate(batch.non_tensor_batch["uid"].tolist()) if uid in baseline_of]
        batch = batch if len(rows) == len(batch) else batch.select_idxs(rows)
        baselines = [baseline_of[uid] for uid in batch.non_tensor_batch["uid"].tolist()]
        batch.batch["reward_baselines"] = torch.tensor(baselines, dtype=sums.dtype)
        return batch, metrics | {"critic/reward_baselines/mean": sums.mean().item()}, counts

    def probe(self, batch: DataProto, columns: Collection[str]) -> DataProto | None:
        """Generate a few responses without top-p and top-k, to compare sampler and trainer on them.

        Args:
            batch: the responses of the step.
            columns: names of the columns of prompts.

        Returns None if no probe is wanted, or if the batch itself was sampled this way. With top-p or top-k, sampler
        and trainer are expected to differ by the probability mass that was kept.
        """
        no_probe = self.config.algorithm.rollout_correction.probe_threshold is None
        if no_probe or is_untruncated(self.config.actor_rollout_ref.rollout):
            return None
        return self.respond(probe_prompts(batch, columns), None, **self._recorded, **UNTRUNCATED)

    @property
    def _recorded(self) -> dict[str, bool]:
        """The setting that has the rollout return the experts of the tokens that the trainer computes."""
        return {ROUTED_EXPERTS: True} if self.needs.sampled_experts else {}

    def respond(self, prompts: DataProto, on_finished: OnFinished | None = None, **sampling: Any) -> DataProto:
        """Generate responses to the rows of `prompts` for training, with settings of this call; see `respond`."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        meta = {"global_steps": prompts.meta_info.get(_STEP, self.step), "validate": False, **sampling}
        return respond(self.rollout, prompts, temperature, on_finished, **meta)

    # ------------------------------------------------------------------ checkpoint

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the prompts and rows that wait for the next step, and return the rest of the state.

        Prompts that are in flight are answered again by a resumed run, with their old keys. The groups of the last
        batch count as trained on.
        """
        if self.is_out:
            self.release()
        return self._loop.call(self._save, folder)

    def _save(self, folder: Path) -> dict[str, Any]:
        self.ready.save(folder)
        lots = self._feeder.inflight()
        for number, lot in enumerate(lots):
            lot.prompts.prompts.save_to_disk(folder / _waiting_file(number))
        return {
            "train_loader": self.loader.state_dict(),
            "reward_columns": list(self.reward_columns),
            "missing": self.missing_statistics.state(),
            "ledger": self._feeder.ledger.state(),
            "journal_bytes": 0 if self._journal is None else self._journal.size,
            "inflight": [[group.seq for group in lot.groups] for lot in lots],
            "reports": {str(seq): report.state() for seq, report in self._feeder.reports().items()},
        }

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Continue from what `save` wrote and returned.

        Raises:
            CheckpointError: rows of a group that waits are missing.
        """
        self.loader.load_state_dict(state["train_loader"])
        self._prompts = _endless(self.loader)
        self.reward_columns = tuple(state["reward_columns"])
        self.ready.load(folder)
        if "missing" in state:  # checkpoints of earlier versions have none
            self.missing_statistics.load(state["missing"])
        ledger = state["ledger"] if "ledger" in state else _ledger_of(self.ready.uids)
        uids = set(self.ready.uids)
        ready = {group["seq"]: group["uid"] for group in ledger["live"] if group["state"] == GroupState.READY.value}
        if missing := set(ready.values()) - uids:
            raise CheckpointError(
                f"{folder} has no rows of {len(missing)} prompts that wait for the next step: {missing}"
            )
        inflight = state.get("inflight", [])
        lots = [
            (DrawnPrompts(DataProto.load_from_disk(folder / _waiting_file(number))), seqs)
            for number, seqs in enumerate(inflight)
        ]
        reports = {int(seq): LotReport.from_state(report) for seq, report in state.get("reports", {}).items()}
        self._loop.call(self._feeder.restore, ledger, lots, dict.fromkeys(ready), reports)
        if self._journal is not None:
            self._journal.resume(state.get("journal_bytes", 0), self._feeder.ledger)

    def close(self) -> None:
        """End what is in flight, and the thread of the feeder."""
        self._loop.run(self._feeder.close())
        self._loop.close()


def _waiting_file(number: int) -> str:
    return f"waiting_{number:05d}.safetensors"


def _ledger_of(uids: Sequence[str]) -> dict[str, Any]:
    """Return the state of a ledger for a checkpoint of an earlier version, which has rows only."""
    live = [
        {"seq": seq, "uid": uid, "admitted": 0, "key": 0, "state": GroupState.READY.value, "passed": 0}
        for seq, uid in enumerate(uids)
    ]
    return {"version": 0, "admitted": len(uids), "released": 0, "voided": {}, "live": live}


def _of_groups(prompts: DataProto, uids: Collection[str]) -> DataProto:
    """Return the prompts of some groups."""
    rows = [row for row, uid in enumerate(prompts.non_tensor_batch["uid"].tolist()) if str(uid) in uids]
    return prompts if len(rows) == len(prompts) else prompts.select_idxs(rows)


def _endless(loader: StatefulLoader) -> Iterator[DataProto]:
    """Yield the loader's batches, epoch after epoch, from its current position."""
    while True:
        yield from loader
