"""Which entry of `llms` answers a request of an agent's HTTP client, by more than the name that it asks for.

llms: {agent: policy, titles: {policy, train: false, match: {program: claude_code}}}, workflow.llm: agent
a request without tools whose reply must be {"title": ...}    -> titles: the policy answers, and is not trained on it
any other request                                             -> agent
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Self

from reinforge.config.schema import CallMatch
from reinforge.dialects.chat_call import ChatCall

AUXILIARY_CALLS = {
    "claude_code": [
        CallMatch(tools=False, properties=["title"]),
        CallMatch(tools=False, model="*haiku*"),  # what it reads of web pages, topics
        CallMatch(system="tasked with summarizing conversations"),
    ],
    "codex": [CallMatch(prompt="You are performing a CONTEXT CHECKPOINT COMPACTION")],
    "opencode": [
        CallMatch(system="You are a title generator"),
        CallMatch(system="Summarize what was done in this conversation"),
    ],
    "qwen_code": [
        CallMatch(system="Generate a concise, sentence-case title"),
        CallMatch(system="You are the component that summarizes internal chat history"),
        CallMatch(system="You generate session recaps"),
        CallMatch(system="You are selecting memories"),
        CallMatch(system="Write a short summary label"),
    ],
}
"""Program -> its calls beside its work, as its current version makes them."""


@dataclass(frozen=True, slots=True)
class LLMRoutes:
    """Which entry of `llms` answers which request.

    Attributes:
        matches: The requests that an entry answers, whatever model they name; the first entry counts.
        embedders: Entries that can embed texts.
        answers_any: Whether the default entry answers requests for models that no entry has.
    """

    matches: Mapping[str, Sequence[CallMatch]] = field(default_factory=dict)
    embedders: Sequence[str] = ()
    answers_any: bool = True

    def find(self, call: ChatCall) -> str | None:
        return next((entry for entry, found in self.matches.items() if any(holds(each, call) for each in found)), None)

    def dump(self) -> dict[str, Any]:
        """Returns the routes as a message to a worker."""
        matches = {
            entry: [each.model_dump(exclude_none=True) for each in found] for entry, found in self.matches.items()
        }
        return {"matches": matches, "embedders": list(self.embedders), "answers_any": self.answers_any}

    @classmethod
    def load(cls, message: Mapping[str, Any]) -> Self:
        matches = {entry: [CallMatch(**each) for each in found] for entry, found in message["matches"].items()}
        return cls(matches, message["embedders"], message["answers_any"])


def holds(match: CallMatch, call: ChatCall) -> bool:
    given = call.arguments
    messages = given.get("messages") or ()
    if match.program is not None and not any(holds(each, call) for each in AUXILIARY_CALLS[match.program]):
        return False
    if match.model is not None and not fnmatchcase(call.model.lower(), match.model.lower()):
        return False
    if match.tools is not None and match.tools != bool(given.get("tools")):
        return False
    systems = [each for each in messages if each.get("role") in ("system", "developer")]
    if match.system is not None and not any(match.system in line for line in _read_first_lines(systems)):
        return False
    if match.prompt is not None and not any(match.prompt in line for line in _read_first_lines(messages[-1:])):
        return False
    schema = ((given.get("response_format") or {}).get("json_schema") or {}).get("schema") or {}
    return match.properties is None or sorted(match.properties) == sorted(schema.get("properties") or ())


def _read_first_lines(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the first line of each message, and of each block of text in it."""
    for message in messages:
        content = message.get("content")
        for block in content if isinstance(content, list) else [{"text": content}]:
            text = block.get("text") if isinstance(block, dict) else None
            if isinstance(text, str):
                yield text.lstrip().partition("\n")[0]
