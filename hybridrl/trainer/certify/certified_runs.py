"""The runs that `hybridrl certify` compares: settings, incidents, and whose weights they have to end with."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

STEPS = 4
SAVED_STEP = 2  # the checkpoint that a killed run resumes from
KILLED_STEP = 3  # it is killed when this step is complete and not yet saved

_MODE = "trainer.v1.trainer_mode"


class Incident(Enum):
    """An event in the life of a run."""

    NONE = "none"
    KILLED = "killed"
    REPLAYED = "replayed"
    REPLICA_LOST = "replica lost"


@dataclass(frozen=True)
class CertifiedRun:
    """A row of the certificate.

    Attributes:
        name: begins with the inference engine.
        engine: its `rollout.name`.
        words: settings besides those that all runs have.
        reference: the row that it is compared with; None: it is one that others are compared with.
        exempt: why its weights may differ from those of the reference; empty: they have to be equal.
        incident: the event in its life. A replay reads the recording of the reference.
    """

    name: str
    engine: str
    words: tuple[str, ...] = ()
    reference: str | None = None
    exempt: str = ""
    incident: Incident = Incident.NONE

    @property
    def must_equal(self) -> bool:
        """Whether its weights have to be those of the reference."""
        return self.reference is not None and not self.exempt


def _own_devices(replicas: int) -> tuple[str, ...]:
    return ("rollout.nnodes=1", f"rollout.n_gpus_per_node={replicas}")


def _ahead(mode: str, drain: bool) -> tuple[str, ...]:
    return (f"{_MODE}={mode}", f"trainer.v1.{mode}.num_warmup_batches=1", f"trainer.v1.drain={drain}")


def _in_place() -> list[CertifiedRun]:
    """Return the runs that generate with the training weights."""
    first, ahead = "hf, S = 0", "hf, S = 1"
    one_ahead, drained = _ahead("colocate_async", False), _ahead("colocate_async", True)
    shapes = "hf computes log-probabilities in batches, and their last bits depend on the shape of the batch"
    sums = "the gradient is summed in another order"
    return [
        CertifiedRun(first, "hf"),
        CertifiedRun("hf, S = 0, killed and resumed", "hf", reference=first, incident=Incident.KILLED),
        CertifiedRun("hf, S = 0, replayed", "hf", reference=first, incident=Incident.REPLAYED),
        CertifiedRun("hf, S = 0, two prompts at a time", "hf", ("data.gen_batch_size=2",), first, shapes),
        CertifiedRun("hf, S = 0, two training processes", "hf", ("trainer.n_gpus_per_node=2",), first, sums),
        CertifiedRun(ahead, "hf", one_ahead),
        CertifiedRun("hf, S = 1, drained", "hf", drained, ahead),
        CertifiedRun("hf, S = 1, killed and resumed", "hf", one_ahead, ahead, incident=Incident.KILLED),
        CertifiedRun("hf, S = 1, replayed", "hf", one_ahead, ahead, incident=Incident.REPLAYED),
    ]


def _replicated() -> list[CertifiedRun]:
    """Return the runs whose tokens come from replicas of an engine."""
    first, ahead, free = "vllm, S = 0, shared devices", "vllm, S = 1, drained, shared devices", "vllm, S = 1"
    drained = _ahead("separate_async", True)
    two = (*drained, *_own_devices(2))
    undrained = (*_ahead("separate_async", False), *_own_devices(1))
    moment = "which tokens are sampled by the new weights depends on the moment of their arrival"
    return [
        CertifiedRun(first, "vllm"),
        CertifiedRun("vllm, S = 0, 1 replica on its own device", "vllm", _own_devices(1), first),
        CertifiedRun("vllm, S = 0, 2 replicas on their own devices", "vllm", _own_devices(2), first),
        CertifiedRun(ahead, "vllm", _ahead("colocate_async", True)),
        CertifiedRun("vllm, S = 1, drained, one of 2 replicas lost", "vllm", two, ahead, "", Incident.REPLICA_LOST),
        CertifiedRun(free, "vllm", undrained, ahead, moment),
        CertifiedRun("vllm, S = 1, replayed", "vllm", undrained, free, "", Incident.REPLAYED),
    ]


_RUNS = (*_in_place(), *_replicated())
ENGINES = tuple(dict.fromkeys(run.engine for run in _RUNS))


def certified_runs(engines: Sequence[str]) -> list[CertifiedRun]:
    """Return the rows of the engines, each after the one that it is compared with."""
    return [run for run in _RUNS if run.engine in engines]


def with_references(names: Sequence[str]) -> list[CertifiedRun]:
    """Return rows by name, and those that they are compared with, in the order of the certificate.

    Raises:
        KeyError: there is no row with a name.
    """
    rows = {run.name: run for run in certified_runs(ENGINES)}
    needed, open_names = set(), list(names)
    while open_names:
        run = rows[open_names.pop()]
        needed.add(run.name)
        if run.reference is not None:
            open_names.append(run.reference)
    return [run for run in rows.values() if run.name in needed]
