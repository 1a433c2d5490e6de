"""What a job of a shared-model group trains on: the views of its agents, in groups of siblings.

    supervised    {"prover": rollouts, "verifier": rollouts}  =>  one trajectory a group, every reply learned
    preferences   {"prover": [a, b]} over {"prover": [x, y]}  =>  [a (1), x (0)], [b (1), y (0)]

Data comes as arrays of the reference or as trajectories. What frozen agents said is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.errors import ConfigError, Problem, TrajectoryError, did_you_mean
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.dialogue import DECISIONS
from reinforge.multiagent.nip.arrays import NestedArrayDict
from reinforge.multiagent.nip.rollouts import Views, dialogues_of, with_true_guess
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory

Given = Mapping[str, NestedArrayDict | Sequence[Trajectory]]

TRUTH = "truth"
"""Where the metadata of a verifier's trajectory says what the right decision is."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Makes siblings of data by agent.

    Attributes:
        group_name: The group.
        handler: The protocol of its agents.
        agents: All of them by name.
        trained: Those that are not frozen.
        weights: What the data of each of these counts.
    """

    group_name: str
    handler: ProtocolHandler
    agents: Mapping[str, PureTextWholeAgent]
    trained: Mapping[str, PureTextWholeAgent]
    weights: Mapping[str, float]

    def supervised(self, rollouts: Given, guess_replaced: Given) -> list[list[Trajectory]]:
        """Returns a group of one for each rollout of each agent.

        Args:
            rollouts: What is imitated.
            guess_replaced: What is imitated once the verifier's last guess is the truth.

        Raises:
            ConfigError: An agent is not of this group.
            TrajectoryError: The data contradicts itself.
        """
        self._refuse_unknown(rollouts, guess_replaced)
        found = [each for name in self.trained if name in rollouts for each in self._whole(name, rollouts[name])]
        for name in self.trained:
            if name in guess_replaced:
                found += self._with_truth(name, guess_replaced[name])
        return [[trajectory] for trajectory in found]

    def preferences(self, preferred: Given, other: Given, timesteps: Given | None = None) -> list[list[Trajectory]]:
        """Returns pairs: the preferred reply with reward 1, the other one with reward 0.

        Args:
            preferred: Of each agent.
            other: The same, in the same order.
            timesteps: What they answer; looked at for its length alone.

        Raises:
            ConfigError: An agent is not of this group.
            TrajectoryError: There is not one of each.
        """
        self._refuse_unknown(preferred, other, timesteps or {})
        pairs = []
        for name in self.trained:
            sides = [
                self._last(name, given[name], reward)
                for given, reward in ((preferred, 1.0), (other, 0.0))
                if name in given
            ]
            lengths = [*map(len, sides), *([len(timesteps[name])] if timesteps and name in timesteps else [])]
            if len(sides) == 1 or len(set(lengths)) > 1:
                told = " and ".join(map(str, lengths if len(sides) == 2 else [len(sides[0]), 0]))
                raise TrajectoryError(f"{name}: a preference is one reply over another, and there are {told} of them")
            pairs += [list(pair) for pair in zip(*sides, strict=True)]
        return pairs

    def _refuse_unknown(self, *given: Given) -> None:
        names = dict.fromkeys(name for each in given for name in each if name not in self.agents)
        there = ", ".join(self.agents)
        if names:
            raise ConfigError(
                Problem(name, f"the group {self.group_name} has no such agent{did_you_mean(name, self.agents)}", there)
                for name in names
            )

    def _views(self, name: str) -> Views:
        return Views(self.agents[name], self.handler, self.group_name, self.weights[name])

    def _whole(self, name: str, given: NestedArrayDict | Sequence[Trajectory]) -> list[Trajectory]:
        if not isinstance(given, NestedArrayDict):
            return [self._own(name, trajectory, place) for place, trajectory in enumerate(given)]
        views = self._views(name)
        found = [views.whole(d, f"{name}/{place}") for place, d in enumerate(dialogues_of(given, self.handler))]
        return [trajectory for trajectory in found if trajectory is not None]

    def _last(self, name: str, given: NestedArrayDict | Sequence[Trajectory], reward: float) -> list[Trajectory]:
        if not isinstance(given, NestedArrayDict):
            return [self._own(name, each, place, reward=reward) for place, each in enumerate(given)]
        views = self._views(name)
        return [
            views.last(dialogue, reward, f"{name}/{place}")
            for place, dialogue in enumerate(dialogues_of(given, self.handler))
        ]

    def _with_truth(self, name: str, given: NestedArrayDict | Sequence[Trajectory]) -> list[Trajectory]:
        if name not in self.handler.verifier_names:
            raise TrajectoryError(f"{name} is no verifier, so it has no guess that the truth could replace")
        if not isinstance(given, NestedArrayDict):
            return [self._told_truth(self._own(name, each, place)) for place, each in enumerate(given)]
        views, found = self._views(name), list[Trajectory]()
        for place, dialogue in enumerate(dialogues_of(given, self.handler)):
            right = with_true_guess(dialogue, self.handler)
            if right is None:
                raise TrajectoryError(f"{name}/{place}: y does not say what is right, so nothing can replace the guess")
            trajectory = views.whole(right, f"{name}/truth/{place}")
            assert trajectory is not None  # it decides
            found.append(trajectory)
        return found

    def _told_truth(self, trajectory: Trajectory) -> Trajectory:
        """Returns a verifier's trajectory whose last reply is the truth that its metadata tells."""
        truth = (trajectory.metadata or {}).get(TRUTH)
        if truth not in DECISIONS[:2] or not trajectory.turns:
            raise TrajectoryError(f"{trajectory.episode_id}: metadata {TRUTH!r} is {truth!r}; write accept or reject")
        last = max(place for place, item in enumerate(trajectory.episode) if item in trajectory.turns)
        right = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content=self.handler.decision_text(truth), trained=True)
        episode = [*trajectory.episode[:last], right]
        return trajectory.model_copy(update={"episode": episode, "episode_id": f"{trajectory.episode_id}/truth"})

    def _own(self, name: str, trajectory: Trajectory, place: int, **changes: Any) -> Trajectory:
        """Returns a given trajectory as this group's: by itself in its group, unless it is one of a pair."""
        if trajectory.agent not in (None, name):
            raise TrajectoryError(f"{trajectory.episode_id} is {trajectory.agent}'s view, and is given as {name}'s")
        fields = {"agent": name, "model_group": self.group_name, "agent_weight": self.weights[name]}
        fields |= {"group_id": f"{name}/{place}", "episode_id": trajectory.episode_id or f"{name}/{place}"}
        return trajectory.model_copy(update={**fields, **changes})
