"""Shared by the learning benchmarks: a warm-started model, runs that are not repeated, and the page with the
results.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridrl.data.preprocess.sort import write_sort_data
from hybridrl.models.tiny import build_tiny_model

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = "recipes_learn.md"
WARM_START_STEPS = 60
WINDOW = 5  # steps at the start and at the end over which the sampled reward is averaged
#: of every run: the quickstart's engine settings; the learning rate and its warm-up in updates
COMMON = (
    "data.max_prompt_length=32",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    "trainer.threads_per_worker=1",
    "trainer.test_freq=10",
    "trainer.project_name=learning",
    "trainer.resume_mode=disable",
)


@dataclass(frozen=True)
class Task:
    """Lists of digits to sort, and a model that has begun to.

    Attributes:
        name: of the folder that holds its data, its model and its runs.
        lengths: digits of a list.
        train_size, test_size: prompts of each length.
    """

    name: str
    lengths: tuple[int, ...]
    train_size: int
    test_size: int

    def make_data(self, out: Path) -> None:
        """Files of each length, once."""
        for length in self.lengths:
            folder = out / self.name / "data" / str(length)
            if not (folder / "sft_val.parquet").exists():
                write_sort_data(folder, train_size=self.train_size, test_size=self.test_size, length=length)

    def files(self, out: Path, name: str, lengths: Sequence[int] = ()) -> str:
        """The files of that name, of some lengths or of all, as a Hydra list."""
        folder = out / self.name / "data"
        return "[" + ",".join(f"'{folder / str(n) / name}.parquet'" for n in lengths or self.lengths) + "]"

    def model(self, out: Path, steps: int = WARM_START_STEPS) -> Path:
        """A random model after supervised steps on right answers; made once. All runs start from that of 60 steps."""
        folder = out / self.name
        name = "warm_start" if steps == WARM_START_STEPS else f"sft_{steps}"
        model = folder / name / f"global_step_{steps}" / "model" / "hf_model"
        if (model / "config.json").exists():
            return model
        build_tiny_model(folder / "model")
        words = [
            f"model.path='{folder / 'model'}'",
            "model.enable_gradient_checkpointing=False",
            f"data.train_files={self.files(out, 'sft_train')}",
            f"data.val_files={self.files(out, 'sft_val')}",
            "data.max_length=64",
            "data.train_batch_size=128",
            "data.micro_batch_size_per_gpu=128",
            "engine.dtype=float32",
            "optim.lr=3e-3",
            "optim.lr_warmup_steps=20",
            "checkpoint.save_contents=[hf_model]",
            f"trainer.default_local_dir='{folder / name}'",
            "trainer.threads_per_worker=1",
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={steps}",
            "trainer.resume_mode=disable",
        ]
        command(["hybridrl.trainer.main_sft", *words], folder / f"{name}.log")
        return model


FIVE_DIGITS = Task("five_digits", (5,), train_size=8000, test_size=256)
MIXED = Task("mixed", (3, 5, 7, 9), train_size=800, test_size=64)


@dataclass(frozen=True)
class Run:
    """A training run: a recipe with settings over it.

    Attributes:
        name: of the run; with the seed it names its folder.
        recipe: folder of `recipes/` whose YAML it takes.
        words: settings that make the run what it is; a result with other ones does not count.
        lengths: of the lists that it is asked to sort; all of the task's where empty.
    """

    name: str
    recipe: str
    seed: int
    steps: int
    words: tuple[str, ...]
    task: Task = FIVE_DIGITS
    lengths: tuple[int, ...] = ()

    def setting(self, key: str) -> str:
        """The value that the words give to a key."""
        return next(word.partition("=")[2] for word in self.words if word.startswith(f"{key}="))

    @property
    def identity(self) -> dict[str, Any]:
        """What a result has to agree with, as JSON has it."""
        known: dict[str, Any] = json.loads(json.dumps({"common": COMMON, **asdict(self)}))
        return known

    def folder(self, out: Path) -> Path:
        """Of the run."""
        return out / self.task.name / f"{self.name}_seed{self.seed}"


@dataclass(frozen=True)
class Result:
    """What a run left: wall seconds of the whole command, and a line of metrics a step."""

    run: Run
    seconds: float
    records: list[dict[str, Any]]
    folder: Path

    def curve(self, metric: str) -> dict[int, float]:
        """Step -> value, in the steps that have one."""
        return {int(record["step"]): record[metric] for record in self.records if metric in record}

    @property
    def rewards(self) -> dict[int, float]:
        """Mean score of everything that was sampled, also of what dynamic sampling threw away."""
        return self.curve("filter_groups/generated_score/mean") or self.curve("critic/score/mean")

    @property
    def sampled(self) -> tuple[float, float]:
        """The sampled reward over the first and over the last steps."""
        values = list(self.rewards.values())
        return mean(values[:WINDOW]), mean(values[-WINDOW:])

    @property
    def rise(self) -> float:
        start, end = self.sampled
        return end - start

    @property
    def accuracy(self) -> dict[int, float]:
        """Greedy accuracy on the validation prompts."""
        name = next(name for record in self.records for name in record if re.match(r"val-core/.*/acc/mean@1$", name))
        return self.curve(name)


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else float("nan")


def run_once(run: Run, out: Path, model: Path | None = None, again: bool = False) -> Result:
    """Train, unless the same run has a result already; `result.json` in its folder is written last.

    Args:
        out: folder of everything.
        model: to start from; the task's own where None.
        again: train nevertheless.
    """
    folder = run.folder(out)
    if not again and (known := find(run, out)) is not None:
        return known
    run.task.make_data(out)
    model = model or run.task.model(out)
    (folder / "result.json").unlink(missing_ok=True)
    words = [
        f"actor_rollout_ref.model.path='{model}'",
        f"data.train_files={run.task.files(out, 'train', run.lengths)}",
        f"data.val_files={run.task.files(out, 'test', run.lengths)}",
        f"trainer.default_local_dir='{folder}'",
        f"trainer.experiment_name={folder.name}",
        f"data.seed={run.seed}",
        f"actor_rollout_ref.rollout.seed={run.seed}",
        f"trainer.total_training_steps={run.steps}",
    ]
    recipe = ["-cp", str(REPOSITORY / "recipes" / run.recipe), "-cn", run.recipe]
    started = time.perf_counter()
    command(["hybridrl.trainer.main_ppo", *recipe, *words, *COMMON, *run.words], folder.with_suffix(".log"))
    told = {"seconds": time.perf_counter() - started, **run.identity}
    (folder / "result.json").write_text(json.dumps(told, indent=1))
    found = find(run, out)
    assert found is not None
    return found


def find(run: Run, out: Path) -> Result | None:
    """The result of this very run, if it is there."""
    folder = run.folder(out)
    if not (folder / "result.json").exists():
        return None
    told = json.loads((folder / "result.json").read_text())
    seconds = told.pop("seconds")
    if told != run.identity:
        return None
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Result(run, seconds, records, folder)


def command(words: Sequence[str], log: Path) -> None:
    """`python -m WORDS`, its output into a log whose end is shown if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        done = subprocess.run([sys.executable, "-m", *words], cwd=REPOSITORY, stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise SystemExit(f"{tail}\n\n{words[0]} failed with status {done.returncode}; all of its output is in {log}")


def write_sections(docs: Path, sections: dict[str, str], page: str = PAGE) -> None:
    """New text between `<!-- NAME -->` and `<!-- end of NAME -->` of a page in `docs`, at first a copy of ours."""
    file = docs / page
    text = (file if file.exists() else REPOSITORY / "docs" / page).read_text()
    for name, body in sections.items():
        before, rest = text.split(f"<!-- {name} -->")
        after = rest.split(f"<!-- end of {name} -->")[1]
        text = f"{before}<!-- {name} -->\n{body}\n<!-- end of {name} -->{after}"
    docs.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
