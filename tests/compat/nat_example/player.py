import logging
import random
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

from .board import SIGNS, format_board, list_moves

logger = logging.getLogger(__name__)

MOVE = re.compile(r"<row>\s*([1-3])\s*</row>.*<col>\s*([1-3])\s*</col>", re.DOTALL)
RULES = "You play {symbol} in tic-tac-toe. Answer only <move><row>R</row><col>C</col></move>."


def build_chain(model: Any, symbol: str) -> Any:
    prompt = ChatPromptTemplate.from_messages([("system", RULES), MessagesPlaceholder(variable_name="messages")])
    return prompt.partial(symbol=symbol) | model | StrOutputParser()


@dataclass
class Player:
    """Moves by itself, or at random if it has no chain."""

    sign: int
    chain: Any = None
    max_retries: int = 0
    messages: list = field(default_factory=list)

    @property
    def symbol(self) -> str:
        return SIGNS[self.sign]

    def choose(self, board: np.ndarray) -> tuple[int, int]:
        moves = list_moves(board)
        if self.chain is None:
            return random.choice(moves)
        self.messages.append(HumanMessage(content=format_board(board)))
        for _ in range(self.max_retries + 1):
            text = self.chain.invoke({"messages": self.messages})
            self.messages.append(AIMessage(content=text))
            found = MOVE.search(text)
            if found and (move := (int(found[1]) - 1, int(found[2]) - 1)) in moves:
                return move
            logger.debug("%s answered %r", self.symbol, text)
            self.messages.append(HumanMessage(content=f"Not possible. Free: {moves}\n{format_board(board)}"))
        raise RuntimeError(f"{self.symbol} does not move")
