"""Merlin-Arthur classifier (arXiv:2206.00759): a helpful or an adversarial prover, and the verifier is not told which.

Merlin argues for the truth and Morgana against it. In each episode one of them, picked at random, sends one message;
the verifier (Arthur) sees it as coming from "prover" and decides, or abstains with `none`. The prover that spoke is
rewarded if the decision is its stance. Train and measure both: merlin's `agent_reward` is the completeness, and
morgana's is 1 - soundness.

If the agents are configured as `prover0` and `prover1`, as in neural-interactive-proofs, `prover0` argues for reject
and `prover1` for accept, whatever the truth.

Differs from the paper: messages are text, not features of the input; each prover speaks in half of the episodes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from reinforge.errors import EvaluationError
from reinforge.multiagent.dialogue import Decision, Dialogue, DialogueProblem
from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn
from reinforge.multiagent.protocols.debate import NUMBERED_PROVERS, has_numbered_provers
from reinforge.multiagent.registration import register_protocol


class MerlinArthurConfig(ProtocolConfig, name="merlin_arthur"):
    """Merlin or Morgana sends one message, then the verifier decides."""

    verifier_first: Literal[False] = Field(default=False, description="Fixed: the verifier only decides.")
    max_message_rounds: Literal[2] = Field(default=2, description="Fixed: one message and one decision.")
    randomize_prover_stance: Literal[False] = Field(default=False, description="Fixed: stances follow the truth.")


@register_protocol(MerlinArthurConfig)
class MerlinArthur(ProtocolHandler):
    provers = ("merlin", "morgana")
    verifiers = ("verifier",)
    needs_truth = True
    config: MerlinArthurConfig

    def __init__(self, config: MerlinArthurConfig):
        super().__init__(config)
        if has_numbered_provers(config):
            self.provers, self.needs_truth = NUMBERED_PROVERS, False

    def stances(self, problem: DialogueProblem, rng: random.Random) -> dict[str, Decision]:
        """Returns the truth for Merlin and the opposite for Morgana; numbered provers have fixed stances."""
        if self.provers == NUMBERED_PROVERS:
            return {"prover0": "reject", "prover1": "accept"}
        if problem.truth is None:
            raise EvaluationError("merlin_arthur needs the right decision: give the example an answer")
        return {"merlin": problem.truth, "morgana": "reject" if problem.truth == "accept" else "accept"}

    def absent(self, problem: DialogueProblem, rng: random.Random) -> frozenset[str]:
        return frozenset((rng.choice(self.provers),))

    def display_name(self, agent: str, dialogue: Dialogue) -> str:
        return "prover" if agent in self.provers else agent

    def turns(self) -> Sequence[Sequence[Turn]]:
        return [[(name, "main") for name in self.provers], [("verifier", "main")]]
