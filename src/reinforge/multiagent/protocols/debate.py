"""Debate (arXiv:1805.00899): two provers argue for opposite decisions, and the verifier decides.

`prover_accept` argues for accept and `prover_reject` for reject, whatever the truth, so one of them is always right. A
prover is rewarded if the verifier decides for its side.

Differs from the paper: the provers are assigned their sides instead of choosing an answer; they may speak at the same
time; the verifier may ask questions between their turns. Rewards come from the configuration: the winning prover gets
`prover_reward`, the other gets 0.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from reinforge.multiagent.dialogue import Decision, Dialogue, DialogueProblem
from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn
from reinforge.multiagent.registration import register_protocol


class TwoProversConfig(ProtocolConfig):
    """What the protocols with two provers share."""

    sequential: bool = Field(default=False, description="The provers speak in turn instead of at the same time.")
    randomize_channel_order: bool = Field(
        default=True, description="Deliver messages of the same round in an order that is random per episode."
    )


class DebateConfig(TwoProversConfig, name="debate"):
    """Two provers and a verifier."""


@register_protocol(DebateConfig)
class Debate(ProtocolHandler):
    """Two provers of opposite stances before one verifier."""

    provers = ("prover_accept", "prover_reject")
    verifiers = ("verifier",)
    config: DebateConfig

    def stances(self, problem: DialogueProblem, rng: random.Random) -> dict[str, Decision]:
        """Returns the two stances, randomly swapped if stances are randomized."""
        sides: list[Decision] = ["accept", "reject"]
        if self.config.randomize_prover_stance:
            rng.shuffle(sides)
        return dict(zip(self.provers, sides, strict=True))

    def display_name(self, agent: str, dialogue: Dialogue) -> str:
        """Returns a prover's name after its stance, which differs from its own name if stances were swapped."""
        return f"prover_{dialogue.stances[agent]}" if agent in dialogue.stances else agent

    def order(self, problem: DialogueProblem, rng: random.Random) -> tuple[str, ...]:
        """Returns the provers in random order."""
        return shuffle_names(self.provers, rng) if self.config.randomize_channel_order else ()

    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns the verifier's round, and one round of both provers or one round each."""
        return build_rounds(self.config, [[("verifier", "main")]], [(name, "main") for name in self.provers])


def build_rounds(
    config: TwoProversConfig, verifier: Sequence[Sequence[Turn]], provers: Sequence[Turn]
) -> Sequence[Sequence[Turn]]:
    """Returns the verifier's rounds and one round of all provers or, if sequential, one round each."""
    prover_rounds = [[turn] for turn in provers] if config.sequential else [list(provers)]
    return [*verifier, *prover_rounds] if config.verifier_first else [*prover_rounds, *verifier]


def shuffle_names(names: Sequence[str], rng: random.Random) -> tuple[str, ...]:
    """Returns names in random order."""
    return tuple(rng.sample(list(names), len(names)))
