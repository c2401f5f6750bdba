"""What the modules under verl's import paths compute, where hybridrl itself has no such function."""

from __future__ import annotations

import importlib
import os
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from raising import raises_with
from tensordict import NonTensorData, NonTensorStack

import hybridrl.verl_compat
from hybridrl.config import ActorConfig, OptimConfig
from hybridrl.errors import ConfigError, DataError, RemoteFileError
from hybridrl.protocol import DataProto, union_tensor_dict
from hybridrl.verl_compat.base_config import BaseConfig
from hybridrl.verl_compat.protocol import deserialize_tensordict, serialize_tensordict
from hybridrl.verl_compat.trainer.config import RolloutCorrectionConfig
from hybridrl.verl_compat.trainer.ppo.ray_trainer import compute_advantage
from hybridrl.verl_compat.utils import hdfs_io
from hybridrl.verl_compat.utils import tensordict_utils as tu
from hybridrl.verl_compat.utils import torch_functional as F
from hybridrl.verl_compat.utils.config import omega_conf_to_dataclass
from hybridrl.verl_compat.utils.dataset.rl_dataset import collate_fn
from hybridrl.verl_compat.utils.fs import copy_to_local
from hybridrl.verl_compat.utils.metric import AggregationType, Metric, reduce_metrics
from hybridrl.verl_compat.utils.py_functional import append_to_dict, convert_to_regular_types, temp_env_var
from hybridrl.verl_compat.utils.tracking import Tracking
from hybridrl.verl_compat.workers.config import FSDPActorConfig, FSDPOptimizerConfig


def modules() -> list[str]:
    found = pkgutil.walk_packages(hybridrl.verl_compat.__path__, "hybridrl.verl_compat.")
    return [module.name for module in found if not module.name.endswith((".__main__", ".as_verl"))]


@pytest.mark.parametrize("name", modules())
def test_every_name_that_a_module_lists_is_there(name: str) -> None:
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        assert getattr(module, public) is not None


# ---- batches without a DataProto ------------------------------------------------------------------------------------


def batch(rows: int = 4) -> tu.TensorDict:
    jagged = tu.nested_tensor_from_tensor_list([torch.arange(row + 1) for row in range(rows)])
    ids = torch.arange(rows * 2).reshape(rows, 2)
    names = [chr(ord("a") + row) for row in range(rows)]
    return tu.get_tensordict({"ids": ids, "jagged": jagged, "name": names}, {"step": 7})


def as_rows(data: tu.TensorDict) -> list[tuple[list[int], list[int], str]]:
    """Each row in plain Python."""
    jagged = [row.tolist() for row in data["jagged"].unbind()]
    return list(zip(data["ids"].tolist(), jagged, tu.get(data, "name"), strict=True))


def test_rows_are_chosen_cut_padded_and_joined_together() -> None:
    whole = as_rows(batch())
    assert as_rows(tu.index_select_tensor_dict(batch(), [3, 0])) == [whole[3], whole[0]]
    chunks = tu.chunk_tensordict(batch(), 2)
    assert [as_rows(chunk) for chunk in chunks] == [whole[:2], whole[2:]]
    assert all(chunk["step"] == 7 for chunk in chunks)
    joined = tu.concat_tensordict(chunks)
    tu.assert_tensordict_eq(joined, batch())
    padded, added = tu.pad_to_divisor(batch(), 3)
    assert added == 2 and as_rows(padded) == [*whole, whole[0], whole[1]]
    assert as_rows(tu.unpad(padded, added)) == whole
    drawn = list(tu.make_iterator(batch(), 2, epochs=2, seed=3, dataloader_kwargs={"shuffle": True}))
    assert [len(part) for part in drawn] == [2, 2, 2, 2]
    seen = [row for part in drawn for row in as_rows(part)]
    assert sorted(seen[:4]) == sorted(seen[4:]) == sorted(whole)


def test_matrices_keep_their_ragged_dimension_when_rows_are_alike() -> None:
    rows = [torch.arange(6).reshape(2, 3), torch.arange(6, 12).reshape(2, 3), torch.ones(2, 5, dtype=torch.long)]
    data = tu.get_tensordict({"positions": tu.nested_tensor_from_tensor_list([*rows, rows[2]])})
    for part, expected in zip(tu.chunk_tensordict(data, 2), (rows[:2], [rows[2], rows[2]]), strict=True):
        assert all(map(torch.equal, part["positions"].unbind(), expected))
    assert tu.index_select_tensor_dict(data, [1])["positions"].unbind()[0].tolist() == rows[1].tolist()


def test_fields_are_read_and_removed() -> None:
    data = batch()
    assert tu.get(data, "step") == 7 and tu.get(data, "none", 5) == 5
    assert set(tu.get_keys(data, ["ids", "step"]).keys()) == {"ids", "step"}
    with pytest.raises(KeyError, match="none"):
        tu.pop_keys(data, ["ids", "none"])
    assert tu.pop(data, "name") == ["a", "b", "c", "d"] and "name" not in data
    assert tu.pop_keys(data, ["ids"])["ids"].shape == (4, 2) and "ids" not in data


def test_union_refuses_other_values_and_shares_nothing_else() -> None:
    first, second = batch(), tu.get_tensordict({"ids": batch()["ids"].clone(), "more": torch.ones(4)}, {"step": 7})
    assert set(tu.union_tensor_dict(first, second).keys()) == {"ids", "jagged", "name", "step", "more"}
    for change in ({"step": 8}, {"name": ["a", "b", "c", "x"]}):
        with pytest.raises(AssertionError, match=next(iter(change))):
            tu.union_tensor_dict(batch(), tu.assign_non_tensor(tu.get_tensordict({"ids": batch()["ids"]}), **change))
    with pytest.raises(AssertionError, match="ids"):
        union_tensor_dict(tu.get_tensordict({"ids": torch.ones(2)}), tu.get_tensordict({"ids": torch.zeros(2)}))


def test_values_of_rows_must_be_as_many_as_the_rows() -> None:
    data = tu.get_tensordict({"ids": torch.zeros(3)})
    with pytest.raises(RuntimeError):
        tu.assign_non_tensor(data, name=NonTensorStack(NonTensorData("a"), NonTensorData("b")))
    with pytest.raises(RuntimeError, match="ids"):
        tu.get_tensordict({"ids": torch.zeros(3), "name": ["a"]})


def test_batches_as_bytes_and_back() -> None:
    data = tu.get_tensordict(
        {
            "half": torch.randn(3, 2).bfloat16(),
            "strided": torch.arange(12).reshape(3, 4)[:, ::2],
            "empty": torch.empty(3, 0),
            "jagged": tu.nested_tensor_from_tensor_list([torch.ones(2), torch.zeros(1), torch.ones(3)]),
        }
    )
    back = deserialize_tensordict(serialize_tensordict(data))
    assert back.batch_size == data.batch_size
    for key in ("half", "strided", "empty"):
        assert back[key].dtype == data[key].dtype and torch.equal(back[key], data[key])
    assert [row.tolist() for row in back["jagged"].unbind()] == [[1, 1], [0], [1, 1, 1]]
    with pytest.raises(TypeError, match="name"):
        serialize_tensordict(batch())


def test_none_stands_for_no_fields_and_lists_unfold() -> None:
    empty = DataProto(batch=None, non_tensor_batch=None, meta_info=None)  # type: ignore[arg-type]
    assert len(empty) == 0 and empty.non_tensor_batch == {} and empty.meta_info == {}
    data = DataProto.from_dict({"x": torch.arange(4).reshape(2, 2)}, {"words": [["a", "b"], ["c", "d"]], "id": [1, 2]})
    rows = data.unfold_column_chunks(2, split_keys=["x", "words"])
    assert rows.non_tensor_batch["words"].tolist() == [["a"], ["b"], ["c"], ["d"]]
    assert rows.batch["x"].tolist() == [[0], [1], [2], [3]] and rows.non_tensor_batch["id"].tolist() == [1, 1, 2, 2]
    ragged = DataProto.from_dict(non_tensors={"words": [["a", "b"], ["c"]]})
    with pytest.raises(ValueError, match="words"):
        ragged.unfold_column_chunks(2, split_keys=["words"])


# ---- settings -------------------------------------------------------------------------------------------------------


def test_factories_of_rollout_correction() -> None:
    weights = RolloutCorrectionConfig.decoupled_seq_is_rs(1.5, rs_threshold="0.4_3.0")
    assert (weights.rollout_is, weights.rollout_is_threshold) == ("sequence", 1.5)
    assert (weights.rollout_rs, weights.rollout_rs_threshold) == ("seq_sum_k1", "0.4_3.0")
    assert RolloutCorrectionConfig.decoupled_token_is(threshold=3.0).rollout_is_threshold == 3.0
    ice = RolloutCorrectionConfig.bypass_pg_token_icepop(threshold=4.0, threshold_lower=0.25)
    assert (ice.rollout_is_threshold, ice.bypass_mode, ice.loss_type) == ("0.25_4.0", True, "reinforce")
    assert RolloutCorrectionConfig.disabled() == RolloutCorrectionConfig()
    with raises_with(TypeError, "rs_threshold"):
        RolloutCorrectionConfig.decoupled_token_is(rs_threshold=1.0)


def test_old_name_of_the_micro_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert ActorConfig(ppo_micro_batch_size=4).ppo_micro_batch_size_per_gpu == 4
    assert "ppo_micro_batch_size=4" in capsys.readouterr().err
    assert ActorConfig(ppo_micro_batch_size_per_gpu=2).ppo_micro_batch_size is None
    with raises_with(ConfigError, "ppo_micro_batch_size=4", "ppo_micro_batch_size_per_gpu=2"):
        ActorConfig(ppo_micro_batch_size=4, ppo_micro_batch_size_per_gpu=2)


def test_groups_from_omegaconf() -> None:
    values = {
        "_target_": "hybridrl.verl_compat.workers.config.FSDPActorConfig",
        "clip_ratio": 0.3,
        "optim": {"lr": 0.1},
        "ppo_micro_batch_size": 2,
    }
    built = omega_conf_to_dataclass(OmegaConf.create(values))
    assert isinstance(built, FSDPActorConfig) and built.clip_ratio == 0.3
    assert isinstance(built.optim, OptimConfig) and built.optim.lr == 0.1
    assert omega_conf_to_dataclass({"lr": 0.5}, FSDPOptimizerConfig) == OptimConfig(lr=0.5)
    with raises_with(ConfigError, "OptimConfig", "learning_rate"):
        omega_conf_to_dataclass({"learning_rate": 0.5}, FSDPOptimizerConfig)


def test_dataclass_of_settings_is_a_mapping_that_is_set_once() -> None:
    @dataclass
    class Inner(BaseConfig):
        size: int = 1

    @dataclass
    class Outer(BaseConfig):
        _mutable_fields = BaseConfig._mutable_fields | {"steps"}
        steps: int = 2
        inner: Inner = field(default_factory=Inner)

    outer = Outer()
    assert {**outer}["inner"]["size"] == 1 and "steps" in outer and outer.get("none", 3) == 3
    outer.steps = 5
    assert outer["steps"] == 5
    with pytest.raises(AttributeError, match="inner"):
        outer.inner = Inner()


# ---- metrics and helpers --------------------------------------------------------------------------------------------


def test_metrics_collect_and_reduce() -> None:
    total: dict[str, object] = {}
    for value in (1.0, torch.tensor(2.0), np.float32(3.0)):
        append_to_dict(total, {"loss": Metric(AggregationType.SUM, value), "lr": float(value)}, prefix="actor/")
    assert reduce_metrics(total) == {"actor/loss": 6.0, "actor/lr": 2.0}
    assert Metric.aggregate_dp([Metric("sum", 1.0), Metric("sum", 3.0)]) == 2.0
    assert Metric.aggregate_dp([Metric("max", 1.0), Metric("max", 3.0)]) == 3.0
    for wrong in (lambda: Metric("median"), lambda: Metric("mean", torch.ones(2))):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(ValueError, match="mean"):
        Metric("sum", 1.0).append(Metric("mean", 1.0))


def test_masks_and_padding() -> None:
    ids = torch.tensor([[5, 2, 7, 2], [5, 5, 5, 5], [3, 1, 2, 2]])
    assert F.get_response_mask(ids, 2).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert F.get_response_mask(ids, [2, 3]).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0, 3).tolist() == [[1, 0, 0], [2, 3, 0]]
    assert F.pad_sequence_to_length(ids[:1], 6, 9, left_pad=True).tolist() == [[9, 9, 5, 2, 7, 2]]
    mask = torch.ones_like(ids)
    for side, kept in {"left": [7, 2], "right": [5, 2], "middle": [5, 2]}.items():
        cut, cut_mask = F.postprocess_data(ids, mask, 2, 0, truncation=side)
        assert cut[0].tolist() == kept and cut_mask.shape == (3, 2)
    with raises_with(DataError, "truncation=error", "4 tokens", "max_length=2"):
        F.postprocess_data(ids, mask, 2, 0)


def test_rows_collate_and_advantages_have_verls_arguments() -> None:
    rows = [{"ids": torch.tensor([row]), "info": {"n": row}, "tags": ["x"]} for row in range(2)]
    columns = collate_fn(rows)
    assert columns["ids"].tolist() == [[0], [1]] and columns["tags"].shape == (2,)
    data = DataProto.from_dict(
        {
            "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 3.0]]),
            "attention_mask": torch.ones(2, 3),
            "responses": torch.zeros(2, 2),
        },
        {"uid": ["a", "a"]},
    )
    out = compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False)
    assert out.batch["advantages"].tolist() == [[-1.0, -1.0], [1.0, 1.0]]


def test_plain_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert convert_to_regular_types({"a": [OmegaConf.create({"b": 1})]}) == {"a": [{"b": 1}]}
    with temp_env_var("VERL_COMPAT_TEST", "1"):
        assert os.environ["VERL_COMPAT_TEST"] == "1"
    assert "VERL_COMPAT_TEST" not in os.environ
    assert copy_to_local(tmp_path) == str(tmp_path)
    with raises_with(RemoteFileError, "nosuch://a/b"):
        copy_to_local("nosuch://a/b")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("{}")
    hdfs_io.makedirs("memory://verl/data", exist_ok=True)
    hdfs_io.copy(str(tmp_path / "rows"), "memory://verl/data")
    assert hdfs_io.exists("memory://verl/data/rows/a.jsonl") and not hdfs_io.exists("memory://verl/data/b")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert Path(copy_to_local("memory://verl/data/rows/a.jsonl")).read_text() == "{}"
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    logger = Tracking("project", "run", default_backend=[], config={"lr": 1})
    logger.log({"loss": 2.0}, step=1)
    with pytest.raises(ValueError, match="wandb"):
        logger.log({"loss": 2.0}, step=2, backend="wandb")
    logger.finish()
    assert '"loss":2.0' in (tmp_path / "project" / "run" / "metrics.jsonl").read_text()
