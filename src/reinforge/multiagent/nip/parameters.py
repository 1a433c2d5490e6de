"""The blocks of an experiment of neural-interactive-proofs, with its names and defaults.

Setting an unsupported field to anything but its default is an error (`reject_unsupported_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from reinforge.errors import Problem
from reinforge.multiagent.protocol import SupervisedRounds

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class ParameterBlock:
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}
    """Fields that reinforge does not support, each with what to use instead."""


def get_changed_fields(block: Any) -> dict[str, Any]:
    """Returns the fields of a block that differ from their defaults, by name."""
    defaults = {name: field.get_default(call_default_factory=True) for name, field in block.__pydantic_fields__.items()}
    return {name: value for name, default in defaults.items() if (value := getattr(block, name)) != default}


def find_unsupported(path: str, block: Any) -> list[Problem]:
    """Returns the unsupported fields that are set in a block or in a nested one."""
    problems, changed = [], get_changed_fields(block)
    for name, instead in block.UNSUPPORTED.items():
        if name in changed:
            message = f"is {changed[name]!r}, but this field is not supported"
            problems.append(Problem(f"{path}.{name}", message, instead))
    for name, value in vars(block).items():
        nested = value.items() if isinstance(value, dict) else [("", value)]
        for key, each in nested:
            if is_dataclass(each) and isinstance(each, ParameterBlock):
                problems += find_unsupported(f"{path}.{name}.{key}".rstrip("."), each)
    return problems


DEFAULT_AGENT = "_default"
"""The name in `AgentsParameters` under which the parameters of all agents that are not named are."""
CODE_VALIDATION = "code_validation"  # the scenario whose agents have role prompts of their own (`code_validation.py`)
_SERVER_FIELDS = ("language_model_server_scheme_host", "language_model_server_port", "vllm_server_port")


@dataclass(config=STRICT)
class PureTextAgentParameters(ParameterBlock):
    """One agent."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "use_dummy_api": "write a scripted policy server (tests/doubles.py has one)",
        "repetition_penalty": "leave it out; temperature and top_p are supported",
        **dict.fromkeys(_SERVER_FIELDS, "leave it out; SelfHosted needs no server, this process serves the model"),
    }

    model_name: str  # folder, hub id or `bundled:NAME`; with a fine-tuning service, the name of its base model
    shared_model_group: str | None = None  # agents that name the same group share a model; None: the agent has its own
    temperature: float | None = None  # sampling temperature; the same for all trained agents. None: 1
    top_p: float | None = None  # nucleus sampling; the same for all trained agents. None: 1
    fine_tune_from_scratch: bool = True  # each job starts from the base model, not from the previous job's model
    freeze_agent: bool = False  # its replies are never trained, even if its model is
    max_response_words: int = 150  # filled in as $max_response_words in its role prompt
    max_tokens_per_message: int | None = None  # longest reply; None: all the context allows
    num_invalid_generation_retries: int = 20  # retries after an invalid reply
    use_dummy_api: bool = False
    dpo_beta: float | None = Field(default=None, gt=0)
    """Strength of the pull toward the reference model in DPO; None: 0.1."""
    system_prompt_template_path: str | None = None
    """File with the role prompt, as a template of neural-interactive-proofs."""
    repetition_penalty: float | None = None
    use_supervisor_message: SupervisedRounds = "none"
    """Rounds in which a line of a supervisor that says what to write ends its prompt."""
    supervisor_name: str = "Supervisor"  # the name before that line
    language_model_server_scheme_host: str = "http://localhost"
    language_model_server_port: int = 5000
    vllm_server_port: int = 8000
    model_provider: Literal["OpenAI", "SelfHosted", "OpenRouter"] = "SelfHosted"
    """SelfHosted trains and serves the model in this process, OpenAI with OpenAI's API, at OPENAI_BASE_URL if that is
    set. OpenRouter is for frozen agents, with the key in OPENROUTER_API_KEY."""
    lora_rank: int | None = 16  # rank of the group's adapter, which all its agents share; None: all weights are trained
    lora_alpha_factor: float = 2.0  # the adapter's alpha divided by its rank
    prompt: str | None = None  # role prompt, as under `workflow.agents`
    prompt_file: str | None = None  # file that holds the role prompt instead
    agent_weight: float = Field(default=1.0, gt=0)
    """Weight of its data relative to the group's other agents, at any length of their replies."""

    @property
    def lora_alpha(self) -> int | None:
        return None if self.lora_rank is None else round(self.lora_rank * self.lora_alpha_factor)


@dataclass(config=STRICT)
class CodeValidationAgentParameters(PureTextAgentParameters):
    """One agent of the scenario `code_validation`, with a model of OpenAI by default and a role prompt of its own."""

    model_name: str = "gpt-4o-mini-2024-07-18"
    model_provider: Literal["OpenAI", "SelfHosted", "OpenRouter"] = "OpenAI"


def find_differences(agents: Mapping[str, PureTextAgentParameters], fields: Sequence[str], why: str) -> list[Problem]:
    """Returns the fields that differ between agents although these share a model."""
    problems = []
    for field in fields:
        values = {name: getattr(params, field) for name, params in agents.items()}
        if len(set(values.values())) > 1:
            listing = ", ".join(f"{name} {value!r}" for name, value in values.items())
            problems.append(
                Problem(f"hyper_params.agents.*.{field}", f"{why}: {listing}", "set the same value for all")
            )
    return problems


class AgentsParameters(dict[str, PureTextAgentParameters]):
    """The parameters of each agent by name; those under `_default` are for the agents that are not named.

    Example: AgentsParameters(verifier=a, _default=b): "verifier" -> a, "prover" -> b.
    """

    def __missing__(self, name: str) -> PureTextAgentParameters:
        if DEFAULT_AGENT not in self.keys():
            raise KeyError(name)
        return self[DEFAULT_AGENT]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or super().__contains__(DEFAULT_AGENT)


def get_group_name(name: str, params: PureTextAgentParameters) -> str:
    return params.shared_model_group or name


TestSchemeType = Literal["none", "all", "last", "first_and_last"]


@dataclass(config=STRICT)
class RlParameters(ParameterBlock):
    """How much data is collected, and how it is trained on."""

    rollouts_per_iteration: int | None = None  # episodes per iteration; None: one per training example
    num_iterations: int = 1000
    num_epochs: int = 4  # passes over an iteration's data, with `pure_text_grpo`
    lr: float = 0.003  # peak learning rate; the default of neural-interactive-proofs suits models trained from scratch
    num_test_iterations: int = 10
    """Episodes per example of the verdict, for each of the two models. The default, 10, stands for
    `finetuning.gate.num_samples`, which is 1."""
    frames_per_batch: int | None = Field(default=None, ge=1)
    """The episodes of an iteration as rounds: this many divided by the longest dialogue."""
    steps_per_env_per_iteration: int | None = Field(default=None, ge=1)
    """Divides `frames_per_batch` instead of the longest dialogue."""


RlTrainerParameters = RlParameters


@dataclass(config=STRICT)
class TextRlParameters(ParameterBlock):
    """What the text trainers share."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "test_on_whole_dataset": "leave it out; test_size is the share of the examples that is held out"
    }

    fine_tune_on_all_previous_rollouts: bool = False
    """Each iteration also trains on the rollouts of all earlier iterations."""
    verifier_guess_replacement_proportion: float = 0.0
    """Share of rollouts in which the truth replaces the verifier's decision."""
    verifier_guess_replacement_annealing: Literal["none", "linear", "exponential"] = "none"
    """How that share falls with the iterations."""
    verifier_guess_replacement_annealing_rate: float = 0.1  # how fast it falls
    save_transcripts: bool = True  # write the dialogues to readable files
    transcript_format: Literal["json", "yaml"] = "yaml"  # format of these files
    test_scheme: TestSchemeType = "none"
    """Which iterations are validated; the base model and the last iteration always are."""
    num_epochs: int = 1  # passes of a fine-tuning job over its data
    test_on_whole_dataset: bool = True


@dataclass(config=STRICT)
class PureTextEiParameters(ParameterBlock):
    """Which rollouts expert iteration imitates; see the algorithm `expert_iteration`."""

    rollout_selection_method: Literal["threshold", "weighted_sampling"] = "threshold"
    reward_threshold: float = 0.9
    weighting_sample_size_factor: float = 0.5
    weighting_minimum: float | None = None
    weighting_use_replacement: bool = True
    weighting_epsilon: float = 0.01


@dataclass(config=STRICT)
class PureTextMaltParameters(ParameterBlock):
    """The trees of MALT."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "pair_selection_method": "leave it out; the best sibling is preferred to the worst one",
    }

    num_responses_per_timestep: int = 2
    num_initial_ei_iterations: int = Field(default=0, ge=0)
    """Iterations of expert iteration, with the settings of `pure_text_ei`, before the first one with trees."""
    pair_selection_method: Literal["positive_negative", "interval"] = "interval"


@dataclass(config=STRICT)
class PureTextGrpoParameters(ParameterBlock):
    """Multi-agent GRPO, an addition of reinforge."""

    num_generations: int = 8  # episodes per example; advantages are relative to the same agent's rewards in them


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
    """Rewards of decisions; see `workflow` of the protocols."""

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
    zero_knowledge: bool = False  # the zero-knowledge variant of the protocol (`multiagent/zero_knowledge.py`)
    prover_invalid_response_penalty: float | None = None
    verifier_neither_accept_nor_reject_reward: float | None = None
    """Replaces `verifier_no_guess_reward`, the reward of the decision `none`; None: on a scale, the mean of the rewards
    of a right and a wrong decision."""
    force_guess: str | None = None
    verifier_decision_spectrum: VerifierDecisionSpectrumType = "accept_reject"
    """The words that decide (`decision_scales.py`)."""
    verifier_decision_scale: VerifierDecisionSpectrumType = "accept_reject"  # the same, under its earlier name


CommonProtocolParameters = ProtocolCommonParameters


@dataclass(config=STRICT)
class NipProtocolParameters(ParameterBlock):
    max_message_rounds: int = 8
    min_message_rounds: int = 1


@dataclass(config=STRICT)
class DebateProtocolParameters(NipProtocolParameters):
    """Order of speakers in a debate; see `workflow` of the protocol."""

    sequential: bool = False
    prover0_first: bool = True
    randomize_channel_order: bool = True


@dataclass(config=STRICT)
class MnipProtocolParameters(DebateProtocolParameters):
    """Order of speakers with several provers."""


@dataclass(config=STRICT)
class ZkProtocolParameters(ParameterBlock):
    """Rewards of the zero-knowledge variants; see `workflow` of the protocols."""

    simulator_reward_coefficient: float = 1.0
    aux_prover_reward_coefficient: float = 1.0


@dataclass(config=STRICT)
class CodeValidationParameters(ParameterBlock):
    """The scenario `code_validation`; its rows are those of the dataset that is given."""

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
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "max_train_size": "set finetuning.splits.train to a number of examples",
        "max_test_size": "set finetuning.splits.confirm to a number of examples",
    }

    max_train_size: int | None = Field(default=None, ge=1)
    max_test_size: int | None = Field(default=None, ge=1)


@dataclass(config=STRICT)
class BaseRunParameters(ParameterBlock):
    """The run that an experiment starts from, which is always none."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "base_run_type": "`reinforge eval FILE --model RUN` tests the model of another run",
    }

    base_run_type: Literal["none", "parameters", "rerun_tests"] = "none"
    run_id: str | None = None
    wandb_project: str | None = None
    wandb_entity: str | None = None
