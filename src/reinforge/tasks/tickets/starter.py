"""The starter: a small Llama model trained on carelessly filed e-mails, on first use.

Each field of a ticket to imitate is right with probability `DeskRecipe.field_accuracy` and random otherwise, and some
first answers break the schema and are corrected. So the model knows the format, something of the task, and what a
correction is for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from reinforge.registry import TypedConfig
from reinforge.tasks.starters import Recipe, make_bpe_tokenizer, register_starter, supervised_episode
from reinforge.tasks.tickets.grammar import write_email
from reinforge.tasks.tickets.ticket import FIELDS, Ticket, format_ticket, parse_ticket
from reinforge.tasks.tickets.workflow import format_correction
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory

WORDS = r" ?[A-Za-z_]+| ?[0-9]|[^A-Za-z0-9_\s]+|\s"
NUM_TOKENIZER_EMAILS = 2000


@dataclass(frozen=True, slots=True)
class DeskRecipe(Recipe):
    max_model_len: int = 192
    num_steps: int = 200
    batch_size: int = 32
    wording_share: float = 0.75  # share of the wordings in the training e-mails; the task's e-mails use all of them
    field_accuracy: float = 0.9
    fault_rate: float = 0.1


def make_tokenizer() -> Any:
    rng = stable_random(0, "tickets", "tokenizer")
    texts = []
    for _ in range(NUM_TOKENIZER_EMAILS):
        email = write_email(rng)
        texts += [email.text, format_ticket(email.ticket), build_correction(break_ticket(rng, email.ticket))]
    return make_bpe_tokenizer(texts, words=WORDS)


def build_correction(broken: str) -> str:
    _, problem = parse_ticket(broken)
    assert problem is not None
    return format_correction(problem)


def generate_careless_filings(recipe: DeskRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields episodes endlessly: an e-mail and a careless ticket, sometimes after an invalid answer."""
    rng = stable_random(recipe.seed, "tickets", "starter")
    while True:
        email = write_email(rng, recipe.wording_share)
        messages = [{"role": "user", "content": email.text}]
        if rng.random() < recipe.fault_rate:
            text = break_ticket(rng, write_careless_ticket(rng, email.ticket, recipe.field_accuracy))
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": build_correction(text)})
        filed = write_careless_ticket(rng, email.ticket, recipe.field_accuracy)
        yield supervised_episode(tokenizer, [*messages, {"role": "assistant", "content": format_ticket(filed)}])


def write_careless_ticket(rng: random.Random, ticket: Ticket, field_accuracy: float) -> Ticket:
    return {
        name: ticket[name] if rng.random() < field_accuracy else rng.choice(values) for name, values in FIELDS.items()
    }


def break_ticket(rng: random.Random, ticket: Ticket) -> str:
    """Returns an invalid ticket: a field is left out, has another field's value, or the last brace is missing."""
    names = list(FIELDS)
    name = rng.choice(names)
    fault = rng.choice(("left out", "mixed up", "cut"))
    if fault == "cut":
        return format_ticket(ticket)[:-1]
    if fault == "left out":
        return format_ticket({key: value for key, value in ticket.items() if key != name})
    other = rng.choice([key for key in names if key != name])
    return format_ticket({**ticket, name: ticket[other]})


class TicketsStarterConfig(TypedConfig, name="tickets"):
    """A small model that files support e-mails as JSON, with errors; trained on first use."""


register_starter(TicketsStarterConfig, DeskRecipe(), make_tokenizer, generate_careless_filings)
