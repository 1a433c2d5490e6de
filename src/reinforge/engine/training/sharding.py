"""A model whose weights, gradients and optimizer state are sharded across processes while it trains.

    loading               the weights lie in their files, which the processes of a machine share (with `full` and a
                          sampler elsewhere), or every process has a copy
    sampling, scoring     every process has all weights, in the modules that it samples from
    divide()              these are freed; each process keeps the shard of every weight that `fully_shard` gave it
    optimizer steps       each layer's weights are gathered when it is computed, and freed after it
    gather()              every process has all weights again, bit by bit the same

Where another program samples, the model stays divided: log-probs are computed as in a step, and a weight is whole only
while its bytes are hashed or written. So no process ever needs memory for the whole model.

PyTorch's `fully_shard` (FSDP2; ZeRO stage 3, arXiv:1910.02054) works on a copy of the modules, since its hooks and its
DTensors would be in the way of sampling. Weights are divided by rows: of 5 rows over 2 processes, the first has 3.

Every process must make the same number of passes, because each pass exchanges weights. Rows are therefore computed
whole, without shared prefixes: how many passes those take depends on the samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from reinforge.engine.devices import Destination
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.heads import ValueHead
from reinforge.engine.model.text_part import iterate_expert_parameters
from reinforge.engine.token_batch import TokenBatch
from reinforge.engine.training.collate import collate, make_plain_sample
from reinforge.engine.training.logprobs import token_logprobs
from reinforge.engine.training.micro_batches import make_micro_batches
from reinforge.engine.training.scarce_memory import copy_elsewhere
from reinforge.errors import EngineError
from reinforge.types.sample import FloatArray, TrainingSample

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
        stays_divided: True if the model's weights are never gathered after a job, since another program samples.
        is_divided: True while the weights of the model are freed; `divide` begins that.
        shapes: Those of the whole weights, by name.

    Args:
        goes_to: Where the shards go, one layer after the other; None: the model is there.
    """

    def __init__(
        self,
        model: CausalModel,
        peers: DataParallel,
        *,
        stays_divided: bool = False,
        goes_to: Destination | None = None,
    ):
        self.model, self.peers, self.stays_divided = model, peers, stays_divided
        self.is_divided = False
        self.copied = _copy_sharing_weights(model)
        self._pass: Any = TrainingPass(self.copied)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        layers = [part for part in self.copied.module.modules() if isinstance(part, GradientCheckpointingLayer)]
        try:
            for part in (*layers, self._pass):
                place_weights(part, goes_to)
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
        self.shapes = {name: parameter.shape for name, parameter in model.module.named_parameters()}
        self.shards = {name: nn.Parameter(self._divided[name].detach().to_local()) for name in model.trained_parameters}
        self.copied.device = model.device if goes_to is None else goes_to.device

    @property
    def is_first(self) -> bool:
        """True in the process that writes what all have in common."""
        return self.peers.rank == 0

    copy_tensors = staticmethod(copy_elsewhere)

    def divide(self) -> None:
        """Frees the whole weights, and from then on the model is where the shards are."""
        self.is_divided = True
        self._free(self.shapes)
        if self.model.device != self.copied.device:
            self.model.device = self.copied.device
            self.model.module.to(self.model.device)  # what else it has

    def gather(self) -> None:
        self._bring(self.shapes)
        self.is_divided = False

    def _free(self, names: Iterable[str]) -> None:
        parameters = dict(self.model.module.named_parameters())
        for name in names:
            parameters[name].data = torch.empty(0, dtype=self._divided[name].dtype, device=parameters[name].device)

    def _bring(self, names: Iterable[str]) -> None:
        parameters = dict(self.model.module.named_parameters())
        for name in names:
            parameters[name].data = self.join(name)

    @contextmanager
    def use_whole(self, names: Iterable[str]) -> Iterator[None]:
        """Gives the model these weights inside the block, and then keeps their rows; they may change there."""
        names = list(names)
        if not self.is_divided:
            yield
            return
        self._bring(names)
        try:
            yield
            for name in names:
                self.put(name, self.model.module.get_parameter(name))
        finally:
            self._free(names)

    @torch.no_grad()
    def take_shards(self) -> None:
        for name, parameter in self.model.trained_parameters.items():
            self.put(name, parameter)

    @torch.no_grad()
    def copy_rows(self, other: ShardedModel) -> None:
        """Takes the weights of another model that is divided among the same processes."""
        for name, weight in self._divided.items():
            weight.to_local().copy_(other._divided[name].to_local())

    @torch.no_grad()
    def put(self, name: str, whole: Tensor) -> None:
        """Replaces this process's rows of a weight by those of a whole one."""
        self._divided[name].to_local().copy_(self._select(whole))

    @torch.no_grad()
    def join(self, name: str) -> Tensor:
        """Returns a whole weight; all processes call it together."""
        shape, shard = self.shapes[name], self._divided[name].to_local()
        padded = shard.new_zeros(-(-shape[0] // self.peers.size), *shape[1:])
        padded[: len(shard)] = shard
        return torch.cat(self.peers.gather(padded))[: shape[0]].contiguous()

    def select_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this process's rows of the optimizer's tensors: `exp_avg.NAME`, `master.NAME`; counts stay whole."""
        return {key: self._select(value) if self.has_rows(key, value.ndim) else value for key, value in state.items()}

    def has_rows(self, key: str, num_dimensions: int) -> bool:
        """True if each process has some rows of this tensor of the optimizer, and not the same number as the others."""
        return key.partition(".")[2] in self.shards and num_dimensions > 0

    def get_dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = self._divided[name].dtype
        return found

    def choose_rows(self, count: int) -> slice:
        """Returns which of a tensor's rows this process has."""
        rows = -(-count // self.peers.size)
        return slice(min(self.peers.rank * rows, count), min((self.peers.rank + 1) * rows, count))

    def _select(self, whole: Tensor) -> Tensor:
        return whole[self.choose_rows(len(whole))]

    @torch.no_grad()
    def score(
        self, samples: Sequence[TrainingSample], max_tokens: int, critic: ValueHead | None = None
    ) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens, or what a critic says before them, `[T]` each, 0 elsewhere.

        All processes call it together, each with samples of its own, or with none.

        Args:
            max_tokens: Maximum tokens of a micro-batch, padding included.
        """
        found: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
        batches = make_micro_batches(samples, max_tokens, share=False)
        num_passes = max(int(each["count"]) for each in self.peers.collect({"count": len(batches)}))
        for indices in (*batches, *[None] * (num_passes - len(batches))):
            batch = None if indices is None else collate([samples[i] for i in indices], self.model.device)
            logprobs_BT, _ = self.compute(batch, critic=critic)
            if batch is not None and indices is not None:
                rows_BT = logprobs_BT if batch.values is None else batch.values
                for i, row in zip(indices, rows_BT.cpu().numpy(), strict=True):
                    found[i] = row[: len(samples[i])].copy()
        return found

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


@torch.no_grad()
def place_weights(module: nn.Module, goes_to: Destination | None) -> None:
    """Moves and converts the weights of a module that are not divided yet; None: they stay as they are."""
    if goes_to is None:
        return
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(goes_to.device, goes_to.dtype)


def _copy_sharing_weights(model: CausalModel) -> CausalModel:
    """Returns a copy of the modules over the same weights; tied ones stay tied."""
    memo: dict[int, Any] = {
        id(each): nn.Parameter(each.detach(), requires_grad=each.requires_grad) for each in model.module.parameters()
    }
    return copy.deepcopy(model, memo)
