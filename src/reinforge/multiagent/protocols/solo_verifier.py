"""The verifier alone (arXiv:2412.08897): the baseline for all other protocols.

Differs from the paper: it may have several rounds (`max_message_rounds`), in which it reads only its own messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn
from reinforge.multiagent.registration import register_protocol


class SoloVerifierConfig(ProtocolConfig, name="solo_verifier"):
    """One verifier that decides on its own."""

    max_message_rounds: int = Field(default=1, ge=1, description="Rounds after which an undecided dialogue ends.")


@register_protocol(SoloVerifierConfig)
class SoloVerifier(ProtocolHandler):
    verifiers = ("verifier",)

    def turns(self) -> Sequence[Sequence[Turn]]:
        return [[("verifier", "main")]]
