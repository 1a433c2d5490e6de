"""Debate (arXiv:1805.00899): two provers argue for opposite decisions, and the verifier decides.

`prover_accept` argues for accept and `prover_reject` for reject, whatever the truth, so one of them is always right. A
prover is rewarded if the verifier decides for its side. If the agents are configured as `prover0` and `prover1`, as in
neural-interactive-proofs, `prover0` argues for reject and `prover1` for accept.

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

NUMBERED_PROVERS = ("prover0", "prover1")
"""The provers' names in neural-interactive-proofs: the first argues for reject, the second for accept."""


class TwoProversConfig(ProtocolConfig):
    """What the protocols with two provers share."""

    sequential: bool = Field(default=False, description="The provers speak in turn instead of at the same time.")
    prover0_first: bool = Field(
        default=True, description="sequential: the first prover speaks first; false: the second one does."
    )
    randomize_channel_order: bool = Field(
        default=True, description="Deliver messages of the same round in an order that is random per episode."
    )


class DebateConfig(TwoProversConfig, name="debate"):
    """Two provers and a verifier."""


@register_protocol(DebateConfig)
class Debate(ProtocolHandler):
    provers = ("prover_accept", "prover_reject")
    verifiers = ("verifier",)
    config: DebateConfig

    def __init__(self, config: DebateConfig):
        super().__init__(config)
        if has_numbered_provers(config):
            self.provers = NUMBERED_PROVERS

    def stances(self, problem: DialogueProblem, rng: random.Random) -> dict[str, Decision]:
        """Returns the two stances, randomly swapped if stances are randomized."""
        sides: list[Decision] = ["reject", "accept"] if self.provers == NUMBERED_PROVERS else ["accept", "reject"]
        if self.config.randomize_prover_stance:
            rng.shuffle(sides)
        return dict(zip(self.provers, sides, strict=True))

    def display_name(self, agent: str, dialogue: Dialogue) -> str:
        if self.provers == NUMBERED_PROVERS:
            return agent
        return f"prover_{dialogue.stances[agent]}" if agent in dialogue.stances else agent

    def order(self, problem: DialogueProblem, rng: random.Random) -> tuple[str, ...]:
        return shuffle_names(self.provers, rng) if self.config.randomize_channel_order else ()

    def turns(self) -> Sequence[Sequence[Turn]]:
        return build_rounds(self.config, [[("verifier", "main")]], [(name, "main") for name in self.provers])


def has_numbered_provers(config: ProtocolConfig) -> bool:
    """Returns True if the agents are configured under the names of neural-interactive-proofs."""
    return set(NUMBERED_PROVERS) <= config.agents.keys()


def build_rounds(
    config: TwoProversConfig, verifier: Sequence[Sequence[Turn]], provers: Sequence[Turn]
) -> Sequence[Sequence[Turn]]:
    provers = provers if config.prover0_first else provers[::-1]
    prover_rounds = [[turn] for turn in provers] if config.sequential else [list(provers)]
    return [*verifier, *prover_rounds] if config.verifier_first else [*prover_rounds, *verifier]


def shuffle_names(names: Sequence[str], rng: random.Random) -> tuple[str, ...]:
    return tuple(rng.sample(list(names), len(names)))
