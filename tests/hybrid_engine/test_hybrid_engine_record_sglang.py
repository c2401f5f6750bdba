"""SGLang's own loaders against their real load: what they are planned to need, and both ways of an update."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from transformers import AutoModelForCausalLM

if importlib.util.find_spec("sglang") is None:
    pytest.skip("runs in the SGLang environment", allow_module_level=True)

#: layouts of two processes, and the families that have something to show in them
CASES = {"tp=2": list(FAMILIES), "tp=2,ep=2": ["qwen3_moe", "deepseek"], "pp=2": ["llama", "qwen2"]}
#: what SGLang computes while it loads: two projections become one; 1 is added to the weights of norms
WHOLE = {"deepseek": (".q_a_proj.", ".kv_a_proj_with_mqa."), "gemma": ("norm.",)}
#: what SGLang holds more of than the layout asks for: all of the embedding; the head in the first stage
MORE = {("tp=2", "gemma3"): "model.embed_tokens.weight", ("pp=2", "llama"): "lm_head.weight"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, finish: Callable[..., Any]) -> dict[tuple[str, str, str], Any]:
    """What each process found, by ("" or "padded-", layout, family)."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in FAMILIES.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    program = str(Path(__file__).with_name("record_sglang.py"))
    cases = [(sizes, name) for sizes, names in CASES.items() for name in names]
    done = finish([sys.executable, program, *(f"{sizes}@{folder / name}" for sizes, name in cases)])
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        (kind, sizes, name): [json.loads((folder / name / f"{kind}{sizes}-{rank}.json").read_text()) for rank in (0, 1)]
        for sizes, name in cases
        for kind in ("", "padded-")
    }


@pytest.mark.slow
def test_loaders_are_planned_without_a_table(reports: dict[tuple[str, str, str], Any]) -> None:
    """Every tensor is planned or has a reason why not, and the recorded copies give what SGLang itself loads."""
    for (kind, sizes, name), of_ranks in reports.items():
        for report in of_ranks:
            where = kind, sizes, name, report
            assert all(any(part in one for part in WHOLE.get(name, ())) for one in report["unplanned"]), where
            assert report["untouched"] and report["copies"] and report["wrong"] == [], where
            assert report["without_rule"] == [], where
    assert all(reports["", "tp=2", name][0]["unplanned"] for name in WHOLE)


@pytest.mark.slow
def test_slices_are_those_of_the_rules(reports: dict[tuple[str, str, str], Any]) -> None:
    """Without the heads and columns that SGLang adds on a CPU, where it puts whole heads on one rank."""
    for (kind, sizes, name), of_ranks in reports.items():
        for report in of_ranks if not kind else ():
            assert set(report["differ_from_rules"]) <= {MORE.get((sizes, name))}, (sizes, name, report)
            assert report["skipped"] == [], (sizes, name, report)
            assert report["experts_recorded"] == report["experts_by_rules"], (sizes, name, report)
    assert any(report["experts_recorded"] for report in reports["", "tp=2,ep=2", "qwen3_moe"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["update", "stream"])
def test_updates_bring_what_sglang_loads_from_files(reports: dict[tuple[str, str, str], Any], way: str) -> None:
    """By a plan, and streamed through one bucket that both processes read."""
    assert {which: [report[way] for report in found] for which, found in reports.items()} == {
        which: [[], []] for which in reports
    }
