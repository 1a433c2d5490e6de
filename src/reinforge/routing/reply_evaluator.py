"""Evaluators whose score of a reply is its confidence: they are shown a request and its reply, and nothing else.

--router_evaluator json_schema                              {"_type": "json_schema"}
--router_evaluator checks:is_valid                          {"_type": "python", "function": "checks:is_valid"}
--router_evaluator '{_type: json_schema, schema: f.json}'   as it stands
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from reinforge.config.document import parse_yaml
from reinforge.config.loader import build_config
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.evaluators.base import score_item
from reinforge.interfaces import Evaluator, GroupEvaluator
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelReply, ModelRequest

logger = logging.getLogger(__name__)
KEY, SECTION = "evaluator", "eval.evaluators."
TIMEOUT_S = 10.0


def read_evaluator(text: str) -> dict[str, Any]:
    """Returns the settings of an evaluator that an option names: `_type`, `module:function`, or YAML of a mapping."""
    if text.lstrip().startswith("{"):
        return dict(parse_yaml(text).data)
    return {"_type": "python", "function": text} if ":" in text else {"_type": text}


class ReplyEvaluator:
    """Scores replies; the first one without a score is logged."""

    def __init__(self, evaluator: Evaluator):
        self._evaluator, self._has_warned = evaluator, False

    async def score(self, request: ModelRequest, reply: ModelReply) -> float | None:
        output = [reply.message] if reply.message.get("tool_calls") else reply.message.get("content") or ""
        shown: dict[str, Any] = {"input_obj": request.messages, "output_obj": output, "full_dataset_entry": {}}
        item = EvalInputItem(id="", expected_output_obj=None, **shown)
        found = await score_item(self._evaluator, item, TIMEOUT_S)
        if found.error is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("the router's evaluator has no score for a reply (this is said once): %s", found.error)
        return found.as_reward()


@asynccontextmanager
async def open_evaluator(settings: Mapping[str, Any], folder: Path, source: str) -> AsyncIterator[ReplyEvaluator]:
    """Yields an evaluator that needs no expected answer.

    Args:
        folder: Where `module:function` and files are looked up.
        source: The file or the option with the settings, for messages.

    Raises:
        ConfigError: It cannot be built, or compares replies with an expected answer.
    """
    async with AsyncExitStack() as stack:
        try:
            loaded = build_config({"eval": {"evaluators": {KEY: dict(settings)}}})
            builder = await stack.enter_async_context(ComponentBuilder(replace(loaded, project_root=folder)))
            evaluator = await builder.get_evaluator(KEY)
            if getattr(evaluator, "needs_answer", False) or isinstance(evaluator, GroupEvaluator):
                fix = "name one that reads the reply alone, such as `json_schema`, or a function of yours"
                raise ConfigError(Problem(KEY, "compares with an expected answer, which a request does not have", fix))
        except ConfigError as error:
            found = [replace(each, path=each.path.removeprefix(SECTION), location=source) for each in error.problems]
            raise ConfigError(found) from error
        yield ReplyEvaluator(evaluator)
