"""Neural interactive proofs (`nip`, arXiv:2412.08897): a verifier questions one prover until it decides.

Differs from the paper: rewards come from the configuration; the zero-knowledge variant (`zero_knowledge: true`)
compares texts, not distributions.
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn
from reinforge.multiagent.registration import register_protocol


class NIPConfig(ProtocolConfig, name="nip"):
    """A verifier and a prover alternate; the verifier decides."""


@register_protocol(NIPConfig)
class NIP(ProtocolHandler):
    provers = ("prover",)
    verifiers = ("verifier",)

    def turns(self) -> Sequence[Sequence[Turn]]:
        rounds: list[list[Turn]] = [[("verifier", "main")], [("prover", "main")]]
        return rounds if self.config.verifier_first else rounds[::-1]
