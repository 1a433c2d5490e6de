"""The API of neural-interactive-proofs: experiments, shared-model groups, and rollouts as nested arrays.

parameters/ experiment_agents.py                an experiment, its protocol and its agents
code_validation.py                              role prompts of the scenario code_validation
experiment_sections.py trainers.py              experiments as presets of the training loop
experiment_grid.py                              scripts that run an experiment for each point of a grid
shared_model.py adapter_group.py groups.py      agents that share a model, and its fine-tuning jobs
job_files.py                                    the files of a group's jobs, so that a killed process can resume them
arrays.py rollouts.py training_data.py          rollouts as arrays, and the trajectories that jobs train on
collect.py                                      rollouts of groups, for your own training loop

Names are loaded on first use; none of them loads torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES_BY_MODULE = {
    "reinforge.multiagent.agents": ("PureTextWholeAgent",),
    "reinforge.multiagent.protocol": ("ProtocolHandler",),
    "reinforge.multiagent.nip.arrays": (
        "NestedArrayDict",
        "concatenate_nested_array_dicts",
        "stack_nested_array_dicts",
    ),
    "reinforge.multiagent.nip.collect": ("collect_rollouts",),
    "reinforge.multiagent.nip.groups": ("EmbeddedSharedModelGroup", "OpenAISharedModelGroup"),
    "reinforge.multiagent.nip.experiment_agents": ("ExperimentAgent", "build_agents", "build_protocol"),
    "reinforge.multiagent.nip.experiment_grid": (
        "ExperimentFunctionArguments",
        "RunIDFunctionArguments",
        "SequentialHyperparameterExperiment",
        "get_env_var",
        "unflatten_dict_keys",
    ),
    "reinforge.multiagent.nip.experiment_sections": ("experiment_config",),
    "reinforge.multiagent.nip.parameters": (
        "AgentsParameters",
        "AppsDifficultyType",
        "BaseRunParameters",
        "CodeValidationAgentParameters",
        "CodeValidationParameters",
        "CommonProtocolParameters",
        "DatasetParameters",
        "DebateProtocolParameters",
        "ExperimentSettings",
        "HyperParameters",
        "InteractionProtocolType",
        "MnipProtocolParameters",
        "NipProtocolParameters",
        "ProtocolCommonParameters",
        "PureTextAgentParameters",
        "PureTextEiParameters",
        "PureTextGrpoParameters",
        "PureTextMaltParameters",
        "RlParameters",
        "RlTrainerParameters",
        "ScenarioType",
        "TestSchemeType",
        "TextRlParameters",
        "TrainerType",
        "VerifierDecisionSpectrumType",
        "ZkProtocolParameters",
    ),
    "reinforge.multiagent.nip.rollouts": ("build_rollouts", "decode_dialogues"),
    "reinforge.multiagent.nip.shared_model": ("PureTextSharedModelGroup", "PureTextSharedModelGroupState"),
    "reinforge.multiagent.nip.trainers": ("PreparedExperimentInfo", "prepare_experiment", "run_experiment"),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
