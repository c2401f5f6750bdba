"""Checks that files, folders and models named by settings exist and are of the expected kind.

Each check yields one sentence per fault, which begins with the key at fault.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.reward import CustomRewardConfig

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_model(where: str, model: ModelConfig, device: str) -> Iterator[str]:
    """Check the `model` group called `where`."""
    if not model.path:
        yield f"{where}.path is not set; give a directory in Hugging Face format or a hub id org/name"
    else:
        yield from check_source(f"{where}.path", model.path)
    for name in ("tokenizer_path", "hf_config_path"):
        if value := getattr(model, name):
            yield from check_source(f"{where}.{name}", value)
    attention = str(model.override_config.get("attn_implementation", ""))
    if attention.startswith("flash_attention") and device == "cpu":
        yield f"{where}.override_config.attn_implementation={attention} needs a GPU, and trainer.device=cpu; use sdpa"


def check_source(name: str, value: str) -> Iterator[str]:
    """Check that `value` is an existing directory or a hub id."""
    path = Path(value).expanduser()
    if path.is_dir():
        return
    if path.exists():
        yield f"{name}={value}: is a file; give the directory that holds config.json and the weights"
    elif not _HUB_ID.fullmatch(value):
        yield f"{name}={value}: no such directory (from {Path.cwd()}), and a hub id has the form org/name"


def check_files(name: str, files: list[str]) -> Iterator[str]:
    """Check the data files that the key `name` lists."""
    for file in files:
        path = Path(file).expanduser()
        if "://" not in file and not path.exists():
            yield f"{name}={file}: no such file (from {Path.cwd()})"
        elif path.is_dir():
            yield f"{name}={file}: is a folder; name the files in it (parquet, json or jsonl)"


def check_class(where: str, path: str | None, name: str | None, path_key: str, name_key: str) -> Iterator[str]:
    """Check a user's class: file and name are both set, and the file exists."""
    if path is None and name is not None:
        yield f"{where}.{name_key}={name} without {where}.{path_key}; name the Python file that holds it"
    if path is not None and name is None:
        yield f"{where}.{path_key}={path} without {where}.{name_key}; name the class in it"
    if path is not None and path.endswith(".py") and not Path(path).expanduser().is_file():
        yield f"{where}.{path_key}={path}: no such file (from {Path.cwd()})"


def check_function(custom: CustomRewardConfig) -> Iterator[str]:
    """Check `reward.custom_reward_function`."""
    where = "reward.custom_reward_function"
    if custom.path is not None and custom.path.endswith(".py") and not Path(custom.path).expanduser().is_file():
        yield f"{where}.path={custom.path}: no such file (from {Path.cwd()})"
    if custom.path is None and custom.name not in (None, "compute_score"):
        yield f"{where}.name={custom.name} without {where}.path; name the Python file that holds the function"
