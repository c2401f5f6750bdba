"""Identity of the model that a setting names: the commit of a model of the hub, and the content of its files."""

import os
from pathlib import Path

from hybridrl.utils.content_digest import digest_of_files, digest_of_model, is_model

COMMIT, CONTENT = "commit ", "content "


def identities_of(model: str) -> list[str]:
    """Return what identifies a model; two names mean the same model if they have an identity in common.

    Args:
        model: a folder, or a hub id. Of a hub id, the cache of this machine says which commit was loaded last.

    Returns:
        `content ` with a digest of the weights, settings, tokenizer and code (`digest_of_model`), and `commit ` with
        the commit of the hub. Empty if there is no such folder, and nothing of it was downloaded.
    """
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        return [f"{CONTENT}{_digest(folder)}"]
    return _identities_in_cache(model)


def _digest(folder: Path) -> str:
    if is_model(folder):
        return digest_of_model(folder)
    return digest_of_files(folder, (path for path in folder.rglob("*") if path.is_file()))


def _identities_in_cache(name: str) -> list[str]:
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        commit = (cached / "refs/main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return []
    snapshot = cached / "snapshots" / commit
    has_weights = any(path.suffix in (".safetensors", ".bin") for path in snapshot.glob("*"))
    return [f"{COMMIT}{commit}", *([f"{CONTENT}{_digest(snapshot)}"] if has_weights else [])]
