"""The examples of docs/reward.md do what the page says."""

from __future__ import annotations

import re

import pytest

from hybridrl.reward import check_reward, create_reward_manager


def test_the_pages_function_and_manager(config, tokenizer, make_batch, repository, tmp_path):
    page = (repository / "docs" / "reward.md").read_text()
    files = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", page, re.DOTALL))
    assert sorted(files) == ["my_manager.py", "my_reward.py"]
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    config.reward.custom_reward_function.path = str(tmp_path / "my_reward.py")
    settings = config.reward.reward_manager
    settings.source = "importlib"
    settings.module.path, settings.module.name = str(tmp_path / "my_manager.py"), "BrevityManager"
    check_reward(config)
    manager = create_reward_manager(config, tokenizer)
    try:
        truths = [{"style": "rule", "ground_truth": "4"}] * 2
        result = manager(make_batch(["it is 4", "5"], reward_model=truths), return_dict=True)
    finally:
        manager.close()
    lengths = [8, 2]  # a token a character, and EOS
    assert result["reward_extra_info"] == {
        "score": [1.0, 0.0],
        "acc": [True, False],
        "letters": [7, 1],
        "length": lengths,
    }
    assert result["reward_tensor"].sum(-1).tolist() == pytest.approx([1.0 - 0.008, 0.0 - 0.002])
