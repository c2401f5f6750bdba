"""Makes a Hugging Face model of the shards in a checkpoint.

    python -m hybridrl.checkpoint.merge CHECKPOINT --out DIR

CHECKPOINT is `global_step_N`, or a model's folder in it: `actor`, `critic` or that of another role, or `model` of
fine-tuning. It may come from any training engine on any number of ranks, also from verl's FSDP workers. An adapter
(LoRA) is merged into its base, and is written by itself into `lora_adapter`; of a run with `model.load_in_4bit`, the
base is the one that the run computed with, rounded to 4 bits and back. Not much more than the file that is being
written is in memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedConfig

from hybridrl.checkpoint.verl_shards import VerlShards, is_verl_checkpoint
from hybridrl.config.roles import POLICY, ROLES, RoleSpec
from hybridrl.engine import saved_parts
from hybridrl.engine.fsdp import adapted
from hybridrl.engine.hf_files import ModelFiles, stored_dtype, write_config
from hybridrl.engine.saved_slices import SavedSlices, ScatteredSlices
from hybridrl.errors import CheckpointError, ModelError, UserError
from hybridrl.layouts.slices import whole
from hybridrl.models import four_bit, loading, lora, value
from hybridrl.models.kinds import KINDS
from hybridrl.models.model_config import load_model_config
from hybridrl.registry import import_external_lib

#: folder and settings of the model of supervised training, which has no roles
_MODEL = "model"


@dataclass(frozen=True)
class Origin:
    """The model that a run was started with; the fields are the keys of a `ModelConfig`."""

    path: str
    hf_config_path: str | None = None
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    custom_chat_template: str | None = None


def merge(
    checkpoint: Path, out: Path, model: str | None = None, dtype: str | None = None, trust_remote_code: bool = False
) -> Path:
    """Write the weights of a checkpoint as Hugging Face loads them, with configuration and tokenizer.

    Args:
        checkpoint: `global_step_N` with one model, or a model's folder in it.
        out: folder to write into; it holds no weights yet.
        model: the model that the run was started with; None: the one that the checkpoint or its run names.
        dtype: of the weights; None: that of `model`.
        trust_remote_code: run code that comes with the model.

    Returns:
        The folder of the shards that were read.

    Raises:
        UserError: the checkpoint or the model cannot be read, or `out` holds weights already.
    """
    folder = _model_folder(Path(checkpoint))
    is_adapter = (folder / "model" / lora.CONFIG_FILE).is_file()
    if any(match for pattern in loading.WEIGHT_PATTERNS for match in out.glob(pattern)):
        raise CheckpointError(f"{out} holds weights already; name another folder with --out")
    origin = _base_of(folder, model, trust_remote_code) if is_adapter else _origin(folder, model, trust_remote_code)
    config = load_model_config(
        origin.hf_config_path or origin.path, origin.trust_remote_code, override=origin.override_config
    )
    target_dtype = stored_dtype(config) if dtype is None else loading.resolve_dtype(dtype, "--dtype")
    files = ModelFiles(out)
    with VerlShards(folder) if is_verl_checkpoint(folder) else SavedSlices(folder / "model") as saved:
        kind = _kind(frozenset(name.removeprefix(lora.PREFIX) for name in saved.names))
        has_head = not KINDS[kind].predicts_tokens
        if is_adapter:
            tensors = _with_adapter(saved, folder / "model", origin, config, kind, out)
        else:
            tensors = _checkpoint_tensors(saved, config, origin.trust_remote_code, has_head)
        for name, tensor in tensors:
            keeps = target_dtype is None or _is_buffer(name) or not tensor.is_floating_point()
            files.add(name, tensor if keeps else tensor.to(target_dtype))
    files.finish()
    write_config(config, kind, files, out)
    saved_parts.save_tokenizer(origin, out)
    return folder


def _model_folder(checkpoint: Path) -> Path:
    """The folder of the one model in a checkpoint."""

    def holds_model(folder: Path) -> bool:
        return is_verl_checkpoint(folder) or any((folder / "model").glob("*.safetensors"))

    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: there is no such folder")
    if holds_model(checkpoint):
        return checkpoint
    parts = sorted(part for part in checkpoint.iterdir() if part.is_dir())
    folders = [part for part in parts if holds_model(part)]
    if len(folders) == 1:
        return folders[0]
    if folders:
        raise CheckpointError(f"{checkpoint} holds {len(folders)} models: name one of {', '.join(map(str, folders))}")
    inside = sorted(path.name for path in checkpoint.glob("global_step_*"))
    hint = f"it holds {', '.join(inside)}: name one of these" if inside else "save with model in save_contents"
    for part in (checkpoint, *parts):
        if (part / "dist_ckpt").is_dir():
            hint = "verl's Megatron workers wrote it; make a Hugging Face model of it with verl"
    raise CheckpointError(f"{checkpoint} has no weights that can be merged (no model/*.safetensors): {hint}")


def _origin(
    folder: Path, model: str | None, trust_remote_code: bool, near: Sequence[str] = ("huggingface", "hf_model")
) -> Origin:
    """Find the model that a checkpoint's configuration and tokenizer are taken from.

    Args:
        near: folders in `folder` that may hold it.
    """
    if model is not None:
        return Origin(model, trust_remote_code=trust_remote_code)
    for name in near:
        if (folder / name / "config.json").is_file():
            return Origin(str(folder / name), trust_remote_code=trust_remote_code)
    run = folder.resolve().parent.parent / "config.yaml"
    settings = _settings(run, folder.resolve().name) if run.is_file() else None
    if not isinstance(settings, dict) or not settings.get("path"):
        raise CheckpointError(
            f"{folder} does not say which model it was trained from (there is no {run} that does): name it with --model"
        )
    fields = {name: settings[name] for name in Origin.__dataclass_fields__ if settings.get(name) is not None}
    return Origin(**{**fields, "trust_remote_code": trust_remote_code or bool(fields.get("trust_remote_code"))})


def _settings(run: Path, folder: str) -> Any:
    """The settings of the model that a run saved into a folder of this name; None if it did not save them.

    Args:
        run: its `config.yaml`.

    Raises:
        CheckpointError: the module of the run that may have registered the role cannot be imported.
    """
    config = yaml.safe_load(run.read_text(encoding="utf-8"))
    if folder == _MODEL:
        return _at(config, _MODEL)
    if _role_that_saves(folder) is None:
        try:
            import_external_lib(_at(config, f"{ROLES[POLICY].model_path}.external_lib"))
        except ModelError as error:
            raise CheckpointError(f"{run}: {error}; or name the model of {folder} with --model") from error
    spec = _role_that_saves(folder)
    return None if spec is None else _at(config, spec.model_path)


def _role_that_saves(folder: str) -> RoleSpec | None:
    return next((spec for spec in ROLES.values() if spec.saved == folder), None)


def _at(config: Any, path: str) -> Any:
    """Return the value at a dotted path in nested mappings; None if there is none."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _base_of(folder: Path, model: str | None, trust_remote_code: bool) -> Origin:
    """Find the base that a checkpoint's adapter belongs to."""
    adapter_config = json.loads((folder / "model" / lora.CONFIG_FILE).read_text(encoding="utf-8"))
    try:
        origin = _origin(folder, model, trust_remote_code, near=())
    except CheckpointError:
        origin = Origin(str(adapter_config["base_model_name_or_path"]), trust_remote_code=trust_remote_code)
    adapted.check_base(origin.path, folder / "model")
    return origin


def _with_adapter(
    saved: ScatteredSlices, part: Path, origin: Origin, config: PreTrainedConfig, kind: str, out: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Write the adapter by itself into a folder of `out`, and yield the tensors of the base with it merged."""
    own = dict(saved.whole_tensors())
    settings = lora.read_config(part)
    lora.save(out / lora.FOLDER, settings, own)
    build, read = KINDS[kind].build, KINDS[kind].open
    module = build(config, torch.float32, origin.trust_remote_code)
    adapter = lora.attach_saved(module, settings)
    values = {name: own[lora.file_name(name)] for name in adapter.names}
    weights = adapted.AdaptedWeights(read(origin.path, config, "auto", origin.trust_remote_code), values, module)
    rounded_to = adapted.base_dtype(part)
    if rounded_to is not None:
        four_bit.convert(module)
    packed = four_bit.layers_of(module)

    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        saved_names = frozenset(build(config, torch.float32, origin.trust_remote_code).state_dict())
        for name, tensor in weights.tensors():
            parts = adapter.parts_of(name)
            if name in packed and rounded_to is not None:  # the base that the adapter was trained with
                tensor = four_bit.unpack(four_bit.pack(tensor), packed[name].in_features, rounded_to)
            if parts is not None:
                tensor = adapter.merged(name, tensor, *(values[weight] for weight in parts))
            if lora.base_name(name) in saved_names:
                yield lora.base_name(name), tensor

    yield from loading.to_checkpoint_names(module, merged())


def _checkpoint_tensors(
    saved: ScatteredSlices, config: PreTrainedConfig, trust_remote_code: bool, has_head: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors under the names of Hugging Face checkpoints.

    Shards may have the names of a module that keeps several tensors of its checkpoints in one.
    """
    if has_head:
        yield from saved.whole_tensors()
        return
    module = loading.build_language_model(config, torch.float32, trust_remote_code)
    stored = frozenset(saved.names)
    own = [name for name in module.state_dict() if name in stored]
    if len(own) < len(stored):
        yield from saved.whole_tensors()
        return
    in_order = ((name, saved.read(name, whole(saved.shape(name)))) for name in own)  # the tensors of a layer together
    yield from loading.to_checkpoint_names(module, in_order)


def _kind(names: Collection[str]) -> str:
    """The kind of model that has tensors of these names; the head of a reward model has no bias."""
    if f"{value.HEAD_NAME}.weight" not in names:
        return "language_model"
    return "value_model" if f"{value.HEAD_NAME}.bias" in names else "reward_model"


def _is_buffer(name: str) -> bool:
    return name.endswith("e_score_correction_bias")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.checkpoint.merge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--model", help="the model that the run was started with; default: what the run's files name")
    parser.add_argument("--dtype", help="dtype of the weights (bfloat16, float32); default: that of the model")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args(arguments)
    try:
        folder = merge(options.checkpoint, options.out, options.model, options.dtype, options.trust_remote_code)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder} -> {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
