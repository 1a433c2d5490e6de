"""An experiment in the terms of neural-interactive-proofs.

    HyperParameters(
        scenario="cells",
        trainer="pure_text_ei",
        dataset="cells.jsonl",
        agents={"prover": {"model_name": "path/to/model"}, "verifier": {"model_name": "path/to/model"}},
        rl={"num_iterations": 8},
    )

experiment.py agents.py trainers.py protocols.py    the blocks
base.py                                             what a block does not support

Names and defaults are those of neural-interactive-proofs; a block may be a dict or None. Setting an unsupported field
to anything but its default is an error (`reject_unsupported_fields`); a block of another trainer or protocol is not
read, and a warning says so.
"""

from reinforge.multiagent.nip.parameters.agents import (
    CODE_VALIDATION,
    DEFAULT_AGENT,
    AgentsParameters,
    CodeValidationAgentParameters,
    PureTextAgentParameters,
    get_group_name,
)
from reinforge.multiagent.nip.parameters.base import get_changed_fields
from reinforge.multiagent.nip.parameters.experiment import (
    EPISODES_PER_WORKER,
    ExperimentSettings,
    HyperParameters,
    InteractionProtocolType,
    ScenarioType,
    TrainerType,
    reject_service_chosen_fields,
    reject_unsupported_fields,
)
from reinforge.multiagent.nip.parameters.protocols import (
    AppsDifficultyType,
    BaseRunParameters,
    CodeValidationParameters,
    CommonProtocolParameters,
    DatasetParameters,
    DebateProtocolParameters,
    MnipProtocolParameters,
    NipProtocolParameters,
    ProtocolCommonParameters,
    VerifierDecisionSpectrumType,
    ZkProtocolParameters,
)
from reinforge.multiagent.nip.parameters.trainers import (
    PureTextEiParameters,
    PureTextGrpoParameters,
    PureTextMaltParameters,
    RlParameters,
    RlTrainerParameters,
    TestSchemeType,
    TextRlParameters,
)

__all__ = [
    "CODE_VALIDATION",
    "DEFAULT_AGENT",
    "EPISODES_PER_WORKER",
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
    "get_changed_fields",
    "get_group_name",
    "reject_service_chosen_fields",
    "reject_unsupported_fields",
]
