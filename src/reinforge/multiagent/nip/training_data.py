"""Training data of a shared-model group's jobs: views of its agents, in groups of siblings.

    build_supervised    {"prover": rollouts, "verifier": rollouts}  =>  one trajectory per group, every reply trained
    build_preferences   {"prover": [a, b]} over {"prover": [x, y]}  =>  [a (1), x (0)], [b (1), y (0)]

Data is given as nested arrays or as trajectories. Replies of frozen agents are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.errors import ConfigError, Problem, TrajectoryError, did_you_mean
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.dialogue import DECISIONS
from reinforge.multiagent.nip.arrays import NestedArrayDict
from reinforge.multiagent.nip.rollouts import ViewBuilder, decode_dialogues, replace_guess_with_truth
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory

Data = NestedArrayDict | Sequence[Trajectory]
DataByAgent = Mapping[str, Data]

TRUTH = "truth"  # key of the right decision in the metadata of a verifier's trajectory


@dataclass(frozen=True, slots=True)
class PreferenceArguments:
    """The arguments of a DPO job, in either order in which they may be passed.

    (positive, negative)              (positive, negative, name)
    (timesteps, positive, negative)   (timesteps, positive, negative, name)

    """

    preferred: DataByAgent
    rejected: DataByAgent
    job_name: str | None
    timesteps: DataByAgent | None

    @classmethod
    def from_call(
        cls, first: Any, second: Any, more: Sequence[Any], job_name: str | None, timesteps: Any
    ) -> PreferenceArguments:
        """Returns the arguments of a call; `job_name` and `timesteps` were passed by name."""
        rest = list(more)
        if rest and isinstance(rest[0], Mapping):
            if timesteps is not None:
                raise TypeError("create_dpo_fine_tune_job: the timesteps are passed twice")
            timesteps, first, second = first, second, rest.pop(0)
        if rest and job_name is not None:
            raise TypeError(f"create_dpo_fine_tune_job: job_name is passed twice, {rest[0]!r} and {job_name!r}")
        if len(rest) > 1 or not isinstance(next(iter(rest), None), str | None):
            raise TypeError(f"create_dpo_fine_tune_job: expected a job name as the last argument, not {rest[-1]!r}")
        return cls(first, second, rest[0] if rest else job_name, timesteps)


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Builds groups of siblings from data by agent; `trained` are the agents that are not frozen."""

    group_name: str
    handler: ProtocolHandler
    agents: Mapping[str, PureTextWholeAgent]
    trained: Mapping[str, PureTextWholeAgent]
    weights: Mapping[str, float]

    def build_supervised(self, rollouts: DataByAgent, guess_replaced: DataByAgent) -> list[list[Trajectory]]:
        """Returns a group of one for each rollout of each agent."""
        self._check_agent_names(rollouts, guess_replaced)
        views = [view for name in self.trained if name in rollouts for view in self._build_views(name, rollouts[name])]
        for name in self.trained:
            if name in guess_replaced:
                views += self._build_corrected_views(name, guess_replaced[name])
        return [[trajectory] for trajectory in views]

    def build_preferences(
        self, preferred: DataByAgent, rejected: DataByAgent, timesteps: DataByAgent | None = None
    ) -> list[list[Trajectory]]:
        """Returns pairs: the preferred reply with reward 1, the rejected one with reward 0.

        Only the number of timesteps is checked.

        Raises:
            TrajectoryError: The numbers of preferred and rejected replies differ.
        """
        self._check_agent_names(preferred, rejected, timesteps or {})
        pairs = []
        for name in self.trained:
            sides = [
                self._build_last_replies(name, data[name], reward)
                for data, reward in ((preferred, 1.0), (rejected, 0.0))
                if name in data
            ]
            lengths = [*map(len, sides), *([len(timesteps[name])] if timesteps and name in timesteps else [])]
            if len(sides) == 1 or len(set(lengths)) > 1:
                counts = " and ".join(map(str, lengths if len(sides) == 2 else [len(sides[0]), 0]))
                raise TrajectoryError(f"{name}: preferred and rejected replies must be paired, but there are {counts}")
            pairs += [list(pair) for pair in zip(*sides, strict=True)]
        return pairs

    def _check_agent_names(self, *datasets: DataByAgent) -> None:
        unknown = dict.fromkeys(name for data in datasets for name in data if name not in self.agents)
        fix = f"use one of: {', '.join(self.agents)}"
        if unknown:
            raise ConfigError(
                Problem(name, f"the group {self.group_name} has no such agent{did_you_mean(name, self.agents)}", fix)
                for name in unknown
            )

    def _view_builder(self, name: str) -> ViewBuilder:
        return ViewBuilder(self.agents[name], self.handler, self.group_name, self.weights[name])

    def _build_views(self, name: str, data: Data) -> list[Trajectory]:
        if not isinstance(data, NestedArrayDict):
            return [self._assign_to_group(name, trajectory, index) for index, trajectory in enumerate(data)]
        builder, dialogues = self._view_builder(name), decode_dialogues(data, self.handler)
        views = [builder.build_view(dialogue, f"{name}/{index}") for index, dialogue in enumerate(dialogues)]
        return [view for view in views if view is not None]

    def _build_last_replies(self, name: str, data: Data, reward: float) -> list[Trajectory]:
        if not isinstance(data, NestedArrayDict):
            return [self._assign_to_group(name, each, index, reward=reward) for index, each in enumerate(data)]
        builder, dialogues = self._view_builder(name), decode_dialogues(data, self.handler)
        return [builder.build_last_reply(each, reward, f"{name}/{index}") for index, each in enumerate(dialogues)]

    def _build_corrected_views(self, name: str, data: Data) -> list[Trajectory]:
        if name not in self.handler.verifier_names:
            raise TrajectoryError(f"{name} is not a verifier, so it has no guess to replace")
        if not isinstance(data, NestedArrayDict):
            return [self._correct_guess(self._assign_to_group(name, each, index)) for index, each in enumerate(data)]
        builder, views = self._view_builder(name), list[Trajectory]()
        for index, dialogue in enumerate(decode_dialogues(data, self.handler)):
            if not any(message.agent == name for message in dialogue.messages):
                continue  # it gave no valid reply, so there is no guess
            corrected = replace_guess_with_truth(dialogue, self.handler)
            if corrected is None:
                raise TrajectoryError(f"{name}/{index}: y is unknown, so the guess cannot be replaced by the truth")
            view = builder.build_view(corrected, f"{name}/truth/{index}")
            assert view is not None  # it has a decision
            views.append(view)
        return views

    def _correct_guess(self, trajectory: Trajectory) -> Trajectory:
        truth = (trajectory.metadata or {}).get(TRUTH)
        if truth not in DECISIONS[:2] or not trajectory.turns:
            raise TrajectoryError(f"{trajectory.episode_id}: metadata {TRUTH!r} is {truth!r}; write accept or reject")
        last = max(index for index, item in enumerate(trajectory.episode) if item in trajectory.turns)
        text = self.handler.format_decision(truth)
        decision = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content=text, trained=True)
        episode = [*trajectory.episode[:last], decision]
        return trajectory.model_copy(update={"episode": episode, "episode_id": f"{trajectory.episode_id}/truth"})

    def _assign_to_group(self, name: str, trajectory: Trajectory, index: int, **changes: Any) -> Trajectory:
        """Returns a given trajectory as data of this group's agent; trajectories with the same index are siblings."""
        if trajectory.agent not in (None, name):
            raise TrajectoryError(f"{trajectory.episode_id} is {trajectory.agent}'s view but is passed as {name}'s")
        fields = {"agent": name, "model_group": self.group_name, "agent_weight": self.weights[name]}
        fields |= {"group_id": f"{name}/{index}", "episode_id": trajectory.episode_id or f"{name}/{index}"}
        return trajectory.model_copy(update={**fields, **changes})
