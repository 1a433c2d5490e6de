"""Validation without sampling: how likely the policy finds the replies that held-out rows bring.

    a row with replies of 3 and 1 tokens, log-probs -0.5 -0.5 -1.0 and -2.0   =>  score -1.0 (mean over the tokens)
    a row with a preferred and another reply, mean log-probs -0.7 and -0.9    =>  score 1.0 (0.5 if they are equal)

    workflow: {_type: held_out_replies}
    eval: {evaluators: {likelihood: {_type: held_out_replies}}}

The first is minus the loss that supervised training lowers; the second is the accuracy of the policy as a judge of
pairs. Both compare models on the same rows, so the verdict of a run on rows alone needs no agent, no judge and no
sampling.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reinforge.config.schema import EvaluatorConfig
from reinforge.dialects.tool_calls import write_calls
from reinforge.errors import BackendError, PolicyFailure
from reinforge.evaluation.demonstrations import (
    DEMONSTRATION_SHAPES,
    Demonstration,
    detect_row_shape,
    parse_demonstrations,
)
from reinforge.evaluation.evaluators.base import missing_score
from reinforge.interfaces import Builder, Evaluator, PolicyServer
from reinforge.registry import register_evaluator, register_workflow
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.workflows.outside_agent import AgentWorkflowConfig, OutsideWorkflow
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.request import ModelRequest, TokenLogprobs

SCORE, LOSS = "score", "loss"


class HeldOutWorkflowConfig(AgentWorkflowConfig, name="held_out_replies"):
    """Computes the log-probs of the replies in an example's row; nothing is sampled."""


class HeldOutEvaluatorConfig(EvaluatorConfig, name="held_out_replies"):
    """The score of the workflow `held_out_replies`: the mean log-prob of a reply, or which of two is more likely."""


@dataclass(frozen=True)
class HeldOutReplies:
    """Scores the replies of one row after the other."""

    find_policy: Callable[[], PolicyServer | None]

    async def __call__(self, item: EvalInputItem, llm: Any, context: EpisodeContext) -> dict[str, float]:
        """Returns the score of a row, and the mean loss of a token of its (preferred) replies."""
        policy = self.find_policy()
        if policy is None:
            raise BackendError("the backend serves no policy that could score given replies")
        row = item.full_dataset_entry
        shape = detect_row_shape([row])
        if shape not in DEMONSTRATION_SHAPES:
            raise BackendError(f"example {item.id} has the shape {shape}, which has no replies to score")
        means = [await score_replies(policy, each) for each in parse_demonstrations(row, shape)]
        if len(means) == 1:
            return {SCORE: means[0], LOSS: -means[0]}
        preferred, other = means
        score = 0.5 if preferred == other else float(preferred > other)
        return {SCORE: score, LOSS: -preferred}


async def score_replies(policy: PolicyServer, demonstration: Demonstration) -> float:
    """Returns the mean log-prob of the tokens of a conversation's trained replies."""
    written = write_calls(demonstration.messages, policy.chat_template)
    sequences, starts = list[tuple[int, ...]](), list[int]()
    for place in demonstration.replies():
        tokens = await policy.encode(ModelRequest(written[:place], tools=demonstration.tools), written[place])
        if not isinstance(tokens, TokenLogprobs):
            raise BackendError(f"{policy.model_name} does not expose its tokens, so it cannot score given replies")
        sequences.append((*tokens.prompt_token_ids, *tokens.token_ids))
        starts.append(len(tokens.prompt_token_ids))
    logprobs = [
        float(value)
        for scored, start in zip(await policy.score(sequences), starts, strict=True)
        for value in scored[start:]
    ]
    if not logprobs:
        raise PolicyFailure("the row has no reply to score")
    return math.fsum(logprobs) / len(logprobs)


class HeldOutEvaluator(Evaluator):
    """Passes on the score that the workflow has computed."""

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        output = item.output_obj
        if not isinstance(output, Mapping) or not isinstance(output.get(SCORE), int | float):
            return missing_score(item, "needs `workflow: {_type: held_out_replies}`, whose output has the score")
        return EvalOutputItem(id=item.id, score=output[SCORE], reasoning=f"loss {output.get(LOSS)}")


@register_workflow(config_type=HeldOutWorkflowConfig)
async def held_out_workflow(config: HeldOutWorkflowConfig, builder: Builder) -> AsyncIterator[OutsideWorkflow]:
    function = HeldOutReplies(builder.policy)
    yield OutsideWorkflow(function, config.llm, True, config.share_environment_seed, name="held_out_replies")


@register_evaluator(config_type=HeldOutEvaluatorConfig)
async def held_out_evaluator(config: HeldOutEvaluatorConfig, builder: Builder) -> AsyncIterator[HeldOutEvaluator]:
    yield HeldOutEvaluator()
