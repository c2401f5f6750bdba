"""Checks that files, folders and models named by settings exist and are of the expected kind.

Each check yields one sentence per fault, which begins with the key at fault.
"""

import glob
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.convert import nearest
from hybridrl.config.data_names import KINDS, SuiteName, dataset_name, local_files, suite_name
from hybridrl.config.entry_settings import read_own
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.reward import RewardPartConfig, ScoringConfig
from hybridrl.errors import RemoteFileError
from hybridrl.registry import SUITES
from hybridrl.utils.remote_files import file_system_class
from hybridrl.utils.urls import is_remote, is_web, masked, scheme_of, without_file_scheme

_STEP = re.compile(r"global_step_(\d+)")
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
    template = model.custom_chat_template
    if template and "{" not in template:
        yield (
            f"{where}.custom_chat_template={template[:60]}: is no Jinja template, so every prompt would be this text; "
            f'give the text of the template ({where}.custom_chat_template="$(cat FILE)")'
        )
    attention = str(model.override_config.get("attn_implementation", ""))
    if attention.startswith("flash_attention") and device == "cpu":
        yield f"{where}.override_config.attn_implementation={attention} needs a GPU, and trainer.device=cpu; use sdpa"


def check_source(name: str, value: str) -> Iterator[str]:
    """Check that `value` is an existing directory or a hub id."""
    path = Path(value).expanduser()
    if path.is_dir():
        yield from _check_not_a_checkpoint(name, path)
        return
    if path.exists():
        yield f"{name}={value}: is a file; give the directory that holds config.json and the weights"
    elif not _HUB_ID.fullmatch(value):
        yield f"{name}={value}: no such directory (from {Path.cwd()}), and a hub id has the form org/name"


def _check_not_a_checkpoint(name: str, path: Path) -> Iterator[str]:
    """Refuse a run's folder, a checkpoint or a part of one, and say where the model is."""
    if (path / "config.json").exists():
        return
    inside = [child for child in path.iterdir() if _STEP.fullmatch(child.name)]
    newest = max(inside, key=lambda child: int(child.name.rpartition("_")[2]), default=None)
    if verl := next(iter(path.glob("model_world_size_*_rank_*.pt")), None):
        yield (
            f"{name}={path}: holds shards of verl ({verl.name}), not a model; make one of them with "
            f"python -m hybridrl.checkpoint.merge {path} --out DIR, and set {name}=DIR"
        )
        return
    checkpoint = newest or next((folder for folder in (path, path.parent) if _STEP.fullmatch(folder.name)), None)
    if checkpoint is None:
        return
    models = [model for model in (path / "hf_model", *sorted(checkpoint.glob("*/hf_model"))) if model.is_dir()]
    if models:
        yield f"{name}={path}: holds a checkpoint, not a model; its model is {models[0]}"
    else:
        yield (
            f"{name}={path}: holds a checkpoint without a model in Hugging Face format; make one with "
            f"python -m hybridrl.checkpoint.merge {checkpoint} --out DIR, and set {name}=DIR"
        )


def check_files(name: str, files: list[str]) -> Iterator[str]:
    """Check the data files that the key `name` lists. Other machines are asked when the data are loaded."""
    for file in files:
        if (suite := suite_name(file)) is not None:
            yield from _check_suite(name, file, suite)
            continue
        if is_remote(file):
            yield from check_address(name, file)
            continue
        path = Path(without_file_scheme(file)).expanduser()
        if dataset_name(file) is not None:
            continue
        if path.is_dir():
            yield f"{name}={file}: is a folder; name the files in it ({KINDS}), e.g. {name}={path / '*.parquet'}"
        elif not local_files(file):
            kind = "no file has such a name" if glob.has_magic(file) else "no such file"
            yield f"{name}={file}: {kind} (from {Path.cwd()})"


def check_address(name: str, url: str) -> Iterator[str]:
    """Check that the package for an address is installed. What is there is seen when it is read."""
    try:
        file_system_class(url)
    except RemoteFileError as error:
        yield f"{name}={error}"


def check_written_address(name: str, url: str) -> Iterator[str]:
    """Check that files can be written behind an address, as far as its scheme says."""
    if scheme_of(url) is None:
        yield f"{name}={url}: must be an address, such as s3://bucket/run; a mounted folder is file:///folder"
    elif is_web(url):
        yield f"{name}={masked(url)}: nothing can be written over HTTP; use s3://, gs://, abfs:// or hdfs://"
    else:
        yield from check_address(name, url)


def _check_suite(name: str, entry: str, suite: SuiteName) -> Iterator[str]:
    """Check that a suite is registered, and that its local copy is there."""
    if not SUITES.knows(suite.name):
        close = nearest(suite.name, list(SUITES.names()))
        yield (
            f"{name}={entry}: unknown suite {suite.name!r}{close}; choose from {', '.join(SUITES.names())}. Your own "
            "is registered with register_suite, in a module that model.external_lib names"
        )
    elif suite.place is None and not SUITES.metadata(suite.name).hub:
        yield f"{name}={entry}: this suite is read from a local copy; name it: {entry}@FILE_OR_FOLDER"
    elif suite.place is not None and is_remote(suite.place):
        yield from check_address(name, suite.place)
    elif suite.place is not None and not local_files(suite.place) and dataset_name(suite.place) is None:
        yield f"{name}={entry}: no such file or folder as {suite.place} (from {Path.cwd()})"


def check_class(where: str, path: str | None, name: str | None, path_key: str, name_key: str) -> Iterator[str]:
    """Check a user's class: file and name are both set, and the file exists."""
    if path is None and name is not None:
        yield f"{where}.{name_key}={name} without {where}.{path_key}; name the Python file that holds it"
    if path is not None and name is None:
        yield f"{where}.{path_key}={path} without {where}.{name_key}; name the class in it"
    if path is not None and path.endswith(".py") and not Path(path).expanduser().is_file():
        yield f"{where}.{path_key}={path}: no such file (from {Path.cwd()})"


def check_source_file(name: str, path: str | None) -> Iterator[str]:
    """Check that a Python file exists and compiles; anything but a `.py` or `.pkl` file is left to its import."""
    if path is None or not path.endswith((".py", ".pkl")):
        return
    file = Path(path).expanduser()
    if not file.is_file():
        yield f"{name}={path}: no such file (from {Path.cwd()})"
    elif path.endswith(".py"):
        try:
            compile(file.read_bytes(), path, "exec")
        except SyntaxError as error:
            text = f": {error.text.strip()}" if error.text else ""
            yield f"{name}={path}, line {error.lineno}: {type(error).__name__}: {error.msg}{text}"
        except (OSError, ValueError) as error:
            yield f"{name}={path}: cannot be read as Python source ({error})"


def check_functions(reward: ScoringConfig, config: Any) -> Iterator[str]:
    """Check `reward.custom_reward_function` and `reward.functions`."""
    where, custom = "reward.custom_reward_function", reward.custom_reward_function
    yield from check_source_file(f"{where}.path", custom.path)
    if custom.path is None and custom.name not in (None, "compute_score"):
        yield f"{where}.name={custom.name} without {where}.path; name the Python file that holds the function"
    if reward.functions and custom.path is not None:
        yield f"{where}.path={custom.path} and reward.functions are both set; make it an entry of reward.functions"
    for name, values in reward.functions.items():
        key = f"reward.functions.{name}"
        if not name.isidentifier() or name == "score":
            yield f"{key}: a reward function's name must be a Python name, and not 'score', which is their sum"
        elif not isinstance(values, Mapping):
            yield f"{key}={values}: must be a group {{path, name, weight, reward_kwargs}}"
        else:
            part, faults = read_own(RewardPartConfig, values, f"{key}.", config)
            yield from faults
            yield from () if faults else _check_part(key, part)


def _check_part(key: str, part: RewardPartConfig) -> Iterator[str]:
    yield from check_source_file(f"{key}.path", part.path)
    if part.path is None and part.name is not None:
        yield f"{key}.name={part.name} without {key}.path; name the Python file that holds the function"
    if not math.isfinite(part.weight):
        yield f"{key}.weight={part.weight}: must be finite"
