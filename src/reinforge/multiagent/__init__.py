"""Several agents in one dialogue, some of which share a model.

dialogue.py agents.py protocol.py protocols/    who speaks when, who hears what, who decides, what each agent earns
zero_knowledge.py                               the zero-knowledge variant of a protocol
episode.py registration.py                      a protocol as a workflow: a dialogue, or a tree of dialogues
builder.py                                      each agent's own view of an episode, as trajectories
evaluators.py                                   accuracy, rewards and invalid replies of a protocol
nip/                                            the API of neural-interactive-proofs over all this

Names, those of `nip` included, are loaded on first use; none of them loads torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    **dict.fromkeys(("Dialogue", "DialogueProblem", "Message", "Step"), "reinforge.multiagent.dialogue"),
    **dict.fromkeys(("ProtocolOutput", "ProtocolWorkflow"), "reinforge.multiagent.episode"),
    **dict.fromkeys(("AgentParameters", "ProtocolConfig"), "reinforge.multiagent.protocol"),
    "register_protocol": "reinforge.multiagent.registration",
}

_NIP = "reinforge.multiagent.nip"  # stands around the core: its names are looked up when one is used


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted({*_MODULES, *importlib.import_module(_NIP).__all__})
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if not name.startswith("_") and name in (nip := importlib.import_module(_NIP)).__all__:
        return getattr(nip, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
