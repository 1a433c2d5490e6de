"""Abstract decision problem (`adp`), the protocol of prover-verifier games (arXiv:2108.12099).

The prover sends one message, then the verifier decides; the prover is rewarded for `accept`.

Differs from the paper: the message is sampled text, not a vector that gradients pass through; the stance may be random
(`randomize_prover_stance`), whereas the paper's prover always argues for the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn
from reinforge.multiagent.registration import register_protocol


class ADPConfig(ProtocolConfig, name="adp"):
    """The prover sends one message, then the verifier decides."""

    verifier_first: Literal[False] = Field(default=False, description="Fixed: the verifier only decides.")
    max_message_rounds: Literal[2] = Field(default=2, description="Fixed: one message and one decision.")


@register_protocol(ADPConfig)
class ADP(ProtocolHandler):
    provers = ("prover",)
    verifiers = ("verifier",)

    def turns(self) -> Sequence[Sequence[Turn]]:
        return [[("prover", "main")], [("verifier", "main")]]
