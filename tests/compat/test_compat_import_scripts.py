"""`hybridrl import openrlhf|slime|prime-rl`: each setting is told once, and the command passes the checks."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hybridrl.compat.import_command import main, usage
from hybridrl.config.checks.check_run import check
from hybridrl.config.compose import compose_config
from hybridrl.programs import PROGRAMS
from hybridrl.registry import IMPORTED_PROJECTS
from hybridrl.verl_compat.examine import Placeholders
from tests.compat.import_scripts import SCRIPTS, SLIME_MODEL
from tests.project.snippets import snippets

CASES = [(project, name) for project, scripts in SCRIPTS.items() for name in scripts]
STATES = ("mapped", "no effect here", "refused", "unknown")


def write_script(folder: Path, project: str, text: str) -> Path:
    """A script in a folder, with what it sources."""
    script = folder / ("run.toml" if project == "prime-rl" else "run.sh")
    script.write_text(text)
    if project == "slime":
        (folder / "models").mkdir(exist_ok=True)
        (folder / "models" / "model.sh").write_text(SLIME_MODEL)
    return script


def states_of(report: str) -> list[tuple[str, str]]:
    """The states in a report, each with the setting as the script has it."""
    lines = [line[2:] for line in report.partition("\n\n")[0].splitlines()[1:] if line.startswith("  ")]
    return [(state, line[16:]) for line in lines for state in STATES if line.startswith(f"{state:16}")]


def words_of(report: str) -> list[str]:
    """The words of the command at the end of a report."""
    return shlex.split("hybridrl " + report.partition("\nhybridrl ")[2].replace("\\\n", " "))


def options_in(text: str) -> list[str]:
    """The options that a shell script gives to its program, by reading its text."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    after = re.sub(
        r"ray start .*|.*--address.*|.*--runtime-env-json.*|cd --.*|.*dirname.*|.*nproc_per_node \d+", _tail, lines
    )
    return re.findall(r"(?<![\w-])--(?!module\b)([A-Za-z][\w.-]*)", after)


def _tail(match: re.Match[str]) -> str:
    """What follows the last option of a launcher in a line."""
    line = match[0]
    return line.partition("nproc_per_node")[2] if "nproc_per_node" in line else ""


def leaves(tree: Any, prefix: str = "") -> list[str]:
    if isinstance(tree, dict) and tree:
        return [leaf for key, value in tree.items() for leaf in leaves(value, f"{prefix}.{key}".lstrip("."))]
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        return [leaf for at, value in enumerate(tree) for leaf in leaves(value, f"{prefix}.{at}")]
    return [prefix]


def assert_composes(words: list[str], folder: Path) -> None:
    """The command has no fault; that of a policy has none either once its files and models exist."""
    program = PROGRAMS[words[1]]
    config = compose_config(program.tree, words[2:], defaults=program.defaults).config
    if program.tree == "ppo_trainer":
        Placeholders(folder).put(config)
        check(config)  # type: ignore[arg-type]


@pytest.mark.parametrize(("project", "name"), CASES)
def test_each_setting_is_told_once_and_the_command_can_run(
    project: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = SCRIPTS[project][name]
    script = write_script(tmp_path, project, text)
    status = main([project, str(script)])
    report = capsys.readouterr().out
    states = states_of(report)
    if project == "prime-rl":
        expected = leaves(tomllib.loads(text))
        reported = [word.split(" = ")[0] for _, word in states]
    else:
        expected = options_in(text + (SLIME_MODEL if "models/model.sh" in text else ""))
        reported = [re.match(r"--([\w.-]+)", word)[1] for _, word in states if word.startswith("--")]  # type: ignore[index]
    assert sorted(reported) == sorted(expected)
    assert status == (2 if any(state in ("refused", "unknown") for state, _ in states) else 0)
    assert not any(state == "unknown" for state, _ in states)
    assert "to set in the command" not in report
    (tmp_path / "placeholders").mkdir()
    if "<<'EOF'\n" in report:  # the lines before the command write its agent loops
        (tmp_path / "verifiers.yaml").write_text(report.partition("<<'EOF'\n")[2].partition("\nEOF")[0])
    if (project, name) != ("prime-rl", "older"):  # its environments are refused, so it has no data
        assert_composes(words_of(report), tmp_path / "placeholders")


@pytest.mark.parametrize("project", SCRIPTS)
def test_an_unknown_setting_is_never_dropped(project: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if project == "prime-rl":
        text = SCRIPTS[project]["sft"] + "\n[frobnication]\nlevel = 3\n"
    else:
        text = (
            SCRIPTS[project]["grpo"]
            .replace("--ds.param_dtype bf16", "--frobnication.level 3")
            .replace("--attention-backend flash", "--frobnication.level 3")
        )
    assert main([project, str(write_script(tmp_path, project, text))]) == 2
    unknown = [word for state, word in states_of(capsys.readouterr().out) if state == "unknown"]
    assert len(unknown) == 1 and "frobnication.level" in unknown[0]


def test_a_setting_that_is_set_twice_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = "python train.py --rollout-batch-size 8 --lr 1e-5 --lr 2e-5 --hf-checkpoint m --prompt-data d.jsonl"
    main(["slime", "--", *words.split()])
    report = capsys.readouterr().out
    assert [state for state, word in states_of(report) if word.startswith("--lr ")] == ["no effect here", "mapped"]
    assert "actor_rollout_ref.actor.optim.lr=2e-05" in words_of(report)


def test_a_command_in_a_quoted_word_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "slurm.sh"
    script.write_text(
        'srun --nodes=1 -w "$node" bash -c "pip install x && ray job submit -- python3 -m openrlhf.cli.train_ppo_ray '
        '--actor.model_name_or_path organisation/model --actor.adam.lr 3e-7 --data.prompt_dataset p.jsonl" &>> '
        "/dev/null\n"
    )
    main(["openrlhf", str(script)])
    assert "actor_rollout_ref.actor.optim.lr=3e-07" in words_of(capsys.readouterr().out)


def test_nothing_of_a_script_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"python3 -c \"open('{tmp_path}/python', 'w')\"\ntouch {tmp_path}/touched\n"
        "python3 -m openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset d.jsonl --data.output_key o\n"
    )
    main(["openrlhf", str(script)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh"]
    assert words_of(capsys.readouterr().out)[1] == "sft"


def test_commands_that_fail_without_the_programs_do_not_end_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    command = "python3 train.py --hf-checkpoint m --prompt-data d.jsonl --rollout-batch-size 8 --lr 3e-6"
    script.write_text(f'set -ex\nFILE=$(mktemp)\ncat > "$FILE" <<EOF\ntext\nEOF\npip list | grep megatron\n{command}\n')
    main(["slime", str(script)])
    assert "actor_rollout_ref.actor.optim.lr=3e-06" in words_of(capsys.readouterr().out)
    script.write_text(f'set -ex\nif [ -z "$NO_SUCH_VARIABLE" ]; then echo give it; exit 3; fi\n{command}\n')
    assert main(["slime", str(script)]) == 2
    assert "status 3" in capsys.readouterr().err


def test_options_win_over_files_and_later_files_over_earlier_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.toml").write_text(SCRIPTS["prime-rl"]["one-environment"])
    (tmp_path / "trainer.toml").write_text("[optim]\nlr = 4e-6\nweight_decay = 0.2\n")
    words = ["@", str(tmp_path / "base.toml"), "--trainer", "@", str(tmp_path / "trainer.toml"), "--max-steps", "7"]
    main(["prime-rl", "--", "uv", "run", "rl", *words, "--trainer.optim.weight-decay", "0.3", "--clean", "--no-ckpt"])
    command = words_of(capsys.readouterr().out)
    assert {
        "trainer.total_training_steps=7",
        "actor_rollout_ref.actor.optim.lr=4e-06",
        "actor_rollout_ref.actor.optim.weight_decay=0.3",
        "trainer.save_last=false",
    } <= set(command)


def test_environments_become_agent_loops_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    main(["prime-rl", str(write_script(tmp_path, "prime-rl", SCRIPTS["prime-rl"]["several"]))])
    report = capsys.readouterr().out
    loops = yaml.safe_load(report.partition("<<'EOF'\n")[2].partition("\nEOF")[0])
    block = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    assert loops == [
        {"name": "first", "_target_": "verifiers_agent", "env": {"taskset": {"id": "first"}, "agent": block}},
        {"name": "second", "_target_": "verifiers_agent", "env": {"taskset": {"id": "second"}, "agent": block}},
        {"name": "eval-first", "_target_": "verifiers_agent", "env": {"taskset": {"id": "first"}}},
    ]
    words = words_of(report)
    assert "data.val_files=[verifiers_rows/eval-first/train.parquet]" in words
    assert report.count("hybridrl.data.preprocess.verifiers") == 3


def test_a_project_of_a_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's example reads a command line."""
    (example,) = [item.text for item in snippets("docs/coming_from.md") if item.language == "python"]
    (tmp_path / "mine.py").write_text(example)
    project = f"{tmp_path}/mine.py:my_trainer"
    assert main([project, "run", "--model", "organisation/model", "--prompts", "8", "--verbose", "1"]) == 0
    report = capsys.readouterr().out
    assert [state for state, _ in states_of(report)] == ["mapped", "mapped", "no effect here"]
    assert words_of(report)[2:] == [
        "actor_rollout_ref.model.path=organisation/model",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=0.0001",
    ]
    assert main([project, "run", "--modell", "organisation/model"]) == 2


@pytest.mark.parametrize(
    "words", [["openrlhf"], ["slime", "--"], ["other", "x"], ["openrlhf", "none.sh"], ["prime-rl", "none.toml"]]
)
def test_what_cannot_be_read_is_one_message(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and words[-1] in captured.err and not captured.out


def test_programs_that_are_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["openrlhf", "--", "python", "-m", "openrlhf.cli.train_kto", "--beta", "0.1"]) == 2
    assert "openrlhf.cli.train_kto" in capsys.readouterr().out
    assert main(["prime-rl", "--", "uv", "run", "trainer", "@", "x.toml"]) == 2
    assert "uv run trainer" in capsys.readouterr().out
    (tmp_path / "inference.toml").write_text("[vllm]\nmodel = 'organisation/model'\n")
    assert main(["prime-rl", str(tmp_path / "inference.toml")]) == 2
    assert "inference" in capsys.readouterr().out
    (tmp_path / "empty.sh").write_text("echo hello\n")
    assert main(["slime", str(tmp_path / "empty.sh")]) == 2


def test_help_names_the_projects() -> None:
    assert set(IMPORTED_PROJECTS.names()) == {"trl", "openrlhf", "slime", "prime-rl"}
    assert all(re.search(rf"^  {name} ", usage(), re.MULTILINE) for name in IMPORTED_PROJECTS.names())
