"""Starters: the small Llama models of the bundled tasks, trained on first use by one supervised job.

    register_starter(ShopStarterConfig, ClerkRecipe(), make_tokenizer, generate_careless_clerks)    # bundled:shop

`ensure_built` returns a starter's folder in Hugging Face layout. It is cached under `home()` by the hash of the
`Recipe`, so another recipe is another model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reinforge.config.policy import BatchConfig, OptimizerConfig, PolicyConfig, ScheduleConfig
from reinforge.engine.packages import check_packages
from reinforge.errors import ConfigError
from reinforge.files import home
from reinforge.interfaces import Builder
from reinforge.registry import TypedConfig, register_model
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.types.request import Message, ModelRequest, TokenLogprobs
from reinforge.types.sample import TrainingSample
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from reinforge.algorithms.sft import SFT
    from reinforge.engine import Engine

PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

logger = logging.getLogger(__name__)

STEPS_PER_UPDATE = 25  # optimizer steps whose samples are built at once


@dataclass(frozen=True, slots=True)
class Recipe:
    """What determines a starter's weights, besides the task's tokenizer and episodes."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 8
    max_model_len: int = 128  # longest sequence in tokens (`max_position_embeddings`)
    initializer_range: float = 0.08
    """Standard deviation of the initial weights, about 1 / sqrt(hidden_size): with a smaller one, tokens with nearly
    the same role in the supervised job keep nearly the same embedding."""
    num_steps: int = 600
    batch_size: int = 64
    learning_rate: float = 2e-3  # of the supervised job; it follows a cosine
    seed: int = 0  # seed of the weights and the episodes
    version: int = 1  # incremented when the code changes the meaning of the other values

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


RecipeT = TypeVar("RecipeT", bound=Recipe)
MakeTokenizer = Callable[[], Any]
Episodes = Callable[[RecipeT, Any], Iterator[Trajectory]]
"""Yields the episodes to imitate, endlessly, given the recipe and the tokenizer."""


def register_starter(
    config_type: type[TypedConfig], recipe: RecipeT, make_tokenizer: MakeTokenizer, episodes: Episodes[RecipeT]
) -> None:
    """Registers a starter under its configuration's name; it is trained on first use."""

    async def starter(config: Any, builder: Builder) -> AsyncIterator[Path]:
        name, progress = str(config_type.static_type), getattr(builder, "progress", SilentProgress())
        yield await asyncio.to_thread(ensure_built, name, recipe, make_tokenizer, episodes, progress)

    starter.__module__, starter.__qualname__ = episodes.__module__, episodes.__qualname__
    register_model(config_type=config_type)(starter)


def find_folder(name: str, recipe: Recipe) -> Path:
    return home() / "models" / f"{name}-{recipe.sha256[:12]}"


def ensure_built(
    name: str,
    recipe: RecipeT,
    make_tokenizer: MakeTokenizer,
    episodes: Episodes[RecipeT],
    progress: RunProgress | None = None,
) -> Path:
    """Returns a starter's folder, after training the starter if the folder does not exist.

    If several processes call it at once, one trains the starter and the others wait.

    Raises:
        ConfigError: The starter does not exist yet, and the packages that train it are not installed.
    """
    from filelock import FileLock

    folder = find_folder(name, recipe)
    if folder.is_dir():
        return folder
    if problems := check_packages():
        raise ConfigError(problems)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            logger.warning("creating the bundled model %s (once; it takes about a minute)", name)
            unfinished = folder.with_name(f"{folder.name}.making")
            shutil.rmtree(unfinished, ignore_errors=True)
            _build_starter(unfinished, recipe, make_tokenizer, episodes, progress or SilentProgress())
            (unfinished / "trained").rename(folder)
            shutil.rmtree(unfinished)
    return folder


def make_bpe_tokenizer(texts: Iterable[str], words: str, vocab_size: int = 1000) -> Any:
    """Returns a byte-level BPE tokenizer that can encode any text, and the task's texts in few tokens.

    Args:
        texts: Training texts; a word becomes one token if it occurs twice and the vocabulary has room.
        words: Regular expression for the pieces that text is split into; no token spans two pieces.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(words), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def supervised_episode(
    tokenizer: Any, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
) -> Trajectory:
    """Returns a conversation whose assistant turns are supervised; supervised data needs no log-probs."""
    from reinforge.engine.prompts.chat_template import PromptRenderer

    renderer, turns = PromptRenderer(tokenizer), []
    for index, message in enumerate(messages):
        tokens = None
        if message["role"] == "assistant":
            request = ModelRequest(list(messages[:index]), tools=tools)
            prompt, answer = renderer.encode(request, message, [tokenizer.eos_token_id])
            tokens = TokenLogprobs(prompt, answer, (0.0,) * len(answer))
        role, content = EpisodeItemRole(message["role"]), message["content"] or ""
        turns.append(EpisodeItem(role=role, content=content, logprobs=tokens))
    return Trajectory(episode=turns, reward=1.0)


def _build_starter(
    folder: Path, recipe: RecipeT, make_tokenizer: MakeTokenizer, episodes: Episodes[RecipeT], progress: RunProgress
) -> None:
    from reinforge.engine import Engine
    from reinforge.engine.checkpoint import TRAINING

    blank = folder / "blank"
    write_blank_model(blank, recipe, make_tokenizer())
    policy = PolicyConfig(
        model=str(blank),
        init="random",
        optimizer=OptimizerConfig(learning_rate=recipe.learning_rate),
        schedule=ScheduleConfig(name="cosine", warmup_steps=30, final_fraction=0.05),
        batch=BatchConfig(batch_size=recipe.batch_size, micro_batch_tokens=4096),
    )
    with Engine.load(policy, seed=recipe.seed, device="cpu") as engine:
        _train(engine, recipe, episodes(recipe, engine.tokenizer), progress)
        engine.save(folder / "trained", version=0)
    shutil.rmtree(folder / "trained" / TRAINING)  # a plain model: no run resumes this job


def write_blank_model(folder: Path, recipe: Recipe, tokenizer: Any) -> None:
    """Writes a model without weights: a tokenizer and a configuration, for `finetuning.policy.init: random`."""
    from transformers import LlamaConfig

    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=recipe.max_model_len,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(folder)


def _train(engine: Engine, recipe: Recipe, episodes: Iterator[Trajectory], progress: RunProgress) -> None:
    from reinforge.algorithms.sft import SFT  # a cached model needs none

    algorithm = SFT()
    progress.stage(None, "MAKE MODEL", None)
    engine.begin_job()
    for done in range(0, recipe.num_steps, STEPS_PER_UPDATE):
        num_steps = min(STEPS_PER_UPDATE, recipe.num_steps - done)
        engine.update(
            _build_samples(algorithm, [next(episodes) for _ in range(num_steps * recipe.batch_size)]),
            algorithm.loss,
            progress_start=done / recipe.num_steps,
            progress_end=(done + num_steps) / recipe.num_steps,
            epoch=done,
        )
        progress.advance((done + num_steps) / recipe.num_steps)
    engine.end_job()


def _build_samples(algorithm: SFT, episodes: list[Trajectory]) -> list[TrainingSample]:
    group = TrajectoryGroup.model_construct(group_id="starter", trajectories=episodes)
    samples = algorithm.build_samples([group])
    for sample, advantages in zip(samples, algorithm.credit(samples), strict=True):
        sample.advantages = advantages
    return samples
