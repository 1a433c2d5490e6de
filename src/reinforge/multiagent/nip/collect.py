"""Collects rollouts of agents whose models are shared-model groups, for your own training loop.

rollouts = await collect_rollouts([provers, verifiers], rows)
earned = rollouts["next", "agents", "reward"].sum(1)          [dialogue, agent]
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.errors import ConfigError, EvaluationError, Problem
from reinforge.evaluation.datasets import RowDataset
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.episode import ProtocolWorkflow
from reinforge.multiagent.nip.adapter_group import AdapterSharedModelGroup
from reinforge.multiagent.nip.arrays import NestedArrayDict
from reinforge.multiagent.nip.experiment import EPISODES_PER_WORKER
from reinforge.multiagent.nip.rollouts import build_rollouts
from reinforge.rollout.runner import EpisodeRunner, score_alone
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.episode import EpisodeKey

logger = logging.getLogger(__name__)


async def collect_rollouts(
    groups: Sequence[AdapterSharedModelGroup],
    rows: Sequence[Mapping[str, Any]],
    *,
    iteration: int = 0,
    num_dialogues: int = 1,
) -> NestedArrayDict:
    """Runs dialogues on examples and returns their rollouts, batch size (dialogue, round).

    Equal arguments give equal dialogues while the models are the same. Dialogues that fail for reasons outside the
    agents, such as an unreachable endpoint, are left out with a warning, and so are those in which an agent gave no
    valid reply, since what the others earned is unknown. `datapoint_id` is the number of the row.

    Args:
        groups: Groups of one experiment, which together contain all agents of its protocol.
        rows: Examples, such as `{"id": "1", "question": ..., "answer": "accept"}`.
        iteration: Seeds derive from it.

    Raises:
        ConfigError: Agents are missing, or rows are not valid examples.
        EvaluationError: No dialogue finished.
        TrajectoryError: There is no dialogue in which every agent gave valid replies.
    """
    params, settings = groups[0].hyper_params, groups[0].settings
    handler = groups[0].protocol_handler
    agents = {name: _with_group_model(agent, group) for group in groups for name, agent in group.agent_wholes.items()}
    if missing := [name for name in handler.agent_names if name not in agents]:
        message = f"agents of the protocol are missing: {', '.join(missing)}"
        raise ConfigError(Problem("groups", message, "pass their groups too"))
    workflow = ProtocolWorkflow(handler, {name: agents[name] for name in handler.agent_names})
    runner = EpisodeRunner(
        bind_workflow(workflow, groups[0].group_name),
        {group.group_name: group for group in groups},
        sampling=SamplingConfig(),
        limits=LimitsConfig(),
        outcomes=OutcomesConfig(),
        run_seed=params.seed,
        max_concurrency=EPISODES_PER_WORKER * settings.num_rollout_workers,
    )
    items = RowDataset(rows).load()
    numbered = itertools.product(items, range(num_dialogues))
    keys = [(EpisodeKey("collect", iteration, str(item.id), number), item) for item, number in numbered]
    records = await runner.run(keys, score_alone, lambda record: None)  # the rewards are in the episodes' outputs
    finished = [record for record in records if isinstance(record.item.output_obj, dict)]
    lost = [record for record in records if not isinstance(record.item.output_obj, dict)]
    if lost:
        logger.warning("%d of %d dialogues failed and are left out: %s", len(lost), len(records), lost[0].reason)
    if not finished:
        raise EvaluationError(f"none of {len(records)} dialogues finished: {lost[0].reason}")
    numbers = {str(item.id): number for number, item in enumerate(items)}
    return build_rollouts(
        [record.item.output_obj for record in finished],
        handler,
        [record.item.full_dataset_entry for record in finished],
        datapoint_ids=[numbers[record.key.example_id] for record in finished],
    )


def _with_group_model(agent: PureTextWholeAgent, group: AdapterSharedModelGroup) -> PureTextWholeAgent:
    """Returns a copy of an agent that uses its group's model.

    In a run, the run's sampling settings are those of the trained agents, so their own parameters lack them.
    """
    name, params = group.group_name, group.hyper_params.agents[agent.name]
    given = {"temperature": params.temperature, "top_p": params.top_p}
    sampling = {key: value for key, value in given.items() if value is not None}
    parameters, is_trainable = agent.parameters.model_copy(update=sampling), not group.is_frozen(agent.name)
    return PureTextWholeAgent(agent.name, parameters, llm=name, is_trainable=is_trainable, model_group=name)
