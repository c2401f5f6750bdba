"""`hybridrl check model`: it finds what was planted into a model, and says what the page says of each family."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent))
from model_table import FAMILIES, PAGE, checks_of, line_of, lines_of_page

from hybridrl.model_check.check_model_command import main
from hybridrl.model_check.tiny_copy import tiny_config, write_tiny_copy
from hybridrl.registry import MEGATRON_FAMILIES


@pytest.fixture
def single_thread() -> Any:
    """Small matrices are computed faster by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def statuses(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Run the command; return its exit status, and status and text by topic."""
    capsys.readouterr()
    code = main([*words, "--json"])
    return code, {row["topic"]: (row["status"], row["text"]) for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_says_what_is_found(family: str, single_thread: None) -> None:
    rows = checks_of(family)
    assert line_of(family, rows) == lines_of_page()[family], [row for row in rows if row.status == "failed"]
    assert not [row for row in rows if row.status == "failed"]


def test_the_page_has_every_family_and_the_versions() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert list(lines_of_page()) == list(FAMILIES) and len(FAMILIES) >= 30
    assert f"transformers {version('transformers')}" in text
    assert {family for family in MEGATRON_FAMILIES.names() if family in FAMILIES} == {
        family for family, line in lines_of_page().items() if not line.endswith("|  |")
    }


def test_a_sound_model_passes(tiny_model: Path, capsys: pytest.CaptureFixture[str], single_thread: None) -> None:
    before = {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    code, rows = statuses(capsys, str(tiny_model))
    assert code == 0 and not [row for row in rows.items() if row[1][0] == "failed"]
    assert rows["weights: in = out, bit by bit"] == ("ok", "27 tensors equal and finite")
    assert rows["template: the same with answers of tools"][0] == "ok"
    assert "<|im_end|>" in rows["end of a turn"][1]
    assert rows["template: thoughts (reasoning_content)"][0] == "no"
    assert {file.name: file.read_bytes() for file in tiny_model.iterdir()} == before


def _lost_tower(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "visual.blocks.0.weight": torch.ones(2, 2)}, folder / "model.safetensors", {"format": "pt"})


def _nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _missing(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _wrong_end(folder: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        settings |= {"eos_token": "<|im_start|>"} if "tokenizer" in name else {"eos_token_id": 1}
        (folder / name).write_text(json.dumps(settings))


def _end_beyond_vocabulary(folder: Path) -> None:
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [2, 264]}))


def _changes_earlier_text(folder: Path) -> None:
    """A template that cuts the last character of all turns of the model but the last."""
    template = (folder / "chat_template.jinja").read_text()
    content = "(message['content'] or '')"
    assert content in template
    shorter = "((message['content'] or '') if loop.last or message['role'] != 'assistant' else message['content'][:4])"
    (folder / "chat_template.jinja").write_text(template.replace(content, shorter))


@pytest.mark.parametrize(
    ("plant", "topic", "named"),
    [
        (_lost_tower, "weights: names and shapes", "visual.blocks.0.weight"),
        (_nan, "weights: in = out, bit by bit", "model.layers.1.mlp.up_proj.weight"),
        (_missing, "weights: names and shapes", "model.layers.1.mlp.up_proj.weight"),
        (_wrong_end, "end of a turn", "<|im_end|>"),
        (_end_beyond_vocabulary, "end of a turn", "[264]"),
        (_changes_earlier_text, "template: a conversation that goes on keeps its text", "chat template"),
    ],
)
def test_what_is_planted_is_found(
    plant: Callable[[Path], None],
    topic: str,
    named: str,
    micro_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    single_thread: None,
) -> None:
    folder = Path(shutil.copytree(micro_model, tmp_path / "model"))
    plant(folder)
    code, rows = statuses(capsys, str(folder), "--tiny")
    assert code == 2 and rows[topic][0] == "failed" and named in rows[topic][1]
    kind = topic.split(":")[0]
    assert not [other for other, (status, _) in rows.items() if status == "failed" and not other.startswith(kind)]


#: a model whose attention does not read where the sequences of a row begin
LEAKING = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model


class LeakingConfig(Qwen3Config):
    model_type = "leaking"


class LeakingModel(Qwen3Model):
    config_class = LeakingConfig


class LeakingForCausalLM(Qwen3ForCausalLM):
    config_class = LeakingConfig

    def forward(self, *arguments, cu_seq_lens_q=None, cu_seq_lens_k=None, **named):
        return super().forward(*arguments, **named)


AutoConfig.register("leaking", LeakingConfig)
AutoModel.register(LeakingConfig, LeakingModel)
AutoModelForCausalLM.register(LeakingConfig, LeakingForCausalLM)
"""

#: a table of weights for Megatron that has the gate where the up projection belongs
SWAPPED = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from hybridrl.engine.megatron.families.decoder import LAYER
from hybridrl.engine.megatron.families.qwen import Qwen3
from hybridrl.engine.megatron.mapping import Stacked, register_family


class SwappedConfig(Qwen3Config):
    model_type = "swapped"


class SwappedModel(Qwen3Model):
    config_class = SwappedConfig


class SwappedForCausalLM(Qwen3ForCausalLM):
    config_class = SwappedConfig


AutoConfig.register("swapped", SwappedConfig)
AutoModel.register(SwappedConfig, SwappedModel)
AutoModelForCausalLM.register(SwappedConfig, SwappedForCausalLM)


@register_family("swapped")
class Swapped(Qwen3):
    rules = {
        **Qwen3.rules,
        "decoder.layers.{layer}.mlp.linear_fc1.weight": Stacked(
            LAYER + "mlp.up_proj.weight", LAYER + "mlp.gate_proj.weight"
        ),
    }
"""


@pytest.mark.parametrize(
    ("model_type", "source", "topic", "status"),
    [
        ("leaking", LEAKING, "fsdp2: packed rows (model.use_remove_padding)", "no"),
        ("swapped", SWAPPED, "megatron: log-probabilities", "failed"),
    ],
)
def test_faults_in_code_are_found(
    model_type: str,
    source: str,
    topic: str,
    status: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    single_thread: None,
) -> None:
    (tmp_path / f"{model_type}_model.py").write_text(source)
    folder = tmp_path / "model"
    write_tiny_copy(Qwen3Config(), folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": model_type, "architectures": [f"{model_type.title()}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings))
    code, rows = statuses(capsys, str(folder), "--no-text", "--external-lib", str(tmp_path / f"{model_type}_model.py"))
    assert rows[topic][0] == status
    assert {other for other in rows if rows[other][0] == "failed"} == ({topic} if status == "failed" else set()), rows
    assert code == (2 if status == "failed" else 0)


def test_a_configuration_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str], single_thread) -> None:
    CONFIG_MAPPING["qwen3_moe"]().save_pretrained(tmp_path)
    code, rows = statuses(capsys, str(tmp_path), "--no-text")
    assert code == 0 and rows["router replay"][0] == "ok" and not any(topic.startswith("weights") for topic in rows)
    assert "30." in rows["configuration"][1] or "B parameters" in rows["configuration"][1]


def test_no_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_tiny_copy_has_each_kind_of_layer() -> None:
    config = CONFIG_MAPPING["qwen3_next"]()
    small = tiny_config(config)
    assert set(small.layer_types) == set(config.layer_types) and small.num_hidden_layers < 10
    assert AutoModelForCausalLM.from_config(small).num_parameters() < 5_000_000
