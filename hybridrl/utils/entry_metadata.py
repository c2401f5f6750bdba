"""Facts of entries of registries, which are known before an entry is imported: a class for each kind of entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.errors import AlgorithmError


@dataclass(frozen=True, kw_only=True)
class EntryMetadata:
    """Metadata of an entry, available before it is imported.

    Attributes:
        settings: dataclass of its own settings, or its location as `module:Class`. The settings belong to the group
            that holds the key by which the entry is chosen.
    """

    settings: type | str | None = None


@dataclass(frozen=True, kw_only=True)
class EstimatorMetadata(EntryMetadata):
    """An advantage estimator.

    Attributes:
        needs: inputs that it requires in addition to rewards, mask and uid: `values` requires a critic,
            `reward_baselines` a greedy response to each prompt, `prompt_values` rewards from 0 to 1, `old_log_probs`
            the pass that computes them, `sum_pi_squared` the setting `actor.calculate_sum_pi_squared`.
        compares_samples: it compares the samples of one prompt with each other.
        alone: with one sample per prompt, which has no others to compare with, the advantage is the score itself.
            False: it needs two samples of each prompt.
        smallest_group: samples of a prompt that it needs. None: 2 if it compares samples, else 1. Where samples are
            missing, a prompt with fewer left is not trained on; `rollout.n` must not be smaller, unless it is 1 and
            `alone` is true.
        unbiased: for groups of any size from the smallest, the sum of its advantages times the gradients of the
            log-probabilities, divided by the size, is the gradient of the expected reward on average. Samples that are
            missing at random then cost nothing but variance. False: with fewer samples its formula holds for those
            that are left.
        reads_components: it reads the components of the reward (`algorithm.gdpo_reward_keys`) and not their sum.
    """

    needs: tuple[str, ...] = ()
    compares_samples: bool = False
    alone: bool = False
    smallest_group: int | None = None
    unbiased: bool = False
    reads_components: bool = False

    def __post_init__(self) -> None:
        if self.smallest_group is not None and self.smallest_group < 1:
            raise AlgorithmError(f"smallest_group={self.smallest_group}: an estimator needs at least 1 sample")

    @property
    def fewest_samples(self) -> int:
        """Samples of a prompt that it needs."""
        return self.smallest_group or (2 if self.compares_samples else 1)


@dataclass(frozen=True, kw_only=True)
class LossMetadata(EntryMetadata):
    """A policy loss.

    Attributes:
        needs: `old_log_probs`: the pass that computes them is never skipped; `ref_log_prob`: the run has a reference
            policy, and the loss is called with `ref_log_prob=`.
        requires: settings of `actor.policy_loss` that have no default and must be set for this loss.
        samplers_old: its old log-probabilities are the sampler's, so no pass of the policy computes any before the
            update. `algorithm.rollout_correction.bypass_mode` chooses it, not `policy_loss.loss_mode`.
        prepare, prepare_needed, whole_sequences: see `hybridrl.algorithms.register_policy_loss`; those of a built-in
            loss are known once it is imported.
        compares_samples: it compares the samples of one prompt with each other, so `rollout.n` is at least 2. It has a
            `prepare`, which gets the prompt of each row.
    """

    needs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    samplers_old: bool = False
    prepare: Callable[..., Any] | None = None
    prepare_needed: Callable[[Any], bool] | None = None
    whole_sequences: bool | Callable[[Any], bool] = False
    compares_samples: bool = False

    def __post_init__(self) -> None:
        if unknown := set(self.needs) - {"old_log_probs", "ref_log_prob"}:
            raise AlgorithmError(f"needs={sorted(unknown)}: a policy loss may need old_log_probs and ref_log_prob")


@dataclass(frozen=True, kw_only=True)
class DistillationMetadata(EntryMetadata):
    """A distillation loss.

    Attributes:
        reads: log-probabilities of the sampled `tokens`, of the teacher's `top` tokens, or of the `vocabulary`.
        direct: its gradient leads to the teacher. False: it is only a reward, for `use_policy_gradient`.
    """

    reads: str = "tokens"
    direct: bool = True

    def __post_init__(self) -> None:
        if self.reads not in ("tokens", "top", "vocabulary"):
            raise AlgorithmError(f"reads={self.reads!r}: a distillation loss reads tokens, top or vocabulary")


@dataclass(frozen=True, kw_only=True)
class DatumMetadata(EntryMetadata):
    """A loss of datums, which clients of the training server choose for each request.

    Attributes:
        inputs: names of the tensors, one number per target token, that a datum brings for it.
        config: names of its numbers, with their defaults; None: a request must set it.
        several_targets: a position may have several target tokens.
    """

    inputs: tuple[str, ...] = ()
    config: Mapping[str, float | None] = field(default_factory=dict)
    several_targets: bool = False


@dataclass(frozen=True, kw_only=True)
class ManagerMetadata(EntryMetadata):
    """A reward manager. Its settings belong to `reward.reward_kwargs`.

    Attributes:
        runs_functions: it asks reward functions. False: it takes the rewards that sessions bring along.
    """

    runs_functions: bool = True


@dataclass(frozen=True, kw_only=True)
class InferenceMetadata(EntryMetadata):
    """A generation engine.

    Attributes:
        packages: packages that it needs.
        in_place: it generates with the training weights, in the training workers.
        takes_weights: it accepts new weights, so a policy can be trained with it.
        serves: its replicas can be served over HTTP (`rollout.server`, `rollout.prometheus`).
        auto: its position in the order in which `rollout.name=auto` tries engines on a GPU; 0: never.
        install: how to install it, for messages.
        reserves_of_total: it takes `rollout.gpu_memory_utilization` of a device's whole memory, not of what is free.
        records_routing: it returns the experts of each token (`routed_experts`) where the meta of prompts asks for it.
        takes_adapters: it applies an adapter (LoRA) that it is sent next to weights that it has.
        sees_images: it generates from the images of prompts (`multi_modal_inputs`).
        scores: it serves classifiers with one label (`EngineSpec.task` is `score`).
        reads: it returns log-probabilities of prompts and of the likeliest tokens there (`EngineSpec.task` is `read`).
        constrains: it keeps responses to a JSON schema (`SamplingParams.json_schema`).
    """

    packages: tuple[str, ...] = ()
    in_place: bool = False
    takes_weights: bool = True
    serves: bool = True
    auto: int = 0
    install: str = ""
    reserves_of_total: bool = False
    records_routing: bool = False
    takes_adapters: bool = False
    sees_images: bool = False
    scores: bool = False
    reads: bool = False
    constrains: bool = False

    @property
    def has_replicas(self) -> bool:
        """Whether it runs in its own processes with its own weights."""
        return self.takes_weights and not self.in_place


@dataclass(frozen=True, kw_only=True)
class TrainMetadata(EntryMetadata):
    """A training engine.

    Attributes:
        model_types: what it can train: `language_model`, `value_model`, `reward_model`, `step_model`.
        layout: class of the layouts in which it holds a model, a `layouts.topology.Layout`, or its location as
            `module:Class`; None: it exports whole tensors only.
    """

    model_types: tuple[str, ...] = ("language_model", "value_model")
    layout: type | str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentLoopMetadata(EntryMetadata):
    """An agent loop.

    Attributes:
        only_answers: it answers each prompt once, without tools and simulated users.
        reads: what it has in its sessions, whose settings it reads: `tools`, `environments`, or `gateway` for agents
            that call the run's server.
    """

    only_answers: bool = False
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TraceMetadata(EntryMetadata):
    """A service for traces of rollouts.

    Attributes:
        packages: packages that it needs.
        install: how to install them, for messages.
    """

    packages: tuple[str, ...] = ()
    install: str = ""


@dataclass(frozen=True, kw_only=True)
class ImportMetadata(EntryMetadata):
    """A project whose scripts `hybridrl import` reads.

    Attributes:
        reads: the kinds of its scripts, for `--help`.
    """

    reads: str = ""


@dataclass(frozen=True, kw_only=True)
class SuiteMetadata(EntryMetadata):
    """A benchmark suite.

    Attributes:
        hub: its data set on the hub, `ORG/NAME@CONFIG:SPLIT`; "": it is read from local copies only.
        files: names of its files in a local copy, as globs; `SPLIT.jsonl` and the like are tried besides.
        columns: columns that a row must have; names that published copies use for one column are separated by `|`,
            and the row has the value under the first of them.
        sampling: the sampling that results are usually reported with, for people.
        licence: of the data, and where the data are from, for people.
    """

    hub: str = ""
    files: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    sampling: str = ""
    licence: str = ""


#: what an objective of supervised training computes with, and the tree whose runs choose it
OBJECTIVE_KINDS = {"tokens": "sft_trainer", "pairs": "dpo_trainer", "labels": "kto_trainer", "scores": "rm_trainer"}


@dataclass(frozen=True, kw_only=True)
class ObjectiveMetadata(EntryMetadata):
    """An objective of supervised training.

    Attributes:
        kind: of which rows: `tokens`: of the tokens of conversations; `pairs`: of the log-probabilities of pairs of
            answers; `labels`: of those of answers with a label; `scores`: of the rewards of pairs of answers.
        reference: it compares the log-probabilities with those of the model before training.
        reads: the settings of its group that it reads; to set another one is a fault.
        margins: it reads the margins of pairs (`data.margin_key`).
        kl_baseline: it reads the step's estimate of the KL to the reference, of prompts and answers of other rows.
        likelihood: the likelihood of chosen answers is added to it with a coefficient of 1 unless one is set.
    """

    kind: str = "tokens"
    reference: bool = False
    reads: tuple[str, ...] = ()
    margins: bool = False
    kl_baseline: bool = False
    likelihood: bool = False

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVE_KINDS:
            raise AlgorithmError(f"kind={self.kind!r}: an objective is of one of {', '.join(OBJECTIVE_KINDS)}")
