"""Inputs and outputs of an evaluation: examples, scores, the output of a run, and means with their intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from reinforge.types.steps import IntermediateStep

MAX_SCORE = 1e9  # largest absolute score and reward. Squares and sums of such numbers stay finite, even in float32


class EvalInputItem(BaseModel):
    """One example, before and after the agent ran on it."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    id: Any = Field(description="The example's id.")
    input_obj: Any = Field(description="Input of the agent.")
    expected_output_obj: Any = Field(description="Expected output; may be None.")
    output_obj: Any = Field(default=None, description="Output of the agent.")
    expected_trajectory: list[IntermediateStep] = Field(default_factory=list, description="Expected steps.")
    trajectory: list[IntermediateStep] = Field(default_factory=list, description="Actual steps.")
    full_dataset_entry: Any = Field(description="The row of the dataset, unchanged.")

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Returns the example of a row with `id`, `question` and, if there is one, `answer`."""
        given, expected = row["question"], row.get("answer")
        return cls(id=row["id"], input_obj=given, expected_output_obj=expected, full_dataset_entry=row)

    def copy_with_updates(self, **fields: Any) -> Self:
        return self.model_copy(update=fields)


class EvalInput(BaseModel):
    """The examples of one evaluation."""

    eval_input_items: list[EvalInputItem] = Field(description="The examples.")


class EvalOutputItem(BaseModel):
    """One score."""

    id: Any = Field(description="The example's id.")
    score: Any = Field(description="The score; None if missing.")
    reasoning: Any = Field(description="The evaluator's explanation.")
    error: str | None = Field(default=None, description="Why the score is missing.")

    def as_reward(self) -> float | None:
        """Returns the score as a finite number, or None if it is missing; never 0.0 for unknown."""
        if self.error is not None or not isinstance(self.score, bool | int | float):
            return None
        return float(self.score) if abs(self.score) <= MAX_SCORE else None


class EvalOutput(BaseModel):
    """The scores of one evaluator."""

    average_score: Any = Field(description="Mean of the scores that are not missing; None if all are.")
    eval_output_items: list[EvalOutputItem] = Field(description="One per example.")


class EvaluationRunConfig(BaseModel):
    """Settings of one evaluation."""

    config_file: Path | BaseModel = Field(description="YAML file, or a loaded configuration.")
    dataset: str | Path | None = Field(default=None, description="Replaces the configuration's dataset.")
    result_json_path: str = Field(default="$", description="JSONPath into the response of a remote workflow.")
    skip_workflow: bool = Field(
        default=False, description="Score the outputs in the dataset instead of running the agent."
    )
    skip_completed_entries: bool = Field(default=False, description="Skip rows that already have an output.")
    endpoint: str | None = Field(default=None, description="URL of a remote workflow.")
    endpoint_timeout: int = Field(default=300, description="Seconds to wait for the remote workflow.")
    reps: int = Field(default=1, description="Runs of each example.")
    override: tuple[tuple[str, str], ...] = Field(default=(), description="Pairs of path and value.")
    write_output: bool = Field(default=True, description="Write the output files.")


class EvaluationRunOutput(BaseModel):
    """Output of one evaluation."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    workflow_output_file: Path | None = Field(description="File with the agent's outputs, if one was written.")
    evaluator_output_files: list[Path] = Field(description="Files with the scores.")
    workflow_interrupted: bool = Field(description="True if some examples were not run.")
    eval_input: EvalInput = Field(description="The examples, with outputs and steps.")
    evaluation_results: list[tuple[str, EvalOutput]] = Field(description="Scores by evaluator.")
    usage_stats: Any = Field(default=None, description="Token counts and durations.")
    profiler_results: Any = Field(
        default=None, description="For compatibility with the NeMo Agent Toolkit; always None."
    )

    def score_range(self, metric: str | None = None) -> dict[str, Any]:
        """Returns mean, lowest and highest score of one evaluator (None: of all), over the items that have a score."""
        outputs = [output for name, output in self.evaluation_results if metric in (None, name)]
        rewards = [item.as_reward() for output in outputs for item in output.eval_output_items]
        scores = [reward for reward in rewards if reward is not None]
        return {
            "avg_reward": statistics.fmean(scores) if scores else None,
            "min_reward": min(scores, default=None),
            "max_reward": max(scores, default=None),
            "num_examples": len(scores),
        }


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """A mean with its 95 % confidence interval."""

    metric: str  # name of the evaluator
    mean: float | None  # mean over examples; None if nothing was scored
    ci_low: float | None  # ends of the interval; None if nothing was scored
    ci_high: float | None
    num_examples: int  # number of examples that were scored
    num_unscored: int  # number of examples without a score because the environment failed
    unscored_reason: str | None = None
    """The most common reason for that; None: all are scored, or the reason is not known."""
    num_clusters: int | None = None
    """Distinct prompts or conversations that the scored examples are of, which the interval counts; None: not known."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.mean is None:
            return f"{self.metric} unknown ({self.num_unscored} examples unscored)"
        known = self.ci_low is not None and self.ci_high is not None
        interval = f"[{self.ci_low:.3f}, {self.ci_high:.3f}]" if known else "(interval unknown)"
        return f"{self.metric} {self.mean:.3f} {interval} on {count_examples(self.num_examples, self.num_clusters)}"


def count_examples(count: int, num_clusters: int | None = None) -> str:
    """Returns `250 examples`, or `250 examples of 58 prompts` where some share a prompt or a conversation."""
    examples = f"{count:,} example" if count == 1 else f"{count:,} examples"
    if num_clusters is None or num_clusters >= count:
        return examples
    return f"{examples} of {num_clusters:,} prompt" if num_clusters == 1 else f"{examples} of {num_clusters:,} prompts"


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The result of one evaluation of one model."""

    split: str  # the examples it ran on
    epoch: int  # epoch of the evaluation; -1 for the baseline
    scores: dict[str, dict[str, float]]
    """Metric -> example id -> mean score of its scored samples; without missing examples."""
    num_examples: int  # number of examples in the evaluation
    outcomes: dict[str, int]  # outcome -> number of episodes
    reward_metric: str
    error: str | None = None  # why there are no scores; None if there are
    summaries: dict[str, MetricSummary] = field(default_factory=dict)  # metric -> mean with its interval
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Example id -> its cluster, of examples that share a prompt or a conversation with others."""

    def as_validation(self) -> dict[str, Any]:
        """Returns the report in the format of `run_validation_evaluation`."""
        summary = self.summaries.get(self.reward_metric)
        rewards = self.scores.get(self.reward_metric, {}).values()
        return {
            "avg_reward": summary.mean if summary else None,
            "min_reward": min(rewards, default=None),
            "max_reward": max(rewards, default=None),
            "ci_low": summary.ci_low if summary else None,
            "ci_high": summary.ci_high if summary else None,
            "num_examples": summary.num_examples if summary else 0,
            "num_clusters": summary.num_clusters if summary else None,
            "num_unscored": summary.num_unscored if summary else self.num_examples,
            "unscored_reason": summary.unscored_reason if summary else None,
            "metrics": {name: s.mean for name, s in self.summaries.items()},
            "summaries": {name: s.as_dict() for name, s in self.summaries.items()},
            "outcomes": dict(self.outcomes),
            "error": self.error,
        }
