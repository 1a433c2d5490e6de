"""The push-button loop: experiences, optimizer steps, checkpoints, evaluations, limits.

It is the reference's loop, with what it lacked. Our systems ride on the engine; a user's own system is torch and trains
by the same lines, since both hand out a `Mover`: the optimizer with clipping, schedule and refusal of what is not
finite that the engine's learner is too.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from reinforge.config.schema import OptimizerConfig, ScheduleConfig
from reinforge.errors import ConfigError, JobFailed, Problem
from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.common import ActionT, Batch, StateT, Step
from reinforge.redteam.core.evaluator import Evaluator
from reinforge.redteam.core.sampler import Sampler
from reinforge.redteam.methods.ast import ASTEvaluator, ASTSampler
from reinforge.redteam.training.checkpoints import Checkpoints, TrainerState
from reinforge.redteam.training.configuration import TrainingConfiguration
from reinforge.redteam.training.harness import Harness
from reinforge.types.seeding import stable_seed

if TYPE_CHECKING:
    from torch.optim import Optimizer

logger = logging.getLogger(__name__)


class Trainer(Generic[StateT, ActionT, Step, Batch]):
    """Trains a tester.

    Example:
        problem = ASTProblem()
        sampler = ASTSampler(problem, openings)
        trainer = Trainer(TrainingConfiguration(training_steps=20), sampler, DPO(problem))
        trainer.train()

    Args:
        config: The settings.
        sampler: Draws trees.
        algorithm: Says what is learned from them.
        evaluator: Looks at the tester every `eval_every` experiences; None: `ASTEvaluator` of an `ASTSampler`.
        use_wandb: Log to Weights & Biases.
        wandb_kwargs: Arguments of `wandb.init`.

    Attributes:
        config: The settings.
        harness: Collects experiences and knows the algorithm.
        optimizer: What moves the weights.
        history: What each experience did, and each evaluation found.
        stopped: Why `train` ended before `training_steps`; None: it did not.
        _global_step_counter: Batches so far, which gradients are accumulated by.
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
        self._checkpoints = Checkpoints(config.run_dir, config.keep_checkpoints) if config.run_dir else None
        self._refuse()
        if config.eval_every is not None and evaluator is None:
            self.evaluator = _default_evaluator(sampler)
        self.harness = Harness(
            sampler,
            algorithm,
            config.num_episodes_per_experience,
            use_wandb,
            wandb_kwargs,
            {"batch_size": config.batch_size},
            log_file=config.run_dir / "log.jsonl" if config.run_dir else None,
        )
        self._mover = self.system.make_mover(
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
        self._num_pending = 0
        self._ends_at = float("inf")
        if config.resume:
            self._resume()

    @property
    def optimizer(self) -> Optimizer:
        """What moves the weights."""
        return self._mover.optimizer

    def _refuse(self) -> None:
        if self._checkpoints is None:
            if self.config.resume:
                raise ConfigError(Problem("resume", "there is nothing to go on from", "name the run_dir"))
        elif not self.config.resume and self._checkpoints.newest() is not None:
            message = f"{self.config.run_dir} holds checkpoints of a training already"
            raise ConfigError(Problem("run_dir", message, "write resume=True to go on, or name another folder"))

    def _resume(self) -> None:
        assert self._checkpoints is not None
        folder = self._checkpoints.newest()
        if folder is None:
            logger.warning("%s holds no checkpoint: the training begins anew", self.config.run_dir)
            return
        self._state = self._checkpoints.load(folder, self.system, self._mover)
        self._global_step_counter = self._state.global_step
        logger.info("goes on from %s", folder)

    def train(self) -> None:
        """Trains until `training_steps` experiences are done, or a limit is reached, which `stopped` tells.

        Raises:
            JobFailed: Several experiences in a row, the first ones or broken ones, moved no weight.
        """
        config, state = self.config, self._state
        self.stopped = None
        self._ends_at = time.monotonic() + 60 * config.max_minutes if config.max_minutes else float("inf")
        if config.eval_every is not None and state.experience == 0:
            self._evaluate()
        while state.experience < config.training_steps and self.stopped is None:
            self._learn_from_one_experience()
            self._after_experience()
        if self._num_pending:
            with self.system.updating():
                self.system.compute(self._move)
        self._save()
        if self.stopped is not None:
            logger.info("stopped after %d experiences: %s", state.experience, self.stopped)

    def _after_experience(self) -> None:
        """Refuses to go on without learning, evaluates and saves, as often as is configured."""
        config, done = self.config, self._state.experience
        self._refuse_to_learn_nothing()
        if config.eval_every is not None and done % config.eval_every == 0:
            self._evaluate()
        if done % config.checkpoint_every == 0 and not self._num_pending:
            self._save()

    def _learn_from_one_experience(self) -> None:
        number, begun = self._state.experience, time.monotonic()
        batches = list(self.harness.experience(stable_seed(self.config.seed, "experience", number)))
        drawn_s, num_learned, losses = time.monotonic() - begun, 0, list[float]()
        if batches:
            with self.system.updating():
                for batch in batches:
                    logs = self.system.compute(partial(self._learn, batch))
                    self.harness.log_current_step(logs)
                    if "refused" not in logs:
                        num_learned += 1
                        losses.append(logs["loss"])
                    self._look_at_limits()
                    if self.stopped is not None:
                        break
        self._look_at_limits()
        state = self._state
        state.experience, state.global_step = number + 1, self._global_step_counter
        state.num_empty = 0 if num_learned else state.num_empty + 1
        rewards = [node.reward for graph in self.harness.graphs for node in graph.nodes()]
        self._tell(
            {
                "experience": number,
                "num_rollouts": len(self.harness.graphs),
                "num_probes": len(rewards),
                "mean_reward": statistics.fmean(rewards) if rewards else None,
                "num_batches": len(batches),
                "num_refused": len(batches) - num_learned if self.stopped is None else None,
                "mean_loss": statistics.fmean(losses) if losses else None,
                "optimizer_steps": self._mover.num_steps,
                "draw_s": drawn_s,
                "learn_s": time.monotonic() - begun - drawn_s,
            }
        )

    def _learn(self, batch: Batch) -> dict[str, Any]:
        """Adds one batch's gradient, moves the weights where enough is accumulated, and returns what is told of it."""
        import torch

        self._global_step_counter += 1
        loss, told = self.harness.step(batch)
        logs: dict[str, Any] = {
            **told,
            "step": self._global_step_counter,
            "experience": self._state.experience,
            "loss": float(loss.detach()),
        }
        if torch.isfinite(loss).all():
            (loss / self.config.gradient_accumulation_steps).backward()
            self._mover.take_gradients()
            self._num_pending += 1
        else:
            logs["refused"] = "the loss is not finite"
        if self._global_step_counter % self.config.gradient_accumulation_steps == 0 and self._num_pending:
            logs |= self._move()
        return logs

    def _move(self) -> dict[str, Any]:
        """Makes one optimizer step by what is accumulated, whose mean it is also where it is less than configured."""
        config = self.config
        if self._num_pending < config.gradient_accumulation_steps:
            self._mover.scale_gradients(config.gradient_accumulation_steps / self._num_pending)
        moved = self._mover.move(self._state.experience / config.training_steps)
        self._mover.clear_gradients()
        self._num_pending, self._state.num_steps = 0, self._mover.num_steps
        return {"refused": "the gradient is not finite"} if moved is None else moved

    def _look_at_limits(self) -> None:
        config = self.config
        if config.max_steps is not None and self._mover.num_steps >= config.max_steps:
            self.stopped = f"max_steps: {config.max_steps} optimizer steps"
        elif time.monotonic() >= self._ends_at:
            self.stopped = f"max_minutes: {config.max_minutes:g} minutes"

    def _refuse_to_learn_nothing(self) -> None:
        """Ends a training that learns no more, and fails one that never did or whose losses are broken."""
        row, count = self.history[-1], self._state.num_empty
        if count < self.config.max_empty or self.stopped is not None:
            return
        broken = f"all {row['num_batches']} batches of the last one were refused: their loss is not finite"
        equal = "nothing was made of their rollouts: rewards or texts of siblings are all equal"
        why = f"{count} experiences in a row moved no weight; {broken if row['num_batches'] else equal}"
        if row["num_batches"] or not self._mover.num_steps:
            raise JobFailed(why)
        self.stopped = f"max_empty: {why}"

    def _evaluate(self) -> None:
        assert self.evaluator is not None
        count = None if self.evaluator.seeds is not None else self.config.eval_rollouts
        found = self.evaluator.evaluate(count, progress=False)
        score, state = self.score_of(found), self._state
        better = score is not None and (state.best is None or score > state.best)
        state.since_best = 0 if better else state.since_best + 1
        summary = found.get("summary", found) if isinstance(found, dict) else found
        self._tell({"experience": state.experience, "evaluation": summary, "score": score})
        if better:
            state.best = score
            if self._checkpoints is not None and not self._num_pending:
                self._checkpoints.save(self.system, self._mover, state, best=True)
        elif self.config.patience is not None and state.since_best >= self.config.patience:
            self.stopped = f"patience: {state.since_best} evaluations without a better one than {state.best}"

    def score_of(self, metrics: Any) -> float | None:
        """Returns what an evaluation is judged by, the more the better; override it for figures of your own."""
        return metrics["summary"]["attack_success"]["mean"]

    def _tell(self, row: dict[str, Any]) -> None:
        self.history.append(row)
        self.harness.log_current_step(row)

    def _save(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.save(self.system, self._mover, self._state)


def _default_evaluator(sampler: Sampler[Any, Any]) -> Evaluator[Any, Any]:
    if not isinstance(sampler, ASTSampler):
        message = f"nobody knows how to look at rollouts of {type(sampler).__name__}"
        raise ConfigError(Problem("eval_every", message, "give the trainer an evaluator"))
    return ASTEvaluator(sampler)
