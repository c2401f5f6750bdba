"""Checks of the reward function and of the data's columns, before a model is loaded."""

from __future__ import annotations

import pytest
from raising import raises_with

from hybridrl.config import DataConfig
from hybridrl.data import create_rl_dataset
from hybridrl.reward import RewardError, check_dataset, check_reward


def test_check_reward_refuses_before_anything_is_loaded(config, user_file, tmp_path):
    custom = config.reward.custom_reward_function
    check_reward(config)
    custom.path = user_file("def compute_score(data_source, solution_str, ground_truth, extra_info): return 1")
    check_reward(config)
    for path, name, message in [
        (str(tmp_path / "none.py"), None, "none.py: no such file"),
        (user_file("def f(x): ...", "b.py"), None, "b.py: f takes"),
        (user_file("import not_there", "c.py"), None, "c.py, line 1"),
        (custom.path, "missing", "name=missing: no such function"),
        (None, "compute_score", "path is not"),
    ]:
        custom.path, custom.name = path, name
        with pytest.raises(RewardError, match=message):
            check_reward(config)
    custom.path, custom.name, config.reward.reward_manager.name = None, None, "magic"
    with pytest.raises(RewardError, match="magic"):
        check_reward(config)


def test_check_reward_runs_the_users_file_elsewhere(config, user_file, tmp_path):
    import os

    note = tmp_path / "pid"
    config.reward.custom_reward_function.path = user_file(
        f"import os\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ndef compute_score(solution_str, ground_truth): "
        "..."
    )
    check_reward(config)
    assert int(note.read_text()) != os.getpid()


def test_check_dataset_names_file_and_row(config, tokenizer, sort_data, tmp_path):
    import pyarrow.parquet

    data = DataConfig()
    check_dataset(config, create_rl_dataset(sort_data / "train.parquet", data, tokenizer))
    rows = pyarrow.parquet.read_table(sort_data / "train.parquet").to_pylist()
    for column, value, message in [
        ("data_source", "my/data", "row 5 .*unknown data source 'my/data'"),
        ("data_source", None, "row 5 .*no data source"),
        ("reward_model", {"style": "rule", "ground_truth": None}, "row 5 .*no ground truth"),
        ("reward_model", None, "row 5 .*no ground truth"),
    ]:
        bad = [dict(row) for row in rows]
        bad[5][column] = value
        file = tmp_path / "bad.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(bad), file)
        dataset = create_rl_dataset(file, data, tokenizer)
        with pytest.raises(RewardError, match=rf"bad\.parquet, {message}"):
            check_dataset(config, dataset)
        config.reward.custom_reward_function.path = "my.py"
        check_dataset(config, dataset)  # a function of the user's own may need neither
        config.reward.custom_reward_function.path = None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": row["prompt"]} for row in rows]), file)
    with raises_with(RewardError, "'data_source'", "openai/gsm8k"):
        check_dataset(config, create_rl_dataset(file, data, tokenizer))
