"""Speed of the configuration: `--cfg job` compared with `python -c 'import hydra'`, and importing `hybridrl.config`.

    python benchmarks/config.py [--rounds 7] [--json FILE]

Each command is a new process on a warm disk cache; rounds alternate. Limits: `--cfg job` takes at most 6 times as
long as `import hydra` (medians), without torch or ray; the import takes less than 0.3 s (the best round, because an
absolute time means nothing while other work uses the cores).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

RATIO_LIMIT = 6.0
IMPORT_LIMIT_S = 0.3
REPOSITORY = Path(__file__).resolve().parents[1]
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import hydra": ["-c", "import hydra"],
    "import hybridrl.config": ["-c", "import hybridrl.config"],
    "main_ppo --cfg job": ["-m", "hybridrl.trainer.main_ppo", "--cfg", "job"],
    "main_sft --cfg job": ["-m", "hybridrl.trainer.main_sft", "--cfg", "job"],
}


def seconds(words: list[str]) -> float:
    """Wall time of one process from start to end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def heavy_modules(words: list[str]) -> list[str]:
    """Which of torch, ray and transformers a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    return sorted(imported & {"torch", "ray", "transformers"})


def main() -> None:
    """Measure, print the table, and end with status 1 where a figure is not held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="times that each command is measured")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds + 1):
        for name, words in COMMANDS.items():
            times[name].append(seconds(words))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms the disk
    base = medians["import hydra"]
    print("| process | median s | / import hydra | torch, ray |\n|---|---|---|---|")
    heavy = {name: heavy_modules(words) for name, words in COMMANDS.items()}
    for name, value in medians.items():
        print(f"| {name} | {value:.3f} | {value / base:.2f} | {', '.join(heavy[name]) or 'none'} |")
    own_import = min(times["import hybridrl.config"])
    ratio = medians["main_ppo --cfg job"] / base
    print(f"\n--cfg job / import hydra: {ratio:.2f} (at most {RATIO_LIMIT:g})")
    print(f"importing hybridrl.config, with the interpreter: {own_import:.3f} s (under {IMPORT_LIMIT_S} s)")
    if options.json:
        figures = {"medians_s": medians, "cfg_job_ratio": ratio, "import_s": own_import, "heavy": heavy}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if ratio > RATIO_LIMIT or own_import >= IMPORT_LIMIT_S or any(heavy.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
