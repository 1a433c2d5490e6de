"""Experiences: sample trees, flatten them with the algorithm, and yield batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from reinforge.errors import ConfigError, Problem
from reinforge.files import append_line
from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.common import ActionT, Batch, StateT, Step
from reinforge.redteam.core.sampler import Graph, Sampler, derive_seed
from reinforge.redteam.utils.logging import ASTRAWandbLogger, logger

if TYPE_CHECKING:
    from torch import Tensor


class StepDataset(Generic[Step]):
    """Steps as a dataset for torch's `DataLoader`."""

    def __init__(self, list: Sequence[Step]):
        self.list = list

    def __len__(self) -> int:
        return len(self.list)

    def __getitem__(self, idx: int) -> Step:
        return self.list[idx]


ListDataset = StepDataset  # astra-rl's name


class Harness(Generic[StateT, ActionT, Step, Batch]):
    """The parts of a training loop, to write your own.

    Example:
        harness = Harness(sampler, algorithm, 8, dataloader_kwargs={"batch_size": 16})
        for number in range(100):
            for batch in harness.experience(seed=number):
                loss, logs = harness.step(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                harness.log_current_step(logs)

    Args:
        num_episodes_per_experience: Trees per experience; each has its own seed.
        use_wandb: Log to Weights & Biases; install `wandb` separately.
        wandb_kwargs: Arguments of `wandb.init`.
        dataloader_kwargs: Arguments of torch's `DataLoader`; `batch_size` is 16 by default, and no batch is dropped.
        log_file: File for metrics as JSON lines.

    Attributes:
        graphs: The trees of the last experience.
    """

    def __init__(
        self,
        sampler: Sampler[StateT, ActionT],
        algorithm: Algorithm[StateT, ActionT, Step, Batch],
        num_episodes_per_experience: int = 32,
        use_wandb: bool = False,
        wandb_kwargs: Mapping[str, Any] | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        *,
        log_file: Path | None = None,
    ):
        if num_episodes_per_experience < 1:
            message = f"found {num_episodes_per_experience}, expected at least 1"
            raise ConfigError(Problem("num_episodes_per_experience", message, "set it to 1 or more"))
        if algorithm.needs_siblings and getattr(sampler, "tree_width", None) == 1:
            message = f"is 1, but {type(algorithm).__name__} compares siblings and would have no training signal"
            raise ConfigError(
                Problem("tree_width", message, "set it to 2 or more, or use PPO, which needs no siblings")
            )
        self.sampler, self.algorithm = sampler, algorithm
        self.num_episodes_per_experience, self.log_file = num_episodes_per_experience, log_file
        self.dataloader_kwargs = {"batch_size": 16, **(dataloader_kwargs or {})}
        self.graphs: list[Graph[StateT, ActionT]] = []
        self._num_experiences = 0
        self._wandb = ASTRAWandbLogger(wandb_kwargs or {}) if use_wandb else None

    def experience(self, seed: int | None = None) -> Iterator[Batch]:
        """Returns the batches of one experience, after sampling all of its trees; `len()` gives their number.

        Args:
            seed: The seeds of the trees derive from it: the same seed and weights give the same trees; 0 is a seed like
                any other. None: different trees each time.
        """
        if seed is None:
            seed = derive_seed(0, "experience", self._num_experiences)
            self._num_experiences += 1
        seeds = [derive_seed(seed, "episode", i) for i in range(self.num_episodes_per_experience)]
        self.graphs = self.sampler.rollouts(seeds)
        steps = [step for graph in self.graphs for step in self.algorithm.flatten(graph)]
        if not steps:
            logger.warning("no training signal in an experience of %d rollouts", len(self.graphs))
        return self._batches(StepDataset(steps))

    def _batches(self, steps: StepDataset[Step]) -> Iterator[Batch]:
        from torch.utils.data import DataLoader

        if not len(steps):
            return iter(DataLoader(steps))  # type: ignore[arg-type]  # some of torch's samplers refuse no steps
        collate = {"collate_fn": self.algorithm.collate_fn}
        return iter(DataLoader(steps, **{**collate, **self.dataloader_kwargs}))  # type: ignore[arg-type]

    def step(self, batch: Batch) -> tuple[Tensor, dict[Any, Any]]:
        return self.algorithm.step(batch)

    def log_current_step(self, logs: Mapping[Any, Any]) -> None:
        """Logs metrics: a JSON line in `log_file`, the logger `reinforge.redteam`, Weights & Biases if enabled."""
        logger.info("%s", dict(logs))
        if self.log_file is not None:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.log_file, {str(name): value for name, value in logs.items()})
        if self._wandb is not None:
            self._wandb.log(logs)
