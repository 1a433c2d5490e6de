"""The agent: plays one game against an opponent that moves at random.

Each move is a separate model call with the board; the answer is the number of a square. A call:

    user       Play +: +1 2 -3 4 5 6 7 8 9
    assistant   5
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from reinforge.config.schema import WorkflowConfig
from reinforge.interfaces import Builder
from reinforge.registry import register_workflow
from reinforge.rollout.workflow import PolicyFailure, bind_workflow
from reinforge.tasks.tic_tac_toe.game import (
    EMPTY_BOARD,
    Board,
    Side,
    completing_moves,
    format_prompt,
    is_over,
    legal_moves,
    other,
    parse_move,
    place,
    render,
    side_to_move,
    winner,
)
from reinforge.types.workflow import BoundWorkflow


@dataclass(slots=True)
class Game:
    """A game in progress, from one side's view."""

    side: Side
    board: Board = EMPTY_BOARD
    moves: list[dict[str, Any]] = field(default_factory=list)
    """The moves of both sides so far: `{"side": "X", "square": 5}`, squares from 1 to 9."""
    num_moves: int = 0  # number of the agent's answers, including invalid ones
    num_legal: int = 0
    failed: bool = False  # True if an answer was not a legal move, which ends the game

    def play(self, square: int) -> None:
        side = side_to_move(self.board)
        self.board = place(self.board, square, side)
        self.moves.append({"side": side, "square": square + 1})

    @property
    def result(self) -> str:
        """The result for the agent: `win`, `draw`, `loss` or `illegal`."""
        if self.failed:
            return "illegal"
        side = winner(self.board)
        return "draw" if side is None else "win" if side == self.side else "loss"

    def as_output(self) -> dict[str, Any]:
        """Returns the game ready for JSON; `board` is for people."""
        return {
            "result": self.result,
            "side": self.side,
            "moves": self.moves,
            "board": render(self.board),
            "num_legal": self.num_legal,
            "num_moves": self.num_moves,
        }


async def play(item: Any, llm: Any, context: Any) -> dict[str, Any]:
    """Plays one game and returns it (`Game.as_output`).

    Args:
        item: The example; `input_obj` has `side`, `opponent` (`random`, or `sharp`: random, but it completes its line
            whenever it can) and `world_seed`, the seed of the opponent's moves, so that siblings have the same one.

    Raises:
        PolicyFailure: An answer was not a legal move.
    """
    game = Game(side=item.input_obj["side"])
    rng, is_sharp = random.Random(item.input_obj["world_seed"]), item.input_obj["opponent"] == "sharp"
    while not is_over(game.board):
        if side_to_move(game.board) == other(game.side):
            completing = completing_moves(game.board, side_to_move(game.board)) if is_sharp else []
            game.play(rng.choice(completing or legal_moves(game.board)))
        else:
            await _play_agent_move(game, llm)
    return game.as_output()


async def _play_agent_move(game: Game, llm: Any) -> None:
    messages = [{"role": "user", "content": format_prompt(game.board, game.side)}]
    reply = await llm.chat.completions.create(messages=messages, max_tokens=4)
    text = reply.choices[0].message.content
    square = parse_move(text)
    game.num_moves += 1
    if square is None or game.board[square] is not None:
        game.failed = True
        reason = "not one digit from 1 to 9" if square is None else "a square that is taken"
        raise PolicyFailure(f"move {game.num_moves} was {text!r}: {reason}", output=game.as_output())
    game.num_legal += 1
    game.play(square)


class TicTacToeWorkflowConfig(WorkflowConfig, name="tic_tac_toe"):
    """The bundled agent, which plays tic-tac-toe."""

    llm: str | None = Field(
        default=None, description="Entry of llms that plays; null: the only entry, or the only one that is trained."
    )


@register_workflow(config_type=TicTacToeWorkflowConfig)
async def tic_tac_toe_workflow(config: TicTacToeWorkflowConfig, builder: Builder) -> AsyncIterator[BoundWorkflow]:
    yield bind_workflow(play, config.llm)
