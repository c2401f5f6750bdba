"""The command line in real processes: what it prints, how it ends, what it leaves, what it imports."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hybridrl.config import ConfigError, cli, load_config
from hybridrl.errors import UserError, WorkerError

PROGRAM = """
import sys
from hybridrl.config import cli
def run(config):
    print("ran with", config.trainer.experiment_name)
cli("ppo_trainer", run)
"""


def start(folder: Path, *words: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def ready(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.parquet").touch()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "grpo_math.yaml").write_text(
        "actor_rollout_ref: {model: {path: model}, rollout: {n: 4}, actor: {lr: 1e-5}}\n"
        "algorithm: {adv_estimator: grpo}\ndata: {train_files: train.parquet}\n"
    )
    return tmp_path


def test_a_partial_file_from_the_working_directory_runs_and_leaves_nothing(ready):
    done = start(ready, "--config-path", "conf", "--config-name", "grpo_math", "+trainer.experiment_name=mine")
    assert (done.returncode, done.stdout) == (0, "ran with mine\n")
    assert done.stderr.count("notice:") == 1
    assert "actor_rollout_ref.actor.lr" in done.stderr
    assert sorted(path.name for path in ready.iterdir()) == ["conf", "model", "train.parquet"]


def test_words_may_stand_around_options(ready):
    done = start(ready, "trainer.experiment_name=a", "-cp", "conf", "-cn=grpo_math", "trainer.experiment_name=b")
    assert done.stdout == "ran with b\n"


def test_faults_end_with_status_2_and_one_message(tmp_path):
    done = start(tmp_path, "trainer.epochs=3", "data.train_batch_size=x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: 2 faults")
    assert "Traceback" not in done.stderr
    done = start(tmp_path)
    assert done.returncode == 2
    assert "actor_rollout_ref.model.path is not set" in done.stderr
    assert "data.train_files is not set" in done.stderr


def test_cfg_job_prints_yaml_without_torch_or_ray(tmp_path):
    program = PROGRAM + "\nassert not {'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules), 'heavy import'\n"
    done = start(tmp_path, "--cfg", "job", "data.seed=5", program=program)
    assert done.returncode == 0, done.stderr
    tree = yaml.safe_load(done.stdout)
    assert tree["data"]["seed"] == 5
    assert tree["actor_rollout_ref"]["ref"]["strategy"] == "${actor_rollout_ref.actor.strategy}"
    assert list(tmp_path.iterdir()) == []


def test_the_real_entry_points_print_their_configuration_without_torch(tmp_path):
    for name in ("main_ppo", "main_sft"):
        program = (
            f"import runpy, sys\nsys.argv = ['{name}', '--cfg', 'job']\n"
            f"runpy.run_module('hybridrl.trainer.{name}', run_name='__main__')\n"
            "assert not {'torch', 'ray'} & set(sys.modules), 'heavy import'\n"
        )
        done = start(tmp_path, program=program)
        assert done.returncode == 0, done.stderr
        assert "trainer" in yaml.safe_load(done.stdout)


def test_the_package_imports_without_torch_or_ray(tmp_path):
    program = "import hybridrl.config, sys; assert not {'torch', 'ray', 'hydra', 'omegaconf'} & set(sys.modules)"
    assert start(tmp_path, program=program).returncode == 0


def test_cfg_job_resolved_and_in_part(capsys):
    cli("ppo_trainer", lambda config: None, ["--cfg", "job", "--resolve", "actor_rollout_ref.actor.strategy=fsdp"])
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["critic"]["strategy"] == "fsdp2"
    cli("ppo_trainer", lambda config: None, ["--cfg", "job", "-p", "critic.optim"])
    assert yaml.safe_load(capsys.readouterr().out)["lr"] == 1e-5
    with pytest.raises(SystemExit):
        cli("ppo_trainer", lambda config: None, ["--cfg", "job", "-p", "critic.optm"])
    assert "nearest: optim" in capsys.readouterr().err


def test_cfg_job_output_can_be_read_back(tmp_path, capsys):
    cli("ppo_trainer", lambda config: None, ["--cfg", "job", "actor_rollout_ref.rollout.n=3", "data.seed=2"])
    (tmp_path / "saved.yaml").write_text(capsys.readouterr().out)
    expected = load_config("ppo_trainer", ["actor_rollout_ref.rollout.n=3", "data.seed=2"])
    assert load_config("ppo_trainer", [], tmp_path, "saved") == expected


@pytest.mark.parametrize("words", [["--help"], ["--info"]])
def test_help_and_info(words, capsys):
    try:
        cli("ppo_trainer", lambda config: None, words)
    except SystemExit as end:
        assert end.code == 0
    out = capsys.readouterr().out
    assert "main_ppo" in out or "config groups" in out


@pytest.mark.parametrize("word", ["--multirun", "-m", "--shell-completion", "--experimental-rerun=x"])
def test_what_hydra_has_and_we_have_not_is_refused_by_name(word, capsys):
    with pytest.raises(SystemExit) as end:
        cli("ppo_trainer", lambda config: None, [word])
    assert end.value.code == 2
    assert "error: --" in capsys.readouterr().err


def test_errors_of_the_user_are_one_message_and_others_are_raised(ready, monkeypatch, capsys):
    class Missing(UserError):
        pass

    class Wrapped(RuntimeError, Missing):
        """As Ray wraps an error of a worker: derived from its cause."""

    monkeypatch.chdir(ready)
    words = ["-cp", "conf", "-cn", "grpo_math"]
    for kind in (Missing, Wrapped, ConfigError):

        def run(config: object, kind: type[Exception] = kind) -> None:
            raise kind("the thing is missing")

        with pytest.raises(SystemExit) as end:
            cli("ppo_trainer", run, words)
        assert end.value.code == 2
        assert "error: the thing is missing" in capsys.readouterr().err

    def fail(config: object) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        cli("ppo_trainer", fail, words)


def test_notes_interruptions_and_failed_workers_are_one_message_too(ready, monkeypatch, capsys):
    noted = UserError("the thing is missing")
    noted.add_note("the batch is kept")
    cases = [
        (noted, 2, "error: the thing is missing\nthe batch is kept\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/run"), 2, "No space left on device: '/run'\n"),
        (WorkerError("actor rank 1 died"), 1, "error: actor rank 1 died\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ]
    monkeypatch.chdir(ready)
    for error, status, text in cases:

        def run(config: object, error: BaseException = error) -> None:
            raise error

        with pytest.raises(SystemExit) as end:
            cli("ppo_trainer", run, ["-cp", "conf", "-cn", "grpo_math"])
        assert end.value.code == status
        assert capsys.readouterr().err.endswith(text)


def test_the_working_directory_stays(ready, monkeypatch):
    monkeypatch.chdir(ready)
    seen = []
    cli("ppo_trainer", lambda config: seen.append(os.getcwd()), ["-cp", "conf", "-cn", "grpo_math"])
    assert seen == [str(ready)]
