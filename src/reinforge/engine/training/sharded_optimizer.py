"""The optimizer of a model and its critic, whole or in shards (`sharding.py`, which only sharded training imports)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.heads import CRITIC_PREFIX, ValueHead
from reinforge.engine.training.scheduled_optimizer import ScheduledOptimizer

if TYPE_CHECKING:
    from reinforge.engine.devices import Destination
    from reinforge.engine.training.data_parallel import DataParallel
    from reinforge.engine.training.sharding import ShardedModel


class ShardedOptimizer(ScheduledOptimizer):
    """Trains a model and its critic, whole or in shards.

    Args:
        waits: The model's weights come later, by `shard` or `use_parameters`.

    Attributes:
        peers: The processes that share each step, of which this one computes its part; None: it computes all.
        sharded: This process's shards of the model, which are then its `parameters`; None: it trains the whole model.
    """

    def __init__(
        self, model: CausalModel, config: PolicyConfig, critic: ValueHead | None = None, *, waits: bool = False
    ):
        parameters = {} if waits else model.trained_parameters
        if critic is not None:
            parameters |= {f"{CRITIC_PREFIX}{name}": p for name, p in critic.named_parameters()}
        super().__init__(parameters, config.optimizer, config.schedule, config.critic)
        self.model, self.critic = model, critic
        self.peers: DataParallel | None = None
        self.sharded: ShardedModel | None = None

    def use_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Trains these weights from now on, beside the critic's."""
        critic = {name: p for name, p in self.parameters.items() if name.startswith(CRITIC_PREFIX)}
        self.parameters = {**parameters, **critic}
        self.reset()

    def shard(self, *, stays_divided: bool = False, goes_to: Destination | None = None) -> None:
        """Divides the model, its gradients and its optimizer among the peers from now on.

        Args:
            stays_divided: No job leaves whole weights, since another program samples.
            goes_to: Where the shards go; None: the model is there.
        """
        from reinforge.engine.training.scarce_memory import return_freed_memory
        from reinforge.engine.training.sharding import ShardedModel

        assert self.peers is not None
        if self.model.device.type == "cpu":
            return_freed_memory()
        state, num_steps = self.state(), self.num_steps
        self.sharded = ShardedModel(self.model, self.peers, stays_divided=stays_divided, goes_to=goes_to)
        self.use_parameters(self.sharded.shards)
        self.restore(self.sharded.select_state(state), num_steps)

    def gather_weights(self) -> None:
        """Gives the model the weights of the shards, which have changed; all processes call it together."""
        if self.sharded is not None and not self.sharded.stays_divided:
            self.sharded.gather()

    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned, of this process's rows, after the model's weights were loaded."""
        if self.sharded is not None and not self.sharded.is_divided:
            self.sharded.take_shards()
        self.restore(state, num_steps)

    def take_gradients(self) -> None:
        if self.sharded is not None:
            self.sharded.take_gradients()
        super().take_gradients()

    def clear_gradients(self) -> None:
        if self.sharded is not None:
            self.sharded.clear_gradients()
        super().clear_gradients()

    def measure_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Returns the norm of the policy's gradients, of which each process may have its shards only."""
        norm = super().measure_norm(parameters)
        if self.sharded is None or self.peers is None:
            return norm
        total = norm.double().square()
        self.peers.add(total)
        return total.sqrt().to(norm.dtype)

    @contextmanager
    def divide_weights(self) -> Iterator[None]:
        """Frees the whole weights inside the block; where it fails, `gather_weights` brings them back."""
        if self.sharded is None or self.sharded.is_divided:
            yield
            return
        self.sharded.divide()
        yield
        self.sharded.gather()

    def count_passes(self, own: int) -> int:
        """Returns how many passes all processes make together: the most that one of them has."""
        if self.sharded is None or self.peers is None:
            return own
        return max(int(each["count"]) for each in self.peers.collect({"count": own}))

    def help_others(self, logprobs_BT: Tensor | None = None) -> None:
        """Makes a pass without a gradient, or ends one whose log-probs are computed."""
        assert self.sharded is not None
        if logprobs_BT is None:
            logprobs_BT, _ = self.sharded.compute(None)
        with self.sharded.require_end():
            (logprobs_BT.sum() * 0.0).backward()
        self.take_gradients()
