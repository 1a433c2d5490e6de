"""`PureTextSharedModelGroup`: agents that share a model, and the fine-tuning jobs that move it.

    group = EmbeddedSharedModelGroup(hyper_params, settings, protocol_handler, agent_wholes, "provers")
    await group.create_supervised_fine_tune_job({"prover": rollouts})
    while await group.get_fine_tune_job_status() in ("pending", "running"): ...
    await group.switch_to_next_model()          # from now on group.model_name serves

The names are the reference's, and so is what is a coroutine; `group.sync` has the same methods for blocking callers.
Here is what a group is; `adapter_group.py` has jobs over a trainer adapter, `groups.py` the groups that there are.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from reinforge.errors import ConfigError, JobFailed, Problem
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.nip.arrays import NestedArrayDict
from reinforge.multiagent.nip.parameters import (
    ExperimentSettings,
    HyperParameters,
    PureTextAgentParameters,
    refuse_unhonoured,
)
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.rollout.threads import LoopThread
from reinforge.types.trajectory import Trajectory

JobStatus = Literal["pending", "running", "succeeded", "failed", "cancelled", "not_found"]
Rollouts = NestedArrayDict | Sequence[Trajectory]
"""Data of one agent: the reference's arrays, or our trajectories."""

ENDED_WITHOUT_MODEL = ("failed", "cancelled", "not_found")


@dataclass
class PureTextSharedModelGroupState:
    """What a group goes on from.

    Attributes:
        fine_tune_job_id: The job that was created last; None: none was.
        fine_tuned_model_name: The model that is served; None: the base model.
    """

    fine_tune_job_id: str | None = None
    fine_tuned_model_name: str | None = None


class PureTextSharedModelGroup(ABC):
    """A group of agents that share a model, which is fine-tuned on the data of all of them.

    Args:
        hyper_params: The experiment's.
        settings: Of its run.
        protocol_handler: What the agents talk by.
        agent_wholes: The agents of the group, from any iterable; it is gone through once.
        group_name: Names the group.

    Attributes:
        agent_wholes: The agents by name.
        agent_names: Their names.
        shared_agent_params: Parameters of the first, whose `SHARED` fields are those of all.
        base_model_name: The model that the group begins with.
        fine_tune_job_id: As in the state.
        fine_tuned_model_name: As in the state.
        is_training: Set by `train` and `eval`.

    Raises:
        ConfigError: Parameters are missing, cannot be honoured, or differ where agents share them.
    """

    SHARED: ClassVar = ("model_name", "fine_tune_from_scratch", "lora_rank", "lora_alpha_factor")

    def __init__(
        self,
        hyper_params: HyperParameters,
        settings: ExperimentSettings,
        protocol_handler: ProtocolHandler,
        agent_wholes: Iterable[PureTextWholeAgent],
        group_name: str,
    ):
        refuse_unhonoured(hyper_params, settings)
        self.hyper_params = hyper_params
        self.settings = settings
        self.protocol_handler = protocol_handler
        self.group_name = group_name
        self.agent_wholes = {agent.name: agent for agent in agent_wholes}
        self.agent_names = tuple(self.agent_wholes)
        self.shared_agent_params = self._shared_params()
        self.base_model_name = self.shared_agent_params.model_name
        self.fine_tune_job_id: str | None = None
        self.fine_tuned_model_name: str | None = None
        self.is_training = True
        self.logger = settings.logger or logging.getLogger(__name__)
        self._own_loop = LoopThread(f"group-{group_name}")

    def _shared_params(self) -> PureTextAgentParameters:
        """Returns the first agent's parameters, once those of all agents fit together."""
        given, known, problems = self.hyper_params.agents, self.protocol_handler.agent_names, list[Problem]()
        if not self.agent_names:
            problems.append(Problem(self.group_name, "the group has no agents", "give at least one"))
        for name in self.agent_names:
            if name not in known:
                message = f"the protocol has no such agent; there are {', '.join(known)}"
                problems.append(Problem(f"agent_wholes.{name}", message))
            if name not in given:
                problems.append(Problem(f"hyper_params.agents.{name}", "its parameters are missing", "add them"))
        of_group = {name: given[name] for name in self.agent_names if name in given}
        for field in self.SHARED:
            values = {name: getattr(params, field) for name, params in of_group.items()}
            if len(set(values.values())) > 1:
                told = ", ".join(f"{name} {value!r}" for name, value in values.items())
                message = f"differs within the group {self.group_name}, which has one model: {told}"
                problems.append(Problem(f"hyper_params.agents.*.{field}", message, "give all the same value"))
        if problems:
            raise ConfigError(problems)
        return next(iter(of_group.values()))

    # What the group is.

    @property
    def model_name(self) -> str:
        """The model that serves: the base model, or a fine-tuned one."""
        return self.fine_tuned_model_name or self.base_model_name

    @property
    def lora_alpha(self) -> int | None:
        """Alpha of the group's adapter: rank times factor; None where all weights are trained."""
        return self.shared_agent_params.lora_alpha

    @property
    def num_epochs(self) -> int:
        """Passes of a job over its data."""
        return self.hyper_params.text_rl.num_epochs

    @property
    def rl_learning_rate(self) -> float:
        """Peak learning rate."""
        return self.hyper_params.rl.lr

    @property
    def max_message_rounds(self) -> int:
        """Rounds after which a dialogue of the protocol is over."""
        return self.protocol_handler.max_message_rounds

    @property
    def is_trainable(self) -> bool:
        """True if some agent of the group is not frozen."""
        return any(not self.is_frozen(name) for name in self.agent_names)

    def is_frozen(self, agent_name: str) -> bool:
        """Returns True for an agent whose data is never trained, while others of its group may be."""
        return self.hyper_params.agents[agent_name].freeze_agent or not self.agent_wholes[agent_name].is_trainable

    def agent_ids_and_names(self) -> Iterable[tuple[int, str]]:
        """Yields each agent of the group with its place among the protocol's agents."""
        places = {name: place for place, name in enumerate(self.protocol_handler.agent_names)}
        yield from ((places[name], name) for name in self.agent_names)

    # Jobs.

    @abstractmethod
    async def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: dict[str, Rollouts],
        guess_replaced_rollouts: dict[str, Rollouts] = {},  # noqa: B006  the seed's default, which nobody changes
        job_name: str | None = None,
    ) -> str:
        """Starts a job that imitates what agents said, and returns its id.

        Args:
            rollouts_per_agent: Data of each agent, as it stands at each rollout's last step.
            guess_replaced_rollouts: Further rollouts of verifiers, whose last guess becomes the truth.
            job_name: Makes the job easier to find.
        """

    @abstractmethod
    async def create_dpo_fine_tune_job(
        self,
        positive_examples_per_agent: dict[str, Rollouts],
        negative_examples_per_agent: dict[str, Rollouts],
        job_name: str | None = None,
        *more: Any,
        timesteps_per_agent: Any = None,
    ) -> str:
        """Starts a job that prefers some replies to others, and returns its id.

        Args:
            positive_examples_per_agent: Of each agent, preferred replies; batch size (timestep,).
            negative_examples_per_agent: The other reply to the same prompt, in the same order.
            job_name: Makes the job easier to find.
            more: The job's name, where a leading `timesteps_per_agent` shifts all.
            timesteps_per_agent: What they are replies to, which the examples themselves say.
        """

    @abstractmethod
    async def get_fine_tune_job_status(
        self,
    ) -> Literal["pending", "running", "succeeded", "failed", "cancelled", "not_found"]:
        """Returns where the job stands that was created last."""

    @abstractmethod
    async def get_fine_tune_job_error_repr(self) -> str:
        """Returns why the job has failed, or that it has not."""

    async def switch_to_next_model(self) -> None:
        """Serves what the job made; a group whose agents are all frozen keeps the model that it has.

        A group that overrides it sets `fine_tuned_model_name` once the job has succeeded, which this makes sure of.

        Raises:
            JobFailed: The job has not succeeded, with the reason.
        """
        word = await self.get_fine_tune_job_status() if self.is_trainable else "succeeded"
        if word != "succeeded":
            why = await self.get_fine_tune_job_error_repr()
            raise JobFailed(f"{self.group_name}: there is no model to switch to: the job is {word} ({why})")

    async def fine_tune_job_failed(self) -> bool:
        """Returns True if no model will come of the job: it failed, was cancelled, or is not there."""
        return await self.get_fine_tune_job_status() in ENDED_WITHOUT_MODEL

    async def train(self) -> None:
        """Sets the group to training mode."""
        self.is_training = True

    async def eval(self) -> None:
        """Sets the group to evaluation mode."""
        self.is_training = False

    async def wait_for_ready(self, timeout: float = 300.0) -> None:
        """Waits until the group's model can be asked.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: It cannot by then.
        """
        async with asyncio.timeout(timeout):
            await self._wait_until_ready()

    async def _wait_until_ready(self) -> None:
        """Waits without end; unless overridden there is nothing to wait for."""
        return

    # State.

    def get_state(self) -> PureTextSharedModelGroupState:
        """Returns what the group goes on from."""
        return PureTextSharedModelGroupState(self.fine_tune_job_id, self.fine_tuned_model_name)

    def get_state_dict(self) -> dict:
        """Returns the same as a dict, ready for JSON."""
        return asdict(self.get_state())

    def set_state(self, checkpoint: PureTextSharedModelGroupState) -> None:
        """Goes on from a state, which may be a dict.

        Raises:
            ConfigError: It is no state.
        """
        given = dict(checkpoint) if isinstance(checkpoint, Mapping) else asdict(checkpoint)
        names = [field.name for field in fields(PureTextSharedModelGroupState)]
        if unknown := [name for name in given if name not in names]:
            raise ConfigError(f"the state of a group has {', '.join(names)}, and not {', '.join(unknown)}")
        state = PureTextSharedModelGroupState(**given)
        self.fine_tune_job_id, self.fine_tuned_model_name = state.fine_tune_job_id, state.fine_tuned_model_name

    def __getstate__(self) -> Any:
        """Refuses to be pickled: a group holds a live model or client, and `get_state` says what it goes on from."""
        raise TypeError(f"{type(self).__name__} cannot be pickled; send get_state_dict(), and set_state it there")

    @property
    def sync(self) -> Any:
        """The same group with every coroutine as a method that blocks."""
        return _Blocking(self, self._own_loop)


class _Blocking:
    """A group whose coroutines block."""

    def __init__(self, group: PureTextSharedModelGroup, loop: LoopThread):
        self._group, self._loop = group, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if not inspect.iscoroutinefunction(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._loop.run(found(*args, **kwargs))

        return call
