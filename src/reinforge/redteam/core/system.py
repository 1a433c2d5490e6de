"""The models of adversarial training and the reward of a conversation.

A system of your own is plain torch: it returns log-probs with gradient and the parameters behind them, and trains in
the same loop as the bundled systems. The methods below the abstract ones have defaults that suit such a system; the
bundled systems override them to keep the sampler's tokens and to change weights only between replies.
Shapes: B conversations, T tokens of the longest continuation.
"""

from __future__ import annotations

import math
import warnings
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

    from reinforge.config.policy import OptimizerConfig, ScheduleConfig
    from reinforge.engine.training.scheduled_optimizer import ScheduledOptimizer

T = TypeVar("T")

EARLIER_NAMES = {
    "get_auditor_logprobs": "get_tester_logprobs",
    "rollout_prompt_with_auditor": "rollout_prompt_with_tester",
}
"""Methods that systems of earlier versions of astra-rl define, and their names now."""

WEIGHTS_FILE = "parameters.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


class System(ABC, Generic[StateT, ActionT]):
    """A tester, which is trained, a target, which is attacked, and a baseline, the model that the tester started from.

    Example: see `tests/redteam/toy.py`, a system in 60 lines whose tester is one matrix.
    """

    def __init__(self, scorer: Scorer[StateT, ActionT]):
        self.scorer = scorer

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accepts the names that methods of the tester had in earlier versions of astra-rl, and warns."""
        super().__init_subclass__(**kwargs)
        for old, new in EARLIER_NAMES.items():
            if old in vars(cls) and new not in vars(cls):
                setattr(cls, new, vars(cls)[old])
                warnings.warn(f"{cls.__name__}.{old}: rename it to {new}", DeprecationWarning, stacklevel=3)

    @abstractmethod
    def get_target_logprobs(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Returns log p of each token of the continuations under the target, `[B, T]`, padded with 0."""

    @abstractmethod
    def get_baseline_logprobs(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Returns the same under the baseline, `[B, T]`, never with gradient."""

    @abstractmethod
    def get_tester_logprobs(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Returns the same under the tester, `[B, T]`, with gradient."""

    @abstractmethod
    def rollout_prompt_with_tester(self, x: Sequence[StateT]) -> Sequence[ActionT]:
        """Returns the tester's next probe for each conversation, without the conversation itself."""

    @abstractmethod
    def rollout_prompt_with_target(self, x: Sequence[StateT]) -> Sequence[StateT]:
        """Returns the target's response to each conversation that ends with a probe."""

    @abstractmethod
    def advance(self, context: StateT, probe: ActionT, response: StateT) -> StateT:
        """Returns the conversation after one more turn."""

    @abstractmethod
    def parameters(self) -> Iterator[Parameter]:
        """Yields the trained parameters: the tester's, and the value head's if there is one."""

    @abstractmethod
    def reward(
        self, context: Sequence[StateT], probe: Sequence[ActionT], response: Sequence[StateT]
    ) -> Sequence[float]:
        """Returns the tester's reward for each turn."""

    # The same, validated, and without gradient unless it is the tester's; algorithms and samplers call these.

    def _get_tester_logprobs_and_validate(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        return check_logprobs(self.get_tester_logprobs(context, continuation), len(context), "tester")

    def _get_baseline_logprobs_and_validate(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        import torch

        with torch.no_grad():
            return check_logprobs(self.get_baseline_logprobs(context, continuation), len(context), "baseline").detach()

    def _get_target_logprobs_and_validate(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        import torch

        with torch.no_grad():
            return check_logprobs(self.get_target_logprobs(context, continuation), len(context), "target").detach()

    def _rollout_prompt_with_tester_and_validate(self, x: Sequence[StateT]) -> Sequence[ActionT]:
        return check_count(self.rollout_prompt_with_tester(x), len(x), "rollout_prompt_with_tester")

    def _rollout_prompt_with_target_and_validate(self, x: Sequence[StateT]) -> Sequence[StateT]:
        return check_count(self.rollout_prompt_with_target(x), len(x), "rollout_prompt_with_target")

    def get_sampling_logprobs(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Returns log p of each token when it was sampled, `[B, T]`; called before the next optimizer step."""
        import torch

        with torch.no_grad():
            return self.get_tester_logprobs(context, continuation)

    def token_mask(self, context: Sequence[StateT], continuation: Sequence[ActionT], logprobs: Tensor) -> Tensor:
        """Returns `[B, T]`, True where a continuation has a token: from the first log-prob that is not 0 to the last.

        So a system may return rows over the continuation alone, or over context and continuation with zeros for the
        context, as astra-rl's examples do:

            [-5.7, 0, -5.7, 0, 0] -> [1, 1, 1, 0, 0]        [0, 0, 0, -5.7, -5.7] -> [0, 0, 0, 1, 1]

        Override it if the probability of a first or last token may be exactly 1.

        Args:
            logprobs: `[B, T]` from any of the models.
        """
        has_logprob_BT = (logprobs.detach() != 0).long()
        begun_BT = has_logprob_BT.cumsum(dim=1) > 0
        not_over_BT = has_logprob_BT.flip(1).cumsum(dim=1).flip(1) > 0
        return begun_BT & not_over_BT

    def sample_probes(self, context: Sequence[StateT], seeds: Sequence[int]) -> Sequence[ActionT | None]:
        """Returns `rollout_prompt_with_tester`, reproducible by seed; None where a conversation cannot continue.

        Args:
            seeds: One per conversation. By default, torch's generator is seeded with all of them together.
        """
        return self._run_seeded(seeds, lambda: self._rollout_prompt_with_tester_and_validate(context))

    def sample_responses(self, x: Sequence[StateT], seeds: Sequence[int]) -> Sequence[StateT | None]:
        return self._run_seeded(seeds, lambda: self._rollout_prompt_with_target_and_validate(x))

    @staticmethod
    def _run_seeded(seeds: Sequence[int], work: Callable[[], T]) -> T:
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(stable_seed(0, *seeds))
            return work()

    def compute(self, work: Callable[[], T]) -> T:
        """Runs `work`; a system may override this to run it in the thread of its models."""
        return work()

    def updating(self) -> AbstractContextManager[None]:
        """Returns a context manager within which weights change and nothing is sampled."""
        return nullcontext()

    def make_scheduled_optimizer(self, settings: OptimizerConfig, schedule: ScheduleConfig) -> ScheduledOptimizer:
        from reinforge.engine.training.scheduled_optimizer import ScheduledOptimizer

        return ScheduledOptimizer(
            {str(i): parameter for i, parameter in enumerate(self.parameters())}, settings, schedule
        )

    def write(self, folder: Path, optimizer: ScheduledOptimizer) -> None:
        from safetensors.torch import save_file

        for file, tensors in ((WEIGHTS_FILE, optimizer.parameters), (OPTIMIZER_FILE, optimizer.state())):
            save_file({name: each.detach().cpu().contiguous() for name, each in tensors.items()}, folder / file)

    def read(self, folder: Path, optimizer: ScheduledOptimizer, num_steps: int) -> None:
        """Loads what `write` wrote; an `EngineError` if parameters have other names or shapes."""
        import torch
        from safetensors.torch import load_file

        saved = load_file(folder / WEIGHTS_FILE)
        if {name: p.shape for name, p in saved.items()} != {name: p.shape for name, p in optimizer.parameters.items()}:
            raise EngineError(
                f"{folder / WEIGHTS_FILE}: parameter names or shapes differ from this system's; load it with the "
                "system that wrote it"
            )
        with torch.no_grad():
            for name, parameter in optimizer.parameters.items():
                parameter.copy_(saved[name])
        optimizer.restore(load_file(folder / OPTIMIZER_FILE), num_steps)


class ValueFunctionSystem(System[StateT, ActionT]):
    """A system that also estimates the value before each token, as PPO needs."""

    @abstractmethod
    def value(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> Tensor:
        """Returns the value before each token of the continuations, `[B, T]`, with gradient; column 0 is token 0's."""

    def logprobs_and_values(self, context: Sequence[StateT], continuation: Sequence[ActionT]) -> tuple[Tensor, Tensor]:
        """Returns `get_tester_logprobs` and `value`; a system whose models share layers can compute both at once."""
        logprobs = self._get_tester_logprobs_and_validate(context, continuation)
        return logprobs, check_values(self.value(context, continuation), logprobs)


def check_count(values: Any, count: int, method: str, each: str = "conversation") -> Any:
    """Returns what a method returned, if it is one value for each conversation, or for `each` of something else."""
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise EngineError(f"{method}: expected a list of {count}, one for each {each}, found {values!r:.80}")
    if len(values) != count:
        raise EngineError(f"{method}: expected {count}, one for each {each}, found {len(values)}")
    return values


def check_rewards(rewards: Any, probes: Sequence[Any]) -> list[float]:
    """Returns the rewards of probes as numbers; a NaN is refused, since it would silently remove its siblings."""
    numbers = []
    for reward, probe in zip(check_count(rewards, len(probes), "reward", "probe"), probes, strict=True):
        try:
            number = float(reward)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise EngineError(f"reward: found {reward!r:.80} for the probe {probe!r:.80}, expected a number")
        numbers.append(number)
    return numbers


def check_logprobs(logprobs: Any, count: int, whose: str) -> Tensor:
    """Returns log-probs of a system if they are `[B, T]` with `count` rows, at most 0, the tester's with gradient."""
    import torch

    if not isinstance(logprobs, torch.Tensor) or logprobs.ndim != 2 or len(logprobs) != count:
        found = list(logprobs.shape) if isinstance(logprobs, torch.Tensor) else type(logprobs).__name__
        raise EngineError(f"get_{whose}_logprobs: expected a tensor [B, T] with B = {count} rows, found {found}")
    if whose == "tester" and torch.is_grad_enabled() and not logprobs.requires_grad:
        raise EngineError("get_tester_logprobs: the tensor carries no gradient, so it cannot be trained on")
    if logprobs.numel() and logprobs.detach().amax() > 1e-4:
        highest = logprobs.detach().amax().item()
        raise EngineError(
            f"get_{whose}_logprobs: found {highest:g}, expected at most 0; are these probabilities, not log-probs?"
        )
    return logprobs


def check_same_tokens(baseline: Tensor, logprobs: Tensor) -> Tensor:
    """Returns the baseline's log-probs on the tester's device if shapes agree: sums, `[B, 1]`, would be broadcast."""
    if baseline.shape != logprobs.shape:
        raise EngineError(
            f"get_baseline_logprobs: expected {list(logprobs.shape)}, the shape that get_tester_logprobs returned for "
            f"the same texts, found {list(baseline.shape)}; both return one number per token, from the same tokenizer"
        )
    return baseline.to(logprobs.device)


def check_values(values: Any, logprobs: Tensor) -> Tensor:
    """Returns a system's values as `[B, T]`, as the log-probs are and on their device; `[B, T, 1]` loses an axis."""
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.shape != logprobs.shape:
        message = f"value: expected {list(logprobs.shape)}, one number per token of the continuation"
        raise EngineError(f"{message}, found {list(values.shape)}")
    return values.to(logprobs.device)
