"""The debaters' initial model: it knows the rules and its role, and little more.

As a prover it shows the better of two random cells: the higher one if it argues for reject, else the lower one. As a
verifier it rejects the claim if a cell that it sees refutes it, else accepts; one decision in ten is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from string import Template
from typing import Any

from reinforge.registry import TypedConfig
from reinforge.tasks.debate.cells import DIGITS, LIMIT, NAMES, Cells, sample_cells
from reinforge.tasks.starters import Recipe, make_bpe_tokenizer, register_starter, supervised_episode
from reinforge.types.request import Message
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory

PROVER = "argue $stance: every cell is below 4: $cells"
VERIFIER = "decide: every cell is below 4: you see $seen"
HINT = "accept or reject?"  # the role prompts, which `examples/debate` uses too

WORDS = r"[a-h]\d| ?[A-Za-z_]+:?|\d|[^A-Za-z\d]"
STANCES = ("accept", "reject")
ANOTHER = "another"


@dataclass(frozen=True, slots=True)
class DebateRecipe(Recipe):
    num_steps: int = 600
    batch_size: int = 64
    learning_rate: float = 3e-3
    error_rate: float = 0.1  # share of the verifier's decisions that are wrong


def make_tokenizer() -> Any:
    """Returns a tokenizer with one token per word and per cell of the debate."""
    rng, texts = stable_random(0, "debate", "tokenizer"), list[str]()
    for _ in range(3000):
        cells = sample_cells(rng)
        texts += [message["content"] for message in (*write_prover_turns(rng, cells), *write_verifier_turn(rng, cells))]
    return make_bpe_tokenizer(texts, words=WORDS, vocab_size=600)


def generate_episodes(recipe: DebateRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields supervised episodes, half of a prover and half of a verifier."""
    rng = stable_random(recipe.seed, "debate", "starter")
    while True:
        cells = sample_cells(rng)
        if rng.random() < 0.5:
            messages = write_prover_turns(rng, cells)
        else:
            messages = write_verifier_turn(rng, cells, recipe.error_rate)
        yield supervised_episode(tokenizer, messages)


def write_prover_turns(rng: random.Random, cells: Cells) -> list[Message]:
    """Returns a prover's prompt and the cell it shows, then five more cells, for more data per prompt."""
    cells = Cells(tuple(rng.choice(DIGITS) for _ in NAMES), cells.seen)  # it learns to show any digit
    stance, hidden = rng.choice(STANCES), set(range(len(NAMES)))
    prompt = Template(PROVER).substitute(cells.to_row(), stance=stance)
    messages: list[Message] = []
    for question in (prompt, *[ANOTHER] * 5):
        pair = sorted(rng.sample(sorted(hidden), 2), key=lambda i: cells.digits[i])
        index = pair[-1] if stance == "reject" else pair[0]
        hidden.remove(index)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": _format_cell(cells, index)})
    return messages


def write_verifier_turn(rng: random.Random, cells: Cells, error_rate: float = 0.5) -> list[Message]:
    """Returns a verifier's prompt and its decision; a third of the prompts have no evidence of provers."""
    lines, shown = [Template(VERIFIER).substitute(cells.to_row())], [cells.digits[i] for i in cells.seen]
    if rng.random() < 2 / 3:
        picked = [rng.randrange(len(NAMES)) for _ in STANCES]
        shown += [cells.digits[i] for i in picked]
        lines += [f"prover_{s}: {_format_cell(cells, i)}" for s, i in zip(STANCES, picked, strict=True)]
    decision = "reject" if (max(shown) >= LIMIT) != (rng.random() < error_rate) else "accept"
    return [{"role": "user", "content": "\n".join((*lines, HINT))}, {"role": "assistant", "content": decision}]


def _format_cell(cells: Cells, index: int) -> str:
    return f"{NAMES[index]}{cells.digits[index]}"


class DebaterConfig(TypedConfig, name="debate"):
    """A small model that speaks as any debater of the debate task; trained on first use."""


register_starter(DebaterConfig, DebateRecipe(), make_tokenizer, generate_episodes)
