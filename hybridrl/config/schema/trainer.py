"""Settings of a run: devices, steps, logging, checkpoints, and which role lives on which devices."""

from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema import choices
from hybridrl.config.schema.conditions import A_CRITIC, above, among, any_of, is_not_set, is_set, not_among, off, on
from hybridrl.config.schema.mappings import Unchecked
from hybridrl.config.schema.node import ConfigNode, group, key

#: a frequency that verl reads as never
_NEVER = ((False, -1),)
_NO_FREQUENCY = (False, -1, 0, None)


@dataclass
class JobConfig(ConfigNode):
    """`trainer` of `generation`: the devices and processes that every program with worker processes has."""

    device: str = key(
        "auto", "auto: cuda if there is a GPU, otherwise cpu", choices=("auto", "cpu", "cuda"), later=("npu",)
    )
    nnodes: int = key(1, "machines", gt=0)
    n_gpus_per_node: int = key(1, "processes per machine: one per GPU, or this many on a CPU", gt=0)
    threads_per_worker: int | None = key(None, "CPU threads per worker; null: cores are divided evenly", gt=0)
    phase_timeout_s: float = key(7200.0, "seconds a phase of a step may take before the run is ended", gt=0)
    ray_wait_register_center_timeout: int = key(300, "seconds a worker group may take to start", gt=0)
    progress_bar: bool = key(True, "show a progress bar")


@dataclass
class HubConfig(ConfigNode):
    """`trainer.hub`: the trained model on the Hugging Face Hub."""

    model_id: str | None = key(
        None,
        "repository, ORG/NAME, that the trained model is uploaded to once the run is finished, with the token of "
        "HF_TOKEN or hf auth login; null: none",
    )
    private: bool | None = key(
        None, "a new repository is private; null: as the account's settings say", needs=is_set(".model_id")
    )
    revision: str | None = key(None, "branch that it is uploaded to; null: main", needs=is_set(".model_id"))


@dataclass
class RunConfig(JobConfig):
    """The `trainer` settings that `ppo_trainer` and `sft_trainer` share."""

    project_name: str = key("hybridrl", "name of the project in tracking and in default_local_dir")
    experiment_name: str = key("default", "name of the run")
    default_local_dir: str = key(
        "checkpoints/hybridrl/default",
        "folder of the run: configuration, metrics, report, checkpoints",
        follows="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        place="output",
    )
    logger: list[str] = key(
        ["console"], "where metrics go besides metrics.jsonl", choices=choices.LOGGERS, later=choices.LOGGERS_LATER
    )
    total_epochs: int = key(30, "passes over the training data", gt=0, needs=is_not_set(".total_training_steps"))
    total_training_steps: int | None = key(None, "end after this many steps; null: total_epochs decides", gt=0)
    save_freq: int = key(
        -1, "steps between checkpoints; -1 or false: only the last step (save_last)", ge=-1, means=_NEVER
    )
    save_last: bool = key(True, "keep a checkpoint of the last step also with save_freq=-1")
    test_freq: int = key(-1, "steps between validations; -1 or false: none", ge=-1, means=_NEVER)
    remote_dir: str | None = key(
        None,
        "address, such as s3://bucket/run, that finished checkpoints are copied to next to training, and that "
        "resume_mode=auto continues from where it has a newer one than default_local_dir; null: none",
        place="address",
    )
    max_actor_ckpt_to_keep: int | None = key(None, "number of newest checkpoints to keep; null: all", gt=0)
    best_metric: str | None = key(
        None,
        "metric of validations, such as val/loss: the step with its best value is saved at once, and its checkpoint is "
        "kept besides the newest ones; null: none",
        needs=(is_set("data.val_files"), not_among(".test_freq", *_NO_FREQUENCY)),
    )
    greater_is_better: bool | None = key(
        None,
        "the best value of best_metric is the largest one; null: so unless its name ends with loss",
        needs=is_set(".best_metric"),
    )
    early_stopping_patience: int | None = key(
        None,
        "validations in a row without a better value of best_metric after which the run ends; null: it goes on",
        gt=0,
        needs=is_set(".best_metric"),
    )
    early_stopping_threshold: float = key(
        0.0,
        "a value counts as better for early_stopping_patience if it is so by more than this",
        ge=0,
        needs=is_set(".early_stopping_patience"),
    )
    resume_mode: str = key(
        "auto",
        "auto: continue from the newest checkpoint of default_local_dir; resume_path: from resume_from_path",
        choices=choices.RESUME_MODES,
    )
    resume_from_path: str | None = key(
        None,
        "checkpoint folder `.../global_step_N` of resume_mode=resume_path",
        needs=among(".resume_mode", "resume_path"),
        place="output",
    )
    on_nonfinite: str = key(
        "stop", "NaN or infinity in loss or gradient: stop the run, or skip the step", choices=("stop", "skip")
    )
    report: bool = key(True, "write report.html at the end")
    peak_tflops: float | None = key(
        None, "TFLOPs per second that a device can do, for perf/mfu/*; null: as its name says, in bfloat16", gt=0
    )
    hub: HubConfig = group(HubConfig)


@dataclass
class SFTRunConfig(RunConfig):
    """`trainer` of `sft_trainer`."""

    save_freq: int | str = key(  # type: ignore[assignment]  # `SupervisedTrainer` gives a run the number of steps
        -1,
        "steps between checkpoints, or after_each_epoch; -1 or false: only the last step (save_last)",
        ge=-1,
        means=_NEVER,
        choices=choices.FREQUENCIES,
    )
    test_freq: int | str = key(  # type: ignore[assignment]
        -1,
        "steps between validations, or after_each_epoch; -1 or false: none",
        ge=-1,
        means=_NEVER,
        choices=choices.FREQUENCIES,
    )


#: the checks of `trainer.health`
_CHECKS = ("entropy_collapse", "kl_blowup", "uniform_groups", "length_hacking", "logprob_mismatch", "dead_critic")


@dataclass
class HealthCheckConfig(ConfigNode):
    """One check of `trainer.health`."""

    threshold: float = key(
        0.0, "limit of the value; see the check for its direction", needs=not_among(".action", "off")
    )
    patience: int = key(
        1, "consecutive steps beyond the threshold before the action is taken", gt=0, needs=not_among(".action", "off")
    )
    action: str = key(
        "warn",
        "warn: report it; stop: end the run; rollback: return to the last good checkpoint; off: no check",
        choices=choices.HEALTH_ACTIONS,
    )


@dataclass
class LengthCheckConfig(HealthCheckConfig):
    """`trainer.health.length_hacking`."""

    growth: float = key(
        0.1,
        "relative growth of the mean response length over about 20 steps that is needed as well",
        ge=0,
        needs=not_among(".action", "off"),
    )


@dataclass
class HealthConfig(ConfigNode):
    """`trainer.health`: checks that detect a failing run before its reward shows it."""

    entropy_collapse: HealthCheckConfig = group(HealthCheckConfig, threshold=0.01, patience=3)
    kl_blowup: HealthCheckConfig = group(HealthCheckConfig, threshold=10.0, patience=2)
    uniform_groups: HealthCheckConfig = group(
        HealthCheckConfig, threshold=0.95, patience=5, needs=above("actor_rollout_ref.rollout.n", 1)
    )
    length_hacking: LengthCheckConfig = group(LengthCheckConfig, threshold=0.5, patience=10)
    logprob_mismatch: HealthCheckConfig = group(HealthCheckConfig, threshold=0.1, patience=3)
    dead_critic: HealthCheckConfig = group(HealthCheckConfig, threshold=-0.5, patience=20, needs=A_CRITIC)
    max_rollbacks: int = key(
        3,
        "number of rollbacks before the run is stopped instead",
        ge=0,
        needs=any_of(*(among(f".{check}.action", "rollback") for check in _CHECKS)),
    )


@dataclass
class ColocateAsyncConfig(ConfigNode):
    """`trainer.v1.colocate_async`: training and generation take turns on the same devices."""

    num_warmup_batches: float = key(
        1.0,
        "steps of prompts that are answered ahead of training; a response may be trained on as many updates later",
        gt=0,
        needs=among("..trainer_mode", "colocate_async"),
    )


@dataclass
class SeparateAsyncConfig(ConfigNode):
    """`trainer.v1.separate_async`: generation has devices of its own (`rollout.nnodes`)."""

    num_warmup_batches: float = key(
        1.0,
        "steps of prompts that are answered ahead of training; a response may be trained on as many updates later",
        gt=0,
        needs=among("..trainer_mode", "separate_async"),
    )
    parameter_sync_step: int | None = key(
        None,
        "updates of the policy between two transfers of its weights; null: those of a step, the only possible number",
        gt=0,
        needs=among("..trainer_mode", "separate_async"),
    )
    background_validation: bool = key(
        True,
        "validate next to the following step, which waits for its end before it sends new weights; False: training "
        "waits for the whole validation",
        follows="${if_set:${trainer.best_metric},false,true}",
        needs=(among("..trainer_mode", "separate_async"), is_set("data.val_files")),
    )


@dataclass
class StalenessConfig(ConfigNode):
    """`trainer.v1.sampler`: the age of responses in asynchronous training."""

    max_off_policy_threshold: int | None = key(
        None,
        "prompts whose responses began this many versions of the weights before the update are dropped, and others "
        "drawn; null: num_warmup_batches alone bounds the age",
        gt=0,
        needs=not_among("..trainer_mode", "sync"),
    )


@dataclass
class TrainerModeConfig(ConfigNode):
    """`trainer.v1`: whether generation runs ahead of training."""

    trainer_mode: str = key(
        "sync",
        "sync: a step's prompts are answered, then trained on; colocate_async: ahead of training, on its devices; "
        "separate_async: ahead of training, on devices of their own",
        choices=("sync", "colocate_async", "separate_async"),
    )
    window: int = key(
        1,
        "1: prompts are trained on in the order in which they were drawn; W: at most W - 1 later ones pass one whose "
        "responses are unfinished",
        gt=0,
        needs=not_among(".trainer_mode", "sync"),
    )
    drain: bool = key(
        False,
        "wait for all responses in flight before new weights are sent: no response has tokens of two versions, and a "
        "run is a function of its seed",
        needs=not_among(".trainer_mode", "sync"),
    )
    colocate_async: ColocateAsyncConfig = group(ColocateAsyncConfig)
    separate_async: SeparateAsyncConfig = group(SeparateAsyncConfig)
    sampler: StalenessConfig = group(StalenessConfig)

    @property
    def staleness(self) -> float:
        """The number of steps of prompts that are answered ahead of training; 0: none."""
        ahead = self.colocate_async.num_warmup_batches, self.separate_async.num_warmup_batches
        return staleness_of(self.trainer_mode, *ahead)


def staleness_of(trainer_mode: str, colocated: float, separate: float) -> float:
    """Return S, the steps of prompts that are answered ahead of training.

    Args:
        colocated, separate: `num_warmup_batches` of the two modes.
    """
    return {"colocate_async": float(colocated), "separate_async": float(separate)}.get(trainer_mode, 0.0)


@dataclass
class TrainerConfig(RunConfig):
    """`trainer` of `ppo_trainer`."""

    balance_batch: bool = key(True, "give every process about the same number of tokens")
    critic_warmup: int = key(
        0, "steps in which only the critic learns, before the policy starts to learn", ge=0, needs=A_CRITIC
    )
    val_before_train: bool = key(
        True, "validate before the first step", needs=(is_set("data.val_files"), off("trainer.val_only"))
    )
    val_only: bool = key(False, "validate and exit")
    log_val_generations: int = key(0, "validation samples sent to tracking", ge=0, needs=is_set("data.val_files"))
    max_critic_ckpt_to_keep: int | None = key(
        None,
        "must be the same, because actor and critic share one checkpoint",
        follows="${.max_actor_ckpt_to_keep}",
        gt=0,
        needs=A_CRITIC,
    )
    dump_freq: int = key(
        10,
        "steps between dumps of the rollouts as JSONL (each step where rollout_data_dir is set); -1: none",
        follows="${if_set:${.rollout_data_dir},1,10}",
        ge=-1,
    )
    dump_tokens: int = key(
        256,
        "samples of each dump, of rollouts and of validation, that are written with tokens, log-probabilities and "
        "advantages: whole prompts, the same ones in each step; -1: all",
        ge=-1,
        needs=any_of(above(".dump_freq"), is_set("data.val_files")),
    )
    report_rollouts: int = key(
        2000,
        "most samples on the report's page of rollouts, spread over steps; 0: no such page",
        ge=0,
        needs=on(".report"),
    )
    rollout_data_dir: str | None = key(
        None, "folder of these dumps; null: rollouts/ in default_local_dir", needs=above(".dump_freq"), place="output"
    )
    validation_data_dir: str | None = key(
        None,
        "folder of validation dumps; null: validation/ in default_local_dir",
        needs=is_set("data.val_files"),
        place="output",
    )
    record: bool = key(
        False, "write the scored batch of each step to recording/ in default_local_dir, for trainer.replay"
    )
    replay: str | None = key(
        None,
        "folder of a run with trainer.record: learn from its batches, without generating or scoring others",
        place="output",
    )
    journal: bool = key(
        False,
        "write each transition of a prompt's samples (admitted, ready, void, taken, trained on) to ledger.jsonl in "
        "default_local_dir",
        needs=is_not_set(".replay"),
    )
    health: HealthConfig = group(HealthConfig)
    v1: TrainerModeConfig = group(TrainerModeConfig)


@dataclass
class StoredRolloutConfig(ConfigNode):
    """`skip.rollout`: stored batches in place of generation and scoring, to work on what comes after them."""

    enable: bool = key(
        False,
        "read a step's scored batch from dump_dir; a step without one there is generated, scored and stored. Weights "
        "that are other than those that generated are off-policy",
        needs=among("trainer.v1.trainer_mode", "sync"),
    )
    dump_dir: str | None = key(
        None,
        "folder of these batches, which runs of one project_name, experiment_name, batch size, rollout.n and lengths "
        "share; null: ~/.hybridrl/rollout_dump",
        needs=on(".enable"),
        place="output",
    )
    steps: list[int] = key([], "steps that are read and stored; []: all", needs=on(".enable"))
    action: str = key(
        "cache",
        "for steps that are not among `steps`. cache: they generate; repeat: they read the batches of these in turn",
        choices=("cache", "repeat"),
        needs=on(".enable"),
    )


@dataclass
class SkipConfig(ConfigNode):
    """`skip`: parts of a step that are not computed again."""

    rollout: StoredRolloutConfig = group(StoredRolloutConfig)


@dataclass
class PlacementConfig(ConfigNode):
    """`placement`: pools of processes, and the pool of each role."""

    pools: dict[str, list[int]] = key(
        {"global": [1]},
        "processes on each machine, by name of the pool",
        read_by=Unchecked("hybridrl.config.checks.check_roles.check_placement"),
        follows={"global": "${global_pool:${trainer.n_gpus_per_node},${trainer.nnodes}}"},
        gt=0,
    )
    roles: dict[str, str] = key(
        {"actor_rollout_ref": "global", "critic": "global"},
        "pools of actor_rollout_ref and critic; ref: only if it has its own workers",
        read_by=Unchecked("hybridrl.config.checks.check_roles.check_placement"),
    )


@dataclass
class PlannedPlacementConfig(PlacementConfig):
    """`placement` of `ppo_trainer`: also the devices that a run is planned for, and the plan (docs/plan.md)."""

    auto: bool = key(
        False,
        "have the planner choose pools, layouts and micro-batches at the start; settings that are given are kept",
    )
    devices: str | None = key(
        None, "number and kind of the devices, such as 64xH100, for predictions; null: this machine's"
    )
    machine: int | None = key(None, "devices per machine; null: 8, and 4 for GB200", gt=0, needs=is_set(".devices"))
    response: float | None = key(None, "mean tokens of a response, for predictions; null: half of the longest", gt=0)
    prompt: float | None = key(None, "mean tokens of a prompt, likewise", gt=0)
    planned: dict[str, Any] = key(
        {},
        "settings that the planner chose, which a run with auto records; a resumed run has them again",
        read_by=Unchecked("hybridrl.plan.planned_run applies settings of the run"),
        needs=on(".auto"),
    )


@dataclass
class RayConfig(ConfigNode):
    """`ray_kwargs`."""

    ray_init: dict[str, Any] = key({"num_cpus": None}, "arguments of ray.init", read_by="ray-arguments")
    timeline_json_file: str | None = key(
        None,
        "file for Ray's timeline of tasks, written at the end of the run, for chrome://tracing or Perfetto",
        place="output",
    )
