"""What an experiment of the reference is described by: `HyperParameters`, `ExperimentSettings` and their blocks.

    HyperParameters(
        scenario="cells",
        trainer="pure_text_ei",
        dataset="cells.jsonl",
        agents={"prover": {"model_name": "path/to/model"}, "verifier": {"model_name": "path/to/model"}},
        rl={"num_iterations": 8},
    )

Names and defaults are the reference's; a block may be given as a dict. What is not honoured is refused by name as soon
as it is set to something else than its default: `refuse_unhonoured`.
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

_CHECKED = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class _Parameters:
    """Base of the blocks.

    Attributes:
        UNHONOURED: Fields that nothing here reads, and what does the same instead.
    """

    UNHONOURED: ClassVar[Mapping[str, str]] = {}


@dataclass(config=_CHECKED)
class PureTextAgentParameters(_Parameters):
    """One agent.

    Attributes:
        model_name: Folder, hub id or `bundled:NAME`; with a fine-tuning service, the name of its base model.
        shared_model_group: Agents that name the same group speak by one model; None: one of its own.
        temperature: How its replies are drawn; of agents that are trained, the same for all. None: 1.
        top_p: The same.
        fine_tune_from_scratch: Each job begins from the base model, not from the model of the job before.
        freeze_agent: What it says is never trained, whatever model it shares.
        max_response_words: Put into its role prompt as $max_response_words.
        max_tokens_per_message: Longest reply; None: what the context leaves.
        num_invalid_generation_retries: Replies drawn anew if they are invalid.
        use_dummy_api: Not honoured.
        lora_rank: Of the group's adapter, which all its agents share; None: all weights are trained.
        lora_alpha_factor: The adapter's alpha is this times its rank.
        prompt: Role prompt, as under `workflow.agents`.
        prompt_file: File with the role prompt instead.
        agent_weight: What its data counts against that of the other agents of its group; equal by default, however
            much each of them says.
    """

    UNHONOURED: ClassVar[Mapping[str, str]] = {
        "use_dummy_api": "script a policy server of your own (tests/doubles.py is one)"
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
        """Alpha of the group's adapter; None where all weights are trained."""
        return None if self.lora_rank is None else round(self.lora_rank * self.lora_alpha_factor)


@dataclass(config=_CHECKED)
class RlParameters(_Parameters):
    """How much is collected, and how it is trained on.

    Attributes:
        rollouts_per_iteration: Episodes of an iteration; None: one of each training example.
        num_iterations: Times to collect and train.
        num_epochs: Passes over an iteration's data, with `pure_text_grpo`.
        lr: Peak learning rate; the reference's default suits models from scratch.
        num_test_iterations: Not honoured.
    """

    UNHONOURED: ClassVar[Mapping[str, str]] = {
        "num_test_iterations": "the verdict draws finetuning.gate.draws episodes of each held-out example"
    }

    rollouts_per_iteration: int | None = None
    num_iterations: int = 1000
    num_epochs: int = 4
    lr: float = 0.003
    num_test_iterations: int = 10


@dataclass(config=_CHECKED)
class TextRlParameters(_Parameters):
    """What text trainers share.

    Attributes:
        fine_tune_on_all_previous_rollouts: An iteration trains on what those before collected too.
        verifier_guess_replacement_proportion: Share of rollouts whose last verifier message becomes the truth.
        verifier_guess_replacement_annealing: How that share falls with the iterations.
        verifier_guess_replacement_annealing_rate: How fast.
        save_transcripts: Write what was said as files a person can read.
        transcript_format: Of these files.
        test_scheme: Which iterations are validated; the base model and the last one always are.
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


@dataclass(config=_CHECKED)
class PureTextEiParameters(_Parameters):
    """Which rollouts expert iteration imitates.

    Attributes:
        rollout_selection_method: All that reach a reward, or a sample weighted by reward.
        reward_threshold: threshold: the least reward.
        weighting_sample_size_factor: weighted_sampling: rollouts drawn, as a share of those collected.
        weighting_minimum: weighted_sampling: lower rewards count as this one; None: as they are.
        weighting_use_replacement: weighted_sampling: a rollout may be drawn more than once.
        weighting_epsilon: weighted_sampling: share of the weight that is spread evenly.
    """

    rollout_selection_method: Literal["threshold", "weighted_sampling"] = "threshold"
    reward_threshold: float = 0.9
    weighting_sample_size_factor: float = 0.5
    weighting_minimum: float | None = None
    weighting_use_replacement: bool = True
    weighting_epsilon: float = 0.01


@dataclass(config=_CHECKED)
class PureTextMaltParameters(_Parameters):
    """The trees of MALT.

    Attributes:
        num_responses_per_timestep: Replies of each round.
    """

    num_responses_per_timestep: int = 2


@dataclass(config=_CHECKED)
class PureTextGrpoParameters(_Parameters):
    """Multi-agent GRPO; this block is ours.

    Attributes:
        num_generations: Episodes of each example, whose rewards are compared for each agent by itself.
    """

    num_generations: int = 8


@dataclass(config=_CHECKED)
class ProtocolCommonParameters(_Parameters):
    """What decisions are worth; see `workflow` of the protocols."""

    verifier_first: bool = True
    randomize_prover_stance: bool = False
    prover_reward: float = 1.0
    verifier_reward: float = 1.0
    verifier_incorrect_penalty: float = -1.0
    verifier_terminated_penalty: float = -1.0
    verifier_no_guess_reward: float = 0.0
    shared_reward: bool = False


@dataclass(config=_CHECKED)
class NipProtocolParameters(_Parameters):
    """How long a protocol of rounds is."""

    max_message_rounds: int = 8
    min_message_rounds: int = 1


@dataclass(config=_CHECKED)
class DebateProtocolParameters(NipProtocolParameters):
    """How a debate goes; `randomize_channel_order` is honoured by protocols of several channels."""

    sequential: bool = False
    randomize_channel_order: bool = True


@dataclass(config=_CHECKED)
class MnipProtocolParameters(DebateProtocolParameters):
    """How a protocol of several provers goes."""


@dataclass(config=_CHECKED)
class HyperParameters(_Parameters):
    """One experiment.

    Attributes:
        scenario: What it is about, for people; the role prompts are the agents'.
        trainer: `pure_text_ei` is expert iteration, `pure_text_malt` MALT, `pure_text_grpo` multi-agent GRPO.
        dataset: A file of examples, as `reinforge.finetune` takes it.
        interaction_protocol: The `_type` of a protocol.
        seed: Every random choice derives from it.
        test_size: Share of the examples that the verdict is on.
        agents: Parameters of each agent of the protocol, by its name.
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


@dataclass(config=_CHECKED)
class ExperimentSettings(_Parameters):
    """How an experiment is run, which changes nothing of what it finds.

    Attributes:
        run_id: Names the run folder; the same name goes on with what is there.
        num_rollout_workers: Sixteen episodes run at the same time for each.
        num_api_generation_timeouts: Not honoured.
        num_api_connection_errors: Further attempts of a call to a fine-tuning service.
        logger: Where a group says what its jobs do; None: the module's own.
        test_run: Run everything once, as small as it can be.
        output_dir: Folder of the run folders.
        groups_dir: Folder in which shared-model groups that are used by themselves keep their jobs.
    """

    UNHONOURED: ClassVar[Mapping[str, str]] = {
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


def refuse_unhonoured(hyper_params: HyperParameters, settings: ExperimentSettings) -> None:
    """Looks for values that nothing would read.

    Raises:
        ConfigError: With each of them, by name.
    """
    problems = [*_unread("hyper_params", hyper_params), *_unread("settings", settings)]
    for name, owner in _OF_TRAINERS.items():
        if hyper_params.trainer != owner:
            problems += _changed(
                hyper_params, name, f"belongs to the trainer {owner}, and this is a run of another one"
            )
    for name, protocol in _OF_PROTOCOLS.items():
        if hyper_params.interaction_protocol != protocol:
            problems += _changed(hyper_params, name, f"belongs to the protocol {protocol}, and another one is spoken")
    if problems:
        raise ConfigError(problems)


def refuse_what_services_choose(rl: RlParameters, agent: PureTextAgentParameters) -> None:
    """Looks for values that a fine-tuning service decides itself.

    Raises:
        ConfigError: With each of them, by name.
    """
    problems = []
    if "lr" in changed_fields(rl):
        fix = "leave it out, or set learning_rate_multiplier of the adapter `_type: openai`"
        problems.append(Problem("hyper_params.rl.lr", f"is {rl.lr}; the service chooses its learning rate", fix))
    for name in ("lora_rank", "lora_alpha_factor"):
        if name in changed_fields(agent):
            message = f"is {getattr(agent, name)}; the service does not say how it trains"
            problems.append(Problem(f"hyper_params.agents.*.{name}", message, "leave it out"))
    if problems:
        raise ConfigError(problems)


_OF_TRAINERS = {name: name for name in ("pure_text_ei", "pure_text_malt", "pure_text_grpo")}
_OF_PROTOCOLS = {f"{name}_protocol": name for name in ("nip", "debate", "mnip")}


def changed_fields(block: Any) -> dict[str, Any]:
    """Returns the fields of a block that do not have their defaults, by name."""
    found = {}
    for each in fields(block):
        default = _default_of(type(block), each.name)
        if (value := getattr(block, each.name)) != default:
            found[each.name] = value
    return found


def _default_of(block: type, name: str) -> Any:
    return block.__pydantic_fields__[name].get_default(call_default_factory=True)  # type: ignore[attr-defined]


def _unread(path: str, block: Any) -> list[Problem]:
    """Returns the problems of a block and of those below it."""
    problems, changed = [], changed_fields(block)
    for name, instead in block.UNHONOURED.items():
        if name in changed:
            problems.append(Problem(f"{path}.{name}", f"is {changed[name]!r}, and nothing here reads it", instead))
    for name, value in vars(block).items():
        below = value.items() if isinstance(value, dict) else [("", value)]
        for key, each in below:
            if is_dataclass(each) and isinstance(each, _Parameters):
                problems += _unread(f"{path}.{name}.{key}".rstrip("."), each)
    return problems


def _changed(hyper_params: HyperParameters, name: str, why: str) -> list[Problem]:
    block = getattr(hyper_params, name)
    return [
        Problem(f"hyper_params.{name}.{field}", f"is {value!r}, and {why}", "leave it out")
        for field, value in changed_fields(block).items()
    ]
