"""Recording one process, without workers; and settings by which nothing would be recorded."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch

from hybridrl.config import load_config
from hybridrl.config.checks.idle import check_idle
from hybridrl.config.roles import ROLES, RoleSpec
from hybridrl.config.schema.profiler import RoleProfilerConfig
from hybridrl.errors import UserError
from hybridrl.utils import device
from hybridrl.workers.profiling import Profile, ProfileRequest

ACTOR = "actor_rollout_ref.actor.profiler"


def _request(folder: Path, tool: str = "torch", role: str = "actor") -> ProfileRequest:
    return ProfileRequest(tool, role, 3, str(folder), None, 1000)


def test_a_trace_has_what_ran_while_it_was_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One recording per process: a second role of the process is told where its trace is."""
    torch.ones(3, 3).sin()
    profile = Profile.start(_request(tmp_path), rank=1)
    assert profile is not None
    assert Profile.start(_request(tmp_path, role="critic"), rank=1) is None
    assert "critic rank 1 is profiled in actor_rank_1" in capfd.readouterr().err
    torch.ones(3, 3) @ torch.ones(3, 3)
    file = profile.finish()
    assert file == str(tmp_path / "step_3" / "actor_rank_1.json.gz")
    with gzip.open(file) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert "aten::mm" in names and "aten::sin" not in names
    again = Profile.start(_request(tmp_path, role="critic"), rank=1)
    assert again is not None and again.finish() is not None


@pytest.mark.skipif(device.is_gpu(), reason="with a GPU, these tools record it")
@pytest.mark.parametrize("tool", ["torch_memory", "nsys"])
def test_tools_that_record_gpus_are_refused_without_one(tmp_path: Path, tool: str) -> None:
    with pytest.raises(UserError, match="no GPU"):
        Profile.start(_request(tmp_path, tool), rank=0)
    profile = Profile.start(_request(tmp_path), rank=0)  # the refused one is not in the way
    assert profile is not None and profile.finish() is not None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["global_profiler.steps=[1,2]"], "global_profiler.tool is not set"),
        ([f"{ACTOR}.enable=True"], "global_profiler.tool is not set"),
        (["global_profiler.tool=torch"], "global_profiler.steps"),
        (["global_profiler.tool=torch", "global_profiler.steps=[1]"], "profiler.enable=True"),
        (
            ["global_profiler.tool=torch", "global_profiler.steps=[1]", f"{ACTOR}.enable=True"],
            f"{ACTOR}.ranks is not set",
        ),
    ],
)
def test_settings_that_write_no_profile_are_told(words: list[str], told: str) -> None:
    for program, where in (("ppo_trainer", ACTOR), ("sft_trainer", "profiler")):
        config = load_config(program, [word.replace(ACTOR, where) for word in words])  # type: ignore[call-overload]
        faults, notices = check_idle(config)
        assert faults == [] and told.replace(ACTOR, where) in " ".join(notices)


@pytest.mark.parametrize(("program", "where"), [("ppo_trainer", ACTOR), ("sft_trainer", "profiler")])
def test_settings_that_write_one_are_not(program: str, where: str) -> None:
    words = ["global_profiler.tool=torch", "global_profiler.steps=[1]", f"{where}.enable=True", f"{where}.ranks=[0]"]
    config = load_config(program, words)  # type: ignore[call-overload]
    assert check_idle(config) == ([], [])


def test_the_profile_of_a_role_of_ones_own_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ("profiler", RoleProfilerConfig, dataclasses.field(default_factory=RoleProfilerConfig))
    settings = dataclasses.make_dataclass("Settings", [group])
    own = RoleSpec("own", worker=None, needed=lambda _: True, placement=("own",), mesh="own", settings=settings)
    monkeypatch.setitem(ROLES, "own", own)
    for ranks in ([0], []):
        words = ["global_profiler.tool=torch", "global_profiler.steps=[1]"]
        config = load_config("ppo_trainer", [*words, f"+roles.own={{profiler: {{enable: true, ranks: {ranks}}}}}"])
        named = {text.split("=")[0] for texts in check_idle(config) for text in texts}
        assert named == (set() if ranks else {"global_profiler.tool", "roles.own.profiler.enable"})
