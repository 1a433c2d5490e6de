"""Neural interactive proofs with two provers (`mnip`, arXiv:2412.08897): a channel each, and the verifier sees both.

The provers argue for the same decision and cannot hear each other, so the verifier can check one against the other. In
its rounds the verifier sends one message per channel; it decides by writing its decision in one channel or in both.

Differs from the paper: rewards come from the configuration; the zero-knowledge variant (`zero_knowledge: true`)
compares texts, not distributions.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from reinforge.multiagent.dialogue import Decision, DialogueProblem
from reinforge.multiagent.protocol import ProtocolHandler, Turn
from reinforge.multiagent.protocols.debate import TwoProversConfig, build_rounds, shuffle_names
from reinforge.multiagent.registration import register_protocol


class MNIPConfig(TwoProversConfig, name="mnip"):
    """Two provers that cannot hear each other, and a verifier that questions both."""


@register_protocol(MNIPConfig)
class MNIP(ProtocolHandler):
    provers = ("prover0", "prover1")
    verifiers = ("verifier",)
    config: MNIPConfig

    def channels(self) -> Mapping[str, Sequence[str]]:
        return {f"{name}_channel": (name, "verifier") for name in self.provers}

    def stances(self, problem: DialogueProblem, rng: random.Random) -> dict[str, Decision]:
        stance: Decision = rng.choice(("accept", "reject")) if self.config.randomize_prover_stance else "accept"
        return dict.fromkeys(self.provers, stance)

    def order(self, problem: DialogueProblem, rng: random.Random) -> tuple[str, ...]:
        return shuffle_names(self.provers, rng) if self.config.randomize_channel_order else ()

    def turns(self) -> Sequence[Sequence[Turn]]:
        questions = [("verifier", channel) for channel in self.channels()]
        return build_rounds(self.config, [questions], [(name, f"{name}_channel") for name in self.provers])
