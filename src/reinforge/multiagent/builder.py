"""The trajectory builder `_type: agents`: every trained agent of a protocol gets its own view of each episode.

An agent's own messages are `assistant` turns, what it heard is `user`, and the reward is the agent's own. Siblings are
the views of one agent on one example, or of one agent at one point of a tree.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from reinforge.algorithms.malt import MALT, MALTConfig
from reinforge.algorithms.preference import Preference
from reinforge.config.schema import Config, FinetuneConfig
from reinforge.errors import ConfigError, ContextOverflow, EvaluationError, Problem, did_you_mean
from reinforge.interfaces import Algorithm, Builder, PolicyServer
from reinforge.multiagent.dialogue import Decision, parse_dialogues
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import build_trajectory
from reinforge.rollout.tree import groups_from_tree
from reinforge.trainer.builders.group import (
    GroupTrajectoryBuilder,
    GroupTrajectoryBuilderConfig,
    find_policy_entries,
    reward_of_episode,
)
from reinforge.types.episode import EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ChatPrompt, ModelRequest, TokenLogprobs
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryGroup
from reinforge.types.workflow import BoundWorkflow


class AgentsTrajectoryBuilderConfig(GroupTrajectoryBuilderConfig, name="agents"):
    """For workflows that are protocols: single dialogues, or trees if the protocol's num_responses is above 1."""

    agent_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="Weight of an agent's data relative to the agents trained with it, at any length; default 1.",
    )
    fine_tune_on_all_previous_rollouts: bool = Field(
        default=False, description="Each epoch also trains on the episodes of all earlier epochs (from the journal)."
    )
    verifier_guess_replacement_proportion: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of episodes in which the verifier's decision is replaced by the right one.",
    )
    verifier_guess_replacement_annealing: Literal["none", "linear", "exponential"] = Field(
        default="none",
        description="linear: the share falls by the rate each epoch; exponential: it is multiplied by 1 - rate.",
    )
    verifier_guess_replacement_annealing_rate: float = Field(default=0.1, ge=0, le=1, description="Annealing rate.")

    def guess_replacement_share(self, epoch: int) -> float:
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
    """Collects dialogues and returns groups of the views of each trained agent.

    Args:
        policies: Entries of `llms` that are trained, with the adapter that each names.
        workflow: Returns the protocol's workflow.
        policy: Returns the policy that encodes replaced decisions as tokens.
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

    def validate(
        self, config: Config, algorithm: Algorithm, examples: Sequence[EvalInputItem], row_locations: Mapping[str, str]
    ) -> list[Problem]:
        """Returns why an algorithm cannot learn from these dialogues, or which settings do not fit the protocol."""
        settings = self.trajectory_builder_config
        problems = super().validate(config, algorithm, examples, row_locations)
        workflow_config = config.workflow
        agents, name = list(getattr(workflow_config, "agents", {})), type(algorithm).__name__
        for agent in settings.agent_weights:
            if agents and agent not in agents:
                message = f"the protocol has no agent {agent}{did_you_mean(agent, agents)}"
                problems.append(Problem(f"agent_weights.{agent}", message, f"use one of: {', '.join(agents)}"))
        replaces = settings.verifier_guess_replacement_proportion > 0
        wanted = {
            "verifier_guess_replacement_proportion": replaces,
            "fine_tune_on_all_previous_rollouts": settings.fine_tune_on_all_previous_rollouts,
        }
        for setting, is_wanted in wanted.items():
            if is_wanted and not algorithm.offline:
                message = f"{name} can only learn from replies that the current policy sampled"
                problems.append(Problem(setting, message, "use expert_iteration, malt or dpo, or remove this key"))
        if not agents:  # a workflow in Python: its agents are only known once it has run
            return problems
        is_tree = workflow_config.num_responses > 1
        if replaces and is_tree:
            message = "not supported for trees, where each decision is already compared with its siblings"
            fix = "remove this key, or set num_responses: 1"
            problems.append(Problem("verifier_guess_replacement_proportion", message, fix))
        several_turns = getattr(workflow_config, "max_message_rounds", len(agents)) > 1
        if not is_tree and isinstance(algorithm, Preference) and (several_turns or isinstance(algorithm, MALT)):
            message = f"{name} compares replies to the same prompt, but separate dialogues differ after the first turn"
            problems.append(Problem("workflow.num_responses", message, "set it to 2 or more, so that dialogues branch"))
        return problems

    def num_siblings(self, workflow_config: Any) -> int:
        """Returns the replies per turn of a tree, or the dialogues per example."""
        width = getattr(workflow_config, "num_responses", 1)
        return width if width > 1 else super().num_siblings(workflow_config)

    def example_rewards(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[str, float]]:
        """Returns each example and its mean reward, by the run's reward function and not by those of single agents."""
        episodes = {str(trajectory.episode_id) for group in groups for trajectory in group.trajectories}
        found: dict[str, list[float]] = {}
        for episode in sorted(episodes & self._scores.keys()):
            example, reward = self._scores[episode]
            found.setdefault(example, []).append(reward)
        return [(example, statistics.fmean(rewards)) for example, rewards in found.items()]

    async def _build_groups(self, records: Sequence[EpisodeRecord], meta: dict[str, Any]) -> list[list[Trajectory]]:
        epoch, is_refill = int(meta.get("epoch", 0)), bool(meta.get("round", 0))
        if not is_refill:
            self._scores = {}
        for record in records:
            if (reward := reward_of_episode(record)) is not None:
                self._scores[str(record.key)] = (record.key.example_id, reward)
        groups = await self._build_epoch_groups(epoch, records, meta)
        if self.trajectory_builder_config.fine_tune_on_all_previous_rollouts and not is_refill:
            assert self.evaluation is not None
            num_single = count_single_dialogue_epochs(self.run_config)
            for before in range(num_single if epoch >= num_single else 0, epoch):
                earlier = await self._build_epoch_groups(before, self.evaluation.journalled_episodes(before), meta)
                for trajectory in (each for siblings in earlier for each in siblings):
                    trajectory.group_id = f"epoch {before}/{trajectory.group_id}"
                groups += earlier
        return groups

    async def _build_epoch_groups(
        self, epoch: int, records: Sequence[EpisodeRecord], meta: dict[str, Any]
    ) -> list[list[Trajectory]]:
        groups = await super()._build_groups(records, meta)
        share = self.trajectory_builder_config.guess_replacement_share(epoch)
        if share > 0:
            assert self.workflow is not None
            workflow: Any = (await self.workflow()).function
            await replace_verifier_guesses(
                groups, records, workflow.handler, share=share, seed=self.run_config.seed, policy=self.policy()
            )
        return groups

    def _group_scored(self, scored: Sequence[tuple[EpisodeRecord, float]]) -> list[list[Trajectory]]:
        groups: dict[str, list[Trajectory]] = {}
        for record, _ in scored:
            output = get_protocol_output(record)
            if output is None:
                continue
            targets = dict(zip((call.call_id for call in record.calls), self._targets(record), strict=True))
            for name, agent in output["agents"].items():
                if not agent["trained"]:
                    continue
                view = build_agent_view(record, output, name)
                trained = [targets[call.call_id] for call in view.calls]
                for siblings in _build_sibling_groups(view, output, name, trained):
                    for trajectory in siblings:
                        trajectory.agent, trajectory.model_group = name, agent["model_group"]
                        trajectory.agent_weight = self.trajectory_builder_config.agent_weights.get(name, 1.0)
                        trajectory.group_id = f"{trajectory.group_id}/{name}"
                        groups.setdefault(trajectory.group_id, []).append(trajectory)
        return list(groups.values())


def count_single_dialogue_epochs(config: FinetuneConfig) -> int:
    """Returns the epochs at the start of a run that collect single dialogues even if the protocol grows trees."""
    return config.algorithm.num_initial_ei_epochs if isinstance(config.algorithm, MALTConfig) else 0


def get_protocol_output(record: EpisodeRecord) -> dict[str, Any] | None:
    """Returns the output of a protocol's episode; None if it has none, for a prompt that did not fit or a timeout."""
    output = record.item.output_obj
    if output is None and record.outcome.is_policy_failure:
        return None
    if not isinstance(output, dict) or "branches" not in output:
        raise EvaluationError(
            "the trajectory builder `agents` needs a workflow that is a protocol (docs/multiagent.md)"
        )
    return output


def build_agent_view(record: EpisodeRecord, output: dict[str, Any], agent: str) -> EpisodeRecord:
    """Returns an episode reduced to the replies of one agent that are in the dialogue, in their order."""
    calls = {call.call_id: call for call in record.calls}
    own = [message["call_id"] for message in output["messages"] if message["agent"] == agent]
    marks = [mark for mark in record.marks if mark.call_id in own]
    return replace(record, calls=[calls[call_id] for call_id in own], marks=marks)


def _build_sibling_groups(
    view: EpisodeRecord, output: dict[str, Any], agent: str, trained: Sequence[bool]
) -> list[list[Trajectory]]:
    """Returns an agent's trajectories of one episode: one, or the groups of its tree; none if its reward is unknown."""
    if len(output["branches"]) > 1:
        known = {mark.call_id for mark in view.marks}  # an unknown reward is not a reward of 0
        has_reward = [t and call.call_id in known for t, call in zip(trained, view.calls, strict=True)]
        return groups_from_tree(view, has_reward)
    reward = output["branches"][0]["rewards"].get(agent)
    if reward is None or not view.calls:
        return []
    return [[build_trajectory(view, reward, trained)]]


@register_trajectory_builder(config_type=AgentsTrajectoryBuilderConfig)
async def agents_builder(
    config: AgentsTrajectoryBuilderConfig, builder: Builder
) -> AsyncIterator[AgentsTrajectoryBuilder]:
    yield AgentsTrajectoryBuilder(config, find_policy_entries(builder), builder.get_workflow, builder.policy)


async def replace_verifier_guesses(
    groups: Sequence[Sequence[Trajectory]],
    records: Sequence[EpisodeRecord],
    handler: ProtocolHandler,
    *,
    share: float,
    seed: int,
    policy: PolicyServer | None,
) -> int:
    """Replaces the verifier's decision by the truth in a share of its trajectories and returns their number.

    The choice depends only on the run's seed and the episodes' names. Episodes without a decision or a known truth are
    not counted; an episode whose prompt and new decision do not fit the context is left unchanged.

    Args:
        groups: Views of dialogues that are not trees; those of the verifier are changed in place.
        policy: Encodes the decision as tokens, or as a chat prompt if the backend returns no tokens.

    Raises:
        ConfigError: The backend serves no policy.
        EvaluationError: `parse_decision` does not read back what `format_decision` writes.
    """
    if policy is None:
        reason, fix = "the backend serves no policy to encode the decision", "use `_type: local`, or remove this key"
        raise ConfigError(Problem("verifier_guess_replacement_proportion", reason, fix))
    episodes = {str(record.key): record for record in records}
    decided = [
        (trajectory, call, episodes[str(trajectory.episode_id)])
        for siblings in groups
        for trajectory in siblings
        if trajectory.agent in handler.verifier_names[:1]
        and (call := _find_decision_call(episodes[str(trajectory.episode_id)], handler)) is not None
    ]
    decided.sort(key=lambda each: stable_seed(seed, "guess", str(each[0].episode_id)))
    chosen = decided[: round(share * len(decided))]
    return sum([await _replace_guess(*each, handler, policy) for each in chosen])


def _find_decision_call(record: EpisodeRecord, handler: ProtocolHandler) -> ModelCall | None:
    """Returns the call that sampled the verifier's decision; None without exactly one, or if the truth is unknown."""
    output = record.item.output_obj
    if output["truth"] is None or len(output["branches"]) > 1 or output["branches"][0]["decision"] is None:
        return None
    own = [message for message in output["messages"] if message["agent"] == handler.verifier_names[0]]
    last = [message for message in own if message["round"] == own[-1]["round"]]
    ids = [message["call_id"] for message in last if handler.parse_decision(message["text"]) is not None]
    return next((call for call in record.calls if [call.call_id] == ids), None)


async def _replace_guess(
    trajectory: Trajectory, call: ModelCall, record: EpisodeRecord, handler: ProtocolHandler, policy: PolicyServer
) -> bool:
    output, sampled = record.item.output_obj, call.training_source
    turn = next((turn for turn in trajectory.turns if _is_sampled_turn(turn, sampled)), None)
    if turn is None:
        return False
    truth: Decision = output["truth"]
    text = handler.format_decision(truth)
    if handler.parse_decision(text) != truth:
        name = type(handler).__name__
        raise EvaluationError(
            f"{name}.parse_decision does not read {text!r} as {truth}: override {name}.format_decision"
        )
    request = ModelRequest(call.request.messages, tools=call.request.tools)
    try:
        encoded = await policy.encode(request, {"role": "assistant", "content": text})
    except ContextOverflow:
        return False
    if isinstance(encoded, TokenLogprobs) and isinstance(sampled, TokenLogprobs):
        encoded = replace(encoded, prompt_token_ids=sampled.prompt_token_ids)
    turn.content, turn.logprobs = text, encoded
    dialogue = parse_dialogues(output)[0]
    messages = tuple(replace(m, text=text) if m.call_id == call.call_id else m for m in dialogue.messages)
    trajectory.reward = handler.rewards(replace(dialogue, messages=messages), truth)[str(trajectory.agent)]
    trajectory.metadata = {**(trajectory.metadata or {}), "guess_replaced": True}
    return True


def _is_sampled_turn(turn: EpisodeItem, sampled: TokenLogprobs | ChatPrompt | None) -> bool:
    if isinstance(sampled, TokenLogprobs):
        return turn.tokens is sampled
    return sampled is not None and turn.prompt == sampled
