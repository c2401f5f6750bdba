"""A run is not continued as another experiment: other data, reward, tools, environment, judge or code, by content."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises_with

from hybridrl.config import load_config
from hybridrl.errors import CheckpointError
from hybridrl.observe.run_folder import write_run_info
from hybridrl.reward import reward_settings
from hybridrl.trainer.experiment import changed_keys, definition_of
from hybridrl.trainer.own_folder import settle_folder
from hybridrl.trainer.run import TrainingRun

REWARD = "def compute_score(solution_str):\n    return 0.5\n"
TOOL = "from hybridrl.agents import BaseTool\n\n\nclass Shop(BaseTool):\n    price = 1\n"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that an experiment consists of, which is the working directory."""
    (tmp_path / "r.py").write_text(f"import helper\n\n\n{REWARD}")
    (tmp_path / "helper.py").write_text("from pack.inner import LIMIT\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    (tmp_path / "pack/inner.py").write_text("LIMIT = 3\n")
    (tmp_path / "shop_tool.py").write_text(TOOL)
    (tmp_path / "lib.py").write_text("SIZE = 4\n")
    (tmp_path / "tools.yaml").write_text("tools:\n  - class_name: shop_tool.Shop\n    config: {prices: prices.txt}\n")
    (tmp_path / "prices.txt").write_text("a 1")
    (tmp_path / "users.yaml").write_text("interaction:\n  - {name: a, class_name: shop_tool.Shop, config: {}}\n")
    (tmp_path / "worlds.yaml").write_text(
        "environments:\n  - {name: a, class_name: 'shop_tool:Shop', config: {n: 1}}\n"
    )
    (tmp_path / "loops.yaml").write_text("- {name: a, _target_: shop_tool.Shop}\n")
    (tmp_path / "question.txt").write_text("{{ response }}")
    (tmp_path / "verdict.py").write_text("def parse(text):\n    return 1.0\n")
    rows = [json.dumps({"prompt": f"question {number}", "answer": number}) for number in range(3000)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def words(folder: str = "run") -> list[str]:
    return [
        "actor_rollout_ref.model.path=models/a",
        "actor_rollout_ref.model.external_lib=lib.py",
        "data.train_files=[train.jsonl]",
        "reward.custom_reward_function.path=r.py",
        "+reward.custom_reward_function.reward_kwargs.limit=3",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml",
        f"{ROLLOUT}.multi_turn.interaction_config_path=users.yaml",
        f"{ROLLOUT}.agent.environment_config_path=worlds.yaml",
        f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml",
        "reward.reward_model.enable=True",
        "reward.reward_model.judge.url=http://here/v1",
        "reward.reward_model.judge.template=question.txt",
        "reward.reward_model.judge.parse.path=verdict.py",
        f"trainer.default_local_dir={folder}",
        "trainer.logger=[]",
        "trainer.report=False",
    ]


def train(*more: str, steps: int = 2, tree: str = "ppo_trainer", first: list[str] | None = None) -> int:
    """Do the steps of a run that computes nothing; the step that it began after."""
    config = load_config(tree, [*(words() if first is None else first), *more])
    with TrainingRun(config, config.trainer, steps, identity={"model": "x"}) as run:
        run.restore(lambda folder, state: None)
        before = run.step
        while not run.is_last:
            with run.measured_step():
                run.report({"train/loss": 1.0})
            run.save(lambda folder: {})
    return before


def replace(file: str, before: str, now: str) -> Callable[[], None]:
    def change() -> None:
        text = Path(file).read_text()
        assert text.count(before) == 1
        Path(file).write_text(text.replace(before, now))

    return change


CHANGES = {
    "reward": (replace("r.py", "0.5", "0.25"), "reward.custom_reward_function.path"),
    "a module of the reward": (replace("pack/inner.py", "3", "4"), "reward.custom_reward_function.path"),
    "one row in the middle": (replace("train.jsonl", '"question 1500"', '"question 15OO"'), "data.train_files"),
    "entry of a tool": (replace("tools.yaml", "prices.txt", "other.txt"), "tool_config_path"),
    "code of a tool": (replace("shop_tool.py", "price = 1", "price = 2"), "tool_config_path"),
    "text of a tool": (replace("prices.txt", "a 1", "a 2"), "tool_config_path"),
    "simulated user": (replace("users.yaml", "config: {}", "config: {mood: bad}"), "interaction_config_path"),
    "environment": (replace("worlds.yaml", "n: 1", "n: 2"), "environment_config_path"),
    "agent loop": (replace("loops.yaml", "}", ", turns: 2}"), "agent_loop_config_path"),
    "question of the judge": (replace("question.txt", "{{", "Good? {{"), "reward_model.judge.template"),
    "parser of the judge": (replace("verdict.py", "1.0", "0.0"), "judge.parse.path"),
    "losses and estimators": (replace("lib.py", "4", "5"), "actor_rollout_ref.model.external_lib"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_content_is_another_experiment(place: Path, name: str) -> None:
    change, key = CHANGES[name]
    train()
    config = load_config("ppo_trainer", words())
    settle_folder(config)
    change()
    with pytest.raises(CheckpointError, match=rf"content of \S*{key} was '\w+', now '\w+'"):
        settle_folder(config)


@pytest.mark.parametrize("steps", [2, 4], ids=["finished", "unfinished"])
def test_another_reward_changes_nothing_and_can_be_accepted(place: Path, steps: int) -> None:
    assert train() == 0 and train() == 2
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    replace("r.py", "0.5", "0.25")()
    with raises_with(CheckpointError, "reward.custom_reward_function.path") as caught:
        train(steps=steps)
    for remedy in ("trainer.default_local_dir", "trainer.experiment_name", "resume_mode=disable", "resume_path"):
        assert remedy in str(caught.value)
    now = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert {path: now[path] for path in before} == before, "the earlier run is as it was"
    accept = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=run/global_step_2"]
    assert train(*accept, steps=4) == 2
    assert train(steps=5) == 4, "the new content is what the run goes on with"


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("reward.custom_reward_function.reward_kwargs.limit=4", "reward_kwargs"),
        ("reward.custom_reward_function.path=r2.py", "reward.custom_reward_function.path"),
        ("data.train_files=[other.jsonl]", "data.train_files"),
        ("reward.reward_model.judge.system_prompt=Be_strict", "judge.system_prompt"),
        ("reward.reward_model.weight=0.5", "reward_model.weight"),
        ("reward.reward_model.enable=False", "reward_model.enable"),
        (f"{ROLLOUT}.multi_turn.tool_config_path=null", "tool_config_path"),
        (f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent", "default_agent_loop"),
        ("actor_rollout_ref.model.external_lib=null", "external_lib"),
        ("actor_rollout_ref.model.custom_chat_template='{{ messages[0].content }}!'", "custom_chat_template"),
        ("+data.apply_chat_template_kwargs.enable_thinking=False", "apply_chat_template_kwargs"),
        ("data.prompt_key=question", "data.prompt_key"),
        ("data.system_prompt=Be_brief", "data.system_prompt"),
        ("data.last_assistant_turn=ground_truth", "data.last_assistant_turn"),
    ],
)
def test_another_setting_is_another_experiment(place: Path, word: str, key: str) -> None:
    (place / "r2.py").write_text("def compute_score(solution_str):\n    return 1.0\n")
    shutil.copy("train.jsonl", "other.jsonl")
    replace("other.jsonl", '"question 7"', '"question seven"')()
    train()
    with raises_with(CheckpointError, "another experiment", key, "now"):
        train(word)


def test_places_comments_and_layout_do_not_matter(place: Path) -> None:
    """Everything is moved to another folder, and code is written in another way."""
    train()
    (place / "moved").mkdir()
    for name in ("r.py", "helper.py", "pack", "train.jsonl", "tools.yaml", "question.txt", "verdict.py", "lib.py"):
        shutil.move(name, f"moved/{name}")
    Path("moved/r.py").rename("moved/score.py")
    Path("moved/score.py").write_text(
        "# another comment\nimport helper\n\ndef compute_score( solution_str ):\n\n    return (0.5)  # half\n"
    )
    Path("moved/helper.py").write_text("from pack.inner import (\n    LIMIT,\n)\n")
    Path("moved/tools.yaml").write_text(
        "# tools\ntools:\n- config:\n    prices: prices.txt\n  class_name: shop_tool.Shop\n"
    )
    more = [
        "reward.custom_reward_function.path=moved/score.py",
        "data.train_files=[moved/train.jsonl]",
        f"{ROLLOUT}.multi_turn.tool_config_path={place}/moved/tools.yaml",
        "reward.reward_model.judge.template=moved/question.txt",
        "reward.reward_model.judge.parse.path=moved/verdict.py",
        "actor_rollout_ref.model.external_lib=moved/lib.py",
    ]
    settle_folder(load_config("ppo_trainer", [*words(), *more]))
    assert train(*more, steps=3) == 2
    assert train(*more, steps=4) == 3


@pytest.mark.parametrize(
    "word",
    [
        f"{ROLLOUT}.n=8",
        "actor_rollout_ref.actor.optim.lr=2e-6",
        "trainer.save_freq=5",
        "reward.num_workers=2",
        "reward.reward_model.judge.url=http://there/v1",
        "+reward.reward_kwargs.max_concurrent=9",
    ],
)
def test_other_settings_may_change(place: Path, word: str) -> None:
    train()
    assert train(word, steps=3) == 2


@pytest.mark.parametrize(
    "word",
    [
        *("data.prompt_dict_keys=[question]", "data.response_dict_keys=[answer]", "data.enable_thinking_default=True"),
        "+data.mm_processor_kwargs.max_pixels=9",
    ],
)
def test_another_reading_of_the_same_files_is_another_experiment(place: Path, word: str) -> None:
    first = ["model.path=models/a", "data.train_files=[train.jsonl]", "data.prompt_key=a", "data.response_key=b"]
    before, now = (definition_of(load_config("sft_trainer", [*first, *more])) for more in ([], [word]))
    assert any(word.lstrip("+").startswith(key) for key in changed_keys(before, now))


@pytest.mark.parametrize("tree", ["sft_trainer", "dpo_trainer", "kto_trainer", "rm_trainer"])
def test_fine_tuning_compares_data_and_code(place: Path, tree: str) -> None:
    first = ["model.path=models/a", "model.external_lib=lib.py", "data.train_files=[train.jsonl]"]
    first += ["trainer.default_local_dir=run", "trainer.logger=[]", "trainer.report=False"]
    train(tree=tree, first=first)
    assert train(tree=tree, first=first) == 2
    replace("train.jsonl", '"question 0"', '"question O"')()
    with raises_with(CheckpointError, "data.train_files"):
        train(tree=tree, first=first)
    replace("train.jsonl", '"question O"', '"question 0"')()
    replace("lib.py", "4", "5")()
    with raises_with(CheckpointError, "model.external_lib"):
        train(tree=tree, first=first)


def test_a_checkpoint_without_the_record_is_resumed_with_a_notice(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier version saved it. Its settings are compared as they were."""
    train()
    folder = Path("run/global_step_2")
    state = json.loads((folder / "trainer.json").read_text())
    state["code"] = {"reward.custom_reward_function.path": "0123456789ab"}
    del state["experiment"]
    from hybridrl.checkpoint import RunStore, save_json

    shutil.rmtree("run/global_step_1")
    shutil.rmtree(folder)
    with RunStore("run", identity={"model": "x"}).writing(2) as written:
        save_json(written / "trainer.json", state)
    replace("r.py", "0.5", "0.25")()
    capsys.readouterr()
    settle_folder(load_config("ppo_trainer", words()))
    assert train(steps=3) == 2
    assert "saved by an earlier version" in capsys.readouterr().err
    with raises_with(CheckpointError, "data.train_files"):
        train("data.train_files=[other.jsonl]", steps=3)


PROGRAM = """
import sys
from hybridrl.reward import reward_settings
{prefix}
LIMIT = {limit}

def inner(text):
    return len(text) > LIMIT

def score(solution_str):  # {comment}
    return {value} if inner(solution_str) else {{"a", "b", "c"}}.__len__()

print(reward_settings(score, sys.argv[1])["custom_reward_function"]["path"])
"""


def pickled(folder: Path, **parts: object) -> Path:
    """Write a function's file from another process, as a program that calls `hybridrl.grpo` does."""
    text = PROGRAM.format(**{"prefix": "", "limit": 3, "comment": "", "value": 0.5, **parts})
    (folder / "program.py").write_text(text)
    done = subprocess.run([sys.executable, "program.py", str(folder)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_functions_of_programs_are_compared_by_what_they_compute(tmp_path: Path) -> None:
    def record(path: Path) -> dict[str, dict[str, str]]:
        words = ["actor_rollout_ref.model.path=a", f"reward.custom_reward_function.path={path}"]
        return definition_of(load_config("ppo_trainer", words))

    key = "reward.custom_reward_function.path"
    first = record(pickled(tmp_path))
    assert changed_keys(first, record(pickled(tmp_path))) == []
    assert changed_keys(first, record(pickled(tmp_path, prefix="import os\n\n\n", comment="half"))) == []
    assert changed_keys(first, record(pickled(tmp_path, value=0.25))) == [key]
    assert changed_keys(first, record(pickled(tmp_path, limit=4))) == [key], "a constant that it reads"


def test_a_function_of_a_module_is_compared_with_its_module(place: Path) -> None:
    """Its pickle holds no more than the module's name."""
    import helper_of_test  # type: ignore[import-not-found]

    def record() -> dict[str, dict[str, str]]:
        path = reward_settings(helper_of_test.score, place / "reward")["custom_reward_function"]["path"]
        return definition_of(load_config("ppo_trainer", [f"reward.custom_reward_function.path={path}"]))

    first = record()
    assert changed_keys(first, record()) == []
    replace("helper_of_test.py", "0.5", "0.25")()
    assert changed_keys(first, record()) == ["reward.custom_reward_function.path"]


@pytest.fixture(autouse=True)
def _module(place: Path) -> None:
    (place / "helper_of_test.py").write_text("def score(solution_str):\n    return 0.5\n")


def test_a_new_experiment_gets_a_new_folder_where_none_is_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default folder is checkpoints/PROJECT/default, as verl's; the next ones are default-2, default-3."""
    unnamed = [word for word in words() if "default_local_dir" not in word]

    def folder_of(*more: str) -> str:
        config = load_config("ppo_trainer", [*unnamed, *more])
        settle_folder(config)
        with TrainingRun(config, config.trainer, 1, identity={"model": "x"}) as run:
            run.restore(lambda folder, state: None)
            while not run.is_last:
                with run.measured_step():
                    run.report({})
                run.save(lambda folder: {})
        return str(config.trainer.default_local_dir)

    first = "checkpoints/hybridrl/default"
    assert folder_of() == folder_of() == first
    capsys.readouterr()
    replace("r.py", "0.5", "0.25")()
    assert folder_of() == f"{first}-2"
    said = " ".join(capsys.readouterr().err.split())
    assert "content of reward.custom_reward_function.path was" in said and f"the new folder {first}-2" in said
    assert folder_of() == f"{first}-2", "the same command resumes its own run"
    assert folder_of("algorithm.adv_estimator=rloo") == f"{first}-3"
    assert folder_of("trainer.resume_mode=disable") == first
    replace("r.py", "0.25", "0.5")()
    assert folder_of() == f"{first}-4", "the first one was started over with the other reward"
    with pytest.raises(CheckpointError, match="as another experiment"):
        folder_of(f"trainer.default_local_dir={first}-2")


def test_another_program_gets_a_new_folder_where_none_is_named(place: Path) -> None:
    write_run_info("checkpoints/hybridrl/default", load_config("ppo_trainer", words()))
    train(f"trainer.default_local_dir={Path('checkpoints/hybridrl/default')}")
    config = load_config("sft_trainer", ["model.path=models/a", "data.train_files=[train.jsonl]"])
    settle_folder(config)
    assert config.trainer.default_local_dir == "checkpoints/hybridrl/default-2"


@pytest.mark.parametrize(
    ("tree", "word", "key"),
    [
        ("ppo_trainer", "reward.custom_reward_function.path=pkg://pack.inner", "reward.custom_reward_function.path"),
        ("ppo_trainer", "reward.custom_reward_function.path=lib", "reward.custom_reward_function.path"),
        ("ppo_trainer", "+reward.functions.a.path=pack/inner.py", "reward.functions"),
        ("ppo_trainer", "+reward.functions.a={path: pack.inner, weight: 2}", "reward.functions"),
        ("ppo_trainer", "reward.reward_manager.module.path=lib.py", "reward.reward_manager.module.path"),
        ("ppo_trainer", "+reward.custom_reward_function.reward_kwargs.prompt=prices.txt", ".reward_kwargs"),
        ("ppo_trainer", f"{ROLLOUT}.agent.default_agent_loop=pack.inner:Loop", ".default_agent_loop"),
        ("ppo_trainer", f"{ROLLOUT}.agent.default_environment=lib:World", ".default_environment"),
        ("ppo_trainer", f"{ROLLOUT}.agent.function=lib.py:agent", ".agent.function"),
        ("ppo_trainer", f"'{ROLLOUT}.agent.command=python lib.py --fast'", ".agent.command"),
        ("ppo_trainer", f"{ROLLOUT}.multi_turn.function_tool_path=lib", ".function_tool_path"),
        ("ppo_trainer", "data.custom_cls.path=lib.py", "data.custom_cls.path"),
        ("ppo_trainer", "data.sampler.class_path=pack/inner.py", "data.sampler.class_path"),
        ("ppo_trainer", "actor_rollout_ref.model.external_lib='json,pack.inner'", ".external_lib"),
        ("ppo_trainer", "actor_rollout_ref.actor.optim.optimizer_impl=lib.py", ".optimizer_impl"),
        ("sft_trainer", "model.external_lib=lib", "model.external_lib"),
        ("sft_trainer", "data.custom_cls.path=lib.py", "data.custom_cls.path"),
        ("rm_trainer", "optim.optimizer_impl=pack.inner", "optim.optimizer_impl"),
        ("generation", "actor_rollout_ref.model.external_lib=lib", "actor_rollout_ref.model.external_lib"),
    ],
)
def test_every_way_of_naming_code_is_compared_by_content(place: Path, tree: str, word: str, key: str) -> None:
    config = load_config(tree, [word.strip("'") if "command" in word else word])
    first = definition_of(config)
    assert changed_keys(first, definition_of(config)) == [] and any(name.endswith(key) for name in first["code"])
    for file in ("lib.py", "pack/inner.py", "prices.txt"):
        Path(file).write_text(Path(file).read_text() + "OTHER = 1\n")
    changed = changed_keys(first, definition_of(config))
    assert any(name.endswith(key) for name in changed), changed


def test_code_that_another_python_parses_otherwise_is_the_same(place: Path) -> None:
    """Either the bytes or the syntax trees are equal; of a record of another version, only the bytes are."""
    config = load_config("ppo_trainer", words())
    first = definition_of(config)
    other = {"values": {**first["values"], "reward.custom_reward_function.path": "0"}, "code": first["code"]}
    assert changed_keys(other, first) == []


def test_data_are_compared_in_order_and_folders_with_all_their_files(place: Path) -> None:
    """Also what only a dataset class of one's own can read."""
    (place / "shards").mkdir()
    (place / "shards/a.bin").write_text("a")
    shutil.copy("train.jsonl", "copy.jsonl")

    def record(files: str) -> dict[str, dict[str, str]]:
        return definition_of(load_config("ppo_trainer", [f"data.train_files={files}"]))

    first = record("[train.jsonl,shards,s3://bucket/rows]")
    assert changed_keys(first, record("[copy.jsonl,shards,s3://bucket/rows]")) == []
    assert changed_keys(first, record("[shards,train.jsonl,s3://bucket/rows]")) == ["data.train_files"]
    assert changed_keys(first, record("[train.jsonl,shards,s3://bucket/others]")) == ["data.train_files"]
    (place / "shards/a.bin").write_text("b")
    assert changed_keys(first, record("[train.jsonl,shards,s3://bucket/rows]")) == ["data.train_files"]


def test_responses_of_other_code_or_models_are_not_taken_for_finished(place: Path) -> None:
    """Generation compares the settings of its output by itself; those include what code and models they name."""
    from hybridrl.trainer.generation.run_generation import output_settings

    model, adapter = "actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_adapter_path"
    for folder in ("model", "adapter"):
        (place / folder).mkdir()
        (place / folder / "config.json").write_text("{}")
        (place / folder / "model.safetensors").write_text("1")

    def changes(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
        return [name for name in {**first, **second} if first.get(name) != second.get(name)]

    def settings(*more: str) -> dict[str, Any]:
        return output_settings(
            load_config("generation", ["data.path=[train.jsonl]", "data.output_path=out.parquet", *more])
        )

    plain = settings()
    assert not any(name.startswith("content of") for name in plain)
    words = ["data.custom_cls.path=lib.py", f"{model}=model", f"{adapter}=adapter"]
    first = settings(*words)
    assert first == settings(*words)
    replace("lib.py", "4", "5")()
    second = settings(*words)
    assert changes(first, second) == ["content of data.custom_cls.path"]
    shutil.move("model", "moved")
    words[1] = f"{model}=moved"
    assert settings(*words) == second, "its place does not count"
    (place / "moved/model.safetensors").touch()
    assert settings(*words) == second, "and neither does its time"
    for folder, key in (("moved", model), ("adapter", adapter)):
        (place / folder / "model.safetensors").write_text("2")
        assert changes(second, settings(*words)) == [f"content of {key}"]
        (place / folder / "model.safetensors").write_text("1")


@pytest.mark.parametrize("text", ["~~ be kind ~~", "~nobody/x.py", "a" * 5000, "a.b:c.d"])
def test_texts_that_look_like_paths_are_texts(place: Path, text: str) -> None:
    config = load_config("ppo_trainer", words())
    config.data.system_prompt = text
    config.reward.custom_reward_function.reward_kwargs = {"text": text, "number": {1: float("nan")}}
    assert changed_keys(definition_of(config), definition_of(config)) == []
