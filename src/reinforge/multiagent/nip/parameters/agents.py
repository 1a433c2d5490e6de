"""Parameters of agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from reinforge.multiagent.agent_parameters import SupervisedRounds
from reinforge.multiagent.nip.parameters.base import STRICT, ParameterBlock

DEFAULT_AGENT = "_default"
"""The name in `AgentsParameters` under which the parameters of all agents that are not named are."""
CODE_VALIDATION = "code_validation"
"""The scenario whose agents have role prompts of their own (`code_validation.py`)."""
_SERVER_FIELDS = ("language_model_server_scheme_host", "language_model_server_port", "vllm_server_port")


@dataclass(config=STRICT)
class PureTextAgentParameters(ParameterBlock):
    """One agent.

    Attributes:
        model_provider: SelfHosted trains and serves the model in this process, OpenAI with OpenAI's API, at
            OPENAI_BASE_URL if that is set. OpenRouter is for frozen agents, with the key in OPENROUTER_API_KEY.
        model_name: Folder, hub id or `bundled:NAME`; with a fine-tuning service, the name of its base model.
        shared_model_group: Agents that name the same group share a model; None: the agent has its own.
        temperature: Sampling temperature; the same for all trained agents. None: 1.
        top_p: Nucleus sampling; the same for all trained agents. None: 1.
        fine_tune_from_scratch: Each job starts from the base model, not from the previous job's model.
        freeze_agent: Its replies are never trained, even if its model is.
        max_response_words: Filled in as $max_response_words in its role prompt.
        max_tokens_per_message: Longest reply; None: all the context allows.
        num_invalid_generation_retries: Retries after an invalid reply.
        use_dummy_api: Not supported.
        dpo_beta: Strength of the pull towards the reference model in DPO; None: 0.1.
        system_prompt_template_path: File with the role prompt, as a template of neural-interactive-proofs.
        repetition_penalty: Not supported.
        use_supervisor_message: Rounds in which a line of a supervisor that says what to write ends its prompt.
        supervisor_name: The name before that line.
        language_model_server_scheme_host: Not supported.
        language_model_server_port: Not supported.
        vllm_server_port: Not supported.
        lora_rank: Rank of the group's adapter, which all its agents share; None: all weights are trained.
        lora_alpha_factor: The adapter's alpha divided by its rank.
        prompt: Role prompt, as under `workflow.agents`.
        prompt_file: File that holds the role prompt instead.
        agent_weight: Weight of its data relative to the group's other agents, at any length of their replies.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "use_dummy_api": "write a scripted policy server (tests/doubles.py has one)",
        "repetition_penalty": "leave it out; temperature and top_p are supported",
        **dict.fromkeys(_SERVER_FIELDS, "leave it out; SelfHosted needs no server, this process serves the model"),
    }

    model_name: str
    shared_model_group: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    fine_tune_from_scratch: bool = True
    freeze_agent: bool = False
    max_response_words: int = 150
    max_tokens_per_message: int | None = None
    num_invalid_generation_retries: int = 20
    use_dummy_api: bool = False
    dpo_beta: float | None = Field(default=None, gt=0)
    system_prompt_template_path: str | None = None
    repetition_penalty: float | None = None
    use_supervisor_message: SupervisedRounds = "none"
    supervisor_name: str = "Supervisor"
    language_model_server_scheme_host: str = "http://localhost"
    language_model_server_port: int = 5000
    vllm_server_port: int = 8000
    model_provider: Literal["OpenAI", "SelfHosted", "OpenRouter"] = "SelfHosted"
    lora_rank: int | None = 16
    lora_alpha_factor: float = 2.0
    prompt: str | None = None
    prompt_file: str | None = None
    agent_weight: float = Field(default=1.0, gt=0)

    @property
    def lora_alpha(self) -> int | None:
        """Alpha of the group's adapter; None if all weights are trained."""
        return None if self.lora_rank is None else round(self.lora_rank * self.lora_alpha_factor)


@dataclass(config=STRICT)
class CodeValidationAgentParameters(PureTextAgentParameters):
    """One agent of the scenario `code_validation`, with a model of OpenAI by default and a role prompt of its own."""

    model_name: str = "gpt-4o-mini-2024-07-18"
    model_provider: Literal["OpenAI", "SelfHosted", "OpenRouter"] = "OpenAI"


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


def parse_agents(value: Any, scenario: str) -> Any:
    """Returns the parameters of agents as given, with blocks of the scenario's own class for dicts.

    Example: None, "code_validation" -> {"_default": CodeValidationAgentParameters()}.
    """
    is_code = scenario == CODE_VALIDATION
    if value is None:
        return {DEFAULT_AGENT: CodeValidationAgentParameters()} if is_code else {}
    if not (is_code and isinstance(value, Mapping)):
        return value
    return {
        name: CodeValidationAgentParameters(**params) if isinstance(params, Mapping) else params
        for name, params in value.items()
    }
