"""`PureTextSharedModelGroup`: agents that share a model, and its fine-tuning jobs.

    group = EmbeddedSharedModelGroup(hyper_params, settings, protocol_handler, agent_wholes, "provers")
    await group.create_supervised_fine_tune_job({"prover": rollouts})
    while await group.get_fine_tune_job_status() in ("pending", "running"): ...
    await group.switch_to_next_model()          # group.model_name is served from now on

Names, and which methods are coroutines, follow neural-interactive-proofs; `group.sync` has the same methods for
blocking callers. This file has the base class; `adapter_group.py` runs its jobs on a trainer adapter, and `groups.py`
has the groups to use.
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
from reinforge.multiagent.nip.experiment import ExperimentSettings, HyperParameters, reject_unsupported_fields
from reinforge.multiagent.nip.parameters import PureTextAgentParameters, find_differences, get_group_name
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.rollout.isolation.threads import LoopThread
from reinforge.types.trajectory import Trajectory

JobStatus = Literal["pending", "running", "succeeded", "failed", "cancelled", "not_found"]
Rollouts = NestedArrayDict | Sequence[Trajectory]  # data of one agent: nested arrays, or trajectories

FROZEN_JOB_ID = "frozen_job_id"
"""What creating a job returns for a group whose agents are all frozen, as in neural-interactive-proofs."""


@dataclass
class PureTextSharedModelGroupState:
    """The state from which a group resumes: its last job, and the model that is served; None: the base model."""

    fine_tune_job_id: str | None = None
    fine_tuned_model_name: str | None = None


class PureTextSharedModelGroup(ABC):
    """A group of agents that share a model, which is fine-tuned on the data of all of them.

    Args:
        agent_wholes: The agents of the group, from any iterable; it is consumed once.

    Attributes:
        agent_wholes: The agents by name.
        shared_agent_params: Parameters of the first agent; the `SHARED_FIELDS` are equal for all.
        base_model_name: The model that the group starts with.

    Raises:
        ConfigError: Parameters are missing, not supported, or differ between agents that share a model; or an agent
            is in another group, or belongs to a group of another name.
    """

    SHARED_FIELDS: ClassVar = ("model_name", "fine_tune_from_scratch", "lora_rank", "lora_alpha_factor")
    """Parameters that are equal for all agents of a group, and part of a job's name."""

    def __init__(
        self,
        hyper_params: HyperParameters,
        settings: ExperimentSettings,
        protocol_handler: ProtocolHandler,
        agent_wholes: Iterable[PureTextWholeAgent],
        group_name: str,
    ):
        reject_unsupported_fields(hyper_params, settings)
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
        self._loop = LoopThread(f"group-{group_name}")
        for agent in self.agent_wholes.values():
            agent.shared_model_group = self

    def _shared_params(self) -> PureTextAgentParameters:
        parameters, known, problems = self.hyper_params.agents, self.protocol_handler.agent_names, list[Problem]()
        if self.settings.run_id is None:
            problems.append(Problem("settings.run_id", "is None, but it names the folder of a group", "set it"))
        if not self.agent_names:
            problems.append(Problem(self.group_name, "the group has no agents", "give at least one"))
        for name in self.agent_names:
            if name not in known:
                message = f"the protocol has no such agent; its agents are {', '.join(known)}"
                problems.append(Problem(f"agent_wholes.{name}", message))
            if name not in parameters:
                problems.append(Problem(f"hyper_params.agents.{name}", "its parameters are missing", "add them"))
            else:
                problems += self._find_group_problems(name)
        of_group = {name: parameters[name] for name in self.agent_names if name in parameters}
        why = f"differs within the group {self.group_name}, which has one model"
        problems += find_differences(of_group, (*self.SHARED_FIELDS, "dpo_beta"), why)
        if problems:
            raise ConfigError(problems)
        return next(iter(of_group.values()))

    def _find_group_problems(self, name: str) -> list[Problem]:
        wanted, agent = get_group_name(name, self.hyper_params.agents[name]), self.agent_wholes[name]
        problems = []
        if wanted != self.group_name:
            fix = f"set it to {self.group_name}, or name the group {wanted}"
            message = f"the agent is in a group named {self.group_name}, but it belongs to the group {wanted}"
            problems.append(Problem(f"hyper_params.agents.{name}.shared_model_group", message, fix))
        if agent.shared_model_group is not None:
            message = f"the agent is already in the group {agent.shared_model_group.group_name}"
            problems.append(Problem(f"agent_wholes.{name}", message, "close that group, or call build_agents again"))
        return problems

    def _release_agents(self) -> None:
        for agent in self.agent_wholes.values():
            agent.shared_model_group = None

    @property
    def model_name(self) -> str:
        return self.fine_tuned_model_name or self.base_model_name

    @property
    def lora_alpha(self) -> int | None:
        return self.shared_agent_params.lora_alpha

    @property
    def num_epochs(self) -> int:
        return self.hyper_params.text_rl.num_epochs

    @property
    def rl_learning_rate(self) -> float:
        return self.hyper_params.rl.lr

    @property
    def max_message_rounds(self) -> int:
        return self.protocol_handler.max_message_rounds

    @property
    def is_trainable(self) -> bool:
        return any(not self.is_frozen(name) for name in self.agent_names)

    def is_frozen(self, agent_name: str) -> bool:
        """Returns True for an agent whose replies are never trained, even if others of its group are."""
        return self.hyper_params.agents[agent_name].freeze_agent or not self.agent_wholes[agent_name].is_trainable

    def agent_ids_and_names(self) -> Iterable[tuple[int, str]]:
        indices = {name: index for index, name in enumerate(self.protocol_handler.agent_names)}
        yield from ((indices[name], name) for name in self.agent_names)

    @abstractmethod
    async def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: dict[str, Rollouts],
        guess_replaced_rollouts: dict[str, Rollouts] = {},  # noqa: B006  the signature of neural-interactive-proofs
        job_name: str | None = None,
    ) -> str:
        """Starts a job that imitates the agents' replies, and returns its id; equal data gives the same job.

        Args:
            rollouts_per_agent: Rollouts of each agent; each is trained in its state after the last step.
            guess_replaced_rollouts: Further rollouts of verifiers, whose last guess is replaced by the truth.
            job_name: A name by which to find the job.

        Raises:
            ConfigError: An agent is not in the group.
            TrajectoryError: The data is inconsistent.
            JobFailed: Another job of the group is still running.
        """

    @abstractmethod
    async def create_dpo_fine_tune_job(
        self,
        positive_examples_per_agent: dict[str, Rollouts],
        negative_examples_per_agent: dict[str, Rollouts],
        *more: Any,
        job_name: str | None = None,
        timesteps_per_agent: Any = None,
    ) -> str:
        """Starts a job that prefers some replies to others, and returns its id; equal data gives the same job.

        Args:
            positive_examples_per_agent: Preferred replies of each agent; batch size (timestep,).
            negative_examples_per_agent: The rejected replies to the same prompts, in the same order.
            more: The job's name; or the rejected replies and the job's name, if the timesteps are passed first.
            timesteps_per_agent: What they reply to; redundant, since the examples contain it.
        """

    @abstractmethod
    async def get_fine_tune_job_status(
        self,
    ) -> Literal["pending", "running", "succeeded", "failed", "cancelled", "not_found"]:
        """Returns the status of the last job."""

    @abstractmethod
    async def get_fine_tune_job_error_repr(self) -> str:
        """Returns why the job failed, or that there is no error."""

    async def switch_to_next_model(self) -> None:
        """Serves the job's model; a group with frozen agents only keeps its current model.

        A subclass calls this first, which checks that the job has succeeded, and then sets `fine_tuned_model_name`.

        Raises:
            JobFailed: The job has not succeeded; the message has the reason.
        """
        status = await self.get_fine_tune_job_status() if self.is_trainable else "succeeded"
        if status != "succeeded":
            reason = await self.get_fine_tune_job_error_repr()
            raise JobFailed(f"{self.group_name}: no model to switch to: the job is {status} ({reason})")

    async def fine_tune_job_failed(self) -> bool:
        """Returns True if the last job will produce no model: it failed, was cancelled, or does not exist any more."""
        status = await self.get_fine_tune_job_status()
        return status in ("failed", "cancelled") or (status == "not_found" and self.fine_tune_job_id is not None)

    async def train(self) -> None:
        self.is_training = True

    async def eval(self) -> None:
        self.is_training = False

    async def wait_for_ready(self, timeout: float = 300.0) -> None:
        """Waits until the group's model is served; raises `TimeoutError` after so many seconds."""
        async with asyncio.timeout(timeout):
            await self._wait_until_ready()

    async def _wait_until_ready(self) -> None:
        """Waits without a timeout; by default there is nothing to wait for."""
        return

    def get_state(self) -> PureTextSharedModelGroupState:
        return PureTextSharedModelGroupState(self.fine_tune_job_id, self.fine_tuned_model_name)

    def get_state_dict(self) -> dict:
        return asdict(self.get_state())

    def set_state(self, checkpoint: PureTextSharedModelGroupState) -> None:
        """Restores a state, which may be a dict; anything else is a `ConfigError`."""
        values = dict(checkpoint) if isinstance(checkpoint, Mapping) else asdict(checkpoint)
        names = [field.name for field in fields(PureTextSharedModelGroupState)]
        if unknown := [name for name in values if name not in names]:
            raise ConfigError(f"a group's state has the keys {', '.join(names)}, not {', '.join(unknown)}")
        state = PureTextSharedModelGroupState(**values)
        self.fine_tune_job_id, self.fine_tuned_model_name = state.fine_tune_job_id, state.fine_tuned_model_name

    def __getstate__(self) -> Any:
        """Raises TypeError: a group holds a live model or client; `get_state` returns what can be sent."""
        raise TypeError(f"{type(self).__name__} cannot be pickled; send get_state_dict() and pass it to set_state()")

    @property
    def sync(self) -> Any:
        """The group with every coroutine as a blocking method."""
        return _BlockingGroup(self, self._loop)


class _BlockingGroup:
    def __init__(self, group: PureTextSharedModelGroup, loop: LoopThread):
        self._group, self._loop = group, loop

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._group, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._loop.run(attribute(*args, **kwargs))

        return call
