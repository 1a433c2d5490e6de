"""The request that creates a fine-tuning job, checked before anything is stored."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from reinforge.bounded import find_surrogate
from reinforge.errors import ConfigError, did_you_mean
from reinforge.protocols.openai.graders.schema import Grader, parse_grader
from reinforge.protocols.openai.server.records import FineTuningJob
from reinforge.serving.routes import ApiError, make_id

KEYS = (
    "model", "training_file", "validation_file", "method", "hyperparameters", "integrations", "metadata", "seed",
    "suffix", "job_key",
)  # fmt: skip
WHOLE, POSITIVE = "a whole number from 1", "a number above 0"
HYPERPARAMETERS: dict[str, dict[str, str]] = {
    "supervised": {"batch_size": WHOLE, "learning_rate_multiplier": POSITIVE, "n_epochs": WHOLE},
    "dpo": {"batch_size": WHOLE, "beta": POSITIVE, "learning_rate_multiplier": POSITIVE, "n_epochs": WHOLE},
    "reinforcement": {
        "batch_size": WHOLE,
        "compute_multiplier": POSITIVE,
        "eval_interval": WHOLE,
        "eval_samples": WHOLE,
        "learning_rate_multiplier": POSITIVE,
        "n_epochs": WHOLE,
    },
}
EFFORT = "reasoning_effort"
LIMITS = {
    "n_epochs": 1000, "batch_size": 1 << 16, "eval_interval": 1 << 20, "eval_samples": 64, "compute_multiplier": 32,
    "learning_rate_multiplier": 1e4, "beta": 1e3,
}  # fmt: skip
"""Largest values, so that a request cannot ask for what no machine does."""
MAX_PAIRS, MAX_NAME, MAX_VALUE, MAX_SUFFIX = 16, 64, 512, 64


def read_job(body: Mapping[str, Any]) -> FineTuningJob:
    """Returns the job that a request asks for."""
    if further := sorted(set(body) - set(KEYS)):
        hint = did_you_mean(further[0], KEYS)
        raise ApiError(400, f"Unrecognized request argument supplied: {', '.join(further)[:200]}{hint}")
    return FineTuningJob(
        id=make_id("ftjob"),
        created_at=int(time.time()),
        model=_read_text(body, "model"),
        training_file=_read_text(body, "training_file"),
        validation_file=_read_text(body, "validation_file") if body.get("validation_file") else None,
        method=_read_method(body),
        seed=_read_seed(body.get("seed")),
        suffix=_read_suffix(body.get("suffix")),
        metadata=_read_metadata(body.get("metadata")),
    )


def warn_of_integrations(body: Mapping[str, Any]) -> str | None:
    """Returns the warning of a job whose client asks the server to send its metrics elsewhere; None: it does not."""
    integrations = body.get("integrations") or []
    if not isinstance(integrations, list) or not all(isinstance(each, dict) for each in integrations):
        raise ApiError(400, "integrations must be a list of objects", param="integrations")
    if not integrations:
        return None
    return (
        "integrations are ignored: a request cannot make this server send data elsewhere. The metrics are in the job's "
        "events and in its result file"
    )


def read_grader(job: FineTuningJob, *, allow_python: bool) -> Grader | None:
    if job.method_type != "reinforcement":
        return None
    return check_grader(
        job.method_settings.get("grader"), allow_python=allow_python, path="method.reinforcement.grader"
    )


def check_grader(value: Any, *, allow_python: bool, path: str = "grader") -> Grader:
    try:
        return parse_grader(value, allow_python=allow_python, path=path)
    except ConfigError as error:
        raise ApiError(400, str(error), param=path, code="invalid_grader") from None


def read_job_key(body: Mapping[str, Any]) -> str | None:
    key = body.get("job_key")
    if key is not None and not _is_text(key):
        raise ApiError(400, f"job_key must be a string of at most {MAX_VALUE} characters", param="job_key")
    return key


def _read_text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not _is_text(value):
        raise ApiError(400, f"{name} must be a string", param=name, code="missing_required_parameter")
    return str(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_VALUE and find_surrogate(value) is None


def _read_method(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"type": T, T: {...}}`; without `method`, it is supervised with the deprecated hyperparameters."""
    method, old = body.get("method"), body.get("hyperparameters")
    if method is None:
        method = {"type": "supervised", "supervised": {"hyperparameters": old or {}}}
    elif old:
        raise ApiError(400, "hyperparameters belong in method; give them in one place", param="hyperparameters")
    if not isinstance(method, dict) or method.get("type") not in tuple(HYPERPARAMETERS):
        found = str(method.get("type") if isinstance(method, dict) else method)[:40]
        raise ApiError(400, f"method.type is {found!r}; allowed: {', '.join(HYPERPARAMETERS)}", param="method.type")
    kind = method["type"]
    settings = method.get(kind) or {}
    where = f"method.{kind}"
    allowed = {"hyperparameters", "grader"} if kind == "reinforcement" else {"hyperparameters"}
    if further := sorted(set(method) - {"type", kind}):
        raise ApiError(400, f"method has {', '.join(further)[:200]}, but its type is {kind}", param="method")
    if not isinstance(settings, dict) or set(settings) - allowed:
        raise ApiError(400, f"{where} must be an object with {' and '.join(sorted(allowed))}", param=where)
    if kind == "reinforcement" and not isinstance(settings.get("grader"), dict):
        raise ApiError(400, f"{where}.grader is missing", param=f"{where}.grader", code="missing_required_parameter")
    _check_hyperparameters(settings.get("hyperparameters"), kind, f"{where}.hyperparameters")
    return {"type": kind, kind: settings}


def _check_hyperparameters(given: Any, kind: str, where: str) -> None:
    if given is None:
        return
    if not isinstance(given, dict):
        raise ApiError(400, f"{where} must be an object", param=where)
    known = HYPERPARAMETERS[kind]
    for name, value in given.items():
        path = f"{where}.{name}"
        if name == EFFORT and kind == "reinforcement":
            if value not in (None, "default"):
                message = f"{EFFORT} {str(value)[:20]!r} is not supported: the model reasons as its chat template says"
                raise ApiError(400, message, param=path, code="unsupported_value")
            continue
        if name not in known:
            message = f"{kind} has no hyperparameter {name[:40]}{did_you_mean(name, known)}; it has {', '.join(known)}"
            raise ApiError(400, message, param=path)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and 0 < value <= LIMITS[name] and (known[name] != WHOLE or float(value).is_integer())
        if value not in (None, "auto") and not fits:
            message = f"{name} must be auto or {known[name]}, at most {LIMITS[name]:g}, found {repr(value)[:40]}"
            raise ApiError(400, message, param=path)


def _read_seed(seed: Any) -> int:
    if seed is None:
        return secrets.randbits(31)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
        raise ApiError(400, f"seed must be a whole number from 0, found {str(seed)[:40]}", param="seed")
    return seed


def _read_suffix(suffix: Any) -> str | None:
    if suffix is None or suffix == "":
        return None
    if not isinstance(suffix, str) or len(suffix) > MAX_SUFFIX:
        raise ApiError(400, f"suffix must be a string of at most {MAX_SUFFIX} characters", param="suffix")
    return suffix


def _read_metadata(metadata: Any) -> dict[str, str] | None:
    if metadata is None:
        return None
    is_valid = isinstance(metadata, dict) and len(metadata) <= MAX_PAIRS
    for name, value in metadata.items() if is_valid else ():
        is_valid = is_valid and isinstance(value, str) and len(name) <= MAX_NAME and len(value) <= MAX_VALUE
    if not is_valid:
        message = (
            f"metadata: at most {MAX_PAIRS} pairs of strings, names of {MAX_NAME} and values of {MAX_VALUE} characters"
        )
        raise ApiError(400, message, param="metadata")
    return dict(metadata)


def hash_request(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)
