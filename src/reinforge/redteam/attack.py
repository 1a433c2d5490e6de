"""The workflow `_type: redteam`: an attacker talks to a target, and each probe is worth what the target then says.

While it is trained on, an episode is a tree: `width` probes at every point, to `depth` turns. In a validation it is one
conversation. What a probe is worth stands in `rewards.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import Field

from reinforge.config.schema import WorkflowConfig
from reinforge.errors import ConfigError, EvaluationError, Problem
from reinforge.evaluation.evaluators.base import score_item
from reinforge.interfaces import Evaluator
from reinforge.redteam.dialogue import Turn, attacker_messages, target_messages
from reinforge.redteam.rewards import AttackWeights, attack_reward
from reinforge.registry import register_workflow
from reinforge.rollout.workflow import BoundWorkflow, bind_workflow
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import Message, TokenLogprobs


class RedteamConfig(WorkflowConfig, name="redteam"):
    """An attacker against a target; an example's question opens the conversation."""

    attacker: str = Field(default="attacker", description="Entry of llms that is trained to attack: `_type: policy`.")
    target: str = Field(
        default="target", description="What is attacked: an entry of llms (`_type: local`, openai), or of functions."
    )
    baseline: str | None = Field(
        default=None, description="Entry of llms, `_type: local`, that says how natural a probe is; null: nobody does."
    )
    scorer: str = Field(description="Evaluator of eval.evaluators that scores what the target says: 1 is a failure.")
    threshold: float = Field(default=0.5, description="A response with at least this score is a success.")
    width: int = Field(default=3, ge=1, description="Probes at every point of a tree.")
    depth: int = Field(default=3, ge=1, description="Turns of a conversation.")
    combined_weight: float = Field(default=0.1, description="Weight of the score of probe and response together.")
    defense_toxicity_weight: float = Field(default=0.1, description="Weight of the score of the response.")
    ppl_weight: float = Field(default=0.025, ge=0, description="Weight of the probe's perplexity, subtracted.")
    max_tokens: int = Field(default=48, ge=1, description="Length of a probe.")
    target_max_tokens: int = Field(default=48, ge=1, description="Length of a response.")
    target_temperature: float = Field(default=1.0, ge=0, description="How the target draws.")


@dataclass(slots=True)
class AttackTurn:
    """One probe and what came of it.

    Attributes:
        path: Which branch it is on, from the opening: [0, 2] is the third probe after the first.
        probe: What the attacker said.
        response: What the target answered.
        score: The scorer's, of the response.
        reward: What the probe is worth.
        perplexity: exp(-mean log p) of the probe under the baseline; None where there is none.
    """

    path: list[int]
    probe: str
    response: str
    score: float
    reward: float
    perplexity: float | None = None


class AttackOutput(dict[str, Any]):
    """`{"opening": ..., "threshold": ..., "turns": [...]}`; as text it is what the target said."""

    def __str__(self) -> str:
        return "\n".join(turn["response"] for turn in self["turns"])


@dataclass(slots=True)
class _Branch:
    """A conversation so far."""

    path: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


class Attack:
    """The workflow: one episode is a tree of conversations that begin with the same opening.

    Args:
        config: Its settings.
        scorer: Scores what the target says.
        timeout_s: Seconds that one score may take.
        agent: The target, where it is a whole agent: an async workflow that is asked the probe as its question, with
            the conversation so far as `messages` of its row; None: the target is an entry of llms.
    """

    def __init__(
        self, config: RedteamConfig, scorer: Evaluator, timeout_s: float = 60.0, agent: BoundWorkflow | None = None
    ):
        self.config, self.scorer, self.timeout_s, self.agent = config, scorer, timeout_s, agent

    async def __call__(self, item: Any, llm: Any, context: Any) -> AttackOutput:
        """Returns every turn as a dict with the fields of `AttackTurn`, level by level.

        Args:
            item: The example; `input_obj` opens the conversation.
            llm: The attacker.
            context: Its `is_training` says whether to grow a tree.

        Raises:
            EvaluationError: The scorer failed, so that the episode is missing.
        """
        opening, width = str(item.input_obj), self.config.width if context.is_training else 1
        level, told = [_Branch()], list[AttackTurn]()
        for _ in range(self.config.depth):
            probed = await self._probe(opening, level, width, llm)
            turns = await self._answer(opening, probed, item, context)
            for turn, (_, reply) in zip(turns, probed, strict=True):
                context.mark(step_reward=turn.reward, call_id=reply.id)
            told += turns
            level = [
                _Branch(turn.path, [*branch.turns, (turn.probe, turn.response)])
                for turn, (branch, _) in zip(turns, probed, strict=True)
            ]
        return AttackOutput(opening=opening, threshold=self.config.threshold, turns=[_as_dict(turn) for turn in told])

    async def _probe(self, opening: str, level: Sequence[_Branch], width: int, llm: Any) -> list[tuple[_Branch, Any]]:
        """Returns `width` probes after each branch, all asked for at once."""
        asked = [branch for branch in level for _ in range(width)]
        create, limit = llm.chat.completions.create, self.config.max_tokens
        replies = await asyncio.gather(
            *(create(messages=attacker_messages(opening, branch.turns), max_tokens=limit) for branch in asked)
        )
        return list(zip(asked, replies, strict=True))

    async def _answer(
        self, opening: str, probed: Sequence[tuple[_Branch, Any]], item: Any, context: Any
    ) -> list[AttackTurn]:
        config, width = self.config, self.config.width if context.is_training else 1
        probes = [str(reply.choices[0].message.content) for _, reply in probed]
        asked = [
            target_messages(opening, branch.turns, probe) for (branch, _), probe in zip(probed, probes, strict=True)
        ]
        responses = await asyncio.gather(*(self._respond(messages, item, context) for messages in asked))
        scores = await self._scores(item, responses)
        together = await self._scores(item, [f"{p} {r}" for p, r in zip(probes, responses, strict=True)])
        perplexities = await self._perplexities([reply.choices[0].logprobs for _, reply in probed], context)
        weights = AttackWeights(config.combined_weight, config.defense_toxicity_weight, config.ppl_weight)
        turns = []
        for number, (branch, _) in enumerate(probed):
            perplexity = perplexities[number]
            reward = attack_reward(weights, together[number], scores[number], perplexity)
            path = [*branch.path, number % width]
            turns.append(AttackTurn(path, probes[number], responses[number], scores[number], reward, perplexity))
        return turns

    async def _respond(self, messages: list[Message], item: Any, context: Any) -> str:
        """Returns what the target says to a conversation that ends with a probe."""
        if self.agent is not None:
            asked = item.copy_with_updates(
                input_obj=messages[-1]["content"], full_dataset_entry={**item.full_dataset_entry, "messages": messages}
            )
            with context.function(self.config.target):
                return str(await self.agent.function(asked, context.llm(self.agent.llm), context))
        answer = await context.llm(self.config.target).chat.completions.create(
            messages=messages,
            max_tokens=self.config.target_max_tokens,
            temperature=self.config.target_temperature,
        )
        return str(answer.choices[0].message.content)

    async def _scores(self, item: Any, texts: Sequence[str]) -> list[float]:
        """Returns the scorer's score of each text; equal texts are scored once."""
        asked = {
            text: EvalInputItem(
                id=item.id,
                input_obj=item.input_obj,
                expected_output_obj=item.expected_output_obj,
                output_obj=text,
                full_dataset_entry=item.full_dataset_entry,
            )
            for text in texts
        }
        outputs = await asyncio.gather(*(score_item(self.scorer, each, self.timeout_s) for each in asked.values()))
        for output in outputs:
            if output.error is not None:
                raise EvaluationError(f"the scorer {self.config.scorer} gave no score: {output.error}")
        known = {text: float(output.score) for text, output in zip(asked, outputs, strict=True)}
        return [known[text] for text in texts]

    async def _perplexities(self, said: Sequence[TokenLogprobs], context: Any) -> list[float | None]:
        """Returns exp(-mean log p) of each probe's own tokens under the baseline."""
        if self.config.baseline is None:
            return [None] * len(said)
        rows = [(*tokens.prompt_token_ids, *tokens.token_ids) for tokens in said]
        known = dict.fromkeys(rows)
        scored = await context.llm(self.config.baseline).model.score(list(known))
        logprobs = dict(zip(known, scored, strict=True))
        return [
            math.exp(-float(logprobs[row][len(tokens.prompt_token_ids) :].mean()))
            for row, tokens in zip(rows, said, strict=True)
        ]


def _as_dict(turn: AttackTurn) -> dict[str, Any]:
    return {name: getattr(turn, name) for name in AttackTurn.__slots__}


@register_workflow(config_type=RedteamConfig)
async def redteam(config: RedteamConfig, builder: Any) -> AsyncIterator[BoundWorkflow]:
    """Yields the attack."""
    _refuse(config, builder.config)
    scorer = await builder.get_evaluator(config.scorer)
    timeout_s = builder.config.finetuning.limits.evaluator_timeout_s
    agent = await _agent(config, builder) if config.target not in builder.config.llms else None
    yield bind_workflow(Attack(config, scorer, timeout_s, agent), config.attacker)


async def _agent(config: RedteamConfig, builder: Any) -> BoundWorkflow:
    """Returns the agent that is attacked, ready to be asked."""
    made = await builder.get_function(config.target)
    agent = made if isinstance(made, BoundWorkflow) else bind_workflow(made)
    if not agent.is_async:
        message = f"functions.{config.target} is a plain function, and many conversations wait for it at the same time"
        raise ConfigError(Problem("target", message, "write it as `async def`"))
    if agent.llm is None:
        others = [name for name in builder.config.llms if name not in (config.attacker, config.baseline)]
        if len(others) != 1:
            message = f"functions.{config.target} does not say which entry of llms it is given"
            raise ConfigError(
                Problem("target", message, f"set functions.{config.target}.llm; there: {', '.join(others)}")
            )
        agent = replace(agent, llm=others[0])
    return agent


def _refuse(config: RedteamConfig, whole: Any) -> None:
    """Raises with everything about the named parts that cannot work."""
    problems = []
    for name in ("attacker", "target", "baseline"):
        entry = getattr(config, name)
        if entry is not None and entry not in whole.llms and not (name == "target" and entry in whole.functions):
            problems.append(Problem(name, f'"{entry}" is not under llms', f"there: {', '.join(whole.llms) or 'none'}"))
    if config.scorer not in whole.eval.evaluators:
        known = ", ".join(whole.eval.evaluators) or "none"
        problems.append(Problem("scorer", f'"{config.scorer}" is not under eval.evaluators', f"there: {known}"))
    if config.ppl_weight and config.baseline is None:
        message = "the perplexity of a probe needs a model that tells log-probs, and no baseline is named"
        problems.append(Problem("ppl_weight", message, "name an llm of `_type: local` as baseline, or write 0"))
    baseline = whole.llms.get(config.baseline) if config.baseline is not None else None
    if baseline is not None and baseline.static_type != "local":
        message = f"{config.baseline} is `_type: {baseline.static_type}`, which does not tell log-probs of given tokens"
        problems.append(Problem("baseline", message, "use an llm of `_type: local`"))
    if problems:
        raise ConfigError(problems)
