"""The examples of docs/data.md do what the page says."""

from __future__ import annotations

import re

from hybridrl.config import DataConfig, load_config
from hybridrl.data import SourceRecord, create_rl_dataset, create_train_loader
from hybridrl.registry import CURRICULA


def test_the_pages_dataset_sampler_and_curriculum(write, rows, tokenizer, tmp_path, repository):
    page = (repository / "docs" / "data.md").read_text()
    files = dict(re.findall(r"```python\n# (my_\w+\.py): [^\n]*\n(.*?)```", page, re.DOTALL))
    assert sorted(files) == ["my_curriculum.py", "my_data.py", "my_sampler.py"]
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    config = DataConfig(train_batch_size=7)
    config.custom_cls.path, config.custom_cls.name = str(tmp_path / "my_data.py"), "Terse"
    config.sampler.class_path, config.sampler.class_name = str(tmp_path / "my_sampler.py"), "ShortFirst"
    dataset = create_rl_dataset(write("a.parquet", list(reversed(rows))), config, tokenizer)
    (batch,) = create_train_loader(config, dataset)
    assert batch.non_tensor_batch["index"].tolist() == [6, 5, 4, 3, 2, 1, 0]
    assert "system\nBe brief." in tokenizer.decode(batch.batch["input_ids"][0])
    curriculum = tmp_path / "my_curriculum.py"
    words = ["data.mixture.weights={a: 1}", f"actor_rollout_ref.model.external_lib={curriculum}"]
    words += ["data.mixture.curriculum.name=hard_first", "data.mixture.curriculum.power=2"]
    try:
        settings = load_config("ppo_trainer", words).data.mixture.curriculum.own
        assert CURRICULA.get("hard_first")({"a": SourceRecord(4, 1, 3)}, settings) == {"a": 0.75**2}
    finally:
        CURRICULA.remove("hard_first")
