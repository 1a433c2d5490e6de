"""Several agents in one dialogue, some of which share a model.

dialogue.py agents.py protocol.py protocols/    who speaks when, who hears what, who decides, what each agent earns
zero_knowledge.py                               the zero-knowledge variant of a protocol
episode.py workflow.py registration.py          a protocol as a workflow: a dialogue, or a tree of dialogues
builder.py guess_replacement.py                 each agent's own view of an episode, as trajectories
evaluators.py                                   accuracy, rewards and invalid replies of a protocol
nip/                                            the API of neural-interactive-proofs over all this

Names, those of `nip` included, are loaded on first use; none of them loads torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from reinforge.multiagent.nip import __all__ as _NIP_NAMES

_NAMES_BY_MODULE = {
    "reinforge.multiagent.agent_parameters": ("AgentParameters",),
    "reinforge.multiagent.dialogue": ("Dialogue", "DialogueProblem", "Message", "Step"),
    "reinforge.multiagent.episode": ("ProtocolOutput", "ProtocolWorkflow"),
    "reinforge.multiagent.protocol": ("ProtocolConfig",),
    "reinforge.multiagent.registration": ("register_protocol",),
    "reinforge.multiagent.nip": _NIP_NAMES,
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
