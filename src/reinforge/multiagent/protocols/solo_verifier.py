"""The verifier alone (arXiv:2412.08897): what it can tell without anybody's help, the measure of all other protocols.

Differs from the paper: it may be given several rounds (`max_message_rounds`), in which it talks to itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn
from reinforge.multiagent.registration import register_protocol


class SoloVerifierConfig(ProtocolConfig, name="solo_verifier"):
    """One verifier, which decides at once."""

    max_message_rounds: int = Field(default=1, ge=1, description="Rounds, after which it is over undecided.")


@register_protocol(SoloVerifierConfig)
class SoloVerifier(ProtocolHandler):
    """One agent, one message."""

    verifiers = ("verifier",)

    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns the one round."""
        return [[("verifier", "main")]]
