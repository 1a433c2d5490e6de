"""The replies of a trajectory by unbroken history, which is what training services take as one conversation.

prompt [user q] -> "a";  prompt [user q, assistant a, user r] -> "b";  prompt [user s] -> "c"    =>  [a, b], [c]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reinforge.rollout.episode import build_message
from reinforge.types.request import ChatPrompt, Message
from reinforge.types.trajectory import EpisodeItem


@dataclass(frozen=True, slots=True)
class PromptedReply:
    turn: EpisodeItem
    prompt: ChatPrompt
    message: Message

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt.messages, self.message]


def split_histories(turns: Iterable[EpisodeItem]) -> list[list[PromptedReply]]:
    """Returns the turns whose prompts are known; a prompt that rewrites the history or the tools begins a new one."""
    histories: list[list[PromptedReply]] = []
    for turn in turns:
        if (prompt := turn.prompt) is None:
            continue
        last = histories[-1][-1] if histories else None
        known = last.messages if last is not None else []
        if last is None or prompt.tools != last.prompt.tools or list(prompt.messages[: len(known)]) != known:
            histories.append([])
        histories[-1].append(PromptedReply(turn, prompt, build_message(turn)))
    return histories
