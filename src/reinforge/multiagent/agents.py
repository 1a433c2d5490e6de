"""One agent of a protocol: its role prompt, its view of the dialogue, and how it is sampled."""

from __future__ import annotations

from string import Template
from typing import TYPE_CHECKING, Any

from pydantic import Field

from reinforge.config.schema import Block
from reinforge.errors import EvaluationError
from reinforge.multiagent.dialogue import Dialogue
from reinforge.types.request import Message as ChatMessage

if TYPE_CHECKING:
    from reinforge.multiagent.protocol import ProtocolHandler

GO_ON = "Go on."
"""What an agent is asked with when it has heard nothing since it last spoke."""


class AgentParameters(Block):
    """How one agent speaks."""

    llm: str | None = Field(default=None, description="Entry of llms that it speaks by; null: the only one.")
    prompt: str = Field(
        default="$question",
        description="Role prompt; $question, $stance and the dataset's columns are put in, $$ is a dollar sign.",
    )
    prompt_file: str | None = Field(default=None, description="File below the project with the role prompt instead.")
    freeze_agent: bool = Field(default=False, description="Its replies are never trained, whatever model it shares.")
    temperature: float | None = Field(default=None, ge=0, description="Of a model that is not trained.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Of a model that is not trained.")
    max_response_words: int = Field(default=150, ge=1, description="Put into the role prompt as $max_response_words.")
    max_tokens_per_message: int | None = Field(default=None, ge=1, description="Longest reply; null: the context's.")
    num_invalid_generation_retries: int = Field(default=20, ge=0, description="Replies drawn anew if invalid.")


class PureTextWholeAgent:
    """An agent.

    Args:
        name: Its name in the protocol.
        parameters: How it speaks.
        llm: Entry of `llms`.
        is_trainable: Its replies are trained.
        model_group: The adapter that it speaks by and is trained in, with all others that do; None: there is one.
    """

    def __init__(
        self,
        name: str,
        parameters: AgentParameters,
        *,
        llm: str = "",
        is_trainable: bool = True,
        model_group: str | None = None,
    ):
        self.name, self.parameters, self.llm = name, parameters, llm
        self.is_trainable = is_trainable and not parameters.freeze_agent
        self.model_group = model_group
        self._template = Template(parameters.prompt)

    def prompt(self, dialogue: Dialogue) -> str:
        """Returns the role prompt of one episode.

        Raises:
            EvaluationError: The template names a column that the example does not have.
        """
        row = dialogue.problem.row
        known = {
            **row,
            "stance": dialogue.stances.get(self.name, ""),
            "max_response_words": self.parameters.max_response_words,
        }
        try:
            return self._template.substitute(known)
        except (KeyError, ValueError) as error:
            raise EvaluationError(
                f"the prompt of agent {self.name} asks for {error}; the example has {', '.join(sorted(known))}"
            ) from error

    def messages(self, dialogue: Dialogue, handler: ProtocolHandler, channel: str) -> list[ChatMessage]:
        r"""Returns the dialogue as this agent is asked to go on with it: what it said is `assistant`, all else `user`.

        Example: prompt P, the verifier said "Why?", the agent "Since ...", the verifier "How?" ->
        user "P\nverifier: Why?", assistant "Since ...", user "verifier: How?".
        """
        many = sum(handler.can_agent_see_channel(self.name, name) for name in handler.message_channel_names) > 1
        heard = [self.prompt(dialogue)]
        asked: list[ChatMessage] = []
        for round_ in range(dialogue.round):
            said = dialogue.said_in(round_)
            for own in (m for m in said if m.agent == self.name):
                asked.append(_user([*heard, f"[{own.channel}]"] if many else heard))
                asked.append({"role": "assistant", "content": own.text})
                heard = []
            heard += [
                f"[{m.channel}] {m.agent}: {m.shown}" if many else f"{m.agent}: {m.shown}"
                for m in said
                if m.agent != self.name and handler.can_agent_see_channel(self.name, m.channel)
            ]
        if hint := handler.hint(self.name, dialogue):
            heard.append(hint)
        asked.append(_user([*heard, f"[{channel}]"] if many else heard))
        return asked

    def arguments(self) -> dict[str, Any]:
        """Returns how a reply is drawn; what the run decides for a trained policy overrides it."""
        given = self.parameters
        wanted = {
            "max_tokens": given.max_tokens_per_message,
            "temperature": given.temperature,
            "top_p": given.top_p,
        }
        return {name: value for name, value in wanted.items() if value is not None}


def _user(lines: list[str]) -> ChatMessage:
    return {"role": "user", "content": "\n".join(lines) or GO_ON}
