"""The API of neural-interactive-proofs: experiments, shared-model groups, and rollouts as nested arrays.

parameters.py experiment.py                     the blocks of an experiment, the experiment, its checks
experiment_agents.py                            its protocol and its agents
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

_NIP = "reinforge.multiagent.nip"
_NAMES_BY_MODULE = {
    "reinforge.multiagent.agents": "PureTextWholeAgent",
    "reinforge.multiagent.protocol": "ProtocolHandler",
    f"{_NIP}.arrays": "NestedArrayDict concatenate_nested_array_dicts stack_nested_array_dicts",
    f"{_NIP}.collect": "collect_rollouts",
    f"{_NIP}.experiment": "ExperimentSettings HyperParameters InteractionProtocolType ScenarioType TrainerType",
    f"{_NIP}.experiment_agents": "ExperimentAgent build_agents build_protocol",
    f"{_NIP}.experiment_grid": "ExperimentFunctionArguments RunIDFunctionArguments SequentialHyperparameterExperiment "
    "get_env_var unflatten_dict_keys",
    f"{_NIP}.experiment_sections": "experiment_config",
    f"{_NIP}.groups": "EmbeddedSharedModelGroup OpenAISharedModelGroup",
    f"{_NIP}.parameters": "AgentsParameters AppsDifficultyType BaseRunParameters CodeValidationAgentParameters "
    "CodeValidationParameters CommonProtocolParameters DatasetParameters DebateProtocolParameters "
    "MnipProtocolParameters NipProtocolParameters ProtocolCommonParameters PureTextAgentParameters "
    "PureTextEiParameters PureTextGrpoParameters PureTextMaltParameters RlParameters RlTrainerParameters "
    "TestSchemeType TextRlParameters VerifierDecisionSpectrumType ZkProtocolParameters",
    f"{_NIP}.rollouts": "build_rollouts decode_dialogues",
    f"{_NIP}.shared_model": "PureTextSharedModelGroup PureTextSharedModelGroupState",
    f"{_NIP}.trainers": "PreparedExperimentInfo prepare_experiment run_experiment",
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
