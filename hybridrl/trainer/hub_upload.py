"""The trained model on the Hugging Face Hub (`trainer.hub`): its repository is opened first, and filled at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.config.schema.trainer import HubConfig
from hybridrl.errors import UserError
from hybridrl.notify import notify

if TYPE_CHECKING:
    from hybridrl.programs import ProgramResult


def open_repository(hub: HubConfig) -> None:
    """Create the repository of the settings unless it exists: a run does not end with a model that has no place.

    Raises:
        UserError: the hub cannot be reached, or refuses.
    """
    if hub.model_id is None:
        return
    from huggingface_hub import HfApi  # takes a moment

    try:
        HfApi().create_repo(hub.model_id, private=hub.private, exist_ok=True)
    except Exception as error:  # of the client, of HTTP, of sockets
        raise UserError(
            f"trainer.hub.model_id={hub.model_id}: the hub does not give this repository: {_first_line(error)}. Log in "
            "with hf auth login or set HF_TOKEN, use a name that your account may write, or leave trainer.hub.model_id "
            "away and upload afterwards: hf upload ORG/NAME FOLDER"
        ) from error


def upload_result(hub: HubConfig, result: ProgramResult, part: str) -> None:
    """Upload the model of a finished run. An upload that fails is told, with the command that repeats it.

    Args:
        part: the folder of the trained model in a checkpoint.
    """
    if hub.model_id is None:
        return
    if result.checkpoint is None or not result.finished:
        notify(f"trainer.hub.model_id={hub.model_id}: nothing is uploaded before the run is finished")
        return
    folder = result.checkpoint / part / "hf_model"
    try:
        address = upload_model(folder, hub.model_id, private=hub.private, revision=hub.revision)
    except Exception as error:  # the model is saved, and the result must not be lost
        again = f"hf upload {hub.model_id} {folder}" + (f" --revision {hub.revision}" if hub.revision else "")
        notify(f"the model in {folder} is not uploaded: {_first_line(error)}. To repeat it: {again}", "error")
        return
    notify(f"the model is uploaded: {address}")


def upload_model(
    folder: Path, repository: str, *, private: bool | None = None, revision: str | None = None, message: str = ""
) -> str:
    """Upload a folder with a model to the Hugging Face Hub, and return the address of the commit.

    Args:
        folder: a model in Hugging Face format.
        repository: ORG/NAME; it is created unless it exists.
        private: of a new repository; None: as the account's settings say.
        revision: a branch, which is created unless it exists; None: main.
        message: of the commit.

    Raises:
        UserError: there is no such folder.
        HfHubHTTPError, OSError: the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no model in Hugging Face format to upload")
    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repository, branch=revision, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repository, folder_path=folder, revision=revision, commit_message=message or "Trained with hybridrl"
    )
    return str(commit.commit_url)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
