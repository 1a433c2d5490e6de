import random
import re

from nat.builder.builder import Builder
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.function import FunctionBaseConfig
from pydantic import Field

from .game import Board, pick_randomly

MOVE = re.compile(r"<row>\s*([1-3])\s*</row>.*<col>\s*([1-3])\s*</col>", re.DOTALL)


class PlayerConfig(FunctionBaseConfig, name="tic_tac_toe_player"):
    """Plays against a random opponent."""

    player_model: LLMRef = Field(description="The model that plays.")
    max_parser_retries: int = Field(default=0, description="How often an illegal move may be repeated.")


@register_function(config_type=PlayerConfig, framework_wrappers=[LLMFrameworkEnum.OPENAI])
async def tic_tac_toe_player(config: PlayerConfig, builder: Builder):
    llm = await builder.get_llm(config.player_model, wrapper_type=LLMFrameworkEnum.OPENAI)

    async def move(board: Board, symbol: str) -> int | None:
        prompt = [
            {"role": "system", "content": f"You play {symbol}. Answer <move><row>R</row><col>C</col></move>."},
            {"role": "user", "content": f"Board:\n{board}\nYour move?"},
        ]
        for _ in range(config.max_parser_retries + 1):
            reply = await llm.chat.completions.create(messages=prompt)
            found = MOVE.search(reply.choices[0].message.content)
            if found and (index := 3 * (int(found[1]) - 1) + int(found[2]) - 1) in board.free():
                return index
        return None

    async def play(role: str) -> str:
        """Plays one game as X or O."""
        board, rng = Board(), random.Random(role)
        for turn in range(9):
            symbol = "XO"[turn % 2]
            index = await move(board, symbol) if symbol == role else pick_randomly(board, rng)
            if index is None:
                return "Aborted!"
            board.fields[index] = symbol
            if board.winner() is not None:
                return "Win!" if symbol == role else "Lose!"
        return "Draw!"

    yield FunctionInfo.from_fn(play, description="Tic-tac-toe against a random opponent.")
