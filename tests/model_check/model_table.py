"""The table of families in docs/models.md: what `hybridrl check model` finds for a small model of each.

python tests/model_check/model_table.py        # writes the table
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING

from hybridrl.config import ModelConfig
from hybridrl.model_check.check_rows import ModelCheckRow
from hybridrl.model_check.stored_checks import check_stored
from hybridrl.model_check.tiny_copy import write_tiny_copy
from hybridrl.model_check.training_checks import check_megatron, check_training, reference_run
from hybridrl.registry import MEGATRON_FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
#: model types whose configuration, without arguments, is a model of the family
FAMILIES = (
    *("apertus", "arcee", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon_h1"),
    *("gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_neox"),
    *("gpt_oss", "granite", "granitemoe", "helium", "jamba", "lfm2", "llama", "llama4_text", "mimo_v2_flash"),
    *("minimax", "minimax_m2", "mistral", "mixtral", "nemotron_h", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3"),
    *("phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
    *("seed_oss", "smollm3", "stablelm", "starcoder2"),
)
#: columns: heading, and the topic of the row
COLUMNS = {
    "weights in = out": "weights: in = out, bit by bit",
    "padded": "fsdp2: padded rows",
    "packed": "fsdp2: packed rows (model.use_remove_padding)",
    "shared prefixes": "fsdp2: shared prefixes (model.share_prefixes)",
    "step": "fsdp2: a step of training",
    "critic": "critic and reward model",
    "LoRA": "LoRA",
    "router replay": "router replay",
    "router loss": "loss of routers",
    "Megatron": "megatron: log-probabilities",
}


def checks_of(family: str) -> list[ModelCheckRow]:
    """Run the checks of a small model of a family."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_copy(CONFIG_MAPPING[family](), Path(folder))
        model = ModelConfig(path=folder)
        rows = list(check_stored(model, reads_weights=True))
        reference = reference_run(model)
        rows += check_training(model, reference)
        if MEGATRON_FAMILIES.knows(family):
            rows += check_megatron(model, reference)
    return rows


def line_of(family: str, rows: list[ModelCheckRow]) -> str:
    """The line of the table."""
    statuses = {row.topic: {"ok": "yes", "no": "no", "failed": "FAILED"}[row.status] for row in rows}
    return f"| {family} | {' | '.join(statuses.get(topic, '') for topic in COLUMNS.values())} |"


def lines_of_page() -> dict[str, str]:
    """The lines of the table in the page, by family."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip(): line for line in lines[1:]}


def main() -> None:
    """Write the table."""
    torch.set_num_threads(1)
    lines = []
    for family in FAMILIES:
        rows = checks_of(family)
        lines.append(line_of(family, rows))
        print(lines[-1], *(row.text for row in rows if row.status == "failed"), sep="\n  ", file=sys.stderr)
    versions = ", ".join(f"{package} {version(package)}" for package in ("transformers", "torch", "megatron-core"))
    head = f"| model type | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}"
    table = f"\nWith {versions.replace('+cpu', '')}, on a CPU in float32:\n\n{head}\n" + "\n".join(lines) + "\n"
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
