"""Where nobody rates: an evaluator scores a share of the kept chats that have no feedback, one at a time.

    judge: {evaluator: follows_rules, share: 0.2}   =>  feedback with the source `judge`: {"score": 0.8, "label": true}

What users say of a chat replaces what the judge says of it, and is all that a comparison counts unless asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from reinforge.config.finetuning_blocks import Block
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError, Problem, StorageError
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.reference import read_recorded_reply
from reinforge.interfaces import Evaluator, GroupEvaluator
from reinforge.learning.export import read_exchange
from reinforge.learning.feedback import JUDGE, Feedback
from reinforge.learning.store import STORE, StoredChat, read_unrated
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_seed

logger = logging.getLogger(__name__)
LOOK_S = 10.0  # seconds between two times at which the server looks for chats to judge
TIMEOUT_S = 120.0  # of one evaluation
GOOD = 0.5
"""A score from this on is a thumb up, below it a thumb down."""


class ChatJudgeConfig(Block):
    """What scores chats that nobody rates."""

    evaluator: str = Field(
        description="Evaluator of the file of `train.config`; or `module:function` of a module next to this file."
    )
    share: float = Field(default=0.2, gt=0, le=1, description="Of the chats without feedback.")
    after_minutes: float = Field(default=10.0, ge=0, description="Age of a chat from which on it is judged.")
    compare: bool = Field(default=False, description="Its scores count in the comparison of versions.")


def build_item(chat: StoredChat) -> EvalInputItem:
    """Returns a chat as an evaluator gets it in a run: the messages before the reply, and the reply."""
    prompt, reply, _ = read_exchange(chat)
    row = {"id": chat.id, "messages": [*prompt, *reply]}
    item = EvalInputItem(id=chat.id, input_obj=prompt, expected_output_obj=None, full_dataset_entry=row)
    return item.copy_with_updates(output_obj=read_recorded_reply(item))


class Judge:
    """Scores chats in the background. `keep` takes the key of a chat and the feedback on it."""

    def __init__(self, config: ChatJudgeConfig, file: Path, run: Path | None, data_dir: Path):
        self.config, self._file, self._run, self._database = config, file, run, data_dir / STORE

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Evaluator]:
        """Yields the evaluator; a `ConfigError` if it does not exist, or compares answers."""
        from reinforge.trainer.setup.components import ComponentBuilder

        name, path = self.config.evaluator, "judge.evaluator"
        if ":" in name:
            function = {"_type": "python", "function": name}
            overrides = [(f"eval.evaluators.{JUDGE}.{key}", value) for key, value in function.items()]
            loaded, name = load_config(None, overrides=overrides, project_root=self._file.absolute().parent), JUDGE
        elif self._run is None:
            fix = "add `train: {config: run.yml}`, or name a function beside this file, as module:function"
            raise ConfigError(Problem(path, f"no file has an evaluator {name!r}", fix, str(self._file)))
        else:
            loaded = load_config(self._run)
            if name not in (known := loaded.config.eval.evaluators):
                fix = f"name one of {', '.join(known)}"
                raise ConfigError(Problem(path, f"{self._run} has no evaluator {name!r}", fix, str(self._file)))
        async with ComponentBuilder(loaded) as builder:
            made = await builder.get_evaluator(name)
            if isinstance(made, GroupEvaluator):
                fix = "name one that scores a reply alone"
                raise ConfigError(Problem(path, f"{name} compares answers with each other", fix, str(self._file)))
            yield made

    async def run(self, evaluator: Evaluator, keep: Callable[[str, Feedback], Awaitable[Any]]) -> None:
        seq = 0
        while True:
            try:
                while (chat := await asyncio.to_thread(self.find_next, seq)) is not None:
                    seq = chat.seq
                    await self._judge(chat, evaluator, keep)
            except StorageError as error:
                logger.warning("no chats are judged: %s", error)
            await asyncio.sleep(LOOK_S)

    def find_next(self, seq: int) -> StoredChat | None:
        """Returns the next chat in the share that is old enough and has no feedback; None: there is none now."""
        with contextlib.closing(read_unrated(self._database, seq)) as chats:
            for chat in chats:
                if 0 <= time.time() - chat.started_s < self.config.after_minutes * 60:  # later: a clock was set back
                    return None
                if stable_seed(0, JUDGE, chat.id) < self.config.share * 2**63:
                    return chat
        return None

    async def _judge(
        self, chat: StoredChat, evaluator: Evaluator, keep: Callable[[str, Feedback], Awaitable[Any]]
    ) -> None:
        found = await score_item(evaluator, build_item(chat), TIMEOUT_S)
        if found.error is not None:
            logger.warning("%s has no score of the chat %s: %s", self.config.evaluator, chat.id, found.error)
            return
        score = float(found.score)
        label = {"label": score >= GOOD} if 0 <= score <= 1 else {}
        await keep(chat.key, Feedback(id=chat.id, score=score, source=JUDGE, **label))
