"""What a game is worth: the plain win rate, the shaped training reward, and the share of legal moves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class GameEvaluator(Evaluator):
    """Base: looks at the game that the agent returned; without one the score is missing."""

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the score of one game."""
        game = item.output_obj
        if not isinstance(game, dict) or "result" not in game:
            return EvalOutputItem(id=item.id, score=None, reasoning=None, error="the agent returned no game")
        return EvalOutputItem(id=item.id, score=self.score(game), reasoning=f"{game['result']} as {game['side']}")

    @abstractmethod
    def score(self, game: dict[str, Any]) -> float:
        """Returns the score of a game as `Game.as_output` gives it."""


class WinConfig(EvaluatorConfig, name="tic_tac_toe_win"):
    """1 for a won game, else 0: its mean is the win rate."""


class Win(GameEvaluator):
    """The plain win rate."""

    def score(self, game: dict[str, Any]) -> float:
        """Returns 1.0 if the agent won."""
        return float(game["result"] == "win")


class LegalConfig(EvaluatorConfig, name="tic_tac_toe_legal"):
    """Share of the game's moves that were legal."""


class Legal(GameEvaluator):
    """The share of legal moves."""

    def score(self, game: dict[str, Any]) -> float:
        """Returns legal moves / moves; 1.0 where the agent never came to move."""
        return game["num_legal"] / game["num_moves"] if game["num_moves"] else 1.0


class RewardConfig(EvaluatorConfig, name="tic_tac_toe_reward"):
    """The shaped training reward; an illegal move ends the episode with `finetuning.outcomes.policy_error` instead."""

    win: float = Field(default=1.0, description="A game won with the fewest moves, three.")
    draw: float = Field(default=0.3, description="A drawn game.")
    loss: float = Field(default=0.0, description="A game lost at the second move, the earliest.")
    per_move: float = Field(
        default=0.1, ge=0, description="What each further move of the agent takes from a win and adds to a loss."
    )


class Reward(GameEvaluator):
    """Win soon, lose late: a won game is worth `win - per_move * (moves - 3)`."""

    def __init__(self, config: RewardConfig):
        self.config = config

    def score(self, game: dict[str, Any]) -> float:
        """Returns the reward.

        Example, with the defaults: won in 3 moves -> 1.0, in 5 -> 0.8; drawn -> 0.3; lost after 2 -> 0.0, after 4
        -> 0.2.

        Raises:
            KeyError: The game ended with an illegal move, which the run's penalty scores.
        """
        config = self.config
        worth = {
            "win": config.win - config.per_move * (game["num_moves"] - 3),
            "draw": config.draw,
            "loss": config.loss + config.per_move * (game["num_moves"] - 2),
        }
        return worth[game["result"]]


@register_evaluator(config_type=WinConfig)
async def tic_tac_toe_win(config: WinConfig, builder: Any) -> AsyncIterator[Win]:
    """Yields the win rate."""
    yield Win()


@register_evaluator(config_type=LegalConfig)
async def tic_tac_toe_legal(config: LegalConfig, builder: Any) -> AsyncIterator[Legal]:
    """Yields the share of legal moves."""
    yield Legal()


@register_evaluator(config_type=RewardConfig)
async def tic_tac_toe_reward(config: RewardConfig, builder: Any) -> AsyncIterator[Reward]:
    """Yields the training reward."""
    yield Reward(config)
