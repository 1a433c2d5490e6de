"""The debate about cells: problems, the check of evidence, and what a verifier can know."""

import random
import re
from itertools import islice
from pathlib import Path

import pytest

from reinforge.config.loader import load_config
from reinforge.tasks.debate.cells import LIMIT, Cells, check_evidence, sample_cells
from reinforge.tasks.debate.starter import (
    HINT,
    PROVER,
    VERIFIER,
    DebateRecipe,
    generate_episodes,
    make_tokenizer,
    write_prover_turns,
    write_verifier_turn,
)

EXAMPLES = Path(__file__).parents[3] / "examples" / "debate"
PROBLEM = Cells(digits=(3, 2, 0, 4, 2, 1, 1, 3), seen=(1, 6))


def test_a_problem_is_written_as_each_agent_sees_it():
    assert PROBLEM.to_row() == {
        "question": "every cell is below 4: a3 b2 c0 d4 e2 f1 g1 h3",
        "answer": "reject",
        "cells": "a3 b2 c0 d4 e2 f1 g1 h3",
        "seen": "b2 g1",
    }
    assert Cells((3, 2, 0, 3, 2, 1, 1, 3), (0, 1)).is_true


@pytest.mark.parametrize(
    ("said", "shown"),
    [("d4", "d4"), (" c0", "c0"), ("a4", "false"), ("trust me", "false"), ("d4 c0", "false")],
)
def test_evidence_is_checked(said, shown):
    assert check_evidence(said, PROBLEM.to_row()) == shown


def decides_right(prover, cells):
    """A verifier that rejects if a cell it sees refutes the claim; `prover` picks a cell, None shows none."""
    shown = [cells.digits[i] for i in cells.seen]
    shown += [cells.digits[prover(cells)] for _ in range(2)] if prover else []
    return (max(shown) < LIMIT) == cells.is_true


def test_provers_that_know_are_needed():
    rng, chance = random.Random(0), random.Random(1)
    problems = [sample_cells(rng) for _ in range(4000)]

    def share(prover):
        return sum(decides_right(prover, cells) for cells in problems) / len(problems)

    assert share(lambda cells: cells.digits.index(max(cells.digits))) == 1.0
    assert 0.69 < share(lambda cells: chance.randrange(8)) < 0.74  # 1/2 + 1/2 (1 - (6/8) (7/8)^2) = 0.713
    assert 0.60 < share(None) < 0.65  # 1/2 + 1/2 (2/8) = 0.625
    assert 0.47 < sum(cells.is_true for cells in problems) / len(problems) < 0.53


def test_the_starter_knows_which_way_is_its_own_and_no_more():
    rng, accepted = random.Random(0), {True: [], False: []}
    for _ in range(750):
        prompt, reply = write_verifier_turn(rng, sample_cells(rng), DebateRecipe().error_rate)
        is_shown = any(int(cell[1]) >= LIMIT for cell in re.findall(r"\b[a-h]\d\b", prompt["content"]))
        accepted[is_shown].append(reply["content"] == "accept")
    assert 0.85 < sum(accepted[False]) / len(accepted[False]) < 0.95
    assert 0.05 < sum(accepted[True]) / len(accepted[True]) < 0.15
    argued = [write_prover_turns(rng, sample_cells(rng))[:2] for _ in range(750)]
    said = [(prompt["content"], reply["content"]) for prompt, reply in argued]
    for stance, low, high in (("reject", 0.31, 0.41), ("accept", 0.02, 0.07)):  # 1 - 0.8^2 = 0.36 and 0.2^2 = 0.04
        refuting = [int(reply[1]) >= LIMIT for prompt, reply in said if prompt.startswith(f"argue {stance}")]
        assert low < sum(refuting) / len(refuting) < high


@pytest.mark.slow
def test_its_replies_are_short_in_tokens():
    seen = islice(generate_episodes(DebateRecipe(), make_tokenizer()), 200)
    assert all(len(turn.tokens.token_ids) <= 4 for episode in seen for turn in episode.turns)


@pytest.mark.parametrize("name", ["debate", "solo"])
def test_the_files_ask_as_the_starter_was_asked(name):
    config = load_config(EXAMPLES / f"{name}.yml").config
    prompts = {agent: parameters.prompt for agent, parameters in config.workflow.agents.items()}
    provers = {"prover_accept": PROVER, "prover_reject": PROVER} if name == "debate" else {}
    assert prompts == {**provers, "verifier": VERIFIER}
    assert config.workflow.last_round_hint == HINT
    assert config.finetuning.gate.margin == (0.15 if name == "debate" else 0.0)
