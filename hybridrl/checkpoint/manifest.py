"""The manifest of a checkpoint: its files with their hashes, and the run and model that it belongs to."""

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.checkpoint_files import digest, in_threads, load_json, save_json, sha256, walk
from hybridrl.errors import CheckpointError
from hybridrl.utils.files import sync_file, sync_folder
from hybridrl.version import __version__

MANIFEST = "manifest.json"
FORMAT = 2  # 1 had no hash of the manifest itself
_OWN_HASH = "sha256"


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`.

    Attributes:
        format: version of this layout.
        step: the training step after which the state was taken.
        sequence: running number of the save in its run folder, which orders saves without a clock.
        files: path relative to the checkpoint -> {"size": bytes, "sha256": hex digest}.
        hybridrl: version of the package that wrote it.
        created: UTC time, ISO 8601.
        identity: identifies the model (architecture, sizes, vocabulary); compared at resume.
        world: ranks and devices that wrote it, for information only.
        config_digest: hash of the resolved configuration, or None.
    """

    format: int
    step: int
    sequence: int
    files: dict[str, dict[str, Any]]
    hybridrl: str
    created: str
    identity: dict[str, Any] = field(default_factory=dict)
    world: dict[str, Any] = field(default_factory=dict)
    config_digest: str | None = None

    @property
    def size(self) -> int:
        """The size of all files together, in bytes."""
        return sum(entry["size"] for entry in self.files.values())


def write_manifest(
    folder: Path,
    step: int,
    sequence: int,
    *,
    identity: Mapping[str, Any],
    world: Mapping[str, Any],
    config_digest: str | None,
) -> Manifest:
    """Make every file of `folder` durable, hash it, and write `manifest.json` last.

    Raises:
        CheckpointError: the folder has no files.
    """
    files, folders = walk(folder)
    names = [path.relative_to(folder).as_posix() for path in files]
    if not files:
        raise CheckpointError(f"step {step}: nothing was written into {folder}; a checkpoint needs files")

    def finish(path: Path) -> dict[str, Any]:
        entry = {"size": path.stat().st_size, "sha256": sha256(path)}
        sync_file(path)
        return entry

    manifest = Manifest(
        format=FORMAT,
        step=step,
        sequence=sequence,
        files=dict(zip(names, in_threads(finish, files), strict=True)),
        hybridrl=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        identity=dict(identity),
        world=dict(world),
        config_digest=config_digest,
    )
    data = asdict(manifest)
    save_json(folder / MANIFEST, data | {_OWN_HASH: digest(data)})
    for inner in folders:
        sync_folder(inner)
    sync_folder(folder)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check its form and its own hash.

    Raises:
        CheckpointError: the manifest is missing, unreadable, altered, or of a later format.
    """
    path = Path(folder) / MANIFEST
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is no finished checkpoint of hybridrl")
    return manifest_of(load_json(path), path)


def manifest_of(data: Any, path: Path | str) -> Manifest:
    """Return the manifest with this content, and check its form and its own hash.

    Args:
        data: plain data.
        path: where it was read, for messages.

    Raises:
        CheckpointError: it was altered, or is of a later format.
    """
    if isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] > FORMAT:
        raise CheckpointError(f"{path} has format {data['format']}, this version reads up to {FORMAT}: update hybridrl")
    try:
        own_hash = data.pop(_OWN_HASH, None)
        if own_hash != digest(data) and (own_hash is not None or data["format"] > 1):
            raise CheckpointError(f"{path} is corrupt: it has other content than was saved (its own hash differs)")
        manifest = Manifest(**data)
        sound = isinstance(manifest.step, int) and isinstance(manifest.sequence, int) and manifest.size >= 0
        sound = sound and all(isinstance(entry["sha256"], str) for entry in manifest.files.values())
    except (TypeError, KeyError, AttributeError) as exc:
        raise CheckpointError(f"{path} is corrupt: {type(exc).__name__}: {exc}") from exc
    if not sound:
        raise CheckpointError(f"{path} is corrupt: step, sequence or a file's hash is not what it should be")
    return manifest


def verify(folder: Path, identity: Mapping[str, Any] | None = None) -> Manifest:
    """Check that a checkpoint is complete and belongs to this model, before anything in it is read.

    The identity is checked first (it needs no reading), then the presence and size of every file, then every hash.

    Args:
        folder: `global_step_N`.
        identity: identifies the model of this run; the manifest must have every entry with the same value.

    Returns:
        The manifest.

    Raises:
        CheckpointError: a file is missing, additional, shortened or altered, or the model differs; each is named.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if identity:
        check_identity(folder, manifest, identity)
    present = {path.relative_to(folder).as_posix(): path for path in walk(folder)[0]}
    present.pop(MANIFEST, None)
    faults = [f"{name} is missing" for name in manifest.files if name not in present]
    faults += [f"{name} is not in the manifest" for name in present if name not in manifest.files]
    for name, path in present.items():
        expected = manifest.files.get(name, {}).get("size")
        if expected is not None and path.stat().st_size != expected:
            faults.append(f"{name} has {path.stat().st_size} bytes instead of {expected}")
    if not faults:
        names = list(manifest.files)
        digests = in_threads(sha256, [folder / name for name in names])
        for name, digest in zip(names, digests, strict=True):
            if digest != manifest.files[name]["sha256"]:
                faults.append(f"{name} has other content than was saved (sha256 {digest[:12]}...)")
    if faults:
        raise CheckpointError(f"checkpoint {folder} is corrupt:\n  " + "\n  ".join(faults))
    return manifest


def ranked(manifests: Mapping[int, Manifest]) -> list[int]:
    """Return the steps of checkpoints, starting with the one to resume from.

    The newest checkpoint is the one saved last, which need not have the highest step: a run that went back to an
    earlier step leaves checkpoints of later steps that it abandoned. Those come last.
    """
    if not manifests:
        return []
    newest = max(manifests, key=lambda step: manifests[step].sequence)
    return sorted(manifests, key=lambda step: (step <= newest, manifests[step].sequence), reverse=True)


def check_identity(folder: Path | str, manifest: Manifest, identity: Mapping[str, Any]) -> None:
    """Raise a CheckpointError that shows both sides, unless the manifest agrees with every entry of `identity`."""
    # Compare after a JSON round trip, so that a tuple equals the list it was saved as.
    identity = json.loads(json.dumps(dict(identity)))
    differences = [
        f"{key}: checkpoint {manifest.identity.get(key, 'not recorded')!r}, this run {value!r}"
        for key, value in identity.items()
        if key not in manifest.identity or manifest.identity[key] != value
    ]
    if differences:
        raise CheckpointError(
            f"checkpoint {folder} is of another model:\n  " + "\n  ".join(differences) + "\nUse the model that it was "
            "trained from, another trainer.default_local_dir, or trainer.resume_mode=disable to start over."
        )
