"""Uploads an exported folder to the Hugging Face hub, with the token of the environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from reinforge.errors import BackendError, BackendUnavailable, ConfigError, Problem, boundary
from reinforge.files import MANIFEST
from reinforge.safe_text import redact_secrets, remember_secret

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
WHERE = "--push"


class HubClient(Protocol):
    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        """Creates a repository for a model, if there is none of that name."""

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, ignore_patterns: list[str]) -> Any:
        """Uploads a folder as one commit."""


def make_client(hub_id: str) -> HubClient:
    """Returns the client of the hub; HF_TOKEN or `hf auth login` has the token, which is never printed."""
    if not HUB_ID.fullmatch(hub_id):
        raise ConfigError(Problem(WHERE, f"{hub_id!r} is no name of a model on the hub", "write owner/name"))
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError:
        message = "the package huggingface_hub is not installed"
        raise ConfigError(Problem(WHERE, message, "pip install huggingface_hub")) from None
    token = get_token()
    if not token:
        message = "there is no token for the hub"
        raise ConfigError(Problem(WHERE, message, "set HF_TOKEN to a token with write access, or run hf auth login"))
    remember_secret(token)
    client: HubClient = HfApi(token=token, library_name="reinforge")
    return client


def push_folder(client: HubClient, folder: Path, hub_id: str, message: str, *, private: bool) -> str:
    """Uploads a folder and returns where it is; only the owner can see a new repository that is private."""
    try:
        with boundary(BackendError, f"cannot upload to {hub_id}"):
            created = client.create_repo(hub_id, private=private, exist_ok=True)
            client.upload_folder(
                repo_id=hub_id, folder_path=str(folder), commit_message=message, ignore_patterns=[MANIFEST]
            )
    except BackendError as error:
        again = f"the export is complete in {folder}; upload it again with: hf upload {hub_id} {folder}"
        raise BackendUnavailable(redact_secrets(f"{error}\n    fix: {again}")) from None
    return str(created)
