"""Models by hub id: found in the cache or at the hub without minutes of retries, and checked before they are loaded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from reinforge.engine.model.architecture import find_untrainable
from reinforge.engine.model.model_files import (
    ADAPTER_CONFIG,
    CONFIG,
    SMALL_FILES,
    TOKENIZER_CONFIG,
    check_files,
    check_tokenizer_settings,
    read_json,
)
from reinforge.engine.model.source import ModelSource, find_base_source
from reinforge.errors import BackendUnavailable, ConfigError, Problem

PROBE_S = 4.0  # seconds in which the hub has to answer; HF_HUB_ETAG_TIMEOUT sets another time


def check_model_source(source: str | Path, path: str, *, weights: bool = True, revision: str | None = None) -> bool:
    """Checks a model and the base model of an adapter; returns True if only files on this machine may be used.

    Args:
        path: The setting that names it, for messages.
        weights: Its weights are loaded, not only its configuration.

    Raises:
        ConfigError: It refers to code, to weights outside of it, or to an adapter as the base of an adapter.
        BackendUnavailable: It is a hub id, and neither the cache has it nor does the hub answer.
    """
    is_offline = is_hub_unreachable(source, revision)
    folder = find_folder(source, SMALL_FILES, local_only=is_offline, revision=revision)
    if folder is None:
        return is_offline
    is_only_local = is_offline or Path(source).is_dir()
    problems = check_files(folder, path, is_complete=weights and Path(source).is_dir())
    base = None if problems else find_base_source(folder, path)
    if base is not None and not base.is_gguf:
        is_offline = is_hub_unreachable(base.location, base.revision)
        is_only_local &= is_offline or base.is_folder
        below = find_folder(base.location, SMALL_FILES, local_only=is_offline, revision=base.revision)
        if below is not None and (below / ADAPTER_CONFIG).exists():
            message = f"{base.name} is an adapter, too; the base of an adapter has to be a model"
            problems = [Problem(path, message, "set base_model_name_or_path to a model without adapters")]
        elif below is not None:
            problems = check_files(below, path, is_complete=weights and base.is_folder)
        problems = [
            replace(each, message=f"{source} holds adapters of {base.name}: {each.message}") for each in problems
        ]
    if problems:
        raise ConfigError(problems)
    return is_only_local


def check_trainable(source: ModelSource, path: str) -> None:
    """Checks that a model generates text in a way that the engine can train, before its weights are downloaded."""
    folder = find_folder(source.location, SMALL_FILES, local_only=True, revision=source.revision)
    settings = read_json(folder / CONFIG) if folder is not None else None
    if settings is not None and (found := list(find_untrainable(settings))):
        raise ConfigError([Problem(path, f"{source.name} {message}", fix) for message, fix in found])


def find_adapter_base(source: str | Path, path: str, revision: str | None = None) -> ModelSource | None:
    """Returns the base model of an adapter, after `check_model_source` has checked both; None: it is not an adapter."""
    folder = find_folder(source, SMALL_FILES, local_only=True, revision=revision)
    return None if folder is None else find_base_source(folder, path)


def check_tokenizer_source(source: str | Path, path: str, revision: str | None = None) -> bool:
    """Checks a tokenizer as `check_model_source` does a model; returns True if only local files may be used."""
    is_offline = is_hub_unreachable(source, revision)
    folder = find_folder(source, (TOKENIZER_CONFIG,), local_only=is_offline, revision=revision)
    if folder is not None and (problems := check_tokenizer_settings(folder, path)):
        raise ConfigError(problems)
    return is_offline or Path(source).is_dir()


def is_hub_unreachable(source: str | Path, revision: str | None = None) -> bool:
    """Returns True for a hub id that can only come from the cache, because there is no connection to the hub."""
    if Path(source).is_dir():
        return False
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        reason: str | None = "HF_HUB_OFFLINE is set"
    else:
        reason = _probe(str(source), constants.ENDPOINT)
    if reason is None:
        return False
    names = (CONFIG, ADAPTER_CONFIG, TOKENIZER_CONFIG)
    if find_folder(source, names, local_only=True, revision=revision) is None:
        unset = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "connect this machine, or set HF_ENDPOINT"
        what, option = (source, "") if revision is None else (f"{source} at {revision}", f" --revision {revision}")
        raise BackendUnavailable(
            f"{reason}, and the cache {constants.HF_HUB_CACHE} does not have {what}; {unset}, or run `hf download "
            f"{source}{option}` where there is a network and copy that cache (HF_HUB_OFFLINE=1 then skips every "
            f"request)"
        )
    return True


def find_folder(
    source: str | Path, names: tuple[str, ...], *, local_only: bool, revision: str | None = None
) -> Path | None:
    """Returns the folder with those of a model's files that exist, fetched from the hub if needed; None: none do."""
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils import cached_file

    found = [
        cached_file(
            str(source),
            name,
            revision=revision,
            local_files_only=local_only,
            _raise_exceptions_for_gated_repo=not local_only,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=not local_only,
        )
        for name in names
    ]
    return next((Path(file).parent for file in found if file is not None), None)


def _probe(source: str, endpoint: str) -> str | None:
    """Returns why the hub cannot be reached, or None if it answers anything: one request, without retries."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(source, timeout=float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or PROBE_S))
    except (HfHubHTTPError, ValueError):  # an answer, or a name that no model has: loading says more
        return None
    except Exception as error:  # noqa: BLE001  of whichever HTTP client huggingface_hub uses
        return f"{endpoint} cannot be reached ({str(error) or type(error).__name__})"
    return None
