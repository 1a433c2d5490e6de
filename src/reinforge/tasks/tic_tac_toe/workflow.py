"""The agent: plays one whole game against an opponent that moves at random.

Each move is a fresh call that shows the board; the answer is the number of a square. A call:

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
from reinforge.registry import register_workflow
from reinforge.rollout.workflow import BoundWorkflow, PolicyFailure, bind_workflow
from reinforge.tasks.tic_tac_toe.game import (
    EMPTY_BOARD,
    Board,
    Side,
    completing_moves,
    is_over,
    legal_moves,
    other,
    parse_move,
    place,
    prompt_for,
    render,
    to_move,
    winner,
)


@dataclass(slots=True)
class Game:
    """A game while it is played, seen from one side.

    Attributes:
        side: The side that the agent plays.
        board: The position.
        moves: Every move so far, both sides: `{"side": "X", "square": 5}`, squares from 1 to 9.
        num_moves: Answers that the agent gave, unusable ones too.
        num_legal: Those of them that were legal moves.
        failed: True if an answer was no legal move, which ends the game.
    """

    side: Side
    board: Board = EMPTY_BOARD
    moves: list[dict[str, Any]] = field(default_factory=list)
    num_moves: int = 0
    num_legal: int = 0
    failed: bool = False

    def play(self, square: int) -> None:
        """Makes a move of whoever is to move."""
        mover = to_move(self.board)
        self.board = place(self.board, square, mover)
        self.moves.append({"side": mover, "square": square + 1})

    @property
    def result(self) -> str:
        """`win`, `draw` or `loss` of a finished game as the agent sees it, or `illegal`."""
        if self.failed:
            return "illegal"
        side = winner(self.board)
        return "draw" if side is None else "win" if side == self.side else "loss"

    def as_output(self) -> dict[str, Any]:
        """Returns the game ready for JSON; `board` is for a person."""
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
        item: The example; `input_obj` holds `side`, `opponent` (`random`, or `sharp`: random, but it completes its
            line where it can) and `world_seed`, from which its moves are drawn, so that siblings meet the same one.
        llm: The model that plays.
        context: Not needed.

    Raises:
        PolicyFailure: An answer was no legal move.
    """
    game = Game(side=item.input_obj["side"])
    rng, is_sharp = random.Random(item.input_obj["world_seed"]), item.input_obj["opponent"] == "sharp"
    while not is_over(game.board):
        if to_move(game.board) == other(game.side):
            completing = completing_moves(game.board, to_move(game.board)) if is_sharp else []
            game.play(rng.choice(completing or legal_moves(game.board)))
        else:
            await _answer(game, llm)
    return game.as_output()


async def _answer(game: Game, llm: Any) -> None:
    """Asks the model for one move and makes it."""
    messages = [{"role": "user", "content": prompt_for(game.board, game.side)}]
    reply = await llm.chat.completions.create(messages=messages, max_tokens=4)
    text = reply.choices[0].message.content
    square = parse_move(text)
    game.num_moves += 1
    if square is None or game.board[square] is not None:
        game.failed = True
        why = "not one digit from 1 to 9" if square is None else "a square that is taken"
        raise PolicyFailure(f"move {game.num_moves} was {text!r}: {why}", output=game.as_output())
    game.num_legal += 1
    game.play(square)


class TicTacToeWorkflowConfig(WorkflowConfig, name="tic_tac_toe"):
    """The bundled agent."""

    llm: str | None = Field(default=None, description="Entry of llms that plays; null: the only one.")


@register_workflow(config_type=TicTacToeWorkflowConfig)
async def tic_tac_toe_workflow(config: TicTacToeWorkflowConfig, builder: Any) -> AsyncIterator[BoundWorkflow]:
    """Yields the agent."""
    yield bind_workflow(play, config.llm)
