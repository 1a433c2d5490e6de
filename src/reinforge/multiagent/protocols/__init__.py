"""The built-in protocols, one per file; importing this package registers them."""

from reinforge.multiagent.protocols.adp import ADP, ADPConfig
from reinforge.multiagent.protocols.debate import Debate, DebateConfig
from reinforge.multiagent.protocols.merlin_arthur import MerlinArthur, MerlinArthurConfig
from reinforge.multiagent.protocols.mnip import MNIP, MNIPConfig
from reinforge.multiagent.protocols.multi_channel import MultiChannel, MultiChannelConfig
from reinforge.multiagent.protocols.nip import NIP, NIPConfig
from reinforge.multiagent.protocols.roles import Roles, RolesConfig
from reinforge.multiagent.protocols.solo_verifier import SoloVerifier, SoloVerifierConfig

__all__ = [
    "ADP",
    "MNIP",
    "NIP",
    "ADPConfig",
    "Debate",
    "DebateConfig",
    "MNIPConfig",
    "MerlinArthur",
    "MerlinArthurConfig",
    "MultiChannel",
    "MultiChannelConfig",
    "NIPConfig",
    "Roles",
    "RolesConfig",
    "SoloVerifier",
    "SoloVerifierConfig",
]
