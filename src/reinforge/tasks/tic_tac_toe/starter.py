"""The starter: a small Llama that has only seen uniformly random legal moves, made on first use.

`ensure_starter()` returns its folder, in Hugging Face's layout. It knows which squares are empty and nothing of the
aim of the game: positions come from random play, the move to imitate is drawn uniformly from the legal ones.
The folder is cached below `home()` under the hash of `Recipe`, so that another recipe is another model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from reinforge.algorithms.sft import SFT
from reinforge.config.schema import BatchConfig, OptimizerConfig, PolicyConfig, ScheduleConfig
from reinforge.tasks.tic_tac_toe.game import legal_moves, prompt_for, random_position, to_move
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import TrainingSample
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from reinforge.engine import Engine

PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Progress = Callable[[int, int, float], None]
"""Called with steps done, steps in all, and the loss."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the starter's weights; measured in docs/lab-notes.md.

    Attributes:
        hidden_size, intermediate_size, num_layers, num_heads: Shape of the Llama.
        initializer_range: Standard deviation of the drawn weights; about 1 / sqrt(hidden_size), without which X and O
            stay as good as the same word for a model that needs only to know that a square is taken.
        num_steps, batch_size, learning_rate: Of the supervised job; the rate falls by a cosine.
        seed: Of weights and positions.
        version: Raised when the code here changes what the other values mean.
    """

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 8
    initializer_range: float = 0.08
    num_steps: int = 600
    batch_size: int = 64
    learning_rate: float = 2e-3
    seed: int = 0
    version: int = 1

    @property
    def sha256(self) -> str:
        """Hash of every value."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def home() -> Path:
    """Returns the folder of what reinforge caches: `$REINFORGE_HOME`, or the user's cache folder."""
    return Path(os.environ.get("REINFORGE_HOME") or platformdirs.user_cache_dir("reinforge"))


def ensure_starter(progress: Progress | None = None, recipe: Recipe | None = None) -> Path:
    """Returns the starter's folder; makes it if it is not there, which takes half a minute on two cores.

    Any number of processes may ask at once: one makes it, the others wait.

    Args:
        progress: Told how far the supervised job is.
        recipe: Another recipe, for tests.
    """
    from filelock import FileLock

    recipe = recipe or Recipe()
    folder = home() / "models" / f"tic_tac_toe-{recipe.sha256[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            unfinished = folder.with_name(f"{folder.name}.making")
            shutil.rmtree(unfinished, ignore_errors=True)
            _make(unfinished, recipe, progress)
            (unfinished / "trained").rename(folder)
            shutil.rmtree(unfinished)
    return folder


def make_tokenizer() -> Any:
    """Returns a byte-level BPE tokenizer that makes each square of a board one token and can encode any text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?\S+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    squares = [f" {sign}{number}" for sign in ("", "+", "-") for number in range(1, 10)]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["Play +:" + "".join(squares)] * 2, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_moves(recipe: Recipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields one-move episodes without end: a position of random play, answered by a uniformly random legal move."""
    rng = stable_random(recipe.seed, "starter")
    end = tokenizer.convert_tokens_to_ids(END)
    answers = [tokenizer.encode(f" {square}", add_special_tokens=False) for square in range(1, 10)]
    prompts: dict[str, tuple[int, ...]] = {}
    while True:
        board = random_position(rng)
        text = prompt_for(board, to_move(board))
        if text not in prompts:
            prompts[text] = _prompt_ids(tokenizer, text)
        square = rng.choice(legal_moves(board))
        yield _episode(prompts[text], text, f" {square + 1}", (*answers[square], end))


def _prompt_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer.encode(rendered, add_special_tokens=False))


def _episode(prompt: tuple[int, ...], question: str, answer: str, answer_ids: tuple[int, ...]) -> Trajectory:
    """Returns an episode whose answer is supervised: its log-probs are not known and not needed."""
    tokens = TokenLogprobs(prompt, answer_ids, (0.0,) * len(answer_ids))
    turns = [
        EpisodeItem(role=EpisodeItemRole.USER, content=question),
        EpisodeItem(role=EpisodeItemRole.ASSISTANT, content=answer, logprobs=tokens),
    ]
    return Trajectory(episode=turns, reward=1.0)


def _make(folder: Path, recipe: Recipe, progress: Progress | None) -> None:
    """Trains the starter into `folder / "trained"`."""
    from reinforge.engine import Engine
    from reinforge.engine.checkpoint import TRAINING

    tokenizer = make_tokenizer()
    blank = folder / "blank"
    tokenizer.save_pretrained(blank)
    _model_config(recipe, tokenizer).save_pretrained(blank)
    policy = PolicyConfig(
        model=str(blank),
        init="random",
        optimizer=OptimizerConfig(learning_rate=recipe.learning_rate),
        schedule=ScheduleConfig(name="cosine", warmup_steps=30, final_fraction=0.05),
        batch=BatchConfig(batch_size=recipe.batch_size),
    )
    with Engine.load(policy, seed=recipe.seed, device="cpu") as engine:
        _train(engine, recipe, progress)
        engine.save(folder / "trained", version=0)
    shutil.rmtree(folder / "trained" / TRAINING)  # a plain model: no run continues this job


def _model_config(recipe: Recipe, tokenizer: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=128,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _train(engine: Engine, recipe: Recipe, progress: Progress | None, steps_per_update: int = 25) -> None:
    """One supervised job, its samples made a few steps ahead."""
    algorithm, moves = SFT(), random_moves(recipe, engine.tokenizer)
    engine.begin_job()
    for done in range(0, recipe.num_steps, steps_per_update):
        num_steps = min(steps_per_update, recipe.num_steps - done)
        samples = _samples(algorithm, [next(moves) for _ in range(num_steps * recipe.batch_size)])
        report = engine.update(
            samples,
            algorithm.loss,
            progress_start=done / recipe.num_steps,
            progress_end=(done + num_steps) / recipe.num_steps,
            epoch=done,
        )
        if progress is not None:
            progress(done + num_steps, recipe.num_steps, report.metrics["loss"])
    engine.end_job()


def _samples(algorithm: SFT, episodes: list[Trajectory]) -> list[TrainingSample]:
    """Returns the job's samples with their credit, as an adapter would make them."""
    group = TrajectoryGroup.model_construct(group_id="random-moves", trajectories=episodes)
    samples = algorithm.build_samples([group])
    for sample, advantages in zip(samples, algorithm.credit(samples), strict=True):
        sample.advantages = advantages
    return samples
