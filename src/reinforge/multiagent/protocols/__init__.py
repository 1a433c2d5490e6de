"""The protocols, a file each; importing this registers them."""

from reinforge.multiagent.protocols.debate import Debate, DebateConfig
from reinforge.multiagent.protocols.nip import NIP, NIPConfig
from reinforge.multiagent.protocols.solo_verifier import SoloVerifier, SoloVerifierConfig

__all__ = ["NIP", "Debate", "DebateConfig", "NIPConfig", "SoloVerifier", "SoloVerifierConfig"]
