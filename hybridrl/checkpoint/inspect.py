"""`python -m hybridrl.checkpoint.inspect DIR`: lists the checkpoints of a run, and whether they are complete.

It only reads, so a run may write at the same time.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridrl.checkpoint.manifest import MANIFEST, read_manifest, verify
from hybridrl.checkpoint.store import RunStore
from hybridrl.errors import CheckpointError


def describe(folder: Path, *, check: bool) -> tuple[str, bool]:
    """Return one line about a checkpoint, and whether it is complete (judged by its manifest alone unless `check`)."""
    try:
        manifest = verify(folder) if check else read_manifest(folder)
    except CheckpointError as exc:
        return f"{folder.name:<20} corrupt  " + str(exc).replace("\n", "\n" + " " * 22), False
    state = "complete" if check else "not checked"
    ranks = f"  {manifest.world}" if manifest.world else ""
    return (
        f"{folder.name:<20} {state}  {len(manifest.files)} files, {manifest.size / 2**20:.1f} MiB, "
        f"saved {manifest.created} by hybridrl {manifest.hybridrl}{ranks}",
        True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 if every checkpoint is complete, 1 if one is corrupt, 2 if there is none."""
    parser = argparse.ArgumentParser(prog="python -m hybridrl.checkpoint.inspect", description="List checkpoints.")
    parser.add_argument("folder", type=Path, help="a run's folder (trainer.default_local_dir) or one global_step_N")
    parser.add_argument("--no-hash", action="store_true", help="read the manifests only, do not hash the files")
    options = parser.parse_args(arguments)
    single = (options.folder / MANIFEST).is_file()
    store = RunStore(options.folder)
    folders = [options.folder.resolve()] if single else [store.folder(step) for step in store.steps()]
    if not folders:
        print(f"{options.folder} holds no checkpoint (no global_step_N folder)", file=sys.stderr)
        return 2
    lines = [describe(folder, check=not options.no_hash) for folder in folders]
    print("\n".join(line for line, _ in lines))
    newest = store.newest() if not single else None
    if newest is not None:
        print(f"saved last: global_step_{newest}")
    return 0 if all(complete for _, complete in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
