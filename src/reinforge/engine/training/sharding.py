"""A model whose weights, gradients and optimizer state are sharded across processes while it trains.

    sampling, scoring     every process has all weights, in the modules that it samples from
    divide()              these are freed; each process keeps the shard of every weight that `fully_shard` gave it
    optimizer steps       each layer's weights are gathered when it is computed, and freed after it
    gather()              every process has all weights again, bit by bit the same

PyTorch's `fully_shard` (FSDP2; ZeRO stage 3, arXiv:1910.02054) works on a copy of the modules, since its hooks and its
DTensors would be in the way of sampling. Weights are divided by rows: of 5 rows over 2 processes, the first has 3.

Every process must make the same number of passes, because each pass exchanges weights. Rows are therefore computed
whole, without shared prefixes: how many passes those take depends on the samples.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.heads import ValueHead
from reinforge.engine.model.text_part import iterate_expert_parameters
from reinforge.engine.token_batch import TokenBatch
from reinforge.engine.training.collate import collate, make_plain_sample
from reinforge.engine.training.logprobs import token_logprobs
from reinforge.errors import EngineError

if TYPE_CHECKING:
    from reinforge.engine.training.data_parallel import DataParallel

FILLER = (0, 0)  # tokens of the pass that a process makes while only others still have samples; its gradient is zero


class TrainingPass(nn.Module):
    """The forward pass of training as one module, whose weights outside of the layers are gathered for all of it.

    The output layer needs that: its weight is read by a function of its own (`lm_head.py`), and may be tied to the
    embeddings.
    """

    def __init__(self, model: CausalModel):
        super().__init__()
        self.module, self.model = model.module, model

    def forward(
        self, batch: TokenBatch, entropy_grad: bool, critic: ValueHead | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns log-probs, entropies and values, `[B, T]` each."""
        logprobs_BT, entropies_BT = token_logprobs(self.model, batch, entropy_grad=entropy_grad, critic=critic)
        return logprobs_BT, entropies_BT, batch.values


class ShardedModel:
    """One process's shards of a model, and the passes that all processes make together.

    Attributes:
        shards: This process's rows of each trained weight, by name; the optimizer updates them in place.
        copied: The model that trains.
        is_divided: True while the weights of the model are freed.
    """

    def __init__(self, model: CausalModel, peers: DataParallel):
        self.model, self.peers = model, peers
        self.is_divided = False
        self.copied = _copy_sharing_weights(model)
        self._pass: Any = TrainingPass(self.copied)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        layers = [part for part in self.copied.module.modules() if isinstance(part, GradientCheckpointingLayer)]
        try:
            for part in (*layers, self._pass):
                fully_shard(part, mesh=peers.mesh, mp_policy=policy)
        except (AssertionError, NotImplementedError, ValueError) as cause:
            raise EngineError(f"{model.config.model_type} models cannot be sharded: {cause}") from cause
        takes_unused = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
        if not takes_unused and any(iterate_expert_parameters(model.module)):
            raise EngineError(f"{model.config.model_type} models have experts: to shard those takes torch 2.13")
        divided: list[Any] = [part for part in self._pass.modules() if isinstance(part, FSDPModule)]
        for part in divided:  # a step's loss is normalized already, so gradients are added
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            if takes_unused:
                part.set_reduce_scatter_unused_params(
                    True, recurse=False
                )  # experts to which one process routed no token
        self._divided: dict[str, Any] = dict(self.copied.module.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in model.module.named_parameters()}
        self.shards = {name: nn.Parameter(self._divided[name].detach().to_local()) for name in model.trained_parameters}

    def divide(self) -> None:
        self.is_divided = True
        for parameter in self.model.module.parameters():
            parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def gather(self) -> None:
        for name, parameter in self.model.module.named_parameters():
            parameter.data = self._join(self._divided[name].detach().to_local(), name)
        self.is_divided = False

    @torch.no_grad()
    def take_shards(self) -> None:
        for name, parameter in self.model.trained_parameters.items():
            self.shards[name].copy_(self._select(parameter))

    def select_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this process's rows of the optimizer's tensors: `exp_avg.NAME`, `master.NAME`; counts stay whole."""
        return {key: self._select(value) if self._is_sharded(key, value) else value for key, value in state.items()}

    @torch.no_grad()
    def join_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the whole tensors, on the host, of which `state` has this process's rows."""
        return {
            key: self._join(value, key.partition(".")[2]).cpu() if self._is_sharded(key, value) else value
            for key, value in state.items()
        }

    def _is_sharded(self, key: str, value: Tensor) -> bool:
        return key.partition(".")[2] in self.shards and value.ndim > 0

    def _select(self, whole: Tensor) -> Tensor:
        rows = -(-len(whole) // self.peers.size)
        return whole[self.peers.rank * rows : (self.peers.rank + 1) * rows]

    def _join(self, shard: Tensor, name: str) -> Tensor:
        shape = self._shapes[name]
        padded = shard.new_zeros(-(-shape[0] // self.peers.size), *shape[1:])
        padded[: len(shard)] = shard
        return torch.cat(self.peers.gather(padded))[: shape[0]].contiguous()

    def compute(
        self, batch: TokenBatch | None, *, entropy_grad: bool = False, critic: ValueHead | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probs and entropies, `[B, T]` each; all processes call it together.

        Args:
            batch: This process's micro-batch; None: it has no more, and helps the others with a pass of its own.
        """
        batch = collate([make_plain_sample(FILLER)], self.model.device) if batch is None else batch
        with self.require_end():
            logprobs_BT, entropies_BT, batch.values = self._pass(batch, entropy_grad, critic)
            if not torch.is_grad_enabled():
                self._pass.reshard()  # otherwise the next pass would read what was gathered for this one
        return logprobs_BT, entropies_BT

    def require_end(self) -> AbstractContextManager[None]:
        """Lets no further exchange happen if a forward or backward pass inside the block fails."""
        return self.peers.break_on_failure()

    def take_gradients(self) -> None:
        """Adds the gradients of a backward pass to those of the shards."""
        for name, shard in self.shards.items():
            found, self._divided[name].grad = self._divided[name].grad, None
            if found is not None:
                rows = found.to_local()
                shard.grad = rows if shard.grad is None else shard.grad.add_(rows)

    def clear_gradients(self) -> None:
        """Clears what a pass that failed may have left."""
        for parameter in self._divided.values():
            parameter.grad = None


def _copy_sharing_weights(model: CausalModel) -> CausalModel:
    """Returns a copy of the modules over the same weights; tied ones stay tied."""
    memo: dict[int, Any] = {
        id(each): nn.Parameter(each.detach(), requires_grad=each.requires_grad) for each in model.module.parameters()
    }
    return copy.deepcopy(model, memo)
