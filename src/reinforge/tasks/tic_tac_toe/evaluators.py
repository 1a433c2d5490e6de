"""Evaluators of a game: the plain win rate, the shaped training reward, and the share of legal moves."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class GameEvaluator(Evaluator):
    """Base class: scores the game that the agent returned; without a game the score is missing."""

    reads_steps = False

    def __init__(self, config: Any = None):
        self.config = config

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        game = item.output_obj
        if not isinstance(game, dict) or "result" not in game:
            return EvalOutputItem(id=item.id, score=None, reasoning=None, error="the agent returned no game")
        return EvalOutputItem(id=item.id, score=self.score(game), reasoning=f"{game['result']} as {game['side']}")

    @abstractmethod
    def score(self, game: dict[str, Any]) -> float:
        """Returns the score of a game (`Game.as_output`)."""


class TicTacToeWinConfig(EvaluatorConfig, name="tic_tac_toe_win"):
    """1 for a game that the agent wins, else 0; the mean is the win rate."""


@register_evaluator(config_type=TicTacToeWinConfig)
class TicTacToeWin(GameEvaluator):
    def score(self, game: dict[str, Any]) -> float:
        return float(game["result"] == "win")


class TicTacToeLegalConfig(EvaluatorConfig, name="tic_tac_toe_legal"):
    """Share of the game's moves that were legal."""


@register_evaluator(config_type=TicTacToeLegalConfig)
class TicTacToeLegal(GameEvaluator):
    def score(self, game: dict[str, Any]) -> float:
        return game["num_legal"] / game["num_moves"] if game["num_moves"] else 1.0


class TicTacToeRewardConfig(EvaluatorConfig, name="tic_tac_toe_reward"):
    """The shaped training reward; an illegal move ends the episode with `finetuning.outcomes.policy_error` instead."""

    win: float = Field(default=1.0, description="Reward for a win in three moves, the fewest.")
    draw: float = Field(default=0.3, description="Reward for a draw.")
    loss: float = Field(default=0.0, description="Reward for a loss after two moves, the fewest.")
    per_move: float = Field(
        default=0.1, ge=0, description="Each further move of the agent subtracts this from a win and adds it to a loss."
    )


@register_evaluator(config_type=TicTacToeRewardConfig)
class TicTacToeReward(GameEvaluator):
    """Rewards early wins and late losses: a win is worth `win - per_move * (moves - 3)`."""

    def score(self, game: dict[str, Any]) -> float:
        """Example, with the defaults: won in 3 moves -> 1.0, in 5 -> 0.8; drawn -> 0.3; lost after 4 -> 0.2.

        Raises:
            KeyError: The game ended with an illegal move; the run's penalty applies to those.
        """
        config = self.config
        rewards = {
            "win": config.win - config.per_move * (game["num_moves"] - 3),
            "draw": config.draw,
            "loss": config.loss + config.per_move * (game["num_moves"] - 2),
        }
        return rewards[game["result"]]
