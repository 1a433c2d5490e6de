"""Debate (arXiv:1805.00899): two provers argue for opposite decisions, and the verifier decides.

`prover_accept` argues for accept and `prover_reject` for reject, whatever the truth is, so that one of them is always
right. They earn when the verifier decides for their side.

Differs from the paper: the provers are given their sides and do not choose an answer first; they may speak at the same
time; the verifier may ask between their turns. What each agent earns comes from the configuration: the prover that is
believed earns `prover_reward`, and the other one loses nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from reinforge.multiagent.dialogue import Decision, Dialogue, Problem
from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn
from reinforge.multiagent.registration import register_protocol


class TwoProversConfig(ProtocolConfig):
    """What protocols with two provers share."""

    sequential: bool = Field(default=False, description="The provers speak one after the other, not at the same time.")
    randomize_channel_order: bool = Field(
        default=True, description="What provers say at the same time is told in an order drawn for each episode."
    )


class DebateConfig(TwoProversConfig, name="debate"):
    """Two provers and a verifier."""


@register_protocol(DebateConfig)
class Debate(ProtocolHandler):
    """Two provers of opposite stances before one verifier."""

    provers = ("prover_accept", "prover_reject")
    verifiers = ("verifier",)
    config: DebateConfig

    def stances(self, problem: Problem, rng: random.Random) -> dict[str, Decision]:
        """Returns the two stances, by chance the other way round where stances are randomised."""
        sides: list[Decision] = ["accept", "reject"]
        if self.config.randomize_prover_stance:
            rng.shuffle(sides)
        return dict(zip(self.provers, sides, strict=True))

    def called(self, agent: str, dialogue: Dialogue) -> str:
        """Returns a prover's name by the side that it argues for, which is another than its own by chance."""
        return f"prover_{dialogue.stances[agent]}" if agent in dialogue.stances else agent

    def order(self, problem: Problem, rng: random.Random) -> tuple[str, ...]:
        """Returns the provers, by chance the other way round."""
        return shuffled(self.provers, rng) if self.config.randomize_channel_order else ()

    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns a round of the verifier, and one of both provers or one of each."""
        return in_turn(self.config, [[("verifier", "main")]], [(name, "main") for name in self.provers])


def in_turn(
    config: TwoProversConfig, verifier: Sequence[Sequence[Turn]], provers: Sequence[Turn]
) -> Sequence[Sequence[Turn]]:
    """Returns the verifier's rounds and one of all provers or, where these are sequential, one of each."""
    argued = [[turn] for turn in provers] if config.sequential else [list(provers)]
    return [*verifier, *argued] if config.verifier_first else [*argued, *verifier]


def shuffled(names: Sequence[str], rng: random.Random) -> tuple[str, ...]:
    """Returns names in an order drawn by chance."""
    return tuple(rng.sample(list(names), len(names)))
