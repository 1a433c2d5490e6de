"""One agent of a protocol: its role prompt, its view of the dialogue, and how it is sampled."""

from __future__ import annotations

from string import Template
from typing import TYPE_CHECKING, Any

from reinforge.errors import EvaluationError, did_you_mean
from reinforge.errors import Problem as Wrong
from reinforge.multiagent.agent_parameters import AgentParameters
from reinforge.multiagent.dialogue import Dialogue, Problem
from reinforge.types.request import Message as ChatMessage

if TYPE_CHECKING:
    from reinforge.multiagent.protocol import ProtocolHandler

GO_ON = "Go on."
"""What an agent is asked with when it has heard nothing since it last spoke."""

OURS = ("stance", "max_response_words")
"""What a role prompt may ask for besides the dataset's columns."""


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
        self._placeholders = self._template.get_identifiers() if self._template.is_valid() else None

    def prompt_problem(self, problem: Problem, example_id: str) -> Wrong | None:
        """Returns why the role prompt cannot be written for an example; None: it can."""
        path = f"workflow.agents.{self.name}." + ("prompt_file" if self.parameters.prompt_file else "prompt")
        if self._placeholders is None:
            return Wrong(path, "a $ stands before something that is no name", "write $$ for a dollar sign")
        asked = self._placeholders
        unknown = next((name for name in asked if name not in problem.row and name not in OURS), None)
        if unknown is None:
            return None
        known = sorted({*problem.row, *OURS})
        hint = did_you_mean(unknown, known).removeprefix(", ")
        message = f"it asks for ${unknown}, and example {example_id} has no such column"
        return Wrong(path, message, f"{hint + ' ' if hint else ''}there: {', '.join(known)}")

    def prompt(self, dialogue: Dialogue) -> str:
        """Returns the role prompt of one episode.

        Raises:
            EvaluationError: The template names a column that the example does not have.
        """
        known = self._known(dialogue.problem, dialogue.stances.get(self.name, ""))
        try:
            return self._template.substitute(known)
        except (KeyError, ValueError) as error:
            raise EvaluationError(
                f"the prompt of agent {self.name} asks for {error}; there is {', '.join(sorted(known))}"
            ) from error

    def _known(self, problem: Problem, stance: str) -> dict[str, Any]:
        return {**problem.row, "stance": stance, "max_response_words": self.parameters.max_response_words}

    def messages(self, dialogue: Dialogue, handler: ProtocolHandler, channel: str) -> list[ChatMessage]:
        r"""Returns the dialogue as this agent is asked to go on with it: what it said is `assistant`, all else `user`.

        Each prompt begins with those before it, so that a whole dialogue is read and trained as one.

        Example: prompt P, the verifier said "Why?", the agent "Since ...", the verifier "How?" ->
        user "P\nverifier: Why?", assistant "Since ...", user "verifier: How?".
        """
        seen = [name for name in handler.message_channel_names if handler.can_agent_see_channel(self.name, name)]
        tells = handler.tells_channels and len(seen) > 1
        heard = [self.prompt(dialogue)]
        asked: list[ChatMessage] = []
        for round_ in range(dialogue.round):
            said = dialogue.said_in(round_)
            own = [message for message in said if message.agent == self.name]
            if own and (hint := handler.hint(self.name, dialogue.before(round_))):
                heard.append(hint)
            for message in own:
                asked.append(_user([*heard, f"[{message.channel}]"] if tells else heard))
                asked.append({"role": "assistant", "content": message.text})
                heard = []
            for message in said:
                if message.agent != self.name and message.channel in seen:
                    line = f"{handler.called(message.agent, dialogue)}: {_told(message.shown)}"
                    heard.append(f"[{message.channel}] {line}" if tells else line)
        if hint := handler.hint(self.name, dialogue):
            heard.append(hint)
        asked.append(_user([*heard, f"[{channel}]"] if tells else heard))
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


def _told(text: str) -> str:
    """Returns what another agent said; its further lines are indented, so that none can pass for somebody else's."""
    return "\n  ".join(text.strip().splitlines())
