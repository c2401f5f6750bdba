"""Names of columns: none of the data, of a reward function or of a session changes a run without a word."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising import raises_with
from sampler_tools import PAD, OwnRollout, same

import hybridrl
from hybridrl.agents.loop import AgentLoopOutput
from hybridrl.agents.trajectory_record import trajectory_of
from hybridrl.algorithms.algorithm_registry import ADV_ESTIMATOR_REGISTRY, named_inputs
from hybridrl.config import load_config
from hybridrl.config.schema.choices import SCORES
from hybridrl.data import PromptLoader, RLHFDataset
from hybridrl.data.loader import PromptCollator
from hybridrl.errors import RewardError, RolloutError
from hybridrl.models.tiny import build_tokenizer
from hybridrl.protocol import DataProto, bookkeeping, fields
from hybridrl.protocol.bookkeeping import Writer
from hybridrl.reward.column_checks import check_columns, check_read_columns
from hybridrl.reward.signature import understand
from hybridrl.rollout.batch import batch_of
from hybridrl.rollout.request import Completion
from hybridrl.scored import Scored
from hybridrl.trainer.ppo.advantage import compute_advantage
from hybridrl.trainer.ppo.sampler import Sampler

SOURCES = sorted(Path(hybridrl.__file__).parent.rglob("*.py"))
ESTIMATORS = ("grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_passk", "gpg")
#: parameters of estimators: settings with defaults, and fields
OF_ESTIMATORS = sorted({name for one in ESTIMATORS for name in named_inputs(one)})
DECLARED = sorted(bookkeeping.bookkeeping())
META = ["temperature", "global_steps", "metrics", "missing_samples", "data_columns", "attempt", "update_plan"]
NAMES = sorted({*DECLARED, *OF_ESTIMATORS, *META, "acc", "score", "reward", "input", "output", "gts", "step"})
ROWS = 6


def written(path: Path, values: dict[str, list[Any]]) -> Path:
    """A data file with further columns."""
    rows = [{"prompt": f"Sort: {n}", "answer": str(n), **{k: v[n] for k, v in values.items()}} for n in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reward(extra: dict[str, Any]) -> Any:
    """Scores that differ between the samples of a prompt; `extra` is what the function returns besides."""

    def score(batch: DataProto, return_dict: bool = False) -> Any:
        scores = torch.zeros(batch.batch["responses"].shape)
        scores[:, 0] = batch.batch["responses"].sum(-1) % 3 + torch.arange(len(scores)) % 2
        info = {name: [value] * len(scores) for name, value in extra.items()}
        return {"reward_tensor": scores, "reward_extra_info": info} if return_dict else scores

    return score


def trained_on(path: Path, extra: dict[str, Any] | None = None) -> dict[str, list[Any]]:
    """What training reads of a batch: the rows, their rewards, and the advantages of every estimator."""
    config = load_config(
        "ppo_trainer",
        [
            *("algorithm.adv_estimator=grpo", "data.train_batch_size=3", "actor_rollout_ref.rollout.n=2"),
            *("data.ground_truth_key=answer", f"data.train_files={path}"),
        ],
    )
    dataset = RLHFDataset(path, build_tokenizer(), config.data)
    sampler = Sampler(config, OwnRollout(same), reward(extra or {}), PromptLoader(dataset, 3), PAD)  # type: ignore[arg-type]
    batch = sampler.next().batch
    found: dict[str, list[Any]] = {name: batch.batch[name].tolist() for name in batch.batch.keys()}
    found |= {name: batch.non_tensor_batch[name].tolist() for name in ("uid", "sample", "reward_model", "raw_prompt")}
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    for name in ESTIMATORS:
        compute_advantage(batch, name, 1.0, 1.0, config.algorithm)
        found[name] = batch.batch["advantages"].tolist()
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return trained_on(written(tmp_path_factory.mktemp("plain") / "plain.jsonl", {}))


VALUES = st.one_of(
    st.lists(st.integers(-3, 3), min_size=ROWS, max_size=ROWS),
    st.lists(st.sampled_from(["a", "b", "c0"]), min_size=ROWS, max_size=ROWS),
    st.just([True] * ROWS),
    st.just([[1.5, 2.0]] * ROWS),
)


def apart(left: dict[str, list[Any]], right: dict[str, list[Any]]) -> list[str]:
    return [name for name in left.keys() | right.keys() if left.get(name) != right.get(name)]


@pytest.mark.parametrize("name", NAMES)
@given(values=VALUES)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_column_of_any_internal_name_changes_nothing(name, plain, tmp_path, values) -> None:
    assert apart(plain, trained_on(written(tmp_path / "named.jsonl", {name: values}))) == []


def test_all_internal_names_at_once_change_nothing(plain, tmp_path, capsys) -> None:
    columns = {name: list(range(ROWS)) for name in NAMES}
    assert apart(plain, trained_on(written(tmp_path / "all.jsonl", columns))) == []
    told = " ".join(capsys.readouterr().err.split())
    assert "session_id" in told and "a batch has columns of these names itself" in told


@pytest.mark.parametrize("name", NAMES)
def test_a_key_of_a_reward_changes_nothing_or_is_refused(name, plain, tmp_path) -> None:
    path = written(tmp_path / "data.jsonl", {})
    if name in DECLARED and name not in bookkeeping.columns(Writer.ROLE):
        with pytest.raises(RewardError, match=rf"the key {name!r}, which is already a column.*Rename"):
            trained_on(path, {name: 7.0})
    elif name not in DECLARED:
        assert apart(plain, trained_on(path, {name: 7.0})) == []


@pytest.mark.parametrize("name", [*sorted(bookkeeping.columns(Writer.DATA)), "rm_scores"])
def test_a_key_of_a_reward_is_no_column_that_the_run_reads(name, tmp_path) -> None:
    with pytest.raises(RewardError, match=rf"{name!r}, which is already a column"):
        trained_on(written(tmp_path / "data.jsonl", {}), {name: 7.0})


@pytest.mark.parametrize("brought", ["extra_fields", "scored"])
@pytest.mark.parametrize("name", sorted({*DECLARED, *bookkeeping.columns(Writer.DATA)}))
def test_an_extra_field_of_a_session_is_refused(name, brought) -> None:
    if brought == "extra_fields" and name in bookkeeping.columns(Writer.SESSION):
        return  # these are a session's to give
    fields_ = {name: 1} if brought == "extra_fields" else {}
    score = Scored(1.0, extra={name: 1}) if brought == "scored" else 1.0
    output = AgentLoopOutput([1], [2], [1], reward_score=score, extra_fields=fields_)
    completion = Completion("0", [2], [-0.5], "stop", [(0, 1)])
    with pytest.raises(RolloutError, match=rf"the extra field {name!r}.*another name"):
        trajectory_of(output, [([1], completion)], "0-0", 0, "", 0, None)


def test_items_of_a_users_data_set_carry_no_bookkeeping(capsys) -> None:
    item = {"input_ids": [1, 2], "index": 0, **{name: 1 for name in DECLARED if name not in ("input_ids", "index")}}
    item.pop("position_ids")
    _, objects = PromptCollator(PAD)([item, item])
    own = {"index", "raw_prompt", "multi_modal_inputs", "image_files"}
    assert objects.keys() == own
    assert "session_id" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["session_id", "session_id=None"])
def test_a_reward_that_reads_such_a_column_is_refused_at_the_start(source, tmp_path) -> None:
    path = written(tmp_path / "data.jsonl", {"session_id": list("abcdef")})
    config = load_config("ppo_trainer", ["data.ground_truth_key=answer", f"data.train_files={path}"])
    dataset = RLHFDataset(path, build_tokenizer(), config.data)
    scope: dict[str, Any] = {}
    exec(f"def f(solution_str, {source}): return 1", scope)
    pool = SimpleNamespace(calls=[("f in r.py", understand(scope["f"], "f", {}, "sample", "r.py", "kwargs"))])
    with raises_with(RewardError, "r.py", "'session_id'"):
        check_columns(pool, dataset.columns, True, dataset.left_out)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"],
        ["algorithm.gdpo_reward_keys=[acc]"],
    ],
)
def test_a_column_that_settings_read_of_the_reward_is_refused_at_the_start(words) -> None:
    config = load_config("ppo_trainer", words)
    check_read_columns(config, ["answer"])
    with raises_with(RewardError, "algorithm", "'acc'"):
        check_read_columns(config, ["answer", "acc"])
    assert "acc" not in SCORES


def _text(node: ast.AST, constants: dict[str, str]) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def _is_batch(node: ast.AST) -> bool:
    return getattr(node, "attr", "") == "non_tensor_batch"


def _names_used(tree: ast.AST, constants: dict[str, str]) -> set[str]:
    """Names `X` of `....non_tensor_batch["X"]`, `.get("X")`, `"X" in ...`, and of `non_tensors={"X": ...}`."""
    found: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _is_batch(node.value):
            found.add(_text(node.slice, constants))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_batch(node.func.value):
            found |= {_text(one, constants) for one in node.args[:1]}
        if isinstance(node, ast.Compare) and any(_is_batch(one) for one in node.comparators):
            found.add(_text(node.left, constants))
        given = isinstance(node, ast.keyword) and node.arg in ("non_tensors", "extra_fields")
        if given and isinstance(node.value, ast.Dict):
            found |= {_text(key, constants) for key in node.value.keys if key is not None}
    return {name for name in found if name is not None}


def test_no_code_uses_an_undeclared_column() -> None:
    """A name that is written or read and not declared could be a data column, and would be mistaken for it."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    constants = {
        target.id: node.value.value
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }
    names = {name: path for path, tree in trees.items() for name in _names_used(tree, constants)}
    assert {"sample", "slot", "is_padding", "env_done"} <= names.keys()  # the search works
    declared = bookkeeping.bookkeeping() | bookkeeping.columns()
    undeclared = {name: str(path) for name, path in names.items() if name not in declared}
    assert undeclared == {}, "declare it in hybridrl/protocol/bookkeeping.py"


def test_what_real_batches_hold_is_declared(tmp_path) -> None:
    """Columns of a scored batch are the data's, the reward function's, or declared; so are those of any trajectory."""
    found = trained_on(written(tmp_path / "data.jsonl", {}))
    assert set(found) - {*ESTIMATORS, "reward_model"} <= bookkeeping.bookkeeping()

    experts = torch.zeros(2, 1, 1, dtype=torch.int64)
    whole: dict[str, Any] = {"routed_experts": experts, "image_mask": torch.zeros(2, dtype=torch.bool)}
    whole |= {"multimodal": {"pixel_values": experts}, "positions": torch.zeros(3, 2, dtype=torch.int64)}
    whole |= {"turn_rewards": [1.0], "turn_ends": [0], "turn_states": [(0, 3)], "reward": 1.0, "session": "s"}
    output = AgentLoopOutput([1], [2], [1], reward_score=1.0)
    made = trajectory_of(output, [([1], Completion("0", [2], [-0.5], "stop", [(0, 1)]))], "0-0", 0, "s", 0, None)
    batch = batch_of([replace(made, **whole)], PAD)
    assert {"session_id", "trajectory_reward", "turn_rewards", "__num_turns__"} <= batch.non_tensor_batch.keys()
    assert {*batch.non_tensor_batch, *batch.batch.keys()} <= bookkeeping.bookkeeping()


def test_a_column_is_declared_once() -> None:
    bookkeeping.register_column("uid", Writer.LOADER)
    with pytest.raises(ValueError, match="the loader writes a column of that name"):
        bookkeeping.register_column("uid", Writer.ROLLOUT)
    assert not bookkeeping.columns() & fields.declared() - {"rm_scores"}
    assert ADV_ESTIMATOR_REGISTRY and np.isin("sample", DECLARED)
