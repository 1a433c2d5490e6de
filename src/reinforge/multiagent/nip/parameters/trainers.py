"""Parameters of trainers: how much data is collected, what of it is trained on, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from reinforge.multiagent.nip.parameters.base import STRICT, ParameterBlock

TestSchemeType = Literal["none", "all", "last", "first_and_last"]


@dataclass(config=STRICT)
class RlParameters(ParameterBlock):
    """How much data is collected, and how it is trained on.

    Attributes:
        rollouts_per_iteration: Episodes per iteration; None: one per training example.
        num_iterations: Number of iterations, each of which collects and trains.
        num_epochs: Passes over an iteration's data, with `pure_text_grpo`.
        lr: Peak learning rate; the default of neural-interactive-proofs suits models trained from scratch.
        num_test_iterations: Episodes per example of the verdict, for each of the two models. The default, 10, stands
            for `finetuning.gate.num_samples`, which is 1.
        frames_per_batch: The episodes of an iteration as rounds: this many divided by the longest dialogue.
        steps_per_env_per_iteration: Divides `frames_per_batch` instead of the longest dialogue.
    """

    rollouts_per_iteration: int | None = None
    num_iterations: int = 1000
    num_epochs: int = 4
    lr: float = 0.003
    num_test_iterations: int = 10
    frames_per_batch: int | None = Field(default=None, ge=1)
    steps_per_env_per_iteration: int | None = Field(default=None, ge=1)


RlTrainerParameters = RlParameters


@dataclass(config=STRICT)
class TextRlParameters(ParameterBlock):
    """What the text trainers share.

    Attributes:
        fine_tune_on_all_previous_rollouts: Each iteration also trains on the rollouts of all earlier iterations.
        verifier_guess_replacement_proportion: Share of rollouts in which the truth replaces the verifier's decision.
        verifier_guess_replacement_annealing: How that share falls with the iterations.
        verifier_guess_replacement_annealing_rate: How fast it falls.
        save_transcripts: Write the dialogues to readable files.
        transcript_format: Format of these files.
        test_scheme: Which iterations are validated; the base model and the last iteration always are.
        test_on_whole_dataset: Fixed: all held-out examples are used.
        num_epochs: Passes of a fine-tuning job over its data.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "test_on_whole_dataset": "leave it out; test_size is the share of the examples that is held out"
    }

    fine_tune_on_all_previous_rollouts: bool = False
    verifier_guess_replacement_proportion: float = 0.0
    verifier_guess_replacement_annealing: Literal["none", "linear", "exponential"] = "none"
    verifier_guess_replacement_annealing_rate: float = 0.1
    save_transcripts: bool = True
    transcript_format: Literal["json", "yaml"] = "yaml"
    test_scheme: TestSchemeType = "none"
    num_epochs: int = 1
    test_on_whole_dataset: bool = True


@dataclass(config=STRICT)
class PureTextEiParameters(ParameterBlock):
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


@dataclass(config=STRICT)
class PureTextMaltParameters(ParameterBlock):
    """The trees of MALT.

    Attributes:
        num_responses_per_timestep: Replies per turn.
        num_initial_ei_iterations: Iterations of expert iteration, with the settings of `pure_text_ei`, before the first
            one with trees.
        pair_selection_method: Fixed: sibling replies are compared with each other, not with a middle reward.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "pair_selection_method": "leave it out; the best sibling is preferred to the worst one",
    }

    num_responses_per_timestep: int = 2
    num_initial_ei_iterations: int = Field(default=0, ge=0)
    pair_selection_method: Literal["positive_negative", "interval"] = "interval"


@dataclass(config=STRICT)
class PureTextGrpoParameters(ParameterBlock):
    """Multi-agent GRPO, an addition of reinforge.

    Attributes:
        num_generations: Episodes per example; advantages are relative to the same agent's rewards in them.
    """

    num_generations: int = 8
