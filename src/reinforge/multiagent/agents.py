"""One agent of a protocol: its role prompt, its view of the dialogue and its sampling settings."""

from __future__ import annotations

from string import Template
from typing import TYPE_CHECKING, Any

from reinforge.errors import EvaluationError, Problem, did_you_mean
from reinforge.multiagent.dialogue import Dialogue, DialogueProblem
from reinforge.multiagent.protocol import AgentParameters
from reinforge.types.request import Message as ChatMessage

if TYPE_CHECKING:
    from reinforge.multiagent.protocol import ProtocolHandler

CONTINUE_PROMPT = "Go on."  # the user message when an agent has heard nothing since its last turn

BUILTIN_PLACEHOLDERS = ("stance", "max_response_words")  # placeholders of a role prompt besides the dataset's columns


class PureTextWholeAgent:
    """An agent of a protocol.

    Args:
        llm: Its entry of `llms`.
        model_group: The adapter that it uses and trains, alone or with other agents; None: the run has only one.
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
        self.shared_model_group: Any = None  # the shared-model group that it is in, outside a run; None: it is in none
        self._template = Template(parameters.prompt)
        self._placeholders = self._template.get_identifiers() if self._template.is_valid() else None

    def find_prompt_problem(self, problem: DialogueProblem, example_id: str) -> Problem | None:
        """Returns why the role prompt cannot be rendered for an example; None if it can."""
        path = f"workflow.agents.{self.name}." + ("prompt_file" if self.parameters.prompt_file else "prompt")
        if self._placeholders is None:
            return Problem(path, "a $ is not followed by a placeholder name", "write $$ for a dollar sign")
        known = sorted({*problem.row, *BUILTIN_PLACEHOLDERS})
        unknown = next((name for name in self._placeholders if name not in known), None)
        if unknown is None:
            return None
        hint = did_you_mean(unknown, known)
        message = f"the prompt uses ${unknown}, but example {example_id} has no such column{hint}"
        return Problem(path, message, f"use one of: {', '.join(known)}")

    def render_prompt(self, dialogue: Dialogue) -> str:
        stance, max_words = dialogue.stances.get(self.name, ""), self.parameters.max_response_words
        values = {**dialogue.problem.row, "stance": stance, "max_response_words": max_words}
        try:
            return self._template.substitute(values)
        except (KeyError, ValueError) as error:
            raise EvaluationError(
                f"the prompt of agent {self.name} uses {error}; available: {', '.join(sorted(values))}"
            ) from error

    def build_messages(self, dialogue: Dialogue, handler: ProtocolHandler, channel: str) -> list[ChatMessage]:
        r"""Returns the agent's next prompt: its own messages are `assistant` turns, everything it heard is `user`.

        Each prompt starts with the agent's previous prompt, so a whole dialogue is prefilled and trained as one
        sequence.

        Example: prompt P, verifier "Why?", the agent itself "Since ...", verifier "How?" ->
        user "P\nverifier: Why?", assistant "Since ...", user "verifier: How?".
        """
        visible = [name for name in handler.message_channel_names if handler.can_agent_see_channel(self.name, name)]
        with_labels = handler.labels_channels and len(visible) > 1
        heard = [self.render_prompt(dialogue)]
        prompt: list[ChatMessage] = []
        for round_ in range(dialogue.round):
            messages = dialogue.messages_in(round_)
            own = [message for message in messages if message.agent == self.name]
            if own and (line := self._build_last_line(dialogue.before_round(round_), handler)):
                heard.append(line)
            for message in own:
                prompt.append(_user_message([*heard, f"[{message.channel}]"] if with_labels else heard))
                prompt.append({"role": "assistant", "content": message.text})
                heard = []
            for message in messages:
                if message.agent != self.name and message.channel in visible:
                    shown = "\n  ".join(message.shown.strip().splitlines())  # no line can fake another speaker
                    line = f"{handler.display_name(message.agent, dialogue)}: {shown}"
                    heard.append(f"[{message.channel}] {line}" if with_labels else line)
        if line := self._build_last_line(dialogue, handler):
            heard.append(line)
        prompt.append(_user_message([*heard, f"[{channel}]"] if with_labels else heard))
        return prompt

    def _build_last_line(self, dialogue: Dialogue, handler: ProtocolHandler) -> str:
        """Returns the last line of the agent's prompt for its next turn: the protocol's hint, or the supervisor's."""
        hint, parameters = handler.hint(self.name, dialogue), self.parameters
        if not parameters.is_supervised(dialogue.round):
            return hint
        task = hint or f"{handler.task(self.name, dialogue)} Use at most {parameters.max_response_words} words."
        return f"{parameters.supervisor_name}: {task}"

    def sampling_arguments(self) -> dict[str, Any]:
        """Returns the sampling arguments of a request; for a trained policy the run's own settings override them."""
        parameters = self.parameters
        arguments = {
            "max_tokens": parameters.max_tokens_per_message,
            "temperature": parameters.temperature,
            "top_p": parameters.top_p,
        }
        return {name: value for name, value in arguments.items() if value is not None}


def _user_message(lines: list[str]) -> ChatMessage:
    return {"role": "user", "content": "\n".join(lines) or CONTINUE_PROMPT}
