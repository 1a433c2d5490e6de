"""Merlin-Arthur classifier (arXiv:2206.00759): a helpful or an adversarial prover, and nobody says which.

Merlin argues for the truth and Morgana against it. By chance one of them sends one message in an episode; the verifier
(Arthur) is told that it comes from "prover", and decides, or says that it cannot tell: `none`. The one who spoke earns
when the decision is the one that it argued for. Train and measure both: `agent_reward` of merlin is completeness, and
of morgana what is wanting to soundness.

Differs from the paper: messages are text, not features of the input; each of the two speaks in half the episodes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from reinforge.errors import EvaluationError
from reinforge.multiagent.dialogue import Decision, Dialogue, Problem
from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn
from reinforge.multiagent.registration import register_protocol


class MerlinArthurConfig(ProtocolConfig, name="merlin_arthur"):
    """Merlin or Morgana says one thing, then the verifier decides."""

    verifier_first: Literal[False] = Field(default=False, description="The verifier only decides.")
    max_message_rounds: Literal[2] = Field(default=2, description="One message and one decision.")
    randomize_prover_stance: Literal[False] = Field(default=False, description="The truth says who argues for what.")


@register_protocol(MerlinArthurConfig)
class MerlinArthur(ProtocolHandler):
    """One prover of two, and the verifier does not know which."""

    provers = ("merlin", "morgana")
    verifiers = ("verifier",)
    needs_truth = True

    def stances(self, problem: Problem, rng: random.Random) -> dict[str, Decision]:
        """Returns the truth for Merlin and the opposite for Morgana.

        Raises:
            EvaluationError: Nobody knows what is right.
        """
        if problem.truth is None:
            raise EvaluationError("merlin_arthur needs to know what is right: give the example an answer")
        return {"merlin": problem.truth, "morgana": "reject" if problem.truth == "accept" else "accept"}

    def absent(self, problem: Problem, rng: random.Random) -> frozenset[str]:
        """Returns the one who does not speak."""
        return frozenset((rng.choice(self.provers),))

    def called(self, agent: str, dialogue: Dialogue) -> str:
        """Returns one name for both provers."""
        return "prover" if agent in self.provers else agent

    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns the round of the provers, of whom one is absent, and the verifier's."""
        return [[(name, "main") for name in self.provers], [("verifier", "main")]]
