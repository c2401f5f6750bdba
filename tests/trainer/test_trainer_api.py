"""`hybridrl.grpo` and its relatives: what they accept, how it is checked, what a run leaves."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import call_signatures
import numpy as np
import pytest
import yaml
from raising import raises_with

import hybridrl
from hybridrl.config import PPOTrainerConfig, validate
from hybridrl.config.compose import compose_config
from hybridrl.config.roles import POLICY, ROLES
from hybridrl.config.schema.node import declared
from hybridrl.config.schema.root import ROOTS
from hybridrl.config.short_names import rows
from hybridrl.errors import ConfigError, DataError, UserError
from hybridrl.notify import listening, notify
from hybridrl.observe.run_folder import settings_of, write_run_info
from hybridrl.registry import POLICY_LOSSES, import_external_lib
from hybridrl.trainer.api import trained_part
from hybridrl.trainer.call_settings import PolicySettings
from hybridrl.trainer.callbacks import EventKind, EventStream, RunEvent
from hybridrl.utils import termination

ROWS = [{"prompt": f"Sort: {number}", "answer": str(number)} for number in range(31, 47)]


def share_of_digits(solution_str: str) -> float:
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    return tmp_path


def grpo(**settings: Any) -> hybridrl.Trainer:
    return hybridrl.Trainer("grpo", **{"model": "model", "data": ROWS, "reward": share_of_digits, **settings})


def test_new_settings_elsewhere_take_no_short_name_away() -> None:
    """A name that one of the three groups has, and others too, belongs to the group, unless it is ambiguous indeed."""
    found: dict[str, list[str]] = {}
    for key in declared(ROOTS["ppo_trainer"]):
        group, name = key.rsplit(".", 1) if "." in key else ("", key)
        found.setdefault(name, []).append(group)
    main = {"trainer", "data", "actor_rollout_ref.rollout"}
    left = {name for name, groups in found.items() if len(groups) > 1 and len(main.intersection(groups)) == 1}
    log_prob = {f"log_prob_{name}" for name in ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")}
    of_several = {"dtype", "tensor_model_parallel_size", "pipeline_model_parallel_size", "name"}
    assert left - rows("ppo_trainer").keys() == log_prob | of_several | {"tool_config_path", "function_tool_path"}


def test_the_typed_calls_are_those_of_the_schema() -> None:
    """`python tests/trainer/call_signatures.py` writes them anew."""
    for name, text in call_signatures.texts().items():
        assert (call_signatures.FOLDER / name).read_text() == call_signatures.formatted(name, text), name
    for function in (hybridrl.grpo, hybridrl.ppo, hybridrl.sft, hybridrl.dpo, hybridrl.rm):
        parameters = inspect.signature(function).parameters
        assert {"model", "data", "lr", "seed", "max_steps"} <= parameters.keys()
        assert "lr: peak learning rate (also learning_rate)" in str(function.__doc__)
    assert list(inspect.signature(hybridrl.grpo).parameters)[:3] == ["model", "reward", "data"]
    fields = PolicySettings.__annotations__
    assert {"learning_rate", "num_generations", "adv_estimator", "total_epochs"} <= fields.keys()


def test_positional_arguments_and_trls_names(here: Path) -> None:
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4}
    first = hybridrl.Trainer("grpo", "model", share_of_digits, ROWS, **sizes, seed=5)
    other = hybridrl.Trainer(
        "grpo", model="model", reward_funcs=share_of_digits, train_dataset=ROWS, eval_dataset=ROWS[:2], **sizes
    )
    assert first.config.data.train_batch_size == other.config.data.train_batch_size == 2
    assert (first.config.data.seed, first.config.actor_rollout_ref.rollout.seed) == (5, 5)
    assert len(other.config.data.val_files) == 1 and other.config.reward.custom_reward_function.path is not None
    with pytest.raises(ConfigError) as caught:
        grpo(train_dataset=ROWS)
    assert caught.value.faults[0].startswith("data= and train_dataset=")
    with pytest.raises(ConfigError) as caught:
        hybridrl.Trainer("grpo", reward=share_of_digits)
    assert [fault.split("=")[0] for fault in caught.value.faults] == ["model", "data"]


def test_data_in_every_form_are_rows(here: Path) -> None:
    """Prompts as texts, a generator, one split of a dict, and files by their names."""
    import datasets

    def rows_of(data: Any) -> list[dict[str, Any]]:
        (file,) = grpo(data=data, train_batch_size=4, ppo_mini_batch_size=4).config.data.train_files
        return datasets.Dataset.from_parquet(file).to_list() if file.endswith("t") else read_json_lines(file)

    def read_json_lines(file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(file).read_text().splitlines()]

    texts = [row["prompt"] for row in ROWS]
    assert rows_of(texts) == [{"prompt": text} for text in texts]
    assert rows_of(("What is 1/2?", "50 % of 8\nis?", "x" * 5000, "a\0b")) == [
        {"prompt": text} for text in ("What is 1/2?", "50 % of 8\nis?", "x" * 5000, "a\0b")
    ]
    assert rows_of(row for row in ROWS) == ROWS
    split = datasets.Dataset.from_list(ROWS)
    assert rows_of(datasets.DatasetDict(train=split)) == ROWS
    for wrong, remedy in (
        (datasets.DatasetDict(train=split, test=split), "data['train']"),
        ({"prompt": texts}, "from_dict"),
        (split.to_iterable_dataset(), "take"),
    ):
        with pytest.raises(DataError) as caught:
            grpo(data=wrong)
        assert remedy in str(caught.value)
    for missing in (["trian.parquet"], [Path("train")], "Sort: 31"):
        with pytest.raises(ConfigError):
            grpo(data=missing)
    with pytest.raises(ConfigError) as caught_texts:
        hybridrl.Trainer("sft", "model", data=texts)
    assert caught_texts.value.faults[0].startswith("data:")


def test_early_stopping_waits_for_a_better_value() -> None:
    stops: list[str] = []
    with termination.listening(stops.append):
        callback = hybridrl.EarlyStopping("val/loss", patience=2, smaller_is_better=True)
        for step, loss in enumerate([3.0, 2.0, 2.5, 1.5, 1.6]):
            callback(hybridrl.RunEvent("validation", step, 9, Path("x"), {"val/loss": loss}))
            callback(hybridrl.RunEvent("step", step, 9, Path("x"), {"train/loss": loss}))
        assert not stops and callback.best == -1.5
        callback(hybridrl.RunEvent("validation", 6, 9, Path("x"), {"val/loss": 1.5}))
    assert len(stops) == 1 and "val/loss" in stops[0]


def events(*kinds: EventKind, steps: int = 3, fails: bool = False) -> tuple[EventStream, list[int]]:
    """A stream of a run without workers, and the steps that it has completed."""
    completed: list[int] = []

    def train() -> None:
        stop = threading.Event()
        with termination.listening(lambda reason: stop.set()):
            for step in range(1, steps + 1):
                completed.append(step)
                stream.emit(RunEvent("step", step, steps, Path()))
                if "validation" in kinds:  # otherwise the next event is that of the next step
                    stream.emit(RunEvent("validation", step, steps, Path()))
                if fails:
                    raise UserError("no luck")
                if stop.is_set():
                    return

    stream = EventStream(train, kinds)
    return stream, completed


def test_a_loop_over_steps_sees_each_while_the_run_waits() -> None:
    stream, completed = events("step", "validation")
    seen = []
    for event in stream:
        seen.append((event.kind, event.step))
        time.sleep(0.01)
        assert completed[-1] == event.step
    assert seen == [(kind, step) for step in (1, 2, 3) for kind in ("step", "validation")]
    stream, completed = events("validation")
    assert [event.step for event in stream] == [1, 2, 3] == completed


def test_a_loop_that_is_left_ends_the_run_after_its_step() -> None:
    stream, completed = events("step")
    for event in stream:
        if event.step == 2:
            break
    assert completed == [1, 2]
    stream, completed = events("step")
    with pytest.raises(ZeroDivisionError):
        for event in stream:
            event.step / 0
    assert completed == [1]


def test_what_ends_a_run_is_raised_by_the_loop() -> None:
    stream, _ = events("step", fails=True)
    with pytest.raises(UserError) as caught:
        list(stream)
    assert str(caught.value) == "no luck"


def test_kinds_of_events_that_do_not_exist_are_named(here: Path) -> None:
    with raises_with(ConfigError, "steps('steps')", "validation"):
        grpo().steps("steps")  # type: ignore[arg-type]


def test_a_callback_has_to_be_a_function(here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(callbacks=["x"])
    assert caught.value.faults[0].startswith("callbacks:")


def test_an_adapter_of_peft(here: Path) -> None:
    peft = pytest.importorskip("peft")
    sizes = {"train_batch_size": 8, "ppo_mini_batch_size": 8}
    adapter = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = grpo(peft_config=adapter, **sizes).config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (4, 32, ["q_proj", "v_proj"])
    for wrong, name in (({"lora_dropout": 0.1}, "lora_dropout"), ({"use_dora": True}, "peft_config.use_dora")):
        with pytest.raises(ConfigError) as caught:
            grpo(peft_config=peft.LoraConfig(**wrong), **sizes)
        assert caught.value.faults[0].startswith(f"{name}=")


def test_settings_reach_their_keys(here: Path) -> None:
    trainer = grpo(
        total_epochs=3,
        lr=np.float64(2e-6),
        train_batch_size=np.int64(8),
        ppo_mini_batch_size=4,
        logger=("console",),
        rollout_data_dir=Path("dumps"),
        val_data=ROWS[:2],
        config={"trainer.test_freq": 5, "actor_rollout_ref": {"rollout": {"val_kwargs": {"temperature": 0.5}}}},
    )
    config = trainer.config
    policy = config.actor_rollout_ref
    assert (config.trainer.total_epochs, policy.actor.optim.lr, config.data.train_batch_size) == (3, 2e-6, 8)
    assert (policy.actor.ppo_mini_batch_size, config.trainer.logger) == (4, ["console"])
    assert (config.trainer.rollout_data_dir, config.trainer.test_freq) == ("dumps", 5)
    assert policy.rollout.val_kwargs.temperature == 0.5
    assert (config.algorithm.adv_estimator, policy.rollout.n, policy.actor.rollout_n) == ("grpo", 8, 8)


def test_rows_and_functions_become_files_of_the_run(here: Path) -> None:
    trainer = grpo(train_batch_size=8, ppo_mini_batch_size=8, experiment_name="mine")
    assert trainer.folder == Path("checkpoints/hybridrl/mine")
    (file,) = trainer.config.data.train_files
    assert [json.loads(line) for line in Path(file).read_text().splitlines()] == ROWS
    assert Path(file).is_relative_to(trainer.folder)
    reward = trainer.config.reward.custom_reward_function.path
    assert reward is not None and Path(reward).is_file()


def test_each_run_gets_a_folder_of_its_own_unless_one_is_named(here: Path) -> None:
    folders = []
    for _ in range(3):
        folders.append(grpo(train_batch_size=8, ppo_mini_batch_size=8).folder)
    file = here / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    reward = here / "reward.py"
    reward.write_text("def compute_score(solution_str): return 1.0")
    for _ in range(2):  # nothing is written into the folder before it trains
        folders.append(grpo(data=file, reward=reward, train_batch_size=8, ppo_mini_batch_size=8).folder)
    assert len(set(folders)) == 5 and all(folder.parent == Path("checkpoints/hybridrl") for folder in folders)
    named = grpo(train_batch_size=8, ppo_mini_batch_size=8, config={"trainer": {"default_local_dir": "here"}})
    assert named.folder == Path("here")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"totl_epochs": 3}, r"totl_epochs.*nearest: total_epochs"),
        ({"config": {"trainer.totl_epochs": 3}}, r"trainer.totl_epochs: unknown key; nearest: trainer.total_epochs"),
        ({"seeed": 1}, r"seeed.*nearest: seed"),
        ({"total_epochs": "three"}, r"trainer.total_epochs='three'.*whole number"),
        ({"temperature": 0}, r"rollout.temperature=0.*do_sample=False"),
        (
            {"train_batch_size": 8, "ppo_mini_batch_size": 256},
            r"ppo_mini_batch_size=256 is more than data.train_batch_size=8",
        ),
        ({"model": object()}, r"model is object.*save_pretrained"),
        ({"data": 3}, r"rows must be"),
        ({"data": "nowhere.parquet"}, r"data.train_files=nowhere.parquet: no such file"),
        ({"reward": 3}, r"reward"),
    ],
)
def test_what_cannot_work_is_refused_by_name(here: Path, settings: dict[str, Any], said: str) -> None:
    before = sorted(here.rglob("*"))
    with pytest.raises(UserError, match=said):
        grpo(**settings)
    assert sorted(here.rglob("*")) == before, "a refused run leaves nothing behind"


def test_a_refused_run_leaves_a_used_folder_as_it_was(here: Path) -> None:
    sizes = {"train_batch_size": 8, "ppo_mini_batch_size": 8}
    grpo(**sizes, experiment_name="mine", data=ROWS)
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    with raises_with(ConfigError, "rollout.temperature=0"):
        grpo(**sizes, experiment_name="mine", data=ROWS[::-1], reward=len, temperature=0)
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


def test_faults_of_keywords_are_told_at_once(here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(totl_epochs=3, path="x", lerning_rate=1)
    assert len(caught.value.faults) == 3


def test_messages_of_a_refused_trainer_are_not_those_of_the_next(here: Path) -> None:
    notify("told for a run that is refused", "warning")
    trainer = grpo(train_batch_size=8, ppo_mini_batch_size=8)
    heard: list[str] = []
    with listening(lambda text, level: heard.append(text)):
        assert trainer.folder and "told for a run that is refused" not in heard


def test_sft_has_no_reward(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward.*sft|reward.*supervised"):
        hybridrl.Trainer("sft", model="model", data=ROWS, reward=share_of_digits)
    with pytest.raises(ConfigError, match="reward: dpo has no reward"):
        hybridrl.Trainer("dpo", model="model", data=ROWS, reward=share_of_digits)
    with pytest.raises(ConfigError, match="reward: kto has no reward"):
        hybridrl.Trainer("kto", model="model", data=ROWS, reward=share_of_digits)
    with raises_with(ConfigError, "program='nca'"):
        hybridrl.Trainer("nca", model="model", data=ROWS)


TWICE = """
from dataclasses import dataclass

import datasets
import ray
import torch

import hybridrl
from hybridrl.algorithms import agg_loss, register_policy_loss


@dataclass(frozen=True)
class OwnSettings:
    own_value: float = 0.0


SMALL = dict(
    train_batch_size=16,
    ppo_mini_batch_size=16,
    use_dynamic_bsz=True,
    max_prompt_length=32,
    max_response_length=8,
    lr=1e-2,
    config={"trainer.threads_per_worker": 1, "trainer.device": "cpu", "reward.num_workers": 1},
)
rows = [{"prompt": f"Sort: {number}", "wanted": 8} for number in range(10000, 10064)]
bonus = 0.0  # a closure reaches the processes that score


def digits(solution_str):
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1) + bonus


def short(solution_str, wanted):
    return float(len(solution_str) <= wanted)


first = hybridrl.grpo(model="MODEL", reward=digits, data=rows, total_training_steps=16, **SMALL)
assert not ray.is_initialized()
scores = first.curve("critic/score/mean")
assert len(scores) == 16 and sum(scores[-3:]) > 2 * sum(scores[:3]), scores
assert first.finished and first.step == first.total_steps == 16
assert [record["step"] for record in first.history] == list(range(1, 17))

second = hybridrl.grpo(
    model=first.model_path,
    reward=[digits, short],
    reward_weights=[1.0, 0.5],
    data=datasets.Dataset.from_list(rows),
    total_training_steps=2,
    **SMALL,
)
assert second.folder != first.folder and second.step == 2
assert second.history[0]["critic/score/mean"] > 0.45 + scores[-1] / 2, "the trained model, and two rewards"

chats = [{"messages": [{"role": "user", "content": "Sort: 31"}, {"role": "assistant", "content": "#### 13"}]}] * 16
tuned = hybridrl.sft(
    model="MODEL",
    data=chats,
    train_batch_size=8,
    max_length=64,
    total_training_steps=2,
    config={"trainer.threads_per_worker": 1, "trainer.device": "cpu"},
)
assert tuned.step == 2 and tuned.metrics["train/loss"] > 0

from transformers import AutoModelForCausalLM

for result in (first, second, tuned):
    AutoModelForCausalLM.from_pretrained(result.model_path)
events = []


def watch(event):
    events.append((event.kind, event.step))
    if event.kind == "step" and event.step == 3:
        assert event.metrics["critic/score/mean"] >= 0 and event.total_steps == 9
        assert event.metrics["actor/own"] == 7.0, "the loss of this program, in a worker"
        event.stop("enough")


@register_policy_loss("own", settings=OwnSettings)
def own_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    loss = agg_loss(-advantages * log_prob, response_mask, loss_agg_mode)
    return loss, {"actor/own": torch.tensor(config.policy_loss.own_value)}


own = {"actor_rollout_ref.actor.policy_loss": {"loss_mode": "own", "own_value": 7}}
OWN = {**SMALL, "config": {**SMALL["config"], **own}}
stopped = hybridrl.grpo(
    "MODEL", digits, rows, val_data=rows[:2], callbacks=[watch], max_steps=9, eval_steps=2, num_generations=2,
    best_metric="val-core/unknown/reward/mean@1", **OWN
)
assert stopped.best_checkpoint.name == "global_step_2"
assert stopped.best_model_path.is_relative_to(stopped.best_checkpoint)
assert not stopped.finished and stopped.step == 3 and stopped.checkpoint.name == "global_step_3"
kinds = [("validation", 0), ("step", 1), ("step", 2), ("validation", 2), ("checkpoint", 2), ("step", 3)]
kinds.append(("checkpoint", 3))
assert events == kinds, events
trainer = hybridrl.Trainer("grpo", "MODEL", digits, rows, max_steps=9, num_generations=2, **SMALL)
for event in trainer.steps():
    assert event.kind == "step" and event.metrics["critic/score/mean"] >= 0
    if event.step == 2:
        break
assert trainer.result.step == 2 and not trainer.result.finished and trainer.result.checkpoint.name == "global_step_2"
try:
    first.curve("critic/scores/mean")
except KeyError as error:
    assert "critic/score/mean" in str(error)
print("both ran in", first.folder, second.folder)
"""


CELL = """
from hybridrl.algorithms import register_policy_loss

FACTOR = 3


@register_policy_loss("of_a_cell", prepare=lambda *arguments, **more: FACTOR)
def of_a_cell(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    return FACTOR, {}


def triple(number: int) -> str:
    \"\"\"Triple a number.

    Args:
        number: which one.
    \"\"\"
    return str(FACTOR * number)
"""

OTHER_PROCESS = """
import asyncio, sys
from hybridrl.agents.tools.load_tools import load_tools
from hybridrl.algorithms import get_policy_loss_fn, get_policy_loss_prepare_fn
from hybridrl.registry import import_external_lib

for _ in range(2):
    import_external_lib(sys.argv[1])
assert get_policy_loss_fn("of_a_cell")(*[None] * 6)[0] == get_policy_loss_prepare_fn("of_a_cell")() == 3
(tool,) = load_tools(None, sys.argv[2])
response, *_ = asyncio.run(tool.execute("", {"number": 14}))
print(tool.name, response.text)
"""


def test_what_a_cell_defines_reaches_other_processes(here: Path) -> None:
    """Entries that the program registered, and its tools, are files that workers and agents load."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(CELL, cell)
        trainer = grpo(tools=[cell["triple"]], config={"actor_rollout_ref.actor.policy_loss.loss_mode": "of_a_cell"})
        assert isinstance(trainer.config, PPOTrainerConfig)
        policy = trainer.config.actor_rollout_ref
        assert policy.rollout.multi_turn.enable
        files = str(policy.model.external_lib), str(policy.rollout.multi_turn.function_tool_path)
        assert all(Path(file).parent == trainer.folder.absolute() / "registered" for file in files)
        import_external_lib(files[0])  # this process has the entry
        own = grpo(external_lib="json", default_local_dir="own").config
        assert isinstance(own, PPOTrainerConfig)
        assert str(own.actor_rollout_ref.model.external_lib).startswith("json,")
        lock = threading.Lock()
        cell["of_a_cell"].__defaults__ = (lock,)
        with raises_with(ConfigError, "policy loss 'of_a_cell'", "pickle", "external_lib"):
            grpo()
    finally:
        POLICY_LOSSES.remove("of_a_cell")
    done = subprocess.run([sys.executable, "-c", OTHER_PROCESS, *files], capture_output=True, text=True, check=False)
    assert done.stdout == "triple 42\n", done.stderr


def test_tools_that_cannot_be_used_are_refused_by_name(here: Path) -> None:
    def waits(seconds: int) -> str:
        """Wait.

        Args:
            seconds: so many.
        """
        return str(lock)

    def join(*words: str) -> str:
        """Join words."""
        return " ".join(words)

    lock = threading.Lock()
    for tools, *said in (
        ([join], "function tool join"),
        (share_of_digits, "list of functions"),
        ([], "list of functions"),
        ([waits], "waits", "pickle"),
    ):
        with raises_with(ConfigError, "tools", *said):
            grpo(tools=tools)
    with raises_with(ConfigError, "tools=", "my_tools.py"):
        grpo(tools=[waits], config={"actor_rollout_ref.rollout.multi_turn.function_tool_path": "my_tools.py"})
    with raises_with(ConfigError, "tools", "grpo and ppo"):
        hybridrl.Trainer("sft", model="model", data=ROWS, tools=[waits])
    assert not (here / "checkpoints").exists(), "a refused run leaves no folder"


def test_settings_of_a_call_can_be_used_from_another_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`config.yaml` names the rows, the function and the model that the call gave, wherever it is read."""
    trainer = grpo(default_local_dir="runs/a")
    write_run_info("runs/a", trainer.config)
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    composed = compose_config("ppo_trainer", ["trainer.default_local_dir=b"], str(here / "runs/a"), "config")
    assert composed.notices == []
    validate(composed.config)
    assert composed.config.actor_rollout_ref.model.path == str(here / "model")
    assert Path(composed.config.data.train_files[0]).parent == here / "runs/a/data"
    assert Path(str(composed.config.reward.custom_reward_function.path)).parent == here / "runs/a/reward"
    assert settings_of(composed.config)["trainer"]["default_local_dir"] == str(here / "other/b")


def test_the_trained_model_is_where_the_row_of_the_policy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [trained_part(program) for program in ("grpo", "ppo", "sft", "rm")] == ["actor", "actor", "model", "model"]
    monkeypatch.setitem(ROLES, POLICY, replace(ROLES[POLICY], saved="policy"))
    assert [trained_part(program) for program in ("grpo", "dpo")] == ["policy", "model"]


@pytest.mark.slow(60)
def test_runs_follow_each_other_in_one_process(
    micro_model: Path, tmp_path: Path, finish: Callable[..., Any], forked: str
) -> None:
    (tmp_path / "mine.py").write_text(TWICE.replace("MODEL", str(micro_model)))
    done = finish([forked, "mine.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = Path(re.search(r"both ran in (\S+)", done.stdout)[1])  # type: ignore[index]
    config = yaml.safe_load((tmp_path / folder / "config.yaml").read_text())
    assert config["algorithm"]["adv_estimator"] == "grpo" and (tmp_path / folder / "report.html").is_file()
