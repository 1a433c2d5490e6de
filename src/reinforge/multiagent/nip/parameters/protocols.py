"""Parameters of protocols, and of scenarios and datasets as far as there is anything to set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from reinforge.multiagent.nip.parameters.base import STRICT, ParameterBlock

VerifierDecisionSpectrumType = Literal[
    "accept_reject",
    "likert_scale_4",
    "likert_scale_5",
    "likert_scale_6",
    "likert_scale_7",
    "likert_int_scale_11",
    "out_of_10",
    "out_of_100",
]
AppsDifficultyType = Literal["introductory", "interview", "competition"]
_FILTER_ROWS = "leave it out, and give a dataset with only the rows that you want"


@dataclass(config=STRICT)
class ProtocolCommonParameters(ParameterBlock):
    """Rewards of decisions; see `workflow` of the protocols.

    Attributes:
        zero_knowledge: The zero-knowledge variant of the protocol (`multiagent/zero_knowledge.py`).
        verifier_neither_accept_nor_reject_reward: Replaces `verifier_no_guess_reward`, the reward of the decision
            `none`; None: on a scale, the mean of the rewards of a right and a wrong decision.
        verifier_decision_spectrum: The words that decide (`decision_scales.py`).
        verifier_decision_scale: The same, under its earlier name.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "prover_invalid_response_penalty": "set finetuning.outcomes.policy_error, the penalty of any agent",
        "force_guess": "leave it out; write a protocol whose `parse_decision` returns the guess",
    }

    verifier_first: bool = True
    randomize_prover_stance: bool = False
    prover_reward: float = 1.0
    verifier_reward: float = 1.0
    verifier_incorrect_penalty: float = -1.0
    verifier_terminated_penalty: float = -1.0
    verifier_no_guess_reward: float = 0.0
    shared_reward: bool = False
    zero_knowledge: bool = False
    prover_invalid_response_penalty: float | None = None
    verifier_neither_accept_nor_reject_reward: float | None = None
    force_guess: str | None = None
    verifier_decision_spectrum: VerifierDecisionSpectrumType = "accept_reject"
    verifier_decision_scale: VerifierDecisionSpectrumType = "accept_reject"


CommonProtocolParameters = ProtocolCommonParameters


@dataclass(config=STRICT)
class NipProtocolParameters(ParameterBlock):
    """Length of a protocol."""

    max_message_rounds: int = 8
    min_message_rounds: int = 1


@dataclass(config=STRICT)
class DebateProtocolParameters(NipProtocolParameters):
    """Order of speakers in a debate.

    Attributes:
        sequential: The provers speak in turn.
        prover0_first: The first prover speaks before the second one; only matters if they speak in turn.
        randomize_channel_order: Messages of the same round are delivered in an order that is random per episode.
    """

    sequential: bool = False
    prover0_first: bool = True
    randomize_channel_order: bool = True


@dataclass(config=STRICT)
class MnipProtocolParameters(DebateProtocolParameters):
    """Order of speakers with several provers."""


@dataclass(config=STRICT)
class ZkProtocolParameters(ParameterBlock):
    """Rewards of the zero-knowledge variants.

    Attributes:
        simulator_reward_coefficient: Factor of the simulator's reward.
        aux_prover_reward_coefficient: What the provers get of the simulator's reward.
    """

    simulator_reward_coefficient: float = 1.0
    aux_prover_reward_coefficient: float = 1.0


@dataclass(config=STRICT)
class CodeValidationParameters(ParameterBlock):
    """The scenario `code_validation`; its rows are those of the dataset that is given.

    Attributes:
        apps_difficulty: Not supported.
        apps_solution_number: Not supported.
        apps_exclude_flagged: Not supported.
        system_prompt_version: Not supported.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("apps_difficulty", "apps_solution_number", "apps_exclude_flagged"), _FILTER_ROWS),
        "system_prompt_version": "leave it out; set prompt or prompt_file of an agent for another role prompt",
    }

    apps_difficulty: AppsDifficultyType = "interview"
    apps_solution_number: int = 0
    apps_exclude_flagged: bool = True
    system_prompt_version: Literal["v1", "v2"] = "v2"


@dataclass(config=STRICT)
class DatasetParameters(ParameterBlock):
    """What is used of a dataset.

    Attributes:
        max_train_size: Not supported.
        max_test_size: Not supported.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "max_train_size": "set finetuning.splits.train to a number of examples",
        "max_test_size": "set finetuning.splits.confirm to a number of examples",
    }

    max_train_size: int | None = Field(default=None, ge=1)
    max_test_size: int | None = Field(default=None, ge=1)


@dataclass(config=STRICT)
class BaseRunParameters(ParameterBlock):
    """The run that an experiment starts from, which is always none.

    Attributes:
        base_run_type: Not supported.
        run_id: Not supported.
        wandb_project: Not supported.
        wandb_entity: Not supported.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "base_run_type": "`reinforge eval FILE --model RUN` tests the model of another run",
    }

    base_run_type: Literal["none", "parameters", "rerun_tests"] = "none"
    run_id: str | None = None
    wandb_project: str | None = None
    wandb_entity: str | None = None
