"""Run state on disk: renamed when complete, hashed, verified before reading, and pruned to the newest N."""

from hybridrl.checkpoint.checkpoint_files import digest, load_json, save_json
from hybridrl.checkpoint.manifest import Manifest, read_manifest, verify
from hybridrl.checkpoint.store import RunStore
from hybridrl.errors import CheckpointError

__all__ = ["CheckpointError", "Manifest", "RunStore", "digest", "load_json", "read_manifest", "save_json", "verify"]
