"""The procedural tasks of reasoning-gym: `environment: reasoning_gym:spell_backward`, or several, `a+b`.

The package's own `__init__` imports every dataset, and with them packages that one dataset needs; here only the module
of a dataset that is named is imported.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from reinforge.config.schema import Block, EnvironmentConfig
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.interfaces import Environment, EnvironmentSource
from reinforge.registry import register_environment
from reinforge.types.environment import Observation, Reply, StepResult
from reinforge.types.evaluation import EvalInputItem

PACKAGE = "reasoning_gym"
MAX_DRAWS = 4  # tasks that are drawn for each one that is wanted, since some repeat
NAME = re.compile(r"^DATASET_NAME = [\"'](\w+)[\"']|^register_dataset\([\"'](\w+)[\"']", re.MULTILINE)
ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
EXAMPLES = ("example_answer", "possible_answer", "example_correct_answer")
LABEL = re.compile(r"^.*\banswer(?: is)?\s*:?\s*", re.IGNORECASE)


class TaskSettings(Block):
    """One of several kinds of tasks."""

    weight: float = Field(default=1.0, gt=0, description="Share of the tasks, relative to the other kinds.")
    config: dict[str, Any] = Field(default={}, description="Settings of the dataset, such as {max_word_len: 5}.")


class ReasoningGymConfig(EnvironmentConfig, name="reasoning_gym"):
    """Procedural tasks with an exact score; needs the package reasoning-gym."""

    install: ClassVar[str] = "pip install --no-deps reasoning-gym"
    license: ClassVar[str] = "Apache-2.0"
    metrics: ClassVar[tuple[str, ...]] = ("solved",)

    @classmethod
    def list_names(cls) -> list[str]:
        return sorted(find_datasets())

    @classmethod
    def build_sections(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return {"finetuning": {"curriculum_learning": {"levels": {}}}} if settings.get("levels") else {}

    name: str = Field(description="A dataset of reasoning-gym, or several joined by +.")
    size: int = Field(default=600, ge=3, description="Number of tasks.")
    seed: int = Field(default=0, ge=0, description="Seed of the tasks.")
    config: dict[str, Any] = Field(default={}, description="Settings of every dataset, such as {max_word_len: 5}.")
    levels: int | None = Field(
        default=None,
        ge=1,
        description="Levels of difficulty, from the easiest, as the package has them, with equal shares of the tasks; "
        "training begins with level 0 (`finetuning.curriculum_learning.levels`). Null: the settings alone.",
    )
    transfer: list[str] = Field(
        default=[], description="Datasets that are measured before and after, and never trained."
    )
    transfer_size: int = Field(default=100, ge=2, description="Tasks of each of them.")
    tasks: dict[str, TaskSettings] = Field(default={}, description="Weight and settings of single datasets.")
    prompt: str = Field(
        default="{question}\n\nAnswer with the final answer alone.",
        description="What the policy is shown, with `{question}`.",
    )
    answer: Literal["auto", "reply", "tag", "last_line", "last_number"] = Field(
        default="auto",
        description="What counts as the answer; `auto`: what stands in <answer> tags, else the last number where the "
        "right answer is a number, else the last line, without `Answer:`.",
    )


@register_environment(config_type=ReasoningGymConfig)
class ReasoningGym(EnvironmentSource):
    """Rows such as `{"id": "spell_backward-00012", "question": ..., "answer": ..., "task": ..., "index": 12}`."""

    def __init__(self, config: ReasoningGymConfig):
        self.config = config
        names = config.name.split("+")
        if unknown := [name for name in config.tasks if name not in names]:
            raise ConfigError(Problem("tasks", f"{unknown[0]} is not part of the name {config.name}"))
        weights = {name: config.tasks.get(name, TaskSettings()).weight for name in names}
        total = sum(weights.values())
        levels: list[int | None] = [None] if config.levels is None else list(range(config.levels))
        self.sizes: dict[tuple[str, int | None], int] = {
            (name, level): max(1, round(config.size * weight / total / len(levels)))
            for name, weight in weights.items()
            for level in levels
        }
        self.sizes |= {(name, None): config.transfer_size for name in config.transfer}
        self.datasets = {key: self._create(*key) for key in self.sizes}

    def _create(self, name: str, level: int | None) -> Any:
        import_dataset(name)
        given = {**self.config.config, **self.config.tasks.get(name, TaskSettings()).config}
        # seed + index makes a task, so seeds that lie close together would give the same or similar tasks
        given |= {
            "size": self.sizes[name, level] * MAX_DRAWS,
            "seed": self.config.seed * 1_000_003 + 50_021 * (level or 0),
        }
        factory = sys.modules[f"{PACKAGE}.factory"]
        curriculum = None if level is None else _find_curriculum(factory, name, level)
        try:
            if curriculum is not None:
                given = vars(curriculum.generate_configuration(given))
            return factory.create_dataset(name, **given)
        except (TypeError, AssertionError, ValueError) as error:
            where = "its settings" if level is None else f"the settings of level {level}"
            raise ConfigError(Problem("config", f"{name} refuses {where}: {error}")) from None

    def load(self) -> list[EvalInputItem]:
        """Returns the tasks; no question occurs twice, so a dataset with fewer questions has fewer tasks."""
        items, seen = [], set[str]()
        for (name, level), size in self.sizes.items():
            found = 0
            for index in range(size * MAX_DRAWS):
                item = self._build_item(name, level, index)
                if item.input_obj not in seen:
                    seen.add(item.input_obj)
                    items.append(item)
                    found += 1
                if found == size:
                    break
        return items

    def _build_item(self, name: str, level: int | None, index: int) -> EvalInputItem:
        dataset = self.datasets[name, level]
        entry = dataset[index]
        metadata = json.loads(json.dumps(entry["metadata"], default=str))
        row = {
            "id": f"{name}-{index:05}" if level is None else f"{name}-{level}-{index:05}",
            "question": entry["question"],
            "answer": entry["answer"] if entry["answer"] is not None else _find_example(metadata),
            "task": name,
            "index": index,
            "metadata": metadata,
        }
        if level is not None:
            row["level"] = level
        if name in self.config.transfer:
            row["transfer"] = True
        if (templates := getattr(dataset, "task_indices", None)) is not None:
            row["template"] = f"{name}-{templates[index]}"
        return EvalInputItem.from_row(row)

    def create(self) -> ReasoningTask:
        return ReasoningTask(self)


class ReasoningTask(Environment):
    """One question; the score of the answer is the reward."""

    uses_global_random = False

    def __init__(self, source: ReasoningGym):
        self.source = source

    async def reset(self, item: EvalInputItem, seed: int) -> Observation:
        self.row = item.full_dataset_entry
        text = self.source.config.prompt.replace("{question}", self.row["question"])
        return Observation([{"role": "user", "content": text}])

    async def step(self, reply: Reply) -> StepResult:
        dataset = self.source.datasets[self.row["task"], self.row.get("level")]
        entry = dataset[self.row["index"]]
        if entry["question"] != self.row["question"]:
            raise RuntimeError(
                f"{self.row['id']} is not the task that was shown: its dataset depends on more than the seed"
            )
        answer = find_answer(reply.text, str(entry["answer"]), self.source.config.answer)
        reward = _score(dataset, answer, entry)
        return StepResult(reward=reward, done=True, info={"solved": reward >= 1.0})


def _find_example(metadata: dict[str, Any]) -> Any:
    """Returns one of several right answers, as the datasets without a single one name it, or None."""
    return next((metadata[key] for key in EXAMPLES if key in metadata), None)


def _score(dataset: Any, answer: str | None, entry: dict[str, Any]) -> float:
    """Returns the score of an answer: 0 for one that the package's scorer cannot even read.

    Example: that of prime_factorization raises a `ValueError` at "two and three".
    """
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # noqa: BLE001  whatever the scorers raise
        dataset.score_answer(str(entry["answer"]), entry)  # raises, too, unless it is the answer's fault
        return 0.0


def find_answer(text: str, expected: str, kind: str = "auto") -> str | None:
    r"""Returns the answer in a reply, or None where it has none of that kind.

    Example, where a number is expected: "3 + 4 = 7, so 7." -> "7"; else: "Sure!\n\nAnswer: nus." -> "nus".
    """
    tagged = ANSWER.findall(text)
    if kind == "tag" or (kind == "auto" and tagged):
        return tagged[-1] if tagged else None
    if kind == "last_number" or (kind == "auto" and NUMBER.fullmatch(expected)):
        numbers = NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else None
    lines = text.strip().splitlines()
    if kind == "reply" or not lines:
        return text.strip()
    line = LABEL.sub("", lines[-1].strip())
    return line if expected.endswith(".") else line.removesuffix(".")


def _find_curriculum(factory: Any, name: str, level: int) -> Any:
    """Returns the package's curriculum of a dataset, at a level."""
    if not factory.has_curriculum(name):
        raise ConfigError(Problem("levels", f"the dataset {name} of reasoning-gym has no levels"))
    curriculum = factory.create_curriculum(name)
    if level >= (count := max(len(each.levels) for each in curriculum.attributes.values())):
        raise ConfigError(
            Problem("levels", f"the dataset {name} of reasoning-gym has {count} levels", f"use {count} or less")
        )
    curriculum.set_global_level(level)
    return curriculum


def import_dataset(name: str) -> None:
    """Imports the one module that registers a dataset."""
    modules = find_datasets()
    if (module := modules.get(name)) is None:
        message = f'reasoning-gym has no dataset "{name}"{did_you_mean(name, modules)}'
        raise ConfigError(Problem("name", message, "`reinforge environments list reasoning_gym` lists them"))
    folder = _find_package()
    parts = module.split(".")
    for end in range(1, len(parts)):  # the folders above it, without what their `__init__` imports
        above = ".".join(parts[:end])
        if above not in sys.modules:
            sys.modules[above] = package = types.ModuleType(above)
            package.__path__ = [str(folder.parent.joinpath(*parts[:end]))]
    try:
        importlib.import_module(f"{PACKAGE}.coaching")  # first: each imports the factory, which imports it in turn
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = f"the dataset {name} of reasoning-gym needs the package {error.name}"
        raise ConfigError(Problem("name", message, f"pip install {error.name}")) from None


@cache
def find_datasets() -> dict[str, str]:
    """Returns the module of each dataset, by its name, without importing any."""
    folder, found = _find_package(), {}
    for path in sorted(folder.glob("*/**/*.py")):
        module = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        for names in NAME.findall(path.read_text(encoding="utf-8")):
            found[names[0] or names[1]] = module
    return found


def _find_package() -> Path:
    if PACKAGE in sys.modules:
        return Path(sys.modules[PACKAGE].__path__[0])
    return ReasoningGymConfig.find_package(PACKAGE, "reasoning-gym")
