"""An experiment in the terms of neural-interactive-proofs, and its checks.

    HyperParameters(
        scenario="cells",
        trainer="pure_text_ei",
        dataset="cells.jsonl",
        agents={"prover": {"model_name": "path/to/model"}, "verifier": {"model_name": "path/to/model"}},
        rl={"num_iterations": 8},
    )

A block may be a dict or None. One of another trainer or protocol is not read, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from reinforge.errors import ConfigError, Problem
from reinforge.multiagent.nip import parameters

logger = logging.getLogger(__name__)

TrainerType = Literal["pure_text_ei", "pure_text_malt", "pure_text_grpo"]

ScenarioType = str
InteractionProtocolType = str  # the `_type` of a protocol, of which a user's own is one too

OF_TENSOR_TRAINERS = (
    *("ppo", "vanilla_ppo", "spg", "reinforce", "solo_agent", "graph_isomorphism", "image_classification"),
    *("message_regression", "functionalize_modules", "pretrain_agents", "d_representation", "message_size"),
    *("include_linear_message_space", "d_linear_message_space"),
)
"""Fields for trainers of networks on tensors, which are taken with neural-interactive-proofs' defaults."""
TENSOR_FIX = "leave it out; it is for networks on tensors, and reinforge trains language models"

EPISODES_PER_WORKER = 16  # episodes that run at the same time, per rollout worker


BLOCKS = (
    *("rl", "text_rl", "pure_text_ei", "pure_text_malt", "pure_text_grpo", "protocol_common", "nip_protocol"),
    *("debate_protocol", "mnip_protocol", "zk_protocol", "code_validation", "dataset_options", "base_run"),
)
"""Blocks that have their default values if they are None."""
Agents = Annotated[dict[str, parameters.PureTextAgentParameters], AfterValidator(parameters.AgentsParameters)]


@dataclass(config=parameters.STRICT)
class HyperParameters(parameters.ParameterBlock):
    """One experiment."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = dict.fromkeys(OF_TENSOR_TRAINERS, TENSOR_FIX)

    scenario: str  # description for readers; the agents have the role prompts
    trainer: TrainerType  # `pure_text_ei` is expert iteration, `pure_text_malt` MALT, `pure_text_grpo` multi-agent GRPO
    dataset: str  # a file of examples, as for `reinforge.finetune`
    interaction_protocol: str = "nip"  # the `_type` of a protocol
    seed: int = 6198  # every random choice derives from it
    test_size: float = Field(default=0.2, gt=0, lt=1)  # share of the examples for the verdict
    agents: Agents = Field(default_factory=parameters.AgentsParameters, validate_default=True)
    """Parameters of each agent of the protocol, by name."""
    rl: parameters.RlParameters = Field(default_factory=parameters.RlParameters)
    text_rl: parameters.TextRlParameters = Field(default_factory=parameters.TextRlParameters)
    pure_text_ei: parameters.PureTextEiParameters = Field(default_factory=parameters.PureTextEiParameters)
    pure_text_malt: parameters.PureTextMaltParameters = Field(default_factory=parameters.PureTextMaltParameters)
    pure_text_grpo: parameters.PureTextGrpoParameters = Field(default_factory=parameters.PureTextGrpoParameters)
    protocol_common: parameters.ProtocolCommonParameters = Field(default_factory=parameters.ProtocolCommonParameters)
    nip_protocol: parameters.NipProtocolParameters = Field(default_factory=parameters.NipProtocolParameters)
    debate_protocol: parameters.DebateProtocolParameters = Field(default_factory=parameters.DebateProtocolParameters)
    mnip_protocol: parameters.MnipProtocolParameters = Field(default_factory=parameters.MnipProtocolParameters)
    zk_protocol: parameters.ZkProtocolParameters = Field(default_factory=parameters.ZkProtocolParameters)
    code_validation: parameters.CodeValidationParameters = Field(default_factory=parameters.CodeValidationParameters)
    dataset_options: parameters.DatasetParameters = Field(default_factory=parameters.DatasetParameters)
    base_run: parameters.BaseRunParameters = Field(default_factory=parameters.BaseRunParameters)
    test_dataset_split: Literal["validation", "test"] = "test"
    """Not read: the share `test_size` is held out of the one dataset, under either name."""
    ppo: Any = None
    vanilla_ppo: Any = None
    spg: Any = None
    reinforce: Any = None
    solo_agent: Any = None
    graph_isomorphism: Any = None
    image_classification: Any = None
    message_regression: Any = None
    functionalize_modules: bool = False
    pretrain_agents: bool = False
    d_representation: int = 16
    message_size: int = 1
    include_linear_message_space: bool = False
    d_linear_message_space: int = 2

    @field_validator(*BLOCKS, mode="before")
    @classmethod
    def _replace_none(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("agents", mode="before")
    @classmethod
    def _parse_agents(cls, value: Any, info: ValidationInfo) -> Any:
        """Returns the parameters of agents as given, with blocks of the scenario's own class for dicts.

        Example: None, scenario "code_validation" -> {"_default": CodeValidationAgentParameters()}.
        """
        is_code = info.data.get("scenario") == parameters.CODE_VALIDATION
        if not value:
            return {parameters.DEFAULT_AGENT: parameters.CodeValidationAgentParameters()} if is_code else {}
        if not (is_code and isinstance(value, Mapping)):
            return value
        return {
            name: parameters.CodeValidationAgentParameters(**params) if isinstance(params, Mapping) else params
            for name, params in value.items()
        }

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agents": {name: asdict(params) for name, params in self.agents.items()}}

    @classmethod
    def from_dict(cls, params_dict: Mapping[str, Any]) -> HyperParameters:
        return cls(**params_dict)


@dataclass(config=parameters.STRICT)
class ExperimentSettings(parameters.ParameterBlock):
    """How an experiment is run, without influence on its result."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "num_api_generation_timeouts": "use finetuning.limits.episode_timeout_s and outcomes.retries"
    }

    run_id: str | None = None
    """Name of the run folder; an unfinished run of the same name is resumed. None: the date and a random suffix. Groups
    that are used without a run need it."""
    num_rollout_workers: int = Field(default=4, ge=1)  # each runs 16 episodes at the same time
    num_api_generation_timeouts: int = 100
    num_api_connection_errors: int = 10  # retries of a call to a fine-tuning service
    logger: Any = None  # logger for the jobs of a group; None: the module's own
    test_run: bool = False  # run everything once, as small as possible
    device: str | None = None  # device of a model in this process, such as cpu or cuda; None: chosen
    output_dir: Path = Path(".reinforge/runs")  # folder of the run folders
    groups_dir: Path = Path(".reinforge/groups")
    """Folder for the jobs of shared-model groups that are used without a run."""


def reject_unsupported_fields(hyper_params: HyperParameters, settings: ExperimentSettings) -> None:
    """Checks that no unsupported field is set, and warns about blocks of another trainer or protocol."""
    problems = [
        *parameters.find_unsupported("hyper_params", hyper_params),
        *parameters.find_unsupported("settings", settings),
    ]
    if problems:
        raise ConfigError(problems)
    if unread := _list_unread_fields(hyper_params):
        logger.warning("nothing reads %s: they are for another trainer or protocol", ", ".join(unread))


def reject_service_chosen_fields(rl: parameters.RlParameters, agent: parameters.PureTextAgentParameters) -> None:
    """Checks that no field is set that a fine-tuning service chooses itself."""
    problems = []
    if "lr" in parameters.get_changed_fields(rl):
        fix = "remove it, or set learning_rate_multiplier of the adapter `_type: openai`"
        message = f"is {rl.lr}, but the service chooses its own learning rate"
        problems.append(Problem("hyper_params.rl.lr", message, fix))
    for name in ("lora_rank", "lora_alpha_factor"):
        if name in parameters.get_changed_fields(agent):
            message = f"is {getattr(agent, name)}, but the service chooses how it trains"
            problems.append(Problem(f"hyper_params.agents.*.{name}", message, "remove it"))
    if problems:
        raise ConfigError(problems)


def _list_unread_fields(hyper_params: HyperParameters) -> list[str]:
    is_read = {name: hyper_params.trainer == name for name in get_args(TrainerType)}
    if hyper_params.trainer == "pure_text_malt" and hyper_params.pure_text_malt.num_initial_ei_iterations:
        is_read["pure_text_ei"] = True
    is_read |= {f"{name}_protocol": hyper_params.interaction_protocol == name for name in ("nip", "debate", "mnip")}
    is_read["zk_protocol"] = hyper_params.protocol_common.zero_knowledge
    return [
        f"{name}.{field}"
        for name in is_read
        if not is_read[name]
        for field in parameters.get_changed_fields(getattr(hyper_params, name))
    ]
