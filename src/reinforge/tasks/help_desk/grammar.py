"""Chats of a small shop's help desk with the customers' thumbs, and the house rules that the thumbs follow.

    customer   Hello, my lamp has not arrived yet.
    desk       Sorry about the lamp. We will trace the parcel today.          thumb up
    desk       Sorry about the kettle. Please call our hotline.               thumb down

A reply is good if it names what the customer wrote about, says what the desk will do, and promises no money.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from reinforge.tasks.datasets import read_words
from reinforge.types.seeding import stable_random

SORT = "Sort the message of a customer: item, and topic (delivery, defect or bill)."
SYSTEM = "You answer customers of Fernlea, a small shop, in two sentences."

_WORDS = read_words(__file__)
ITEMS, PROBLEMS = _WORDS["items"], _WORDS["problems"]
BRUSH_OFF = "Please call our hotline."
PROMISE = "You get your money back."
PRICES = 2e-6, 8e-6
"""Of a token that the large model reads, and of one that it samples; US dollars."""
SHARE_RATED, SHARE_MISTAKEN = 0.85, 0.05
"""Share of the logged chats with a thumb, and of the thumbs that point the wrong way."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How often a careless desk breaks each house rule."""

    names_another_item: float = 0.2
    brushes_off: float = 0.25
    promises_money: float = 0.2


@dataclass(frozen=True, slots=True)
class Chat:
    question: str
    reply: str

    @property
    def messages(self) -> list[dict[str, str]]:
        texts = (("system", SYSTEM), ("user", self.question), ("assistant", self.reply))
        return [{"role": role, "content": text} for role, text in texts]


def write_chat(rng: random.Random, manners: Manners) -> Chat:
    """Returns a random question with the reply of a desk with these manners."""
    topic, item = rng.choice(list(PROBLEMS)), rng.choice(ITEMS)
    problem = rng.choice(PROBLEMS[topic]).format(item=item, day=rng.choice(_WORDS["days"]))
    question = f"{rng.choice(_WORDS['greetings'])} {problem}{rng.choice(_WORDS['ends'])}"
    if rng.random() < manners.names_another_item:
        item = rng.choice([other for other in ITEMS if other != item])
    action = _WORDS["actions"][topic]
    if rng.random() < manners.promises_money:
        action = PROMISE
    if rng.random() < manners.brushes_off:
        action = BRUSH_OFF
    return Chat(question, f"Sorry about the {item}. {action}")


def count_kept_rules(question: str, reply: str) -> int:
    item = next((item for item in ITEMS if item in question), None)
    return (item is not None and item in reply) + ("We will" in reply) + ("money" not in reply)


def write_calls(num_calls: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields the calls of ten days to a large model that sorts the messages, as `reinforge serve --record` does."""
    rng, begun = stable_random(seed, "help_desk", "calls"), datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(num_calls):
        chat = write_chat(rng, Manners(0, 0, 0))
        topic = next(topic for topic, action in _WORDS["actions"].items() if chat.reply.endswith(action))
        item = next(item for item in ITEMS if item in chat.reply)
        reply = {"role": "assistant", "content": json.dumps({"item": item, "topic": topic})}
        asked = [{"role": "system", "content": SORT}, {"role": "user", "content": chat.question}]
        sent, sampled = (sum(len(each["content"]) for each in part) // 4 for part in (asked, [reply]))
        yield {
            "id": f"call-{number:04}",
            "call_type": "completion",
            "status": "success",
            "model": "large-1",
            "startTime": (begun + number * timedelta(days=10) / num_calls).isoformat(timespec="seconds"),
            "response_time": round(rng.uniform(0.3, 1.2), 3),
            "prompt_tokens": sent,
            "completion_tokens": sampled,
            "response_cost": round(PRICES[0] * sent + PRICES[1] * sampled, 9),
            "messages": asked,
            "response": {"choices": [{"message": reply}]},
        }


def write_logs(num_chats: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields logged chats of a careless desk, most of them with a thumb."""
    rng = stable_random(seed, "help_desk", "logs")
    for number in range(num_chats):
        chat = write_chat(rng, Manners())
        row: dict[str, Any] = {"id": f"chat-{number:04}", "messages": chat.messages}
        is_good = count_kept_rules(chat.question, chat.reply) == 3
        if rng.random() < SHARE_MISTAKEN:
            is_good = not is_good
        if rng.random() < SHARE_RATED:
            row["feedback"] = "thumbs_up" if is_good else "thumbs_down"
        yield row
