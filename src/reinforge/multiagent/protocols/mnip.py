"""Neural interactive proofs with two provers (`mnip`, arXiv:2412.08897): a channel each, and the verifier sees both.

The provers argue for the same decision and cannot hear each other, so that one can be asked about the other's answers.
In its rounds the verifier says one thing in each channel; to decide it writes its decision in one of them or in both.

Differs from the paper: what each agent earns comes from the configuration; zero-knowledge terms are left out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from reinforge.multiagent.dialogue import Decision, Problem
from reinforge.multiagent.protocol import ProtocolHandler, Turn
from reinforge.multiagent.protocols.debate import TwoProversConfig, in_turn, shuffled
from reinforge.multiagent.registration import register_protocol


class MNIPConfig(TwoProversConfig, name="mnip"):
    """Two provers who cannot hear each other, and a verifier who questions both."""


@register_protocol(MNIPConfig)
class MNIP(ProtocolHandler):
    """Two provers of one stance, a channel each."""

    provers = ("prover0", "prover1")
    verifiers = ("verifier",)
    config: MNIPConfig

    def channels(self) -> Mapping[str, Sequence[str]]:
        """Returns a channel for each prover, which it shares with the verifier."""
        return {f"{name}_channel": (name, "verifier") for name in self.provers}

    def stances(self, problem: Problem, rng: random.Random) -> dict[str, Decision]:
        """Returns one stance for both, by chance accept or reject where it is randomised."""
        stance: Decision = rng.choice(("accept", "reject")) if self.config.randomize_prover_stance else "accept"
        return dict.fromkeys(self.provers, stance)

    def order(self, problem: Problem, rng: random.Random) -> tuple[str, ...]:
        """Returns the provers, and so their channels, by chance the other way round."""
        return shuffled(self.provers, rng) if self.config.randomize_channel_order else ()

    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns a round of the verifier in both channels, and one of both provers or one of each."""
        asked = [("verifier", channel) for channel in self.channels()]
        return in_turn(self.config, [asked], [(name, f"{name}_channel") for name in self.provers])
