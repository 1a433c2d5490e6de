"""Several agents in one conversation, some of which share a model.

    hyper_params = HyperParameters("cells", "pure_text_ei", "cells.jsonl", agents={...}, rl={"num_iterations": 8})
    run_experiment(hyper_params, ExperimentSettings(run_id="first"))

dialogue.py agents.py protocol.py protocols/    who speaks when, who hears what, who decides, what each earns
episode.py builder.py evaluators.py guesses.py  dialogues as a workflow, and each agent's own view of them
parameters.py trainers.py                       experiments of the reference, as presets of the one loop
shared_model.py adapter_group.py groups.py      agents that share a model, and its fine-tuning jobs
arrays.py rollouts.py training_data.py          data of the reference, and the trajectories that are trained on
collect.py                                      dialogues of groups, for loops of one's own

Names are loaded when they are first used; none of them loads torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "reinforge.multiagent.agents": ("AgentParameters", "PureTextWholeAgent"),
    "reinforge.multiagent.nip.arrays": (
        "NestedArrayDict",
        "concatenate_nested_array_dicts",
        "stack_nested_array_dicts",
    ),
    "reinforge.multiagent.nip.collect": ("collect_rollouts",),
    "reinforge.multiagent.dialogue": ("Dialogue", "Message", "Problem", "Step"),
    "reinforge.multiagent.episode": ("ProtocolOutput", "ProtocolWorkflow"),
    "reinforge.multiagent.nip.groups": ("EmbeddedSharedModelGroup", "OpenAISharedModelGroup"),
    "reinforge.multiagent.nip.parameters": (
        "DebateProtocolParameters",
        "ExperimentSettings",
        "HyperParameters",
        "MnipProtocolParameters",
        "NipProtocolParameters",
        "ProtocolCommonParameters",
        "PureTextAgentParameters",
        "PureTextEiParameters",
        "PureTextGrpoParameters",
        "PureTextMaltParameters",
        "RlParameters",
        "TextRlParameters",
    ),
    "reinforge.multiagent.protocol": ("ProtocolConfig", "ProtocolHandler", "register_protocol"),
    "reinforge.multiagent.nip.rollouts": ("dialogues_of", "rollouts_of"),
    "reinforge.multiagent.nip.shared_model": ("PureTextSharedModelGroup", "PureTextSharedModelGroupState"),
    "reinforge.multiagent.nip.trainers": ("agents_of", "experiment_config", "protocol_of", "run_experiment"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
