"""What the learning benchmarks share: a warm-started model, runs that are not repeated, and the page that tells."""

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
class Run:
    """A training run: a recipe with settings over it.

    Attributes:
        name: of the run; with the seed it names its folder.
        recipe: folder of `recipes/` whose YAML it takes.
        words: settings that make the run what it is; a result with other ones does not count.
    """

    name: str
    recipe: str
    seed: int
    steps: int
    words: tuple[str, ...]


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


def make_data(folder: Path, lengths: Sequence[int], train_size: int, test_size: int) -> None:
    """The sorting task with that many prompts of each length of digits, once."""
    for length in lengths:
        if not (folder / str(length) / "sft_val.parquet").exists():
            write_sort_data(folder / str(length), train_size=train_size, test_size=test_size, length=length)


def files(folder: Path, lengths: Sequence[int], name: str) -> str:
    """The files of that name as a Hydra list."""
    return "[" + ",".join(f"'{folder / str(length) / name}.parquet'" for length in lengths) + "]"


def warm_start(out: Path, data: Path, lengths: Sequence[int]) -> Path:
    """The model that all runs start from: random, then supervised steps on right answers; made once."""
    model = out / "warm_start" / f"global_step_{WARM_START_STEPS}" / "model" / "hf_model"
    if (model / "config.json").exists():
        return model
    build_tiny_model(out / "model")
    words = [
        f"model.path='{out / 'model'}'",
        "model.enable_gradient_checkpointing=False",
        f"data.train_files={files(data, lengths, 'sft_train')}",
        f"data.val_files={files(data, lengths, 'sft_val')}",
        "data.max_length=64",
        "data.train_batch_size=128",
        "data.micro_batch_size_per_gpu=128",
        "engine.dtype=float32",
        "optim.lr=3e-3",
        "optim.lr_warmup_steps=20",
        "checkpoint.save_contents=[hf_model]",
        f"trainer.default_local_dir='{out / 'warm_start'}'",
        "trainer.threads_per_worker=1",
        f"trainer.total_training_steps={WARM_START_STEPS}",
        f"trainer.save_freq={WARM_START_STEPS}",
        "trainer.resume_mode=disable",
    ]
    command(["hybridrl.trainer.main_sft", *words], out / "warm_start.log")
    return model


def run_once(run: Run, out: Path, model: Path, data: Path, lengths: Sequence[int], again: bool = False) -> Result:
    """Train, unless the same run has a result already.

    The run's folder is `out/NAME_seedN`; `result.json` in it is written last.
    """
    folder = out / f"{run.name}_seed{run.seed}"
    if not again and (known := find(run, folder)) is not None:
        return known
    started = time.perf_counter()
    (folder / "result.json").unlink(missing_ok=True)
    paths = [
        f"actor_rollout_ref.model.path='{model}'",
        f"data.train_files={files(data, lengths, 'train')}",
        f"data.val_files={files(data, lengths, 'test')}",
        f"trainer.default_local_dir='{folder}'",
        f"trainer.experiment_name={folder.name}",
    ]
    size = [
        f"data.seed={run.seed}",
        f"actor_rollout_ref.rollout.seed={run.seed}",
        f"trainer.total_training_steps={run.steps}",
    ]
    recipe = ["-cp", str(REPOSITORY / "recipes" / run.recipe), "-cn", run.recipe]
    command(["hybridrl.trainer.main_ppo", *recipe, *paths, *COMMON, *size, *run.words], out / f"{folder.name}.log")
    seconds = time.perf_counter() - started
    known_by = {"seconds": seconds, "common": COMMON, **asdict(run)}
    (folder / "result.json").write_text(json.dumps(known_by, indent=1))
    found = find(run, folder)
    assert found is not None
    return found


def find(run: Run, folder: Path) -> Result | None:
    """The result of this very run, if it is there."""
    if not (folder / "result.json").exists():
        return None
    told = json.loads((folder / "result.json").read_text())
    seconds = told.pop("seconds")
    if told != json.loads(json.dumps({"common": COMMON, **asdict(run)})):
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


def write_sections(docs: Path, sections: dict[str, str]) -> None:
    """New text between `<!-- NAME -->` and `<!-- end of NAME -->` of the page in `docs`, at first a copy of ours."""
    page = docs / PAGE
    text = (page if page.exists() else REPOSITORY / "docs" / PAGE).read_text()
    for name, body in sections.items():
        before, rest = text.split(f"<!-- {name} -->")
        after = rest.split(f"<!-- end of {name} -->")[1]
        text = f"{before}<!-- {name} -->\n{body}\n<!-- end of {name} -->{after}"
    docs.mkdir(parents=True, exist_ok=True)
    page.write_text(text)
