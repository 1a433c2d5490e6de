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

from reinforge.tasks.tickets.ticket import FIELDS, Ticket

PRODUCTS = {
    "kettle": ("kettle", "Pour 2", "tea kettle", "water boiler"),
    "lamp": ("lamp", "Glimmer", "desk lamp", "reading light"),
    "camera": ("camera", "Peek", "door camera", "video doorbell"),
    "vacuum": ("vacuum", "Dusty", "vacuum cleaner", "robot sweeper"),
    "speaker": ("speaker", "Humm", "kitchen radio", "music box"),
    "router": ("router", "Hopper", "wifi box", "network hub"),
}

STORIES = {
    "defect": (
        "My {it} stopped working after two weeks.",
        "The {it} does not switch on any more.",
        "Since the last update the {it} restarts every hour.",
        "The {it} broke the second time I used it.",
        "There is a strange smell whenever the {it} runs.",
        "The {it} goes off by itself after a minute.",
    ),
    "delivery": (
        "The {it} that I ordered has not arrived.",
        "I am still waiting for my {it}.",
        "The tracking of the {it} has not moved since {day}.",
        "The courier says the {it} was handed over, but nobody here has it.",
        "My {it} should have been here on {day}.",
        "Where is the {it} that I paid for in {month}?",
    ),
    "wrong_item": (
        "I ordered the {it} and found a {other} in the box.",
        "You sent me a {other} instead of the {it}.",
        "The label says {it}, but inside is a {other}.",
        "The {it} came in the wrong colour.",
        "This is not the {it} that I chose, it is the smaller model.",
        "A {other} was in the parcel where the {it} should have been.",
    ),
    "billing": (
        "I was charged twice for the {it}.",
        "The invoice for my {it} shows the wrong amount.",
        "My discount code was not applied to the {it}.",
        "You took the money for the {it} two times.",
        "My card was billed {price} euros for the {it}, although it was on sale.",
        "There is a fee on the bill for the {it} that nobody mentioned.",
    ),
}

ASKS = {
    True: (
        "I would like my money back.",
        "Please refund the full price.",
        "Kindly return the amount to my card.",
        "I want to be paid back.",
        "Please reimburse me.",
    ),
    False: (
        "I do not want my money back, please just put it right.",
        "A refund is not what I want, only a solution.",
        "Could you look into this?",
        "Please tell me what to do next.",
        "I still want to keep the order.",
    ),
}

URGENCY = {
    "high": (
        "I need this solved before {day}.",
        "This is urgent, we depend on it at work.",
        "Please act today.",
        "I cannot wait any longer.",
        "Guests arrive tomorrow and we need it.",
    ),
    "low": (
        "There is no hurry.",
        "Whenever you have a moment is fine.",
        "This is not urgent at all.",
        "Take your time.",
        "I am away until {month}, so it can wait.",
    ),
    "normal": (
        "",
        "Please let me know by e-mail.",
        "I look forward to your reply.",
        "Last time it was urgent, today it is not a matter of days.",
        "Thank you for your help in {month}.",
    ),
}

PRAISE = (
    "The {other} I bought last year works like new.",
    "My sister is very happy with her {other}.",
    "We also own the {other}, no complaints there.",
    "I nearly chose the {other} this time.",
)

DENIALS = {
    "defect": ("Nothing is broken.", "The device itself works."),
    "delivery": ("The parcel came on time.", "The delivery was quick."),
    "wrong_item": ("It is the model I chose.", "It is the right colour."),
    "billing": ("The bill was correct.", "The price was as agreed."),
}
"""Sentences for e-mails with another issue."""

CHATTER = (
    "The order number is {number}.",
    "My account is {number}.",
    "I have been a customer since 2019.",
    "I tried to call, but the line was busy.",
)

SUBJECTS = ("order {number}", "please help", "question", "my order", "customer {number}", "a problem")
GREETINGS = ("Hello,", "Hi there,", "Dear Fernlea team,", "Good morning,", "To whom it may concern,")
CLOSINGS = ("Thanks,", "Regards,", "Best wishes,", "Yours,")
NAMES = ("Mira", "Jonas", "Ines", "Tomasz", "Aiko", "Samuel", "Leila", "Pavel", "Nora", "Chidi")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
MONTHS = ("March", "April", "May", "June", "September", "October")


@dataclass(frozen=True, slots=True)
class Email:
    text: str
    ticket: Ticket


def random_ticket(rng: random.Random) -> Ticket:
    return {name: rng.choice(values) for name, values in FIELDS.items()}


def write_email(rng: random.Random, wording_share: float = 1.0) -> Email:
    """Returns a random e-mail that uses a share of the wordings, the first ones of each list."""
    ticket = random_ticket(rng)
    writer = _Writer(rng, wording_share, ticket)
    sentences = [writer.pick(STORIES[ticket["issue"]])]
    if rng.random() < 0.5:
        sentences.insert(rng.randrange(2), writer.write_aside())
    if rng.random() < 0.4:
        sentences.insert(rng.randrange(len(sentences) + 1), rng.choice(CHATTER))
    ending = [writer.pick(ASKS[ticket["refund"]]), writer.pick(URGENCY[ticket["priority"]])]
    rng.shuffle(ending)
    body = " ".join(sentence for sentence in sentences + ending if sentence)
    subject, closing = rng.choice(SUBJECTS), f"{rng.choice(CLOSINGS)} {rng.choice(NAMES)}"
    text = f"Subject: {subject}\n{rng.choice(GREETINGS)}\n{body}\n{closing}"
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
            return self.pick(PRAISE)
        return self.pick(DENIALS[self.rng.choice([issue for issue in DENIALS if issue != self.ticket["issue"]])])

    def fill(self, text: str) -> str:
        """Returns the text with its placeholders filled; each mention gets its own random wording."""
        rng, product = self.rng, self.ticket["product"]
        others = [other for other in PRODUCTS if other != product]
        words = {
            "it": lambda: self.pick(PRODUCTS[product]),
            "other": lambda: self.pick(PRODUCTS[rng.choice(others)]),
            "day": lambda: rng.choice(DAYS),
            "month": lambda: rng.choice(MONTHS),
            "number": lambda: str(rng.randrange(1000, 10000)),
            "price": lambda: str(rng.randrange(20, 100)),
        }
        return re.sub(r"{(\w+)}", lambda placeholder: words[placeholder[1]](), text)
