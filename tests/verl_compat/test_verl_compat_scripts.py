"""Shell scripts written for verl: their commands are found without running a program, told key by key, and run."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from raising import raises_with

from hybridrl.errors import ConfigError
from hybridrl.verl_compat import __main__ as command
from hybridrl.verl_compat.examine import Placeholders, examine, settings_of
from hybridrl.verl_compat.shell import ScriptCommand, read_script, run_script, translated
from hybridrl.verl_compat.table import count, reason

SCRIPT = """\
set -euo pipefail
MODEL=${MODEL:-org/model}
rm -rf precious
curl http://example.invalid > fetched.txt
python3 prepare.py --out data
for lr in 1e-6 2e-6; do
    python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_trainer \\
        algorithm.adv_estimator=grpo \\
        data.train_files=$HOME/train.parquet \\
        actor_rollout_ref.model.path="$MODEL" \\
        actor_rollout_ref.model.use_fused_kernels=True \\
        actor_rollout_ref.actor.optim.lr=$lr "$@" 2>&1 | tee -a log.txt
done
launcher() { srun --nodes=1 torchrun --nproc_per_node=2 "$@"; }
launcher -m verl.trainer.sft_trainer engine=fsdp model.partial_pretrain=$MODEL data.train_files=a.parquet
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").mkdir()
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


def test_commands_are_read_without_running_a_program(script: Path) -> None:
    found = read_script(script, ["trainer.nnodes=2"], {"HOME": "/home/me", "MODEL": "my model"})
    assert found.status == 0
    first, second, tuning = found.commands
    assert first.module == second.module == "verl.trainer.main_ppo"
    assert first.words[:2] == ["--config-path=config", "--config-name=ppo_trainer"]
    assert first.words[3] == "data.train_files=/home/me/train.parquet"
    assert first.words[4] == "actor_rollout_ref.model.path=my model"
    assert [each.words[-2] for each in (first, second)] == [
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.optim.lr=2e-6",
    ]
    assert first.words[-1] == "trainer.nnodes=2"
    assert (tuning.module, tuning.launcher[-2:]) == ("verl.trainer.sft_trainer", ["torchrun", "--nproc_per_node=2"])
    assert tuning.folder == script.parent
    assert (script.parent / "precious").is_dir() and not (script.parent / "data").exists()


def test_a_report_overwrites_no_file(script: Path) -> None:
    kept = script.parent / "kept.txt"
    kept.write_text("mine")
    script.write_text("echo new > kept.txt\npython3 -m verl.trainer.main_eval data.path=x\n")
    assert len(read_script(script).commands) == 1
    assert kept.read_text() == "mine"


def _environments(folder: Path) -> list[str]:
    """Ways of a script to put another Python first: each starts with `real` and would leave a file `started`."""
    tools = folder / "venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "python3", "torchrun"):
        (tools / name).write_text(f"#!/bin/sh\ntouch {folder}/started\n")
        (tools / name).chmod(0o755)
    (tools / "activate").write_text(f"PATH={tools}:$PATH\nexport PATH\nhash -r 2>/dev/null\n")
    eval_words = "-m verl.trainer.main_eval data.path=a.parquet --cfg job -p data"
    return [
        f"source venv/bin/activate\npython3 {eval_words}\n",
        f"set -eux\n. venv/bin/activate\nnohup python {eval_words}\n",
        f"go() {{ export PATH={tools}:$PATH; (exec python3 {eval_words}); }}\ngo\n",
        f"conda() {{ PATH={tools}:$PATH; }}\nconda activate verl\npython3 {eval_words} & wait $!\n",
    ]


def test_a_program_named_by_its_path_is_refused_before_anything_starts(script: Path, capsys) -> None:
    """It would be the real one: no stand-in is found by a path."""
    text = [
        "#!/usr/bin/python3",
        "# /opt/env/bin/python -m verl.trainer.main_ppo",
        "export PATH=/opt/env/bin:$PATH; ls /usr/lib/python3/dist-packages ./ray/; T=${D:-/tmp/ray}; cd /w/ray",
        f'{sys.executable} -c \'open("started", "w")\' -m verl.trainer.main_ppo',
        "PYTHON=${PYTHON:-/opt/env/bin/python3.11}",
        '"$CONDA_PREFIX/bin/torchrun" --nproc_per_node=2 -m verl.trainer.sft_trainer',
        "(./venv/bin/python -m verl.trainer.main_ppo)",
    ]
    script.write_text("\n".join(text))
    for words in (["--report"], []):
        assert command.main(["script", *words, str(script)]) == 2
        said = capsys.readouterr().err
        for line, program in (
            (4, sys.executable),
            (5, "/opt/env/bin/python3.11"),
            (6, "$CONDA_PREFIX/bin/torchrun"),
            (7, "./venv/bin/python"),
        ):
            assert f"line {line}: {program}" in said
        assert said.count("line ") == 4 and not (script.parent / "started").exists()


def test_a_script_that_changes_the_path_starts_nothing_while_it_is_read(script: Path) -> None:
    tools = script.parent / "venv" / "bin"
    prefixed = f"PATH={tools}:$PATH python3 -m verl.trainer.main_eval data.path=a.parquet\n"
    for text in (*_environments(script.parent), prefixed):
        script.write_text(text)
        found = read_script(script)
        assert found.status == 0, found.errors
        assert [each.module for each in found.commands] == ["verl.trainer.main_eval"], text
        assert not (script.parent / "started").exists(), text


@pytest.mark.parametrize("case", range(4))
def test_a_script_that_changes_the_path_runs_our_programs(case: int, script: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    script.write_text(_environments(script.parent)[case])
    assert run_script(script) == 0
    out, err = capfd.readouterr()
    assert "path:" in out
    assert "HYBRIDRL_STAND_INS" not in err, "the trap is not traced by `set -x`"
    assert not (script.parent / "started").exists()


def test_a_script_that_runs_sees_its_last_status_and_the_users_bash_env(script: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    users = script.parent / "users.sh"
    users.write_text("module() { echo loaded $1; }\n")
    monkeypatch.setenv("BASH_ENV", str(users))
    script.write_text(
        "module cuda\nfalse\necho status=$?\ntrue | false\necho ${PIPESTATUS[*]}\n"
        "python3 -c 'import os; print(os.environ[\"BASH_ENV\"])'\nexit 3\n"
    )
    assert run_script(script) == 3
    assert capfd.readouterr().out.split() == ["loaded", "cuda", "status=1", "0", "1", str(users)]


def test_a_script_that_does_not_end_is_ended_with_all_it_started(script: Path) -> None:
    script.write_text("bash -c 'echo $$ > \"$PWD/child\"; while :; do read -t 1 < <(:) || :; done' & wait\n")
    with raises_with(ConfigError, "run.sh"):
        read_script(script, seconds=2)
    child = int((script.parent / "child").read_text())
    status, deadline = Path(f"/proc/{child}/status"), time.monotonic() + 30
    while status.exists() and "State:\tZ" not in status.read_text():  # it was killed, and may not have stopped yet
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_key_is_told_as_mapped_without_effect_or_not_supported(script: Path, capsys) -> None:
    script.write_text(
        "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=org/model "
        "actor_rollout_ref.actor.lr=1e-5 trainer.use_legacy_worker_impl=disable algorithm.gama=1 "
        "actor_rollout_ref.model.mtp.enable=True"
    )
    assert command.main(["script", "--report", str(script)]) == 2
    lines = capsys.readouterr().out.splitlines()
    for word, state, why in (
        ("data.train_files=a.parquet", "mapped", ""),
        ("actor_rollout_ref.actor.lr=1e-5", "mapped", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.use_legacy_worker_impl=disable", "no effect here", "workers"),
        ("algorithm.gama=1", "not supported", "algorithm.gamma"),
        ("actor_rollout_ref.model.mtp.enable=True", "not supported", "multi-token"),
    ):
        (line,) = [line for line in lines if word in line and not line.strip().startswith("cannot run")]
        assert line.split(word)[0].strip() == state and why in line
    assert sum(line.strip().startswith("cannot run") for line in lines) == 2


def test_the_script_runs_with_our_programs_in_the_place_of_verls(script: Path, monkeypatch, capfd) -> None:
    """A real `--cfg job` of our program through `python3`, with arguments and environment of the script."""
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    script.write_text(
        "python3 -c 'print(6 * 7)'\n"
        'python3 -m verl.trainer.main_eval data.path=a.parquet data.max_samples=3 "$@" --cfg job -p data\n'
    )
    assert command.main(["script", str(script), "data.response_key=answer"]) == 0
    out = capfd.readouterr().out
    assert "42" in out
    assert "max_samples: 3" in out and "response_key: answer" in out


def test_a_script_that_cannot_run_is_not_started(script: Path, capsys) -> None:
    script.write_text('python3 -m verl.trainer.main_ppo trainer.nnodes=\npython3 -c \'open("ran", "w")\'\n')
    assert command.main(["script", str(script)]) == 2
    assert "trainer.nnodes" in capsys.readouterr().out
    assert not (script.parent / "ran").exists()
    assert command.main(["script", "nowhere.sh"]) == 2
    script.write_text("echo nothing of verl\n")
    assert command.main(["script", "--report", str(script)]) == 2


def test_modules_are_replaced_behind_every_launcher() -> None:
    job = ["job", "submit", "--", "python3", "-m", "verl.trainer.main_ppo", "a=verl.trainer.main_ppo"]
    assert translated(job)[-2:] == ["hybridrl.trainer.main_ppo", "a=verl.trainer.main_ppo"]
    assert translated(["-m", "verl.trainer.fsdp_sft_trainer"]) == ["-m", "hybridrl.trainer.main_sft"]
    assert translated(["-m", "other", "x"]) == ["-m", "other", "x"]


def test_placeholders_stand_for_files_and_models(tmp_path: Path) -> None:
    words = [
        *("data.train_files=[nowhere.parquet]", "data.val_files=nowhere.parquet", "actor_rollout_ref.model.path=./no"),
        *("custom_reward_function.path=gone.py", "trainer.resume_mode=resume_path", "trainer.resume_from_path=gone"),
        *("reward_model.enable=True", "reward_model.model.path=./no_rewards"),
    ]
    one = ScriptCommand("verl.trainer.main_ppo", words, tmp_path)
    assert len(examine(one).faults) == 6
    assert examine(one, Placeholders(tmp_path)).faults == []
    code = [
        *("data.train_files=a.parquet", "data.val_files=a.parquet", "actor_rollout_ref.model.path=m"),
        *("reward.reward_manager.source=importlib", "reward.reward_manager.module.path=gone2.py"),
        *("reward.reward_manager.module.name=Mine", "data.custom_cls.path=gone3.py", "data.custom_cls.name=Rows"),
        *("data.sampler.class_path=gone4.py", "data.sampler.class_name=Draw"),
    ]
    other = ScriptCommand("verl.trainer.main_ppo", code, tmp_path)
    faults = examine(other).faults
    assert all(any(name in fault for fault in faults) for name in ("gone2.py", "gone3.py", "gone4.py")), faults
    assert examine(other, Placeholders(tmp_path)).faults == []


def test_a_program_that_does_not_exist_here_is_named(tmp_path: Path) -> None:
    name = "verl.experimental.vla.main_ppo"
    (fault,) = examine(ScriptCommand(name, ["a=1"], tmp_path)).faults
    assert name in fault and "vision-language-action" in fault
    assert settings_of(ScriptCommand(name, ["a=1"], tmp_path)) == []
    (fault,) = examine(ScriptCommand("verl.no.such", [], tmp_path)).faults
    assert "verl.no.such" in fault


def test_the_table_counts_commands_and_reasons(tmp_path: Path, capsys) -> None:
    examples = tmp_path / "examples/some"
    examples.mkdir(parents=True)
    good = (
        "python3 -m verl.trainer.main_ppo data.train_files=$DATA/train.parquet "
        "actor_rollout_ref.model.path=${MODEL:?must be set}"
    )
    (examples / "good.sh").write_text(f"set -u\n{good}\n")
    (examples / "bad.sh").write_text(
        f"set -u\n{good} actor_rollout_ref.model.mtp.enable=True\n{good} model_engine=veomni\n"
    )
    (examples / "sft.sh").write_text(
        'if [ "$#" -lt 2 ]; then exit 1; fi\n'
        "torchrun --nproc_per_node=$1 -m verl.trainer.sft_trainer engine=fsdp optim=fsdp model=hf_model "
        "model.path=m data.train_files=t trainer.default_local_dir=$2\n"
    )
    counted = count("mine", tmp_path)
    assert counted.row() == "| mine | 3 | 4 | 2 | 1 | 1 |"
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin: scripts (python -m hybridrl.verl_compat table) -->\n<!-- end: scripts -->\nz\n")
    assert command.main(["table", f"mine={tmp_path}", "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("a\n") and text.endswith("z\n")
    assert "| it trains with VeOmni | 1 | 1 |" in text and "| multi-token prediction is not built | 1 | 1 |" in text
    (tmp_path / "empty").mkdir()
    assert command.main(["table", str(tmp_path / "empty")]) == 2
    assert "empty" in capsys.readouterr().err


def test_reasons_hold_no_value_of_one_command() -> None:
    assert reason("a.b=3 (command line): not supported yet: X is not built. Leave it.") == "X is not built"
    assert "verl" in reason("a.b (/x/y.yaml, line 3): unknown key; nearest: c")


def test_the_commands_are_listed() -> None:
    asked = subprocess.run([sys.executable, "-m", "hybridrl.verl_compat", "--help"], capture_output=True, text=True)
    assert asked.returncode == 0
    assert all(name in asked.stdout for name in command.COMMANDS)
    assert asked.stderr == ""
