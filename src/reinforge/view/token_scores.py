"""What the models from before and after a run's training say of the tokens of an episode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.config.policy import PolicyConfig
from reinforge.engine import import_engine
from reinforge.errors import ConfigError, Problem
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.page.chats import ModelScores
from reinforge.runs.saved_model import find_model

if TYPE_CHECKING:
    from reinforge.engine import Engine


def find_first_model(run: Path) -> Path | None:
    """Returns the folder of the weights before training; None: they are elsewhere, or of several models."""
    folder = run / Checkpoints(run).name(0)
    return folder if any(folder.glob("*.safetensors")) else None


class TokenScorer:
    """Holds the two models of the run that was asked for last; for one thread."""

    def __init__(self) -> None:
        self._run: Path | None = None
        self._description = ""
        self._engines: list[Engine] = []

    def score(self, run: Path, data: dict[str, Any]) -> tuple[str, dict[str, ModelScores]]:
        """Returns which models are compared, and the scores of an episode's replies by the ids of their calls.

        Replies whose tokens are not known have none.

        Raises:
            ConfigError: The run has not saved both models.
            EngineError: A model cannot be loaded, or has not the tokens of the episode.
        """
        from reinforge.types.request import TokenLogprobs

        self._load(run)
        known = [call for call in data["calls"] if call["token_ids"] and call["prompt_token_ids"]]
        if not known:
            return self._description, {}
        rows = [
            TokenLogprobs(tuple(call["prompt_token_ids"]), tuple(call["token_ids"]), tuple(call["logprobs"]))
            for call in known
        ]
        before, after = (engine.reply_logprobs(rows) for engine in self._engines)
        changes = (after.logprobs - before.logprobs).tolist()
        scores = zip(known, after.entropies.tolist(), changes, strict=True)
        by_call = {call["call_id"]: ModelScores(entropies, change) for call, entropies, change in scores}
        return self._description, by_call

    def _load(self, run: Path) -> None:
        if self._run == run:
            return
        self.close()
        trained, first = find_model(str(run), run.parent), find_first_model(run)
        if first is None:
            found = f"{run.name} has not saved one model from before its training"
            raise ConfigError(Problem("models", found, "the other colors need no model"))
        for path in (first, Path(trained.path)):
            self._engines.append(import_engine().load(PolicyConfig(model=str(path)), seed=0, frozen=True))
        self._description = f"Entropy of {trained.description}; change of log-prob from {first.relative_to(run)} to it."
        self._run = run

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        self._run, self._engines = None, []
