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
    # Settings are checked without torch and Ray, of which a fault in them would have to wait for the import.
    program = PROGRAM + "\nassert not {'torch', 'ray'} & set(sys.modules), 'heavy import'\n"
    words = ["--config-path", "conf", "--config-name", "grpo_math", "+trainer.experiment_name=mine"]
    done = start(ready, *words, program=program)
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
    for name in ("main_ppo", "main_sft", "main_dpo", "main_kto", "main_rm"):
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


TORCHRUN = {
    **{"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0", "ROLE_NAME": "default"},
    **{"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"},
    **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
}
PRINTS_PLACE = """
import os
from hybridrl.config import cli
NAMES = ("RANK", "WORLD_SIZE", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "TORCHELASTIC_")
def run(config):
    left = [name for name in os.environ if name.startswith(NAMES)]
    print(config.trainer.n_gpus_per_node, config.trainer.nnodes, config.placement.pools, left)
cli("ppo_trainer", run)
"""


@pytest.fixture
def under_torchrun(ready, monkeypatch):
    """Starts the program as one process of torchrun on one node with four, `changes` in its variables."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        for name, value in (TORCHRUN | changes).items():
            monkeypatch.setenv(name, value)
        return start(ready, "-cp", "conf", "-cn", "grpo_math", *words, program=PRINTS_PLACE)

    return run


@pytest.mark.parametrize("words", [[], ["trainer.n_gpus_per_node=4"], ["trainer.nnodes=1", "~trainer.n_gpus_per_node"]])
def test_rank_0_of_torchrun_takes_the_number_of_processes_and_none_of_the_variables(under_torchrun, words):
    done = under_torchrun(*words)
    assert (done.returncode, done.stdout) == (0, "4 1 {'global': [4]} []\n"), done.stderr
    (notice,) = [line for line in done.stderr.splitlines() if line.startswith("notice: torchrun")]
    assert "main_ppo trainer.n_gpus_per_node=4 trainer.nnodes=1" in notice


def test_two_nodes_of_torchrun_are_two_nodes(under_torchrun):
    done = under_torchrun(WORLD_SIZE="8", GROUP_WORLD_SIZE="2")
    assert (done.returncode, done.stdout) == (0, "4 2 {'global': [4, 4]} []\n"), done.stderr


@pytest.mark.parametrize(
    ("place", "notices"),
    [
        ({"RANK": "3", "LOCAL_RANK": "3"}, 0),
        ({"RANK": "4", "GROUP_RANK": "1"}, 1),
        ({"RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "1"}, 0),
    ],
)
def test_other_ranks_of_torchrun_end_at_once(under_torchrun, place, notices):
    """Whatever the words are: rank 0 checks them, and says once what is wrong."""
    done = under_torchrun("no.such.key=1", WORLD_SIZE="8", GROUP_WORLD_SIZE="2", **place)
    assert (done.returncode, done.stdout, done.stderr.count("notice:")) == (0, "", notices)
    assert len(done.stderr.splitlines()) == notices


@pytest.mark.parametrize("word", ["trainer.n_gpus_per_node=2", "trainer.nnodes=2"])
def test_numbers_that_contradict_torchrun_are_refused(under_torchrun, ready, word):
    done = under_torchrun(word)
    assert done.returncode == 2
    assert word in done.stderr and "torchrun was asked for" in done.stderr
    (ready / "conf" / "grpo_math.yaml").write_text(f"trainer: {{{word.removeprefix('trainer.').replace('=', ': ')}}}\n")
    done = under_torchrun()
    assert done.returncode == 2 and f"{word} (" in done.stderr and "grpo_math.yaml, line 1" in done.stderr


def test_unequal_nodes_of_torchrun_are_refused(under_torchrun):
    done = under_torchrun(WORLD_SIZE="6", GROUP_WORLD_SIZE="2")
    assert done.returncode == 2 and "6 processes on 2 nodes" in done.stderr


def test_a_program_without_workers_runs_on_rank_0_of_torchrun(tmp_path, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "answers.parquet").touch()
    program = 'from hybridrl.config import cli\ncli("evaluation", lambda config: print(*config.data.path))'
    done = start(tmp_path, "data.path=answers.parquet", program=program)
    assert (done.returncode, done.stdout) == (0, "answers.parquet\n"), done.stderr
    assert "n_gpus_per_node" not in done.stderr


def test_a_file_is_given_as_one_word(ready):
    done = start(ready, "--config", "conf/grpo_math.yaml", "trainer.experiment_name=mine")
    assert (done.returncode, done.stdout) == (0, "ran with mine\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["conf/grpo_math.yaml"], "--config conf/grpo_math.yaml"),
        (["--config", "conf/grpo.yaml"], "conf/grpo.yaml: no such file"),
        (["--config", "model"], "model: no such file"),
        (["--config", "train.parquet"], "train.parquet: the name of a YAML file has to end in .yaml"),
        (["--config", "conf/grpo_math.yaml", "-cn", "grpo_math"], "--config-name"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_message(ready, words, said):
    done = start(ready, *words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
