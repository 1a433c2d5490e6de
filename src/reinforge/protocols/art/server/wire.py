"""What clients of ART send and get as JSON: fields of a request, pages of a list, events of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from reinforge.protocols.art.server.model import ARTJob
from reinforge.serving.routes import ApiError, read_page_query, write_page

MAX_NAME = 200
PAGE = 100
_NAME = re.compile(r"[\w.@+ -]{1,200}")
_STEP = re.compile(r".*@\d+")  # names of steps


def read_name(body: Mapping[str, Any], field: str, default: str | None) -> str:
    value = body.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        message = f"{field}: expected 1 to {MAX_NAME} letters, digits and . _ - + @ or spaces, found {value!r:.100}"
        raise ApiError(422, message, param=field)
    if field == "name" and _STEP.fullmatch(value):
        message = f"name: {value!r:.100} is the name of a step; choose one without @ and a number at its end"
        raise ApiError(422, message, param=field)
    return value


def read_object(body: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = body.get(field) or {}
    if not isinstance(value, dict):
        raise ApiError(422, f"{field}: expected an object, found {type(value).__name__}", param=field)
    return value


def read_steps(body: Mapping[str, Any], field: str) -> list[int]:
    value = body.get(field)
    if not isinstance(value, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        raise ApiError(422, f"{field}: expected a list of whole numbers", param=field)
    return value


def read_trainer_args(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the user of the NeMo Agent Toolkit set as `training`.

    Its plugin sends its own defaults with each job, a learning rate of 5e-5, and the user's settings with the model.
    """
    internal = model.get("_internal_config")
    given = read_object(internal, "trainer_args") if isinstance(internal, dict) else {}
    names = {"learning_rate": "learning_rate", "beta": "kl_penalty_coef"}
    return {name: given[theirs] for theirs, name in names.items() if given.get(theirs) is not None}


def answer_page(request: web.Request, rows: list[dict[str, Any]]) -> web.Response:
    after, limit = read_page_query(request, usual=PAGE, most=10_000)
    ids = [row["id"] for row in rows]
    first = ids.index(after) + 1 if after in ids else 0
    page = rows[first : first + limit]
    return write_page(page, first + len(page) < len(rows))


def describe_events(job: ARTJob) -> list[dict[str, Any]]:
    """Returns what has happened in a job so far, as its clients get it."""
    events: list[tuple[str, dict[str, Any]]] = [("training_started", {"num_sequences": job.num_sequences})]
    if job.result is not None and job.result.error is None:
        if job.result.metrics.get("num_updates"):
            events.append(("gradient_step", dict(job.result.metrics)))
        events.append(("training_ended", {"step": job.result.step}))
    elif job.result is not None:
        events.append(("training_failed", {"error_message": job.result.error}))
    return [{"id": f"{job.id}-event-{n}", "type": kind, "data": data} for n, (kind, data) in enumerate(events)]
