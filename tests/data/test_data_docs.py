"""The examples of docs/data.md do what the page says."""

from __future__ import annotations

import re

from hybridrl.config import DataConfig
from hybridrl.data import create_rl_dataset, create_train_loader


def test_the_pages_dataset_and_sampler(write, rows, tokenizer, tmp_path, repository):
    page = (repository / "docs" / "data.md").read_text()
    files = dict(re.findall(r"```python\n# (my_\w+\.py): [^\n]*\n(.*?)```", page, re.DOTALL))
    assert sorted(files) == ["my_data.py", "my_sampler.py"]
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    config = DataConfig(train_batch_size=7)
    config.custom_cls.path, config.custom_cls.name = str(tmp_path / "my_data.py"), "Terse"
    config.sampler.class_path, config.sampler.class_name = str(tmp_path / "my_sampler.py"), "ShortFirst"
    dataset = create_rl_dataset(write("a.parquet", list(reversed(rows))), config, tokenizer)
    (batch,) = create_train_loader(config, dataset)
    assert batch.non_tensor_batch["index"].tolist() == [6, 5, 4, 3, 2, 1, 0]
    assert "system\nBe brief." in tokenizer.decode(batch.batch["input_ids"][0])
