"""`/v1/fine_tuning/alpha/graders`: checks a grader, and runs it on one answer, before a job is paid for with hours."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from reinforge.interfaces import ChatModel
from reinforge.limits import get_limits
from reinforge.protocols.openai.graders.grading import Grade, Grading
from reinforge.protocols.openai.graders.python_grader import PythonGraders, open_python_graders
from reinforge.protocols.openai.graders.schema import Grader, LabelModel, Multi, ScoreModel, StringCheck, TextSimilarity
from reinforge.protocols.openai.graders.templates import GradedSample
from reinforge.protocols.openai.server.request import check_grader
from reinforge.rollout.http.exchange import read_beside
from reinforge.serving.models import ServedModels
from reinforge.serving.routes import READER, ApiError, Feature, decode_object, read_bytes, write_json

FLAGS = (
    "formula_parse_error",
    "sample_parse_error",
    "truncated_observation_error",
    "unresponsive_reward_error",
    "invalid_variable_error",
    "other_error",
    "python_grader_server_error",
    "python_grader_runtime_error",
    "model_grader_server_error",
    "model_grader_refusal_error",
    "model_grader_parse_error",
)
"""OpenAI's names of the kinds of errors."""
SHORT_GRADER = 2048  # bytes of a request whose templates take no time, however often they repeat its answer


class GradersApi(Feature):
    def __init__(self, served: ServedModels, *, allow_python: bool = False):
        self.served, self.allow_python = served, allow_python
        self._python: PythonGraders | None = None
        self._stack = AsyncExitStack()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/fine_tuning/alpha/graders/run", self.run),
            web.post("/v1/fine_tuning/alpha/graders/validate", self.validate),
        ]

    async def start(self) -> None:
        if self.allow_python:
            self._python = await self._stack.enter_async_context(open_python_graders())

    async def close(self) -> None:
        await self._stack.aclose()

    async def validate(self, request: web.Request) -> web.Response:
        grader, _, _ = await self._read(request)
        return write_json({"grader": grader.model_dump(mode="json", exclude_unset=True)})

    async def run(self, request: web.Request) -> web.Response:
        """Grades one answer; a grader that fails has no reward, and the errors say why."""
        grader, body, sent = await self._read(request)
        text, item = body.get("model_sample"), body.get("item")
        most = get_limits().reply_chars
        if not isinstance(text, str) or len(text) > most:
            message = f"model_sample must be the text of an answer, at most {most:,} characters"
            raise ApiError(400, message, param="model_sample")
        if item is not None and not isinstance(item, dict):
            raise ApiError(400, "item must be an object", param="item")

        async def find_model(name: str) -> ChatModel:
            return self.served.find(name).llm

        parts = grader.graders.values() if isinstance(grader, Multi) else [grader]
        if len(sent) > SHORT_GRADER and all(isinstance(each, StringCheck | TextSimilarity) for each in parts):
            grade = await request.config_dict[READER].read(grade_text, sent, kind=TypeAdapter(Grade), short=0)
        else:
            grade = await Grading(grader, find_model, self._python).grade(item or {}, GradedSample(text))
        if grade.is_too_long:
            raise ApiError(400, grade.error, param="grader")
        return write_json(describe_grade(grader, grade))

    async def _read(self, request: web.Request) -> tuple[Grader, dict[str, Any], bytes]:
        def read(text: bytes) -> tuple[Grader, dict[str, Any], bytes]:
            body = decode_object(text)
            return check_grader(body.get("grader"), allow_python=self.allow_python), body, text

        return await read_beside(read, await read_bytes(request, only_settings=True))


def grade_text(sent: bytes) -> Grade:
    """Returns the grade of a request whose grader compares strings, in the process that reads long bodies."""
    body = decode_object(sent)
    grading = Grading(check_grader(body["grader"], allow_python=False))
    with asyncio.Runner() as runner:
        return runner.run(grading.grade(body.get("item") or {}, GradedSample(body["model_sample"])))


def describe_grade(grader: Grader, grade: Grade) -> dict[str, Any]:
    """Returns a grade in OpenAI's form; `reward` is null where there is none."""
    errors: dict[str, Any] = {name: name in grade.errors for name in FLAGS}
    for name in ("python_grader_runtime_error", "model_grader_server_error"):
        errors[f"{name}_details"] = grade.errors.get(name)
    errors["python_grader_server_error_type"] = None
    errors["messages"] = list(grade.errors.values())
    usage = {
        model: {**counts, "total_tokens": sum(counts.values()), "cached_tokens": 0, "rejected_tokens": 0}
        for model, counts in grade.tokens.items()
    }
    return {
        "reward": grade.reward,
        "sub_rewards": grade.sub_rewards,
        "model_grader_token_usage_per_model": usage,
        "metadata": {
            "name": grader.name,
            "type": grader.type,
            "errors": errors,
            "execution_time": grade.seconds,
            "scores": grade.sub_rewards or {grader.name: grade.reward},
            "sampled_model_name": grader.model if isinstance(grader, ScoreModel | LabelModel) else None,
            "token_usage": sum(sum(counts.values()) for counts in grade.tokens.values()) or None,
        },
    }
