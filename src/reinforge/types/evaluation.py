"""What an evaluation takes and gives: items, scores, the whole run's output, and a figure with its interval."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from reinforge.types.steps import IntermediateStep


class EvalInputItem(BaseModel):
    """One example, before and after the agent ran on it."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    id: Any = Field(description="The example's id.")
    input_obj: Any = Field(description="What the agent is given.")
    expected_output_obj: Any = Field(description="What a right answer is compared with; may be None.")
    output_obj: Any = Field(default=None, description="What the agent returned.")
    expected_trajectory: list[IntermediateStep] = Field(default_factory=list, description="Steps expected.")
    trajectory: list[IntermediateStep] = Field(default_factory=list, description="Steps taken.")
    full_dataset_entry: Any = Field(description="The dataset's row as it was read.")

    def copy_with_updates(self, **fields: Any) -> Self:
        """Returns a copy with these fields replaced."""
        return self.model_copy(update=fields)


class EvalInput(BaseModel):
    """The examples of one evaluation."""

    eval_input_items: list[EvalInputItem] = Field(description="The examples.")


class EvalOutputItem(BaseModel):
    """One score."""

    id: Any = Field(description="The example's id.")
    score: Any = Field(description="The score; None where it is missing.")
    reasoning: Any = Field(description="Why, as the evaluator tells it.")
    error: str | None = Field(default=None, description="Why the score is missing.")


class EvalOutput(BaseModel):
    """The scores of one evaluator."""

    average_score: Any = Field(description="Mean over the scores that are not missing; None where all are.")
    eval_output_items: list[EvalOutputItem] = Field(description="One per example.")


class EvaluationRunConfig(BaseModel):
    """What one evaluation runs on."""

    config_file: Path | BaseModel = Field(description="A YAML file, or a configuration already loaded.")
    dataset: str | Path | None = Field(default=None, description="Replaces the configuration's dataset.")
    result_json_path: str = Field(default="$", description="JSONPath into the answer of a remote workflow.")
    skip_workflow: bool = Field(default=False, description="Score outputs that the dataset already holds.")
    skip_completed_entries: bool = Field(default=False, description="Leave out rows that hold an output.")
    endpoint: str | None = Field(default=None, description="URL of a remote workflow.")
    endpoint_timeout: int = Field(default=300, description="Seconds to wait for it.")
    reps: int = Field(default=1, description="Runs of each example.")
    override: tuple[tuple[str, str], ...] = Field(default=(), description="Pairs of path and value.")
    write_output: bool = Field(default=True, description="Write the output files.")


class EvaluationRunOutput(BaseModel):
    """What one evaluation gave."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    workflow_output_file: Path | None = Field(description="The file with the agent's outputs, if one was written.")
    evaluator_output_files: list[Path] = Field(description="The files with the scores.")
    workflow_interrupted: bool = Field(description="True if some examples were not run.")
    eval_input: EvalInput = Field(description="The examples with outputs and steps.")
    evaluation_results: list[tuple[str, EvalOutput]] = Field(description="Scores by evaluator.")
    usage_stats: Any = Field(default=None, description="Tokens and seconds.")
    profiler_results: Any = Field(default=None, description="Kept for callers of the reference; always None.")


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """One figure with its 95 % interval.

    Attributes:
        metric: Name of the evaluator.
        mean: Mean over examples; None where nothing was scored.
        ci_low, ci_high: The interval's ends; None where nothing was scored.
        num_examples: Examples that were scored.
        num_unscored: Examples that are missing because the world failed.
    """

    metric: str
    mean: float | None
    ci_low: float | None
    ci_high: float | None
    num_examples: int
    num_unscored: int

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a JSON-ready dict."""
        return asdict(self)

    def __str__(self) -> str:
        if self.mean is None:
            return f"{self.metric} unknown ({self.num_unscored} examples unscored)"
        known = self.ci_low is not None and self.ci_high is not None
        interval = f"[{self.ci_low:.3f}, {self.ci_high:.3f}]" if known else "(interval unknown)"
        return f"{self.metric} {self.mean:.3f} {interval} on {self.num_examples} examples"


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """One arm of an evaluation.

    Attributes:
        split: The examples it ran on.
        epoch: The epoch it belongs to; -1 for the baseline.
        scores: Metric -> example id -> mean score over its scored draws; missing examples are absent.
        num_examples: Examples that were asked for.
        outcomes: Outcome -> number of episodes.
        reward_metric: The metric that is the reward.
        error: Why there is no figure, where there is none.
        summaries: Metric -> mean with its interval.
    """

    split: str
    epoch: int
    scores: dict[str, dict[str, float]]
    num_examples: int
    outcomes: dict[str, int]
    reward_metric: str
    error: str | None = None
    summaries: dict[str, MetricSummary] = field(default_factory=dict)

    def as_validation(self) -> dict[str, Any]:
        """Returns the report as `run_validation_evaluation` gives it."""
        summary = self.summaries.get(self.reward_metric)
        return {
            "avg_reward": summary.mean if summary else None,
            "ci_low": summary.ci_low if summary else None,
            "ci_high": summary.ci_high if summary else None,
            "num_examples": summary.num_examples if summary else 0,
            "num_unscored": summary.num_unscored if summary else self.num_examples,
            "metrics": {name: s.mean for name, s in self.summaries.items()},
            "summaries": {name: s.as_dict() for name, s in self.summaries.items()},
            "outcomes": dict(self.outcomes),
            "error": self.error,
        }
