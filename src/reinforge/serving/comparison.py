"""For the chat page: the base model of a run, to be served beside it, and questions of the run's data.

support-1      the model of the run
support-1@0    the model that it began with, from its first checkpoint
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.rows import BASELINE
from reinforge.runs.saved_model import SavedModel
from reinforge.serving.routes import Feature, write_json

MAX_EXAMPLES = 20


def list_base_models(served: dict[str, str], found: SavedModel) -> dict[str, str]:
    """Returns the folder of the base model of each served model of a run, by name; empty: none was saved."""
    if found.run is None:
        return {}
    base = found.run / Checkpoints(found.run).name(0)
    folders = {f"{name}@0": base / Path(path).relative_to(found.path) for name, path in served.items()}
    return {name: str(folder) for name, folder in folders.items() if folder.is_dir()}


def read_questions(run: Path) -> list[dict[str, Any]]:
    """Returns the messages that the first model calls of validation episodes sent: held-out examples.

    Calls with tools, which the page has not, or with other content than text are left out.
    """
    reader, found = JournalReader(run), []
    for number in range(min(MAX_EXAMPLES, reader.count_episodes("validate", BASELINE))):
        episode = reader.episode_at(number, "validate", BASELINE)
        call = episode.data["calls"][0] if episode is not None and episode.data["calls"] else {}
        messages = [{"role": each["role"], "content": each.get("content")} for each in call.get("messages", ())]
        is_text = all(isinstance(each["content"], str) for each in messages)
        if messages and is_text and messages[-1]["role"] == "user" and not call["tools"]:
            found.append({"messages": messages})
    return found


class RunQuestions(Feature):
    """The questions of the served runs at `/chat/examples?model=NAME`."""

    def __init__(self) -> None:
        self.by_model: dict[str, list[dict[str, Any]]] = {}

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/chat/examples", self.list_questions)]

    async def list_questions(self, request: web.Request) -> web.Response:
        """Returns the questions of a model's run; none for a model of no run."""
        return write_json({"data": self.by_model.get(request.query.get("model", ""), [])})
