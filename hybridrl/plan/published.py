"""Step times that projects have published, and how far the cost model is off.

A row is a line of the table in `tests/plan/published_rows.csv`: a setting with its source, and the seconds of one
phase or of a whole step. Rows with `use=yes` have everything that the model needs.
"""

import csv
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hybridrl.plan.devices import DEVICES
from hybridrl.plan.seconds import (
    TEXTBOOK,
    CostFactors,
    StepSize,
    TrainingLayout,
    generation,
    refit,
    streaming,
    training,
)
from hybridrl.plan.shapes import ModelShape, shape_of

_SYNC_SHARE, _STREAM_SHARE = 0.6, 0.8  # of memory that engines have; rows do not say
_GROUP = 8  # responses per prompt; most rows do not say
_HELD_OUT = 4  # one setting of so many is never fitted
_FACTORS = (2.0, 1.5, 1.25, 1.12, 1.12, 1.06)
_PRIOR, _OUTLIER = 0.02, 1.5
_SIZES = ("tp", "cp", "ep", "pp")
_SHARES = ("mfu", "all_to_all", "tensor", "decode_flops", "decode_memory")  # of what a data sheet says
_OF_TRAINING = (  # the last one counts in generation, too
    *("mfu", "layer_s", "expert_layer_s", "all_to_all", "tensor", "pass_factor", "host_adam_s"),
    "imbalance",
)
_SHARDED = ("prime-rl", "hybridrl")  # trained with FSDP2; all others with Megatron-core's layouts


@dataclass(frozen=True)
class PublishedRow:
    """One published number with its setting.

    Attributes:
        name: of the row.
        framework, model, device: which ones.
        metric: the phase (`step`, `gen`, `update`, `micro-batch`).
        seconds: what was published.
        fields: the line of the table.
    """

    name: str
    framework: str
    model: str
    device: str
    metric: str
    seconds: float
    fields: Mapping[str, str]

    def number(self, key: str, default: int = 0) -> int:
        """A field as a number."""
        return int(float(self.fields[key])) if self.fields[key] else default

    @property
    def setting(self) -> tuple[str, ...]:
        """The setting, which versions of a framework repeat: model, device, devices, mode and lengths' limit."""
        names = ("model", "device", "gpus", "gen_gpus", "train_gpus", "mode", "samples", "max_len")
        return (self.framework.split()[0], *(self.fields[name] for name in names))

    @property
    def held_out(self) -> bool:
        """Whether the row is never fitted: by a hash of its setting, so that later versions stay on the same side."""
        return hashlib.sha256("|".join(self.setting).encode()).digest()[0] % _HELD_OUT == 0


def read_rows(path: Path) -> list[PublishedRow]:
    """Return the rows of a table that have everything that the model needs."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            PublishedRow(r["id"], r["framework"], r["model"], r["device"], r["metric"], float(r["value"]), r)
            for r in csv.DictReader(file)
            if r["use"] == "yes"
        ]


def read_models(path: Path) -> dict[str, ModelShape]:
    """Return the shapes of the models in a JSON file, {name: entries of config.json}."""
    return {name: shape_of(facts) for name, facts in json.loads(path.read_text(encoding="utf-8")).items()}


def predict(row: PublishedRow, models: Mapping[str, ModelShape], factors: CostFactors) -> float:
    """Return the seconds that the model gives for a row.

    A synchronous step is generation + passes + updates + refit + fixed seconds. In an asynchronous one, generation and
    training run at the same time.
    """
    model = models[row.model]
    return _combined(row, model, factors, _trained_s(row, model, factors), _generated_s(row, model, factors))


def _step_of(row: PublishedRow) -> StepSize:
    most, prompt, updates = row.number("max_len"), row.number("prompt"), row.number("updates", 1)
    response = float(row.fields["response"])
    return StepSize(row.number("samples"), _GROUP, prompt, response, most - prompt, updates, most)


def _trained_s(row: PublishedRow, model: ModelShape, factors: CostFactors) -> tuple[float, float]:
    """Seconds of the updates, and of the passes without gradients."""
    device, trained, names = DEVICES[row.device], row.number("train_gpus"), ("tensor", "context", "expert", "pipeline")
    layout = TrainingLayout(
        row.framework.split()[0] in _SHARDED,
        **{name: row.number(key, 1) for name, key in zip(names, _SIZES, strict=True)},
        shards=max(trained, 1),
        micro_tokens=row.number("mb_tokens", 16384),
        recompute=row.number("recompute"),
    )
    step = _step_of(row)
    update = float(training(model, device, factors, trained, layout, step, True))
    if "optimizer on the CPU" in row.metric:
        update += model.parameters * factors.host_adam_s * (1 if row.number("gpus") > 1 else 2)
    passes = row.number("passes", 1) if row.metric == "step" else 0
    return update, passes and passes * float(training(model, device, factors, trained, layout, step, False))


def _generated_s(row: PublishedRow, model: ModelShape, factors: CostFactors) -> float:
    """Seconds of generation; 0 for a row without it."""
    device, devices, t = DEVICES[row.device], row.number("gen_gpus"), row.number("gen_tp", 1)
    if row.metric not in ("step", "gen"):
        return 0.0
    if row.fields["mode"] == "sync":
        return generation(model, device, factors, devices, t, _step_of(row), _SYNC_SHARE)
    lag = int(row.fields["mode"].removeprefix("async") or 1)
    return streaming(model, device, factors, devices, t, _step_of(row), _STREAM_SHARE, lag)


def _combined(
    row: PublishedRow, model: ModelShape, factors: CostFactors, trained: tuple[float, float], generated: float
) -> float:
    update, passes = trained
    if row.metric != "step":
        return generated if row.metric == "gen" else update
    if row.fields["mode"] == "sync":
        return generated + passes + update + refit(model, factors) + factors.fixed_s
    return max(generated, passes + update) + refit(model, factors) + factors.fixed_s / 2


def fit(rows: Sequence[PublishedRow], models: Mapping[str, ModelShape], rounds: int = len(_FACTORS)) -> CostFactors:
    """Return the factors with the least absolute error of the logarithm, near the textbook's.

    One factor at a time is multiplied and divided by ever smaller steps. Settings that many rows have weigh less each.
    """
    truth = np.log([row.seconds for row in rows])
    kinds = [(row.model, row.framework.split()[0]) for row in rows]
    weights = np.array([1 / math.sqrt(kinds.count(kind)) for kind in kinds])
    start = asdict(TEXTBOOK)
    trained: dict[tuple[float | str, ...], tuple[float, float]] = {}
    generated: dict[tuple[float | str, ...], float] = {}

    def seconds(row: PublishedRow, costs: CostFactors) -> float:
        """`predict`, which computes a part again only where one of its own factors has changed."""
        model = models[row.model]
        first = (row.name, *(getattr(costs, name) for name in _OF_TRAINING))
        second = (row.name, *(getattr(costs, name) for name in start if name not in _OF_TRAINING[:-1]))
        if first not in trained:
            trained[first] = _trained_s(row, model, costs)
        if second not in generated:
            generated[second] = _generated_s(row, model, costs)
        return _combined(row, model, costs, trained[first], generated[second])

    def loss(factors: Mapping[str, float]) -> float:
        costs = CostFactors(**factors)
        off = np.abs(np.log([seconds(row, costs) for row in rows]) - truth)
        distance = sum(math.log2(factors[name] / start[name]) ** 2 for name in start) / len(start)
        return float((weights * np.minimum(off, _OUTLIER)).sum() / weights.sum()) + _PRIOR * distance

    best, least = dict(start), loss(start)
    for factor in _FACTORS[:rounds]:
        for name, change in itertools.product(start, (factor, 1 / factor)):
            trial = {**best, name: best[name] * change}
            possible = trial["imbalance"] >= 1 and all(trial[share] < 0.95 for share in _SHARES)
            if possible and (cost := loss(trial)) < least:
                best, least = trial, cost
    return CostFactors(**{name: float(f"{value:.3g}") for name, value in best.items()})


def errors(rows: Sequence[PublishedRow], models: Mapping[str, ModelShape], factors: CostFactors) -> np.ndarray:
    """Return predicted / published - 1 for each row [rows]."""
    return np.array([predict(row, models, factors) / row.seconds - 1 for row in rows])


def leave_out(
    rows: Sequence[PublishedRow], models: Mapping[str, ModelShape], key: Callable[[PublishedRow], str], rounds: int
) -> np.ndarray:
    """Return the error of each row [rows] with factors that are fitted to the rows with another `key`."""
    result = np.zeros(len(rows))
    for value in sorted({key(row) for row in rows}):
        inside = np.array([key(row) == value for row in rows])
        factors = fit([row for row in rows if key(row) != value], models, rounds)
        result[inside] = errors([row for row in rows if key(row) == value], models, factors)
    return result


def pairs_in_order(rows: Sequence[PublishedRow], predicted: np.ndarray) -> tuple[int, int]:
    """Return how many pairs of settings are predicted in the published order, and how many pairs there are.

    A pair has the same framework and version, model, device and metric, and differs in time by more than 5 %.
    """
    right = total = 0
    for first, second in itertools.combinations(range(len(rows)), 2):
        a, b = rows[first], rows[second]
        same = (a.framework, a.model, a.device, a.metric) == (b.framework, b.model, b.device, b.metric)
        if same and abs(math.log(a.seconds / b.seconds)) > math.log(1.05):
            total += 1
            right += (predicted[first] < predicted[second]) == (a.seconds < b.seconds)
    return right, total
