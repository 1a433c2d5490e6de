"""The models of an adversarial training and what a conversation is worth.

A user's own system is torch and nothing of ours: it gives log-probs with gradient and the parameters that they belong
to, and trains through the same loop. What stands below the abstract methods has a default that suits such a system;
ours overrides it to keep the sampler's tokens and to change weights only between replies.
Shapes: B conversations, T tokens of the longest continuation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reinforge.errors import EngineError
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.scorer import Scorer
from reinforge.types.seeding import stable_seed

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from reinforge.config.schema import OptimizerConfig, ScheduleConfig
    from reinforge.engine.training.optimizer_step import Mover

T = TypeVar("T")

WEIGHTS = "parameters.safetensors"
MOMENTS = "optimizer.safetensors"


class System(ABC, Generic[StateT, ActionT]):
    """A tester, which is trained, a target, which is attacked, and a baseline, which the tester began as.

    Example: see `tests/unit/redteam/toy.py`: a system of forty lines whose tester is one matrix.

    Args:
        scorer: Says how much a text is of what is looked for.
    """

    def __init__(self, scorer: Scorer[StateT, ActionT]):
        self.scorer = scorer

    @abstractmethod
    def get_target_logprobs(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Returns log p of each token of the continuations under the target, `[B, T]`, 0 behind their ends."""

    @abstractmethod
    def get_baseline_logprobs(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Returns the same under the baseline, `[B, T]`; it never carries gradient."""

    @abstractmethod
    def get_tester_logprobs(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Returns the same under the tester, `[B, T]`, with gradient."""

    @abstractmethod
    def rollout_prompt_with_tester(self, x: Sequence[StateT]) -> Sequence[ActionT]:
        """Returns what the tester says after each conversation, without the conversation."""

    @abstractmethod
    def rollout_prompt_with_target(self, x: Sequence[StateT]) -> Sequence[StateT]:
        """Returns what the target answers to each conversation that ends with a probe."""

    @abstractmethod
    def advance(self, context: StateT, probe: ActionT, response: StateT) -> StateT:
        """Returns the conversation after one more turn."""

    @abstractmethod
    def parameters(self) -> Iterator[Parameter]:
        """Yields what is trained: the tester's, and the value head's where there is one."""

    @abstractmethod
    def reward(
        self, context: Sequence[StateT], probe: Sequence[ActionT], response: Sequence[StateT]
    ) -> Sequence[float]:
        """Returns what each turn is worth to the tester."""

    # What has a default.

    def get_sampling_logprobs(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Returns log p of each token when it was drawn, `[B, T]`; asked for before any weight has moved since then."""
        import torch

        with torch.no_grad():
            return self.get_tester_logprobs(context, continuation)

    def token_mask(self, context: Sequence[StateT], continuation: Sequence[ActionT], logprobs: Tensor) -> Tensor:
        """Returns `[B, T]`, True where a continuation has a token: up to the last log-prob that is not 0.

        Args:
            context: The conversations.
            continuation: What is said after them.
            logprobs: `[B, T]` of any of the models.
        """
        import torch

        places_T = torch.arange(logprobs.shape[1], device=logprobs.device)
        last_B = torch.where(logprobs.detach() != 0, places_T, -1).amax(dim=1)
        return places_T <= last_B[:, None]

    def draw_probes(self, context: Sequence[StateT], seeds: Sequence[int]) -> Sequence[ActionT | None]:
        """Returns `rollout_prompt_with_tester`, the same for the same seeds; None: that conversation can go no further.

        Args:
            context: The conversations.
            seeds: One a conversation. By default torch's generator is seeded with all of them together.
        """
        return self._seeded(seeds, lambda: self.rollout_prompt_with_tester(context))

    def draw_responses(self, x: Sequence[StateT], seeds: Sequence[int]) -> Sequence[StateT | None]:
        """Returns `rollout_prompt_with_target`, the same for the same seeds; None: there is no answer."""
        return self._seeded(seeds, lambda: self.rollout_prompt_with_target(x))

    @staticmethod
    def _seeded(seeds: Sequence[int], work: Callable[[], T]) -> T:
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(stable_seed(0, *seeds))
            return work()

    def compute(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns; a system may have a thread of its own for what computes."""
        return work()

    def updating(self) -> AbstractContextManager[None]:
        """Returns a context within which weights change and nothing is drawn."""
        return nullcontext()

    def make_mover(self, settings: OptimizerConfig, schedule: ScheduleConfig) -> Mover:
        """Returns what moves `parameters()`."""
        from reinforge.engine.training.optimizer_step import Mover

        return Mover({str(i): parameter for i, parameter in enumerate(self.parameters())}, settings, schedule)

    def write(self, folder: Path, mover: Mover) -> None:
        """Writes weights and optimizer into an existing folder."""
        from safetensors.torch import save_file

        save_file({name: p.detach().cpu().contiguous() for name, p in mover.parameters.items()}, folder / WEIGHTS)
        save_file({name: value.detach().cpu().contiguous() for name, value in mover.state().items()}, folder / MOMENTS)

    def read(self, folder: Path, mover: Mover, num_steps: int) -> None:
        """Puts back what `write` wrote.

        Raises:
            EngineError: The folder holds other parameters.
        """
        import torch
        from safetensors.torch import load_file

        saved = load_file(folder / WEIGHTS)
        if {name: p.shape for name, p in saved.items()} != {name: p.shape for name, p in mover.parameters.items()}:
            raise EngineError(f"{folder} holds other parameters than this system has")
        with torch.no_grad():
            for name, parameter in mover.parameters.items():
                parameter.copy_(saved[name])
        mover.restore(load_file(folder / MOMENTS), num_steps)


class ValueFunctionSystem(System[StateT, ActionT]):
    """A system that also says what a conversation is worth before each token: what PPO needs."""

    @abstractmethod
    def value(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Returns the worth of what stands before each token, `[B, T]`, with gradient; the first stands at token 0."""

    def logprobs_and_values(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> tuple[Tensor, Tensor]:
        """Returns `get_tester_logprobs` and `value`; a system with one body can compute both at once."""
        logprobs = checked_logprobs(self.get_tester_logprobs(context, continuation), len(context), "tester")
        return logprobs, checked_values(self.value(context, continuation), logprobs)


def checked_logprobs(logprobs: Any, count: int, whose: str) -> Tensor:
    """Returns log-probs that a system gave, once they are seen to be some.

    Raises:
        EngineError: They have no rows and columns, one row too many, no gradient where they need one, or are above 0.
    """
    import torch

    if not isinstance(logprobs, torch.Tensor) or logprobs.ndim != 2 or len(logprobs) != count:
        found = list(logprobs.shape) if isinstance(logprobs, torch.Tensor) else type(logprobs).__name__
        raise EngineError(f"get_{whose}_logprobs: expected a tensor [B, T] with B = {count} rows, found {found}")
    if whose == "tester" and torch.is_grad_enabled() and not logprobs.requires_grad:
        raise EngineError("get_tester_logprobs: the tensor carries no gradient, so nothing could be learned from it")
    if logprobs.numel() and logprobs.detach().amax() > 1e-4:
        highest = logprobs.detach().amax().item()
        raise EngineError(f"get_{whose}_logprobs: {highest:g} is above 0; are these probabilities without a log?")
    return logprobs


def checked_values(values: Any, logprobs: Tensor) -> Tensor:
    """Returns values `[B, T]`; those given as `[B, T, 1]` lose their last axis.

    Raises:
        EngineError: Their shape is neither.
    """
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.shape != logprobs.shape:
        message = f"value: expected {list(logprobs.shape)}, one number a token of the continuation"
        raise EngineError(f"{message}, found {list(values.shape)}")
    return values
