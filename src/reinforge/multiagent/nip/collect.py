"""Dialogues of agents whose models are shared-model groups, for loops of one's own.

rollouts = await collect_rollouts([provers, verifiers], rows)
earned = rollouts["next", "agents", "reward"].sum(1)          [dialogue, agent]
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.config.schema import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.errors import ConfigError, EvaluationError, Problem
from reinforge.evaluation.datasets import ListDataset
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.episode import ProtocolWorkflow
from reinforge.multiagent.nip.adapter_group import AdapterSharedModelGroup
from reinforge.multiagent.nip.arrays import NestedArrayDict
from reinforge.multiagent.nip.rollouts import rollouts_of
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.request import ModelReply, ModelRequest

logger = logging.getLogger(__name__)

EPISODES_OF_A_WORKER = 16


class GroupModel:
    """A group as a model that agents ask; they say how their replies are drawn."""

    is_policy = False

    def __init__(self, group: AdapterSharedModelGroup):
        self.group = group

    @property
    def model_name(self) -> str:
        """The model that serves."""
        return self.group.model_name

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Draws one reply."""
        return await self.group.sample(request)


async def collect_rollouts(
    groups: Sequence[AdapterSharedModelGroup],
    rows: Sequence[Mapping[str, Any]],
    *,
    iteration: int = 0,
    num_dialogues: int = 1,
) -> NestedArrayDict:
    """Returns what the agents of some groups said about examples, batch size (dialogue, round).

    Equal arguments give equal dialogues as long as the models are the same. What the world made fail is left out and
    said; a dialogue in which an agent gave no valid reply is there, with a reward for that agent alone.

    Args:
        groups: Of one experiment; together they have all agents of its protocol.
        rows: Examples, such as `{"id": "1", "question": ..., "answer": "accept"}`.
        iteration: Draws derive from it.
        num_dialogues: Of each example.

    Raises:
        ConfigError: Agents are missing, or rows cannot be examples.
        EvaluationError: There is not one dialogue.
    """
    params, settings = groups[0].hyper_params, groups[0].settings
    handler = groups[0].protocol_handler
    agents = {name: _spoken_by(agent, group) for group in groups for name, agent in group.agent_wholes.items()}
    if missing := [name for name in handler.agent_names if name not in agents]:
        message = f"the protocol needs the agents {', '.join(missing)} too"
        raise ConfigError(Problem("groups", message, "give the groups that they are in"))
    workflow = ProtocolWorkflow(handler, {name: agents[name] for name in handler.agent_names})
    runner = EpisodeRunner(
        bind_workflow(workflow, groups[0].group_name),
        {group.group_name: GroupModel(group) for group in groups},
        sampling=SamplingConfig(),
        limits=LimitsConfig(),
        outcomes=OutcomesConfig(),
        run_seed=params.seed,
        max_concurrency=EPISODES_OF_A_WORKER * settings.num_rollout_workers,
    )
    items = ListDataset(rows).load()
    keys = [
        (EpisodeKey("collect", iteration, str(item.id), number), item)
        for item in items
        for number in range(num_dialogues)
    ]
    records = await runner.run(keys, _unscored, lambda record: None)
    whole = [record for record in records if isinstance(record.item.output_obj, dict)]
    lost = [record for record in records if not isinstance(record.item.output_obj, dict)]
    if lost:
        logger.warning("%d of %d dialogues are missing: %s", len(lost), len(records), lost[0].reason)
    if not whole:
        raise EvaluationError(f"none of {len(records)} dialogues came to an end: {lost[0].reason}")
    entries = [record.item.full_dataset_entry for record in whole]
    return rollouts_of([record.item.output_obj for record in whole], handler, entries)


def _spoken_by(agent: PureTextWholeAgent, group: AdapterSharedModelGroup) -> PureTextWholeAgent:
    """Returns an agent that speaks by its group's model."""
    name = group.group_name
    return PureTextWholeAgent(
        agent.name, agent.parameters, llm=name, is_trainable=not group.is_frozen(agent.name), model_group=name
    )


async def _unscored(record: EpisodeRecord) -> None:
    """Leaves an episode as it is: what each agent earned is in its output."""
