"""The trajectory builder `_type: agents`: each trained agent of a protocol gets its own view of every episode.

What an agent said is `assistant`, what it heard is `user`, and its reward is its own. Siblings are the views of one
agent on one example, or of one agent at one point of a tree.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from reinforge.algorithms.malt import MALT
from reinforge.algorithms.preference import Preference
from reinforge.errors import EvaluationError, Problem, did_you_mean
from reinforge.interfaces import Algorithm, PolicyServer
from reinforge.multiagent.guesses import replace_guesses
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import trajectory_of
from reinforge.rollout.tree import groups_from_tree
from reinforge.rollout.workflow import BoundWorkflow
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig, policy_entries
from reinforge.types.episode import EpisodeRecord
from reinforge.types.trajectory import Trajectory, TrajectoryGroup


class AgentsTrajectoryBuilderConfig(GroupTrajectoryBuilderConfig, name="agents"):
    """For workflows that are protocols: flat dialogues, or trees where the protocol's num_responses is above 1."""

    agent_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="What an agent counts in a job beside those trained with it, however much it says; 1 unless given.",
    )
    fine_tune_on_all_previous_rollouts: bool = Field(
        default=False, description="Each epoch trains on the episodes of all epochs before it too, from the journal."
    )
    verifier_guess_replacement_proportion: float = Field(
        default=0.0, ge=0, le=1, description="Share of episodes in which the verifier learns the truth as its decision."
    )
    verifier_guess_replacement_annealing: Literal["none", "linear", "exponential"] = Field(
        default="none",
        description="linear: the share falls by the rate each epoch; exponential: to 1 - rate of itself.",
    )
    verifier_guess_replacement_annealing_rate: float = Field(default=0.1, ge=0, le=1, description="See annealing.")

    def replaced_share(self, epoch: int) -> float:
        """Returns the share of an epoch in which the verifier's decision is replaced.

        Example: 0.5, rate 0.1, epochs 0, 1, 6: linear 0.5, 0.4, 0; exponential 0.5, 0.45, 0.266.
        """
        share, rate = self.verifier_guess_replacement_proportion, self.verifier_guess_replacement_annealing_rate
        if self.verifier_guess_replacement_annealing == "linear":
            return max(0.0, share - rate * epoch)
        if self.verifier_guess_replacement_annealing == "exponential":
            return share * (1 - rate) ** epoch
        return share


class AgentsTrajectoryBuilder(GroupTrajectoryBuilder):
    """Collects dialogues and returns groups of each trained agent's views.

    Args:
        trajectory_builder_config: Its configuration.
        policies: Entries of `llms` that are trained, with the adapter that each names.
        workflow: Returns the protocol.
        policy: Returns the policy that writes replaced decisions as tokens.
    """

    groups_are_examples = False
    trajectory_builder_config: AgentsTrajectoryBuilderConfig

    def __init__(
        self,
        trajectory_builder_config: AgentsTrajectoryBuilderConfig,
        policies: Sequence[str] | Mapping[str, str | None] = (),
        workflow: Callable[[], Awaitable[BoundWorkflow]] | None = None,
        policy: Callable[[], PolicyServer | None] = lambda: None,
    ):
        super().__init__(trajectory_builder_config, policies)
        self.workflow, self.policy = workflow, policy
        self._scores: dict[str, tuple[str, float]] = {}

    def problems(self, algorithm: Algorithm, workflow_config: Any) -> list[Problem]:
        """Returns why an algorithm cannot learn from these dialogues, or the settings do not fit the protocol."""
        config, problems = self.trajectory_builder_config, super().problems(algorithm, workflow_config)
        agents, name = list(getattr(workflow_config, "agents", {})), type(algorithm).__name__
        for agent in config.agent_weights:
            if agents and agent not in agents:
                there = f"there: {', '.join(agents)}"
                message = f"the protocol has no agent {agent}{did_you_mean(agent, agents)}"
                problems.append(Problem(f"agent_weights.{agent}", message, there))
        replaces = config.verifier_guess_replacement_proportion > 0
        wanted = {
            "verifier_guess_replacement_proportion": replaces,
            "fine_tune_on_all_previous_rollouts": config.fine_tune_on_all_previous_rollouts,
        }
        for setting, is_wanted in wanted.items():
            if is_wanted and not algorithm.offline:
                message = f"{name} learns from what the policy of the moment has drawn, and nothing else"
                problems.append(Problem(setting, message, "use expert_iteration, malt or dpo, or leave it out"))
        if not agents:  # a workflow in Python: what it does is seen when it has run
            return problems
        is_tree = workflow_config.num_responses > 1
        if replaces and is_tree:
            message = "in a tree a decision is compared with its siblings, and the truth is the reward already"
            problems.append(
                Problem("verifier_guess_replacement_proportion", message, "leave it out, or set num_responses: 1")
            )
        several_turns = getattr(workflow_config, "max_message_rounds", len(agents)) > 1
        if not is_tree and isinstance(algorithm, Preference) and (several_turns or isinstance(algorithm, MALT)):
            message = f"{name} compares replies to the same prompt, and separate dialogues differ after the first"
            problems.append(Problem("workflow.num_responses", message, "2 or more, so that dialogues branch"))
        return problems

    def num_siblings(self, workflow_config: Any) -> int:
        """Returns the replies of a round in a tree, else the dialogues of an example."""
        width = getattr(workflow_config, "num_responses", 1)
        return width if width > 1 else super().num_siblings(workflow_config)

    def example_rewards(self, groups: Sequence[TrajectoryGroup]) -> list[float]:
        """Returns the mean of each example's episodes by the run's reward, not by what single agents earned."""
        episodes = {str(trajectory.episode_id) for group in groups for trajectory in group.trajectories}
        found: dict[str, list[float]] = {}
        for episode in sorted(episodes & self._scores.keys()):
            example, reward = self._scores[episode]
            found.setdefault(example, []).append(reward)
        return [statistics.fmean(rewards) for rewards in found.values()]

    async def _grouped(self, records: Sequence[EpisodeRecord], meta: dict[str, Any]) -> list[list[Trajectory]]:
        """Returns the groups of an epoch, and where that is wanted those of all epochs before it."""
        epoch, is_refill = int(meta.get("epoch", 0)), bool(meta.get("round", 0))
        if not is_refill:
            self._scores = {}
        for record in records:
            if (reward := await self._reward(record, meta)) is not None:
                self._scores[str(record.key)] = (record.key.example_id, reward)
        groups = await self._of_epoch(epoch, records, meta)
        if self.trajectory_builder_config.fine_tune_on_all_previous_rollouts and not is_refill:
            assert self.evaluation is not None
            for before in range(epoch):
                earlier = await self._of_epoch(before, self.evaluation.recorded(before), meta)
                for trajectory in (each for siblings in earlier for each in siblings):
                    trajectory.group_id = f"epoch {before}/{trajectory.group_id}"
                groups += earlier
        return groups

    async def _of_epoch(
        self, epoch: int, records: Sequence[EpisodeRecord], meta: dict[str, Any]
    ) -> list[list[Trajectory]]:
        groups = await super()._grouped(records, meta)
        share = self.trajectory_builder_config.replaced_share(epoch)
        if share > 0:
            assert self.workflow is not None
            talk: Any = (await self.workflow()).function
            await replace_guesses(
                groups, records, talk.handler, share=share, seed=self.run_config.seed, policy=self.policy()
            )
        return groups

    def _groups(self, scored: Sequence[tuple[EpisodeRecord, float]]) -> list[list[Trajectory]]:
        """Returns the siblings of each agent and example, or of each agent and point of a tree."""
        groups: dict[str, list[Trajectory]] = {}
        for record, _ in scored:
            output = output_of(record)
            if output is None:
                continue
            targets = dict(zip((call.call_id for call in record.calls), self._targets(record), strict=True))
            for name, agent in output["agents"].items():
                if not agent["trained"]:
                    continue
                view = view_of(record, output, name)
                trained = [targets[call.call_id] for call in view.calls]
                for siblings in _siblings(view, output, name, trained):
                    for trajectory in siblings:
                        trajectory.agent, trajectory.model_group = name, agent["model_group"]
                        trajectory.agent_weight = self.trajectory_builder_config.agent_weights.get(name, 1.0)
                        trajectory.group_id = f"{trajectory.group_id}/{name}"
                        groups.setdefault(trajectory.group_id, []).append(trajectory)
        return list(groups.values())


def output_of(record: EpisodeRecord) -> dict[str, Any] | None:
    """Returns what a protocol's episode left; None where it left nothing, since a prompt did not fit or time was over.

    Raises:
        EvaluationError: The workflow is no protocol.
    """
    output = record.item.output_obj
    if output is None and record.outcome.is_policy_failure:
        return None
    if not isinstance(output, dict) or "branches" not in output:
        raise EvaluationError(
            "the trajectory builder `agents` needs a workflow that is a protocol (docs/multiagent.md)"
        )
    return output


def view_of(record: EpisodeRecord, output: dict[str, Any], agent: str) -> EpisodeRecord:
    """Returns an episode with the valid replies of one agent alone, in the order in which they were said."""
    calls = {call.call_id: call for call in record.calls}
    own = [message["call_id"] for message in output["messages"] if message["agent"] == agent]
    marks = [mark for mark in record.marks if mark.call_id in own]
    return replace(record, calls=[calls[call_id] for call_id in own], marks=marks)


def _siblings(
    view: EpisodeRecord, output: dict[str, Any], agent: str, trained: Sequence[bool]
) -> list[list[Trajectory]]:
    """Returns an agent's trajectories of one episode: one, or the groups of its tree; none where nothing is known."""
    if len(output["branches"]) > 1:
        known = {mark.call_id for mark in view.marks}  # what nobody can tell the worth of is not worth 0
        return groups_from_tree(
            view, [t and call.call_id in known for t, call in zip(trained, view.calls, strict=True)]
        )
    reward = output["branches"][0]["rewards"].get(agent)
    if reward is None or not view.calls:
        return []
    return [[trajectory_of(view, reward, trained)]]


@register_trajectory_builder(config_type=AgentsTrajectoryBuilderConfig)
async def agents_builder(config: AgentsTrajectoryBuilderConfig, builder: Any) -> AsyncIterator[AgentsTrajectoryBuilder]:
    """Yields the builder."""
    yield AgentsTrajectoryBuilder(config, policy_entries(builder), builder.get_workflow, builder.policy)
