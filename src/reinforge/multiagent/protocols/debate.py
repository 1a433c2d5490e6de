"""Debate (arXiv:1805.00899): two provers argue for opposite decisions, and the verifier decides.

`prover_accept` argues for accept and `prover_reject` for reject, whatever the truth is, so that one of them is always
right. They earn when the verifier decides for their side.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from reinforge.multiagent.dialogue import Decision, Problem
from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn, register_protocol


class DebateConfig(ProtocolConfig, name="debate"):
    """Two provers and a verifier."""

    sequential: bool = Field(default=False, description="The provers speak one after the other, not at the same time.")


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

    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns a round of the verifier, and one of both provers or one of each."""
        provers: list[Turn] = [(name, "main") for name in self.provers]
        argued = [[turn] for turn in provers] if self.config.sequential else [provers]
        verifier: list[list[Turn]] = [[("verifier", "main")]]
        return verifier + argued if self.config.verifier_first else argued + verifier
