"""The agent: files a support e-mail as a ticket and may correct an invalid ticket once.

The conversation continues, so both answers are trained as one sample:

    user       Subject: order 4821 ...
    assistant  {"product":"lamp","issue":"wrong_item","priority":"low"}
    user       Invalid ticket: refund is missing.
    assistant  {"product":"lamp","issue":"wrong_item","priority":"low","refund":true}
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from reinforge.config.schema import WorkflowConfig
from reinforge.interfaces import Builder
from reinforge.registry import register_workflow
from reinforge.rollout.workflow import PolicyFailure, bind_workflow
from reinforge.tasks.tickets.ticket import parse_ticket
from reinforge.types.workflow import BoundWorkflow

MAX_ANSWERS = 2


def format_correction(problem: str) -> str:
    return f"Invalid ticket: {problem}."


@dataclass(frozen=True, slots=True)
class TicketAgent:
    instructions: str | None = None
    max_tokens: int = 32

    async def __call__(self, item: Any, llm: Any, context: Any) -> dict[str, Any]:
        """Files one e-mail and returns `{"ticket": {...}, "num_answers": 1 or 2}`."""
        instructions = context.text("system", self.instructions or "")
        messages = [{"role": "system", "content": instructions}] if instructions else []
        messages = [*messages, {"role": "user", "content": item.input_obj}]
        text, problem = "", ""
        for number in range(1, MAX_ANSWERS + 1):
            reply = await llm.chat.completions.create(messages=messages, max_tokens=self.max_tokens)
            text = reply.choices[0].message.content or ""
            ticket, found_problem = parse_ticket(text)
            if found_problem is None:
                return {"ticket": ticket, "num_answers": number}
            problem = found_problem
            correction = {"role": "user", "content": format_correction(problem)}
            messages = [*messages, {"role": "assistant", "content": text}, correction]
        output = {"ticket": None, "num_answers": MAX_ANSWERS}
        raise PolicyFailure(f"answer {MAX_ANSWERS} was {text!r}: {problem}", output=output)


class TicketsWorkflowConfig(WorkflowConfig, name="tickets"):
    """The agent that files support e-mails."""

    llm: str | None = Field(
        default=None, description="Entry of llms that answers; null: the only entry, or the only one that is trained."
    )
    instructions: str | None = Field(
        default=None, description="System prompt; not needed for the starter, but other models need the schema."
    )
    max_tokens: int = Field(default=32, ge=1, description="Maximum tokens of an answer.")


@register_workflow(config_type=TicketsWorkflowConfig)
async def tickets_workflow(config: TicketsWorkflowConfig, builder: Builder) -> AsyncIterator[BoundWorkflow]:
    yield bind_workflow(TicketAgent(config.instructions, config.max_tokens), config.llm)
