import logging
import uuid
from dataclasses import dataclass, field

import numpy as np
from nat.builder.builder import Builder
from nat.builder.context import Context
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.builder.intermediate_step_manager import IntermediateStepManager
from nat.cli.register_workflow import register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.function import FunctionBaseConfig
from nat.data_models.intermediate_step import IntermediateStepPayload, IntermediateStepType
from pydantic import Field

from .board import find_winner, list_moves, value_of
from .player import Player, build_chain

logger = logging.getLogger(__name__)


@dataclass
class Game:
    players: tuple[Player, Player]
    trained: Player
    board: np.ndarray = field(default_factory=lambda: np.zeros((3, 3), dtype=int))

    def __post_init__(self):
        self.step_manager: IntermediateStepManager = Context.get().intermediate_step_manager

    def play(self) -> int:
        """The sign of the winner; 0: a draw. A move of the trained player is a step with its value."""
        for turn in range(9):
            player = self.players[turn % 2]
            self.board[player.choose(self.board)] = player.sign
            if player is self.trained:
                self.push_move(turn)
            if (winner := find_winner(self.board)) or not list_moves(self.board):
                return winner
        raise AssertionError("nine moves fill the board")

    def push_move(self, turn: int) -> None:
        facts = {"agent_name": "trained", "step": turn, "symbol": self.trained.symbol}
        value = {"value": value_of(self.board, self.trained.sign)}
        step = str(uuid.uuid4())[:8]
        for kind, metadata in (
            (IntermediateStepType.CUSTOM_START, facts),
            (IntermediateStepType.CUSTOM_END, facts | value),
        ):
            payload = IntermediateStepPayload(event_type=kind, name="agent_move", metadata=metadata, UUID=step)
            self.step_manager.push_intermediate_step(payload)


class TicTacToeConfig(FunctionBaseConfig, name="rl_with_openpipe_art"):
    """Plays against a second model, or at random."""

    player_model: LLMRef = Field(description="The model that plays.")
    opponent_model: LLMRef | None = Field(description="The model that it plays against.", default=None)
    max_parser_retries: int = Field(default=0, description="How often an impossible move may be repeated.")


@register_function(config_type=TicTacToeConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def tic_tac_toe(config: TicTacToeConfig, builder: Builder):
    langchain = LLMFrameworkEnum.LANGCHAIN
    model = await builder.get_llm(config.player_model, wrapper_type=langchain)
    opponent = await builder.get_llm(config.opponent_model, wrapper_type=langchain) if config.opponent_model else None

    async def play(role: str) -> str:
        """Plays one game as X or O."""
        if role not in ("X", "O"):
            raise ValueError("the role is X or O")
        sign = 1 if role == "X" else -1
        trained = Player(sign, build_chain(model, role), config.max_parser_retries)
        other = Player(-sign)
        if opponent is not None:
            other.chain, other.max_retries = build_chain(opponent, other.symbol), config.max_parser_retries
        players = (trained, other) if sign == 1 else (other, trained)
        try:
            winner = Game(players, trained).play()
        except RuntimeError as error:
            logger.debug("aborted: %s", error)
            return "Aborted!"
        return "Draw!" if winner == 0 else "Win!" if winner == sign else "Lose!"

    yield FunctionInfo.from_fn(play, description=play.__doc__)
