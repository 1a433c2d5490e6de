"""Tokens of models that others serve, for the whole run, and what they cost at the prices that are given.

    tokens of the sample / episodes of the sample x episodes of the run = tokens of the run
    tokens / 1,000,000 x price = cost

No price is built in: prices change, and a wrong one is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from reinforge.interfaces import ChatModel
from reinforge.rollout.models.openai_client import ModelUsage
from reinforge.types.episode import EpisodeRecord

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """What a million tokens cost, in any currency."""

    prompt: float
    completion: float


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The use of one model by a run."""

    entry: str  # its entry of `llms`, or `training`
    calls: float
    prompt_tokens: float  # tokens of prompts, or tokens that are trained on
    completion_tokens: float
    cost: float | None  # in the currency of the price; None: no price was given


def copy_usage(llms: Mapping[str, ChatModel]) -> dict[str, ModelUsage]:
    """Returns what each model that counts its calls has been asked for so far."""
    found = {name: getattr(llm, "usage", None) for name, llm in llms.items()}
    return {name: replace(usage) for name, usage in found.items() if isinstance(usage, ModelUsage)}


def measure_usage(
    llms: Mapping[str, ChatModel], before: Mapping[str, ModelUsage], records: Sequence[EpisodeRecord]
) -> dict[str, ModelUsage]:
    """Returns what a sample of episodes has asked each model for.

    A model that counts its calls knows those of judges too; of the others the calls of the agent are known.
    """
    found = {}
    for name, now in copy_usage(llms).items():
        found[name] = ModelUsage(*map(int.__sub__, astuple(now), astuple(before[name])))
    for name in llms.keys() - found.keys():
        calls = [call for record in records for call in record.calls if call.llm == name]
        found[name] = ModelUsage(
            len(calls),
            sum(call.reply.num_prompt_tokens for call in calls),
            sum(call.num_completion_tokens for call in calls),
        )
    return {name: found[name] for name in llms}


def predict_costs(
    usage: Mapping[str, ModelUsage], num_sampled: int, num_episodes: int, prices: Mapping[str, TokenPrice]
) -> list[ModelCost]:
    """Returns the use of each model by the whole run.

    Example: 2,000 prompt tokens in 80 episodes, 8,000 episodes, 0.5 per million -> 200,000 tokens, 0.1.
    """
    scale, costs = num_episodes / max(1, num_sampled), []
    for entry, used in usage.items():
        prompt, completion = used.num_prompt_tokens * scale, used.num_completion_tokens * scale
        price = prices.get(entry)
        cost = None if price is None else (prompt * price.prompt + completion * price.completion) / MILLION
        costs.append(ModelCost(entry, used.num_calls * scale, prompt, completion, cost))
    return costs


def predict_training_cost(tokens_per_episode: float, num_trained: int, price: float | None) -> ModelCost:
    """Returns the cost of training at a service that counts the tokens of the episodes that it trains on."""
    tokens = tokens_per_episode * num_trained
    return ModelCost("training", 0, tokens, 0, None if price is None else tokens * price / MILLION)
