"""Support e-mails to a made-up shop, Fernlea, and their true tickets, written by a seeded grammar.

    Subject: order 4821
    Dear Fernlea team,
    I ordered the desk lamp and found a camera in the box. My sister is very happy with her speaker. Please refund the
    full price. There is no hurry.
    Regards, Mira

    {"product":"lamp","issue":"wrong_item","priority":"low","refund":true}

The text determines every field, and it also has distractors: other products that work well, other problems that are
denied, a refund that is declined, an urgency of another day.

    product    the product that the complaint is about; in a mix-up the one that was ordered
    issue      what went wrong with it
    priority   high: a deadline, or work that has stopped; low: the customer says that it can wait; else normal
    refund     true if the customer asks for the money back
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.tasks.datasets import read_words
from reinforge.tasks.tickets.ticket import FIELDS, Ticket

_WORDS = read_words(__file__)
PRODUCTS, STORIES, URGENCY = _WORDS["products"], _WORDS["stories"], _WORDS["urgency"]
ASKS = {wants_refund: _WORDS["asks"][str(wants_refund).lower()] for wants_refund in (True, False)}
DENIALS = _WORDS["denials"]  # sentences for e-mails with another issue


@dataclass(frozen=True, slots=True)
class Email:
    text: str
    ticket: Ticket


def write_email(rng: random.Random, wording_share: float = 1.0) -> Email:
    """Returns a random e-mail that uses a share of the wordings, the first ones of each list."""
    ticket = {name: rng.choice(values) for name, values in FIELDS.items()}
    writer = _Writer(rng, wording_share, ticket)
    sentences = [writer.pick(STORIES[ticket["issue"]])]
    if rng.random() < 0.5:
        sentences.insert(rng.randrange(2), writer.write_aside())
    if rng.random() < 0.4:
        sentences.insert(rng.randrange(len(sentences) + 1), rng.choice(_WORDS["chatter"]))
    ending = [writer.pick(ASKS[bool(ticket["refund"])]), writer.pick(URGENCY[ticket["priority"]])]
    rng.shuffle(ending)
    body = " ".join(sentence for sentence in sentences + ending if sentence)
    kinds = ("subjects", "closings", "names", "greetings")
    subject, closing, name, greeting = (rng.choice(_WORDS[kind]) for kind in kinds)
    text = f"Subject: {subject}\n{greeting}\n{body}\n{closing} {name}"
    return Email(writer.fill(text), ticket)


@dataclass(frozen=True, slots=True)
class _Writer:
    rng: random.Random
    wording_share: float
    ticket: Ticket

    def pick(self, wordings: Sequence[str]) -> str:
        return self.rng.choice(wordings[: math.ceil(len(wordings) * self.wording_share)])

    def write_aside(self) -> str:
        if self.rng.random() < 0.5:
            return self.pick(_WORDS["praise"])
        return self.pick(DENIALS[self.rng.choice([issue for issue in DENIALS if issue != self.ticket["issue"]])])

    def fill(self, text: str) -> str:
        """Returns the text with its placeholders filled; each mention gets its own random wording."""
        rng, product = self.rng, self.ticket["product"]
        others = [other for other in PRODUCTS if other != product]
        words = {
            "it": lambda: self.pick(PRODUCTS[product]),
            "other": lambda: self.pick(PRODUCTS[rng.choice(others)]),
            "day": lambda: rng.choice(_WORDS["days"]),
            "month": lambda: rng.choice(_WORDS["months"]),
            "number": lambda: str(rng.randrange(1000, 10000)),
            "price": lambda: str(rng.randrange(20, 100)),
        }
        return re.sub(r"{(\w+)}", lambda placeholder: words[placeholder[1]](), text)
