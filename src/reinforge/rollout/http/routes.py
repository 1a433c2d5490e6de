"""Which entry of `llms` answers a request of an agent's HTTP client, by more than the name that it asks for.

llms: {agent: policy, titles: {policy, train: false, match: {program: claude_code}}}, workflow.llm: agent
a request without tools whose reply must be {"title": ...}    -> titles: the policy answers, and is not trained on it
any other request                                             -> agent
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel

from reinforge.config.schema import CallMatch
from reinforge.dialects.chat_call import ChatCall

AUXILIARY_CALLS = {
    "claude_code": [
        CallMatch(tools=False, properties=["title"]),
        CallMatch(tools=False, model="*haiku*"),  # what it reads of web pages, topics
        CallMatch(system="tasked with summarizing conversations"),
    ],
    "codex": [CallMatch(prompt="You are performing a CONTEXT CHECKPOINT COMPACTION")],
    "gemini_cli": [CallMatch(tools=False)],  # who speaks next, loops, edits, summaries: only its work has tools
    "opencode": [CallMatch(system="You are a title generator"), CallMatch(system="Summarize what was done")],
    "qwen_code": [
        CallMatch(system="Generate a concise, sentence-case title"),
        CallMatch(system="You are the component that summarizes internal chat history"),
        CallMatch(system="You are selecting memories"),
    ],
}
"""Program -> its calls beside its work, as its current version makes them."""


class LLMRoutes(BaseModel):
    """Which entry of `llms` answers which request.

    Attributes:
        matches: The requests that an entry answers, whatever model they name; the first entry counts.
        embedders: Entries that can embed texts.
        answers_any: Whether the default entry answers requests for models that no entry has.
    """

    matches: dict[str, list[CallMatch]] = {}
    embedders: list[str] = []
    answers_any: bool = True

    def find(self, call: ChatCall) -> str | None:
        return next((entry for entry, found in self.matches.items() if any(holds(each, call) for each in found)), None)


def holds(match: CallMatch, call: ChatCall) -> bool:
    given, messages = call.arguments, call.arguments.get("messages") or []
    systems = [each for each in messages if each.get("role") in ("system", "developer")]
    schema = ((given.get("response_format") or {}).get("json_schema") or {}).get("schema") or {}
    auxiliary = AUXILIARY_CALLS[match.program] if match.program is not None else ()
    return (
        (match.program is None or any(holds(each, call) for each in auxiliary))
        and (match.model is None or fnmatchcase(call.model.lower(), match.model.lower()))
        and (match.tools is None or match.tools == bool(given.get("tools")))
        and (match.system is None or any(match.system in line for line in _read_first_lines(systems)))
        and (match.prompt is None or any(match.prompt in line for line in _read_first_lines(messages[-1:])))
        and (match.properties is None or sorted(match.properties) == sorted(schema.get("properties") or ()))
    )


def _read_first_lines(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the first line of each message, and of each block of text in it."""
    for message in messages:
        content = message.get("content")
        texts = [each.get("text") for each in content] if isinstance(content, list) else [content]
        yield from (text.lstrip().partition("\n")[0] for text in texts if isinstance(text, str))
