"""The starter: a small Llama that has seen e-mails filed by a careless desk, made on first use.

Each field of a ticket to imitate is right only with `DeskRecipe.right`, otherwise drawn at random, and some first
answers break the schema and are corrected. So it knows the format, something of the task, and what a correction asks
for. Recipe and figures: docs/lab-notes.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.tasks.starters import Progress, Recipe, Starter, ensure, make_bpe_tokenizer, supervised_episode
from reinforge.tasks.tickets.grammar import write_email
from reinforge.tasks.tickets.ticket import FIELDS, Ticket, read_ticket, write_ticket
from reinforge.tasks.tickets.workflow import correction_for
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory

WORDS = r" ?[A-Za-z_]+| ?[0-9]|[^A-Za-z0-9_\s]+|\s"
NUM_TOKENIZER_EMAILS = 2000


@dataclass(frozen=True, slots=True)
class DeskRecipe(Recipe):
    """The recipe, and how careless the desk is; measured in docs/lab-notes.md.

    Attributes:
        known: Share of the wordings that the desk has seen; the task's e-mails use all of them.
        right: Chance that a field is copied from the true ticket; otherwise it is drawn uniformly from its values.
        faulty: Chance that the first answer breaks the schema.
    """

    max_context: int = 192
    num_steps: int = 200
    batch_size: int = 32
    known: float = 0.75
    right: float = 0.9
    faulty: float = 0.1


def ensure_starter(progress: Progress | None = None, recipe: DeskRecipe | None = None) -> Path:
    """Returns the starter's folder; makes it if it is not there, which takes up to a minute on two cores.

    Args:
        progress: Told how far the supervised job is.
        recipe: Another recipe, for tests.
    """
    recipe = recipe or DeskRecipe()
    return ensure(Starter("tickets", recipe, make_tokenizer, partial(careless_filing, recipe)), progress)


def make_tokenizer() -> Any:
    """Returns a tokenizer that makes the words of e-mails and tickets one token each and can encode any text."""
    rng = stable_random(0, "tickets", "tokenizer")
    texts = []
    for _ in range(NUM_TOKENIZER_EMAILS):
        email = write_email(rng)
        texts += [email.text, write_ticket(email.ticket), correction_of(break_ticket(rng, email.ticket))]
    return make_bpe_tokenizer(texts, words=WORDS)


def correction_of(broken: str) -> str:
    """Returns what the agent is told about a text that is no ticket."""
    _, problem = read_ticket(broken)
    assert problem is not None
    return correction_for(problem)


def careless_filing(recipe: DeskRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields episodes without end: an e-mail and a careless ticket, some after an answer that broke the schema."""
    rng = stable_random(recipe.seed, "tickets", "starter")
    while True:
        email = write_email(rng, recipe.known)
        messages = [{"role": "user", "content": email.text}]
        if rng.random() < recipe.faulty:
            text = break_ticket(rng, careless_ticket(rng, email.ticket, recipe.right))
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": correction_of(text)})
        filed = careless_ticket(rng, email.ticket, recipe.right)
        yield supervised_episode(tokenizer, [*messages, {"role": "assistant", "content": write_ticket(filed)}])


def careless_ticket(rng: random.Random, ticket: Ticket, right: float) -> Ticket:
    """Returns a ticket each of whose fields is the true one with chance `right`, otherwise any of its values."""
    return {name: ticket[name] if rng.random() < right else rng.choice(values) for name, values in FIELDS.items()}


def break_ticket(rng: random.Random, ticket: Ticket) -> str:
    """Returns a text that breaks the schema: a field left out, another field's value, or the last brace missing."""
    names = list(FIELDS)
    name = rng.choice(names)
    fault = rng.choice(("left out", "mixed up", "cut"))
    if fault == "cut":
        return write_ticket(ticket)[:-1]
    if fault == "left out":
        return write_ticket({key: value for key, value in ticket.items() if key != name})
    other = rng.choice([key for key in names if key != name])
    return write_ticket({**ticket, name: ticket[other]})
