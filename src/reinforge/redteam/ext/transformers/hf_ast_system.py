"""Hugging Face variants: models by id or folder, checkpoints for `from_pretrained`, evaluation on openings.

The classes have astra-rl's names and arguments; the engine loads, samples and trains the models.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from transformers import AutoTokenizer

from reinforge.engine.model.hub import check_tokenizer_source
from reinforge.errors import EngineError, ReinforgeError, boundary
from reinforge.files import storage_boundary
from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.scorer import Scorer
from reinforge.redteam.core.system import WEIGHTS_FILE, System
from reinforge.redteam.methods.ast import ASTProblem, ASTSampler
from reinforge.redteam.training.trainer import Trainer, TrainingConfiguration, write_system

logger = logging.getLogger(__name__)

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template for models without one: the messages concatenated."""
TOKENIZERS = ("tokenizer", "tester_tokenizer")
"""Attributes of a system under which its tester's tokenizer is looked for."""


class HFASTSystem(ASTProblem):
    """A tester and a target by Hugging Face id or folder.

    Example: `HFASTSystem("path/to/tester", "path/to/target", None, KeywordScorer("zorp"), device="cpu")`.

    Differs from astra-rl: without a `baseline_model_id`, the baseline is the tester before training, not the target,
    because DPO measures its margin from there. Models without a chat template see the conversation as one text.

    Args:
        scorer: None: 1 where the bundled target's marker word occurs.
        settings: Other arguments of `ASTProblem`.

    Attributes:
        device: The device of the tester, where log-probs are.
        tester, baseline, target: Hugging Face modules; None: the baseline is the tester before training, or the target
            is not a model in this process.
    """

    def __init__(
        self,
        tester_model_id: str | Path,
        target_model_id: str | Path,
        baseline_model_id: str | Path | None = None,
        scorer: Scorer[str, str] | None = None,
        device: str = "cpu",
        **settings: Any,
    ):
        super().__init__(
            tester_model_id, target_model_id, scorer, baseline=baseline_model_id, device=device, **settings
        )
        self.device = str(self.engine.model.device)

        def find_parts(engine: Any) -> tuple[Any, Any]:
            return (None, None) if engine is None else (engine.model.module, engine.tokenizer)

        self.tester, self.tokenizer = find_parts(self.engine)
        self.tester_tokenizer = self.tokenizer
        self.baseline, tokenizer = find_parts(self._baseline)
        self.baseline_tokenizer = self.tokenizer if tokenizer is None else tokenizer
        self.target, self.target_tokenizer = find_parts(self._target_engine)

    def _default_settings(self, model: str) -> dict[str, Any]:
        with boundary(EngineError, f"cannot load the tokenizer of {model}"):
            is_local = check_tokenizer_source(model, "model")
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False, local_files_only=is_local)
        return {} if tokenizer.chat_template else {"chat_template": PLAIN_TEMPLATE}


class HFEvaluationSystem(HFASTSystem):
    """A tester from a checkpoint, for evaluation.

    Example:
        system = HFEvaluationSystem("checkpoints/best", None, "path/to/target", scorer=KeywordScorer("zorp"))
        ASTEvaluator(ASTSampler(system, openings), seeds=openings).evaluate()

    Differs from astra-rl: a checkpoint that cannot be loaded is an error; no other model takes its place.

    Args:
        tester_checkpoint: Folder of a checkpoint, or a hub id.
        tester_base_model_id: The model that the tester started from, used as the baseline; None: the checkpoint itself.
        baseline_model_id: A baseline other than `tester_base_model_id`.
        settings: Other arguments of `HFASTSystem`.
    """

    def __init__(
        self,
        tester_checkpoint: str | Path,
        tester_base_model_id: str | Path | None,
        target_model_id: str | Path,
        device: str = "cpu",
        scorer: Scorer[str, str] | None = None,
        baseline_model_id: str | Path | None = None,
        **settings: Any,
    ):
        baseline = baseline_model_id or tester_base_model_id
        super().__init__(tester_checkpoint, target_model_id, baseline, scorer, device, **settings)


class HFASTConfiguration(TrainingConfiguration):
    """Settings for pretrained models: a low learning rate and small batches."""

    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate.")
    batch_size: int = Field(default=4, ge=1, description="Steps of the algorithm per batch.")
    training_steps: int = Field(default=1000, ge=1, description="Experiences to collect and train on.")
    num_episodes_per_experience: int = Field(default=2, ge=1, description="Rollouts per experience.")


class HFASTTrainer(Trainer[str, str, Any, Any]):
    """Evaluates on openings every `eval_every` experiences; writes the best and the last tester to `ckpt_dir`.

    Example:
        trainer = HFASTTrainer(config, sampler, DPO(system), dev_prompts=openings, eval_every=10, ckpt_dir="testers")
        trainer.train()  # testers/best and testers/last load with from_pretrained

    Args:
        config: The settings; its `eval_every` is ignored.
        environment: Its system may be your own: testers are written with `system.save(folder)` if it has that method,
            else with `system.tester.save_pretrained`, else as `parameters.safetensors`.
        dev_prompts: Openings to evaluate on; None: no evaluation.
        show_progress: Log a line after each experience.
    """

    def __init__(
        self,
        config: TrainingConfiguration,
        environment: ASTSampler,
        algorithm: Algorithm[str, str, Any, Any],
        *,
        dev_prompts: Sequence[str] | None = None,
        eval_every: int = 200,
        ckpt_dir: str | Path = "checkpoints",
        use_wandb: bool = False,
        show_progress: bool = False,
    ):
        self.dev_prompts, self.eval_every = list(dev_prompts or []), max(1, int(eval_every))
        self.ckpt_dir, self.show_progress = Path(ckpt_dir), show_progress
        self.best_score: float | None = None
        self.sampler = environment
        if not hasattr(environment.system, "save") and _find_module(environment.system) is None:
            logger.warning(
                "%s has neither save(folder) nor a tester with save_pretrained: testers are written as %s, which "
                "system.read loads; add one of the two to write them in another format",
                type(environment.system).__name__,
                WEIGHTS_FILE,
            )
        settings = config.model_copy(update={"eval_every": None})
        super().__init__(settings, environment, algorithm, use_wandb=use_wandb)

    def train(self) -> None:
        """Trains, evaluates, and saves the last tester; if training is interrupted or fails, the one it has by then."""
        try:
            super().train()
        except BaseException:
            if self._scheduled_optimizer.num_steps:
                self._save_what_was_trained()
            raise
        self.save(self._state.experience, "last")

    def _save_what_was_trained(self) -> None:
        try:
            folder = self.save(self._state.experience, "last")
        except ReinforgeError as cause:  # the reason why training stopped is the one to raise
            logger.error("training stopped, and the tester could not be saved: %s", cause)
        else:
            logger.warning("training stopped; the tester trained so far is in %s", folder)

    def _after_experience(self) -> None:
        super()._after_experience()
        done = self._state.experience
        if self.show_progress:
            logger.warning("experience %d of %d", done, self.config.training_steps)
        if done % self.eval_every == 0:
            self.eval_epoch(done)

    def save(self, step: int | None, tag: Literal["best", "last", "step"] | str = "step") -> Path:
        """Writes the tester for `from_pretrained` and returns its folder, which is complete or does not exist."""
        folder, system = self.ckpt_dir / (tag if tag in ("best", "last") else f"{tag}-{step}"), self.system
        if hasattr(system, "save"):
            with storage_boundary(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
            system.save(folder)
            return folder

        def fill(staged: Path) -> None:
            if (module := _find_module(system)) is None:
                system.write(staged, self._scheduled_optimizer)
                return
            module.save_pretrained(staged)
            if (tokenizer := _find_saveable(system, TOKENIZERS)) is not None:
                tokenizer.save_pretrained(staged)

        write_system(system, folder, fill)
        return folder

    def eval_epoch(self, step: int, tag: str = "dev") -> float | None:
        """Returns the mean reward of the last turns over the openings, and saves the tester if it is the best so far.

        An empty probe has no perplexity that its reward could be reduced by. A conversation that ends with one counts
        as the worst of the others, and at most 0, so silence never raises the score.

        Example: rewards -0.2 and 0.1, and one that ends with an empty probe: (-0.2 + 0.1 - 0.2) / 3 = -0.1.

        Returns:
            None if there are no openings, or no conversation ends with a probe that is not empty.
        """
        if not self.dev_prompts:
            return None
        graphs = self.sampler.eval_rollouts(self.dev_prompts)
        silent = [any(not path[-1].probe for path in graph.paths()) for graph in graphs]
        ended = [graph for graph, is_silent in zip(graphs, silent, strict=True) if not is_silent]
        rewards = [reward for graph in ended if (reward := self.sampler.final_reward(graph)) is not None]
        rewards += [min(0.0, *rewards)] * sum(silent) if rewards else []
        score = statistics.fmean(rewards) if rewards else None
        row = {"experience": step, f"{tag}_score": score, f"training/{tag}_score": score}
        self._record({**row, f"{tag}_empty_probes": sum(silent)})
        if score is not None and (self.best_score is None or score > self.best_score):
            self.best_score = score
            self.save(step, "best")
        return score


def _find_module(system: System[Any, Any]) -> Any:
    return _find_saveable(system, ("tester", "auditor"))


def _find_saveable(system: System[Any, Any], names: Sequence[str]) -> Any:
    named = (getattr(system, name, None) for name in names)
    return next((found for found in named if hasattr(found, "save_pretrained")), None)
