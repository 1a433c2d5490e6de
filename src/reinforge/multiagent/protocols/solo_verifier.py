"""The verifier alone: what it can tell without anybody's help, against which protocols are measured."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn, register_protocol


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
