"""`HyperParameters` and `ExperimentSettings`: an experiment in the terms of neural-interactive-proofs.

    HyperParameters(
        scenario="cells",
        trainer="pure_text_ei",
        dataset="cells.jsonl",
        agents={"prover": {"model_name": "path/to/model"}, "verifier": {"model_name": "path/to/model"}},
        rl={"num_iterations": 8},
    )

Names and defaults are those of neural-interactive-proofs; a block may be a dict. Setting an unsupported field to
anything but its default is an error (`reject_unsupported_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from reinforge.errors import ConfigError, Problem

Trainer = Literal["pure_text_ei", "pure_text_malt", "pure_text_grpo"]

EPISODES_PER_WORKER = 16
"""Episodes that run at the same time, per rollout worker."""

_STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class _Parameters:
    """Base of the blocks.

    Attributes:
        UNSUPPORTED: Fields that reinforge does not support, each with what to use instead.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}


@dataclass(config=_STRICT)
class PureTextAgentParameters(_Parameters):
    """One agent.

    Attributes:
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
        lora_rank: Rank of the group's adapter, which all its agents share; None: all weights are trained.
        lora_alpha_factor: The adapter's alpha divided by its rank.
        prompt: Role prompt, as under `workflow.agents`.
        prompt_file: File that holds the role prompt instead.
        agent_weight: Weight of its data relative to the group's other agents, at any length of their replies.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "use_dummy_api": "write a scripted policy server (tests/doubles.py has one)"
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
    lora_rank: int | None = 16
    lora_alpha_factor: float = 2.0
    prompt: str | None = None
    prompt_file: str | None = None
    agent_weight: float = Field(default=1.0, gt=0)

    @property
    def lora_alpha(self) -> int | None:
        """Alpha of the group's adapter; None if all weights are trained."""
        return None if self.lora_rank is None else round(self.lora_rank * self.lora_alpha_factor)


@dataclass(config=_STRICT)
class RlParameters(_Parameters):
    """How much data is collected, and how it is trained on.

    Attributes:
        rollouts_per_iteration: Episodes per iteration; None: one per training example.
        num_iterations: Number of iterations, each of which collects and trains.
        num_epochs: Passes over an iteration's data, with `pure_text_grpo`.
        lr: Peak learning rate; the default of neural-interactive-proofs suits models trained from scratch.
        num_test_iterations: Not supported.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "num_test_iterations": "set finetuning.gate.num_samples, the verdict's episodes per held-out example"
    }

    rollouts_per_iteration: int | None = None
    num_iterations: int = 1000
    num_epochs: int = 4
    lr: float = 0.003
    num_test_iterations: int = 10


@dataclass(config=_STRICT)
class TextRlParameters(_Parameters):
    """What the text trainers share.

    Attributes:
        fine_tune_on_all_previous_rollouts: Each iteration also trains on the rollouts of all earlier iterations.
        verifier_guess_replacement_proportion: Share of rollouts in which the truth replaces the verifier's decision.
        verifier_guess_replacement_annealing: How that share falls with the iterations.
        verifier_guess_replacement_annealing_rate: How fast it falls.
        save_transcripts: Write the dialogues to readable files.
        transcript_format: Format of these files.
        test_scheme: Which iterations are validated; the base model and the last iteration always are.
        num_epochs: Passes of a fine-tuning job over its data.
    """

    fine_tune_on_all_previous_rollouts: bool = False
    verifier_guess_replacement_proportion: float = 0.0
    verifier_guess_replacement_annealing: Literal["none", "linear", "exponential"] = "none"
    verifier_guess_replacement_annealing_rate: float = 0.1
    save_transcripts: bool = True
    transcript_format: Literal["json", "yaml"] = "yaml"
    test_scheme: Literal["none", "all", "last", "first_and_last"] = "none"
    num_epochs: int = 1


@dataclass(config=_STRICT)
class PureTextEiParameters(_Parameters):
    """Which rollouts expert iteration imitates.

    Attributes:
        rollout_selection_method: All rollouts that reach a reward, or a sample weighted by reward.
        reward_threshold: For threshold: the lowest reward.
        weighting_sample_size_factor: For weighted_sampling: size of the sample, as a share of the rollouts collected.
        weighting_minimum: For weighted_sampling: lower rewards count as this one; None: the agent's lowest.
        weighting_use_replacement: For weighted_sampling: a rollout may be sampled more than once.
        weighting_epsilon: For weighted_sampling: added to each normalized weight.
    """

    rollout_selection_method: Literal["threshold", "weighted_sampling"] = "threshold"
    reward_threshold: float = 0.9
    weighting_sample_size_factor: float = 0.5
    weighting_minimum: float | None = None
    weighting_use_replacement: bool = True
    weighting_epsilon: float = 0.01


@dataclass(config=_STRICT)
class PureTextMaltParameters(_Parameters):
    """The trees of MALT.

    Attributes:
        num_responses_per_timestep: Replies per turn.
    """

    num_responses_per_timestep: int = 2


@dataclass(config=_STRICT)
class PureTextGrpoParameters(_Parameters):
    """Multi-agent GRPO, an addition of reinforge.

    Attributes:
        num_generations: Episodes per example; advantages are relative to the same agent's rewards in them.
    """

    num_generations: int = 8


@dataclass(config=_STRICT)
class ProtocolCommonParameters(_Parameters):
    """Rewards of decisions; see `workflow` of the protocols."""

    verifier_first: bool = True
    randomize_prover_stance: bool = False
    prover_reward: float = 1.0
    verifier_reward: float = 1.0
    verifier_incorrect_penalty: float = -1.0
    verifier_terminated_penalty: float = -1.0
    verifier_no_guess_reward: float = 0.0
    shared_reward: bool = False


@dataclass(config=_STRICT)
class NipProtocolParameters(_Parameters):
    """Length of a protocol."""

    max_message_rounds: int = 8
    min_message_rounds: int = 1


@dataclass(config=_STRICT)
class DebateProtocolParameters(NipProtocolParameters):
    """Order of speakers in a debate."""

    sequential: bool = False
    randomize_channel_order: bool = True


@dataclass(config=_STRICT)
class MnipProtocolParameters(DebateProtocolParameters):
    """Order of speakers with several provers."""


@dataclass(config=_STRICT)
class HyperParameters(_Parameters):
    """One experiment.

    Attributes:
        scenario: Description for readers; the agents have the role prompts.
        trainer: `pure_text_ei` is expert iteration, `pure_text_malt` MALT, `pure_text_grpo` multi-agent GRPO.
        dataset: A file of examples, as for `reinforge.finetune`.
        interaction_protocol: The `_type` of a protocol.
        seed: Every random choice derives from it.
        test_size: Share of the examples for the verdict.
        agents: Parameters of each agent of the protocol, by name.
    """

    scenario: str
    trainer: Trainer
    dataset: str
    interaction_protocol: str = "nip"
    seed: int = 6198
    test_size: float = Field(default=0.2, gt=0, lt=1)
    agents: dict[str, PureTextAgentParameters] = Field(default_factory=dict)
    rl: RlParameters = Field(default_factory=RlParameters)
    text_rl: TextRlParameters = Field(default_factory=TextRlParameters)
    pure_text_ei: PureTextEiParameters = Field(default_factory=PureTextEiParameters)
    pure_text_malt: PureTextMaltParameters = Field(default_factory=PureTextMaltParameters)
    pure_text_grpo: PureTextGrpoParameters = Field(default_factory=PureTextGrpoParameters)
    protocol_common: ProtocolCommonParameters = Field(default_factory=ProtocolCommonParameters)
    nip_protocol: NipProtocolParameters = Field(default_factory=NipProtocolParameters)
    debate_protocol: DebateProtocolParameters = Field(default_factory=DebateProtocolParameters)
    mnip_protocol: MnipProtocolParameters = Field(default_factory=MnipProtocolParameters)


@dataclass(config=_STRICT)
class ExperimentSettings(_Parameters):
    """How an experiment is run, without influence on its result.

    Attributes:
        run_id: Name of the run folder; an unfinished run of the same name is resumed.
        num_rollout_workers: Each runs 16 episodes at the same time.
        num_api_generation_timeouts: Not supported.
        num_api_connection_errors: Retries of a call to a fine-tuning service.
        logger: Logger for the jobs of a group; None: the module's own.
        test_run: Run everything once, as small as possible.
        output_dir: Folder of the run folders.
        groups_dir: Folder for the jobs of shared-model groups that are used without a run.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "num_api_generation_timeouts": "use finetuning.limits.episode_timeout_s and outcomes.retries"
    }

    run_id: str
    num_rollout_workers: int = Field(default=4, ge=1)
    num_api_generation_timeouts: int = 100
    num_api_connection_errors: int = 10
    logger: Any = None
    test_run: bool = False
    output_dir: Path = Path(".reinforge/runs")
    groups_dir: Path = Path(".reinforge/groups")


def reject_unsupported_fields(hyper_params: HyperParameters, settings: ExperimentSettings) -> None:
    """Checks that no unsupported field is set.

    Raises:
        ConfigError: Names every unsupported field that is set.
    """
    problems = [*_find_unsupported("hyper_params", hyper_params), *_find_unsupported("settings", settings)]
    for name, owner in _TRAINER_BLOCKS.items():
        if hyper_params.trainer != owner:
            problems += _find_set_fields(hyper_params, name, f"only applies to the trainer {owner}")
    for name, protocol in _PROTOCOL_BLOCKS.items():
        if hyper_params.interaction_protocol != protocol:
            problems += _find_set_fields(hyper_params, name, f"only applies to the protocol {protocol}")
    if problems:
        raise ConfigError(problems)


def reject_service_chosen_fields(rl: RlParameters, agent: PureTextAgentParameters) -> None:
    """Checks that no field is set that a fine-tuning service chooses itself.

    Raises:
        ConfigError: Names every such field that is set.
    """
    problems = []
    if "lr" in get_changed_fields(rl):
        fix = "remove it, or set learning_rate_multiplier of the adapter `_type: openai`"
        message = f"is {rl.lr}, but the service chooses its own learning rate"
        problems.append(Problem("hyper_params.rl.lr", message, fix))
    for name in ("lora_rank", "lora_alpha_factor"):
        if name in get_changed_fields(agent):
            message = f"is {getattr(agent, name)}, but the service chooses how it trains"
            problems.append(Problem(f"hyper_params.agents.*.{name}", message, "remove it"))
    if problems:
        raise ConfigError(problems)


_TRAINER_BLOCKS = {name: name for name in ("pure_text_ei", "pure_text_malt", "pure_text_grpo")}
_PROTOCOL_BLOCKS = {f"{name}_protocol": name for name in ("nip", "debate", "mnip")}


def get_changed_fields(block: Any) -> dict[str, Any]:
    """Returns the fields of a block that differ from their defaults, by name."""
    changed = {}
    for each in fields(block):
        default = _get_default(type(block), each.name)
        if (value := getattr(block, each.name)) != default:
            changed[each.name] = value
    return changed


def _get_default(block: type, name: str) -> Any:
    return block.__pydantic_fields__[name].get_default(call_default_factory=True)  # type: ignore[attr-defined]


def _find_unsupported(path: str, block: Any) -> list[Problem]:
    """Returns the unsupported fields that are set in a block or in a nested one."""
    problems, changed = [], get_changed_fields(block)
    for name, instead in block.UNSUPPORTED.items():
        if name in changed:
            message = f"is {changed[name]!r}, but this field is not supported"
            problems.append(Problem(f"{path}.{name}", message, instead))
    for name, value in vars(block).items():
        nested = value.items() if isinstance(value, dict) else [("", value)]
        for key, each in nested:
            if is_dataclass(each) and isinstance(each, _Parameters):
                problems += _find_unsupported(f"{path}.{name}.{key}".rstrip("."), each)
    return problems


def _find_set_fields(hyper_params: HyperParameters, name: str, reason: str) -> list[Problem]:
    block = getattr(hyper_params, name)
    return [
        Problem(f"hyper_params.{name}.{field}", f"is {value!r}, but {reason}", "remove it")
        for field, value in get_changed_fields(block).items()
    ]
