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

    def is_continued_by(self, prompt: ChatPrompt) -> bool:
        messages = self.messages
        return prompt.tools == self.prompt.tools and list(prompt.messages[: len(messages)]) == messages


def split_histories(turns: Iterable[EpisodeItem]) -> list[list[PromptedReply]]:
    """Returns the turns whose prompts are known; a prompt that rewrites the history or the tools begins a new one."""
    histories: list[list[PromptedReply]] = []
    for turn in turns:
        if (prompt := turn.prompt) is None:
            continue
        if not histories or not histories[-1][-1].is_continued_by(prompt):
            histories.append([])
        histories[-1].append(PromptedReply(turn, prompt, build_message(turn)))
    return histories
