"""The training loop: experiences, optimizer steps, checkpoints, evaluations, limits.

It extends astra-rl's loop. The bundled systems run on the engine, a system of your own is plain torch; both train in
this loop, because both provide a `ScheduledOptimizer` (gradient clipping, schedule, no step on non-finite gradients).

run_dir/
  log.jsonl                  one line per batch, experience and evaluation
  checkpoints/step-000012/   weights and optimizer as the system writes them, trainer.json, manifest.json
  best/                      the same, from the best evaluation
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from reinforge.config.policy import OptimizerConfig, ScheduleConfig
from reinforge.errors import ConfigError, JobFailed, Problem
from reinforge.files import find_damage, remove_folder, storage_boundary, write_folder
from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.common import ActionT, Batch, StateT, Step
from reinforge.redteam.core.evaluator import Evaluator
from reinforge.redteam.core.sampler import Sampler, derive_seed
from reinforge.redteam.core.system import System
from reinforge.redteam.methods.ast_system import ASTEvaluator, ASTSampler
from reinforge.redteam.training.harness import Harness

if TYPE_CHECKING:
    from torch.optim import Optimizer

logger = logging.getLogger(__name__)

STATE_FILE = "trainer.json"


class TrainingConfiguration(BaseModel):
    """Settings of a training run; the first six are astra-rl's, with its defaults.

    Example: `TrainingConfiguration(lr=1e-4, training_steps=50, run_dir="runs/first", eval_every=5)`.
    """

    model_config = ConfigDict(extra="forbid")

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field, or in a subclass any attribute, as one for a training loop of its own may do."""
        if type(self) is TrainingConfiguration or name in type(self).model_fields or name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self.__dict__[name] = value

    lr: float = Field(default=3e-3, gt=0, description="Peak learning rate; pretrained models need 1e-6 to 1e-5.")
    batch_size: int = Field(default=16, ge=1, description="Steps of the algorithm per batch.")
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop", "adagrad"] = Field(
        default="adamw", description="The optimizer."
    )
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="Batches per optimizer step.")
    training_steps: int = Field(default=1024, ge=1, description="Experiences to collect and train on.")
    num_episodes_per_experience: int = Field(default=8, ge=1, description="Rollouts per experience.")

    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate changes over the training steps."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up.")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="Final learning rate as a fraction of the peak.")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay, applied to matrices only.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this norm.")
    seed: int = Field(default=0, ge=0, description="The seed that all rollout seeds derive from.")

    run_dir: Path | None = Field(
        default=None, description="Folder for the log and checkpoints; null: neither is written, so no resuming."
    )
    checkpoint_every: int = Field(default=10, ge=1, description="Experiences between checkpoints in run_dir.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Number of newest checkpoints to keep.")
    resume: bool = Field(default=False, description="Resume from the newest checkpoint in run_dir.")

    eval_every: int | None = Field(default=None, ge=1, description="Experiences between evaluations; null: none.")
    eval_rollouts: int = Field(default=16, ge=1, description="Rollouts per evaluation.")
    patience: int | None = Field(
        default=None, ge=1, description="Stop after this many evaluations without a new best; null: never."
    )

    max_minutes: float | None = Field(default=None, gt=0, description="Stop after this many minutes; can be resumed.")
    max_steps: int | None = Field(default=None, ge=1, description="Stop after this many optimizer steps.")
    max_empty: int = Field(
        default=3,
        ge=1,
        description="Stop after this many experiences in a row without training signal; fail if no step was ever made.",
    )


@dataclass(slots=True)
class TrainerState:
    experience: int = 0  # experiences completed
    global_step: int = 0  # batches processed
    num_steps: int = 0
    num_empty: int = 0  # consecutive experiences without a usable batch
    best: float | None = None  # score of the best evaluation
    since_best: int = 0
    earlier: int = 0  # experiences of earlier calls of `train`, each of which was finished


def write_system(system: System[Any, Any], folder: Path, fill: Callable[[Path], Any]) -> None:
    """Calls `fill` with a new folder in the thread of the system's models; the folder is complete or does not exist."""

    def fill_new(staged: Path) -> None:
        with storage_boundary(folder):
            staged.mkdir(parents=True)
            fill(staged)

    write_folder(folder, lambda staged: system.compute(partial(fill_new, staged)))


class Trainer(Generic[StateT, ActionT, Step, Batch]):
    """Trains a tester.

    Example: `Trainer(TrainingConfiguration(training_steps=20), ASTSampler(problem, openings), DPO(problem)).train()`.

    Args:
        evaluator: Evaluates the tester every `eval_every` experiences; None: `ASTEvaluator` for an `ASTSampler`.
        wandb_kwargs: Arguments of `wandb.init`.

    Attributes:
        history: The metrics of each experience and evaluation.
        stopped: Why `train` ended before `training_steps`; None if it did not.
        _global_step_counter: Batches so far; gradient accumulation counts by it.
    """

    def __init__(
        self,
        config: TrainingConfiguration,
        sampler: Sampler[StateT, ActionT],
        algorithm: Algorithm[StateT, ActionT, Step, Batch],
        *,
        evaluator: Evaluator[StateT, ActionT] | None = None,
        use_wandb: bool = False,
        wandb_kwargs: Mapping[str, Any] | None = None,
    ):
        self.config = config
        self.system, self.evaluator = sampler.system, evaluator
        self._check_run_dir()
        if config.eval_every is not None and evaluator is None:
            if not isinstance(sampler, ASTSampler):
                message = f"there is no default evaluator for {type(sampler).__name__}"
                fix = "give the trainer an evaluator, or leave eval_every out"
                raise ConfigError(Problem("eval_every", message, fix))
            self.evaluator = cast("Any", ASTEvaluator(sampler))
        self.harness = Harness(
            sampler,
            algorithm,
            config.num_episodes_per_experience,
            use_wandb,
            wandb_kwargs,
            {"batch_size": config.batch_size},
            log_file=config.run_dir / "log.jsonl" if config.run_dir else None,
        )
        self._scheduled_optimizer = self.system.make_scheduled_optimizer(
            OptimizerConfig(
                name=config.optimizer,
                learning_rate=config.lr,
                weight_decay=config.weight_decay,
                max_grad_norm=config.max_grad_norm,
            ),
            ScheduleConfig(
                name=config.schedule, warmup_steps=config.warmup_steps, final_fraction=config.final_fraction
            ),
        )
        self.history: list[dict[str, Any]] = []
        self.stopped: str | None = None
        self._global_step_counter = 0
        self._state = TrainerState()
        self._num_pending, self._is_finished = 0, False
        self._hooked: Optimizer | None = None
        self._ends_at = float("inf")
        if config.resume:
            self._resume(self._list_checkpoints())

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer; its `step` also trains weights of less than 32 bits, through their float32 copies."""
        optimizer, masters = self._scheduled_optimizer.optimizer, self._scheduled_optimizer.masters
        if masters.copies and optimizer is not self._hooked:
            optimizer.register_step_pre_hook(lambda *_: masters.take_gradients())
            optimizer.register_step_post_hook(lambda *_: masters.store())
            self._hooked = optimizer
        return optimizer

    def _check_run_dir(self) -> None:
        run_dir, fix = self.config.run_dir, "set run_dir to the folder of the run"
        if run_dir is None and self.config.resume:
            raise ConfigError(Problem("resume", "is true, but run_dir is not set", fix))
        if not self.config.resume and any(find_damage(folder) is None for folder in self._list_checkpoints()):
            message = f"{run_dir} already contains checkpoints of another training run"
            raise ConfigError(Problem("run_dir", message, "set resume=True to resume it, or name another folder"))

    def _list_checkpoints(self) -> list[Path]:
        run_dir = self.config.run_dir
        return [] if run_dir is None else sorted((run_dir / "checkpoints").glob("step-*"), reverse=True)

    def _resume(self, folders: list[Path]) -> None:
        folder = next((folder for folder in folders if find_damage(folder) is None), None)
        if folder is None:
            logger.warning("no usable checkpoint in %s; starting from the beginning", self.config.run_dir)
            return
        self._state = TrainerState(**json.loads((folder / STATE_FILE).read_text()))
        self.system.read(folder, self._scheduled_optimizer, self._state.num_steps)
        self._global_step_counter = self._state.global_step
        logger.info("resuming from %s", folder)

    def train(self) -> None:
        """Trains until `training_steps` experiences are done or a limit is reached, which `stopped` then names.

        Called again, it finishes what a limit stopped, or else trains for as many experiences once more.

        Raises:
            JobFailed: `max_empty` experiences in a row had no training signal before any optimizer step was made, or
                non-finite losses.
        """
        config, state = self.config, self._state
        self.stopped = None
        if self._is_finished:
            state.earlier, self._is_finished = state.experience, False
        self._ends_at = time.monotonic() + 60 * config.max_minutes if config.max_minutes else float("inf")
        if config.eval_every is not None and state.experience == 0:
            self._evaluate()
        while self._num_trained < config.training_steps and self.stopped is None:
            self._run_experience()
            self._after_experience()
        if self._num_pending:
            with self.system.updating():
                self.system.compute(self._take_step)
        self._save_checkpoint()
        self._is_finished = self._num_trained >= config.training_steps
        if self.stopped is not None:
            logger.info("stopped after %d experiences: %s", state.experience, self.stopped)

    @property
    def _num_trained(self) -> int:
        return self._state.experience - self._state.earlier

    def _after_experience(self) -> None:
        config, done = self.config, self._state.experience
        self._check_progress()
        if config.eval_every is not None and done % config.eval_every == 0:
            self._evaluate()
        if done % config.checkpoint_every == 0 and not self._num_pending:
            self._save_checkpoint()

    def _run_experience(self) -> None:
        number, started = self._state.experience, time.monotonic()
        batches = list(self.harness.experience(derive_seed(self.config.seed, "experience", number)))
        rollout_s, num_trained, losses = time.monotonic() - started, 0, list[float]()
        if batches:
            with self.system.updating():
                for batch in batches:
                    logs = self.system.compute(partial(self._train_on_batch, batch))
                    self.harness.log_current_step(logs)
                    if "skipped" not in logs:
                        num_trained += 1
                        losses.append(logs["loss"])
                    self._check_limits()
                    if self.stopped is not None:
                        break
        self._check_limits()
        state = self._state
        state.experience, state.global_step = number + 1, self._global_step_counter
        state.num_empty = 0 if num_trained else state.num_empty + 1
        rewards = [node.reward for graph in self.harness.graphs for node in graph.nodes()]
        self._record(
            {
                "experience": number,
                "num_rollouts": len(self.harness.graphs),
                "num_probes": len(rewards),
                "mean_reward": statistics.fmean(rewards) if rewards else None,
                "num_batches": len(batches),
                "num_skipped": len(batches) - num_trained if self.stopped is None else None,
                "mean_loss": statistics.fmean(losses) if losses else None,
                "optimizer_steps": self._scheduled_optimizer.num_steps,
                "rollout_s": rollout_s,
                "train_s": time.monotonic() - started - rollout_s,
            }
        )

    def _train_on_batch(self, batch: Batch) -> dict[str, Any]:
        import torch

        self._global_step_counter += 1
        loss, metrics = self.harness.step(batch)
        logs: dict[str, Any] = {
            **metrics,
            "step": self._global_step_counter,
            "experience": self._state.experience,
            "loss": float(loss.detach()),
        }
        if torch.isfinite(loss).all():
            (loss / self.config.gradient_accumulation_steps).backward()
            self._scheduled_optimizer.take_gradients()
            self._num_pending += 1
        else:
            logs["skipped"] = "the loss is not finite"
        if self._global_step_counter % self.config.gradient_accumulation_steps == 0 and self._num_pending:
            logs |= self._take_step()
        return logs

    def _take_step(self) -> dict[str, Any]:
        config = self.config
        if self._num_pending < config.gradient_accumulation_steps:
            self._scheduled_optimizer.scale_gradients(config.gradient_accumulation_steps / self._num_pending)
        metrics = self._scheduled_optimizer.optimizer_step(self._num_trained / config.training_steps)
        self._scheduled_optimizer.clear_gradients()
        self._num_pending, self._state.num_steps = 0, self._scheduled_optimizer.num_steps
        return {"skipped": "the gradient is not finite"} if metrics is None else metrics

    def _check_limits(self) -> None:
        config = self.config
        if config.max_steps is not None and self._scheduled_optimizer.num_steps >= config.max_steps:
            self.stopped = f"max_steps: {config.max_steps} optimizer steps"
        elif time.monotonic() >= self._ends_at:
            self.stopped = f"max_minutes: {config.max_minutes:g} minutes"

    def _check_progress(self) -> None:
        """Stops a run without training signal; fails it if no step was ever made or its losses are not finite."""
        row, count = self.history[-1], self._state.num_empty
        if count < self.config.max_empty or self.stopped is not None:
            return
        non_finite = f"in the last one, the loss or gradient of all {row['num_batches']} batches was not finite"
        equal = "the rewards or replies of siblings are all equal, so there is no training signal"
        reason = f"{count} experiences in a row changed no weights; {non_finite if row['num_batches'] else equal}"
        if row["num_batches"] or not self._scheduled_optimizer.num_steps:
            raise JobFailed(reason)
        self.stopped = f"max_empty: {reason}"

    def _evaluate(self) -> None:
        assert self.evaluator is not None
        count = None if self.evaluator.seeds is not None else self.config.eval_rollouts
        metrics = self.evaluator.evaluate(count, progress=False)
        score, state = self.compute_score(metrics), self._state
        better = score is not None and (state.best is None or score > state.best)
        state.since_best = 0 if better else state.since_best + 1
        summary = metrics.get("summary", metrics) if isinstance(metrics, dict) else metrics
        self._record({"experience": state.experience, "evaluation": summary, "score": score})
        if better:
            state.best = score
            if self.config.run_dir is not None and not self._num_pending:
                self._write_checkpoint(self.config.run_dir / "best")
        elif self.config.patience is not None and state.since_best >= self.config.patience:
            self.stopped = f"patience: {state.since_best} evaluations without a score above {state.best}"

    def compute_score(self, metrics: Any) -> float | None:
        """Returns the score of an evaluation, higher is better; override it for metrics of your own evaluator."""
        return metrics["summary"]["attack_success"]["mean"]

    def _record(self, row: dict[str, Any]) -> None:
        self.history.append(row)
        self.harness.log_current_step(row)

    def _save_checkpoint(self) -> None:
        if self.config.run_dir is None:
            return
        self._write_checkpoint(self.config.run_dir / "checkpoints" / f"step-{self._state.experience:06}")
        for old in self._list_checkpoints()[self.config.keep_checkpoints :]:
            remove_folder(old)

    def _write_checkpoint(self, folder: Path) -> None:
        def fill(staged: Path) -> None:
            self.system.write(staged, self._scheduled_optimizer)
            (staged / STATE_FILE).write_text(json.dumps(asdict(self._state), indent=1) + "\n")

        write_system(self.system, folder, fill)
