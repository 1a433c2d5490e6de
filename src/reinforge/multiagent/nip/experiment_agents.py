"""The protocol of an experiment and its agents, for runs and for shared-model groups that are used without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError, Problem
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.nip.arrays import NestedArrayDict
from reinforge.multiagent.nip.code_validation import find_role_prompt, read_prompt_template
from reinforge.multiagent.nip.decision_scales import build_decision_block
from reinforge.multiagent.nip.experiment import HyperParameters
from reinforge.multiagent.nip.parameters import (
    DEFAULT_AGENT,
    PureTextAgentParameters,
    get_changed_fields,
    get_group_name,
)
from reinforge.multiagent.nip.rollouts import ViewBuilder, decode_dialogues, replace_guess_with_truth
from reinforge.multiagent.protocol import AgentParameters, ProtocolHandler
from reinforge.multiagent.protocols.debate import NUMBERED_PROVERS
from reinforge.registry import REGISTRY

PROTOCOL_FIELDS = (
    *("max_response_words", "max_tokens_per_message", "num_invalid_generation_retries"),
    *("prompt", "prompt_file"),
)
"""Agent parameters that the protocol's configuration has under the same names."""
SCALE_FIELDS = ("verifier_neither_accept_nor_reject_reward", "verifier_decision_spectrum", "verifier_decision_scale")
"""Fields of `protocol_common` that become other settings of the protocol (`decision_scales.py`)."""
RENAMED_PROVERS = dict.fromkeys(("debate", "merlin_arthur"), NUMBERED_PROVERS)
"""Protocols whose provers have other names in neural-interactive-proofs, with these names."""


class ExperimentAgent(PureTextWholeAgent):
    """An agent of an experiment, with what it is in the protocol."""

    def __init__(
        self,
        name: str,
        parameters: AgentParameters,
        *,
        agent_params: PureTextAgentParameters,
        protocol_handler: ProtocolHandler,
        model_group: str,
    ):
        super().__init__(name, parameters, llm=model_group, model_group=model_group)
        self.agent_params = agent_params
        self.protocol_handler = protocol_handler

    @property
    def agent_name(self) -> str:
        return self.name

    @property
    def agent_id(self) -> int:
        return self.protocol_handler.agent_names.index(self.name)

    @property
    def is_verifier(self) -> bool:
        return self.name in self.protocol_handler.verifier_names

    @property
    def is_prover(self) -> bool:
        return self.name in self.protocol_handler.prover_names

    def build_fine_tune_dataset(
        self,
        rollouts: NestedArrayDict,
        ensure_last_message_is_assistant: bool = True,
        replace_verifier_guess_with_true_label: bool = False,
    ) -> list[dict[str, list[dict[str, str]]]]:
        """Returns the agent's conversation in each rollout, as `{"messages": [{"role": ..., "content": ...}]}`.

        Rollouts in which it has no message are left out.

        Args:
            rollouts: Rollouts, batch size (batch, round), or timesteps, batch size (timestep,).
            ensure_last_message_is_assistant: End with its last message; False: with the prompt of its next one.
            replace_verifier_guess_with_true_label: A verifier's last message becomes the right decision.

        Raises:
            ValueError: The guess is to be replaced, but the conversation does not end with it.
        """
        replaces = replace_verifier_guess_with_true_label and self.is_verifier
        if replaces and not ensure_last_message_is_assistant:
            needed = "ensure_last_message_is_assistant=True: the guess is the last message"
            raise ValueError(f"replace_verifier_guess_with_true_label needs {needed}")
        rows = []
        for dialogue in decode_dialogues(rollouts, self.protocol_handler):
            shown = replace_guess_with_truth(dialogue, self.protocol_handler) if replaces else dialogue
            builder = ViewBuilder(self, self.protocol_handler, str(self.model_group))
            messages = [] if shown is None else builder.build_conversation(shown, ensure_last_message_is_assistant)
            if messages:
                rows.append({"messages": messages})
        return rows


def build_protocol(hyper_params: HyperParameters) -> ProtocolHandler:
    """Returns the handler of an experiment's protocol; a `ConfigError` if it is unknown or its settings are invalid."""
    return _build_handler(hyper_params, build_workflow_block(hyper_params, expand_agents(hyper_params))["agents"])


def _build_handler(hyper_params: HyperParameters, agents: dict[str, Any]) -> ProtocolHandler:
    path, name = "hyper_params.interaction_protocol", hyper_params.interaction_protocol
    component = REGISTRY.get("workflow", name, path)
    build = getattr(component.factory, "build_handler", None)
    if build is None:
        raise ConfigError(Problem(path, f"{name} is not a protocol", "use one, such as nip"))
    handler: ProtocolHandler = build(component.config_type(**{**build_protocol_block(hyper_params), "agents": agents}))
    return handler


def expand_agents(hyper_params: HyperParameters) -> dict[str, PureTextAgentParameters]:
    """Returns the parameters of each agent of the protocol, those under `_default` for the ones that are not named."""
    named = {name: params for name, params in hyper_params.agents.items() if name != DEFAULT_AGENT}
    if len(named) == len(hyper_params.agents):
        return named
    provers = RENAMED_PROVERS.get(hyper_params.interaction_protocol, ())
    handler = _build_handler(hyper_params, {name: {} for name in provers})
    return {name: hyper_params.agents[name] for name in handler.agent_names}


def build_protocol_block(hyper_params: HyperParameters) -> dict[str, Any]:
    """Returns the protocol's settings; fields at their defaults keep the protocol's own defaults."""
    name = hyper_params.interaction_protocol
    common = hyper_params.protocol_common
    block = {field: value for field, value in get_changed_fields(common).items() if field not in SCALE_FIELDS}
    block |= build_decision_block(common)
    if (own := getattr(hyper_params, f"{name}_protocol", None)) is not None:
        block |= get_changed_fields(own)
    if hyper_params.protocol_common.zero_knowledge:
        block |= get_changed_fields(hyper_params.zk_protocol)
    if hyper_params.trainer == "pure_text_malt":
        block["num_responses"] = hyper_params.pure_text_malt.num_responses_per_timestep
    return block


def build_workflow_block(hyper_params: HyperParameters, agents: dict[str, PureTextAgentParameters]) -> dict[str, Any]:
    blocks = {name: build_agent_block(hyper_params, name, params) for name, params in agents.items()}
    return {"_type": hyper_params.interaction_protocol, **build_protocol_block(hyper_params), "agents": blocks}


def build_agent_block(hyper_params: HyperParameters, name: str, params: PureTextAgentParameters) -> dict[str, Any]:
    sampling_fields = ("temperature", "top_p") if params.freeze_agent else ()
    supervisor_fields = () if params.use_supervisor_message == "none" else ("use_supervisor_message", "supervisor_name")
    values = {field: getattr(params, field) for field in (*PROTOCOL_FIELDS, *sampling_fields, *supervisor_fields)}
    if params.system_prompt_template_path is not None:
        path = f"hyper_params.agents.{name}.system_prompt_template_path"
        values["prompt"] = read_prompt_template(params.system_prompt_template_path, path)
    elif params.prompt is None and params.prompt_file is None:
        values["prompt"] = find_role_prompt(hyper_params, name)
    set_values = {field: value for field, value in values.items() if value is not None}
    return {"llm": get_group_name(name, params), "freeze_agent": params.freeze_agent, **set_values}


def build_agents(hyper_params: HyperParameters, project_root: str | Path = ".") -> dict[str, ExperimentAgent]:
    """Returns the agents of an experiment by name, for shared-model groups that are used without a run."""
    handler, agents = build_protocol(hyper_params), {}
    for name, agent_params in expand_agents(hyper_params).items():
        params = AgentParameters(**build_agent_block(hyper_params, name, agent_params))
        if params.prompt_file is not None:
            text = Path(project_root, params.prompt_file).read_text(encoding="utf-8")
            params = params.model_copy(update={"prompt": text})
        group = get_group_name(name, agent_params)
        agents[name] = ExperimentAgent(
            name, params, agent_params=agent_params, protocol_handler=handler, model_group=group
        )
    return agents
