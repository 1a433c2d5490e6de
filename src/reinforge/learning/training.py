"""Trainings on the chats of a store: `reinforge learn run`, and the server that starts it by `train.when`.

    rated chats that no version was trained on >= 200  =>  rows, a run of `reinforge finetune`, a candidate if promoted

The chats are recorded as trained before the run starts, so that a process that is killed at any point trains nothing
twice. The clock alone starts nothing: only ratings do, and people.

Which users are held out is the same in all trainings of a store: no version was trained on those of its gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from reinforge.config.finetuning_blocks import Block
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError, Problem, StorageError, describe_error
from reinforge.evaluation.datasets import FileDataset, choose_format
from reinforge.files import PRIVATE_FILE, open_private
from reinforge.learning.export import ChatSelection, count_new, export_rows
from reinforge.learning.judge import ChatJudgeConfig
from reinforge.learning.store import STORE, find_person, read_last_start
from reinforge.rollout.isolation.processes import describe_exit
from reinforge.routing.live_comparison import LiveTest
from reinforge.runs.run_folder import check_run_name
from reinforge.serving.recording import RecordConfig, read_blocks
from reinforge.serving.routes import ApiError
from reinforge.serving.version_folder import DEFAULT_SHARE, Cause, VersionFolder, VersionState
from reinforge.trainer.setup.fixed_splits import read_shares

if TYPE_CHECKING:
    from reinforge.runs.summary import RunSummary

logger = logging.getLogger(__name__)
ROWS, LOG, LOCK = "training.jsonl", "training.log", "training.lock"
CHECK_S = 10.0  # seconds between two times at which the server counts ratings
STOP_S = 20.0  # seconds that a training has to end when the server stops
LOCK_S = 1.0  # seconds for which a training waits for the lock, which a server holds for a moment to look
PREFERENCES = ("dpo", "ipo", "orpo", "simpo")
BY = "reinforge learn run"


class WhenConfig(Block):
    """When the server starts a training; each condition must hold."""

    rated: int = Field(ge=1, description="Rated chats that the algorithm can use and that no version was trained on.")
    every: str = Field(
        default="0m", pattern=r"^\d{1,6}[mhd]$", description="Least time since the last training began: 90m, 24h, 7d."
    )

    @property
    def every_s(self) -> float:
        return int(self.every[:-1]) * {"m": 60.0, "h": 3600.0, "d": 86400.0}[self.every[-1]]


class RegressionConfig(Block):
    """Examples that a new version must not be worse on."""

    file: Path = Field(description="Rows like those of the dataset; relative to this file.")
    margin: float = Field(default=0.02, gt=0, description="The interval of the change must be above minus this.")


class TrainConfig(Block):
    """How `reinforge learn run` trains the promoted version."""

    config: Path = Field(description="File of `reinforge finetune`; its model and dataset are replaced.")
    when: WhenConfig | None = Field(default=None, description="Null: only people start trainings.")
    share: float = Field(default=DEFAULT_SHARE, gt=0, le=1, description="Of the conversations, for the candidate.")
    replay: float = Field(
        default=1.0, ge=0, le=1, description="Share of the users whose chats are trained on again, of those before."
    )
    since: datetime | None = Field(
        default=None, description="Chats from before are not trained on: set it when users or the product change. UTC."
    )
    judged: bool = Field(default=True, description="Also train on chats that only `judge:` has rated.")
    regression: RegressionConfig | None = Field(
        default=None,
        description="Examples that you choose, on which a model must not be worse than the served version.",
    )

    @property
    def since_s(self) -> float:
        if self.since is None:
            return 0.0
        return (self.since if self.since.tzinfo else self.since.replace(tzinfo=UTC)).timestamp()

    def count_new(self, database: Path) -> int:
        return count_new(database, self.find_use(), judged=self.judged, since_s=self.since_s)

    def find_use(self) -> str:
        """Returns the rows that the algorithm of the file trains on: all, sft, kto or dpo."""
        algorithm = getattr(load_config(self.config).config.finetuning.algorithm, "static_type", "")
        return "dpo" if algorithm in PREFERENCES else algorithm if algorithm in ("kto", "sft") else "all"

    def list_overrides(self) -> list[tuple[str, str]]:
        """Returns what replaces settings of the file: how users are held out, and the regression set."""
        splits = {"fixed": "true", "key": "null", "group_key": "conversation"}
        overrides = [(f"finetuning.splits.{name}", value) for name, value in splits.items()]
        if self.regression is not None:
            overrides.append(("finetuning.gate.regression", json.dumps(str(self.regression.file))))
            overrides.append(("finetuning.gate.regression_margin", str(self.regression.margin)))
        return overrides


BLOCKS: dict[str, type[BaseModel]] = {
    "record": RecordConfig,
    "compare": LiveTest,
    "train": TrainConfig,
    "judge": ChatJudgeConfig,
}


def read_train_config(file: Path) -> TrainConfig:
    """Returns the `train:` block of a `learn.yml`, with the path of its file."""
    config: TrainConfig | None = read_blocks(file, **BLOCKS).get("train")
    if config is None:
        fix = "add one with `config: run.yml`, a file of `reinforge finetune`"
        raise ConfigError(Problem("train", f"{file} has no `train:` block", fix))
    path = file.absolute().parent / config.config.expanduser()
    if not path.is_file():
        fix = "make one: reinforge init NAME --template logs"
        raise ConfigError(Problem("train.config", f"{path} does not exist", fix, str(file)))
    config = config.model_copy(update={"config": path})
    if (pinned := config.regression) is not None:
        pinned = pinned.model_copy(update={"file": file.absolute().parent / pinned.file.expanduser()})
        config = config.model_copy(update={"regression": pinned})
    loaded = load_config(path, overrides=config.list_overrides())
    try:
        read_shares(loaded.config.finetuning.splits)
    except ConfigError as error:
        raise ConfigError([replace(each, location=loaded.locate(each.path)) for each in error.problems]) from None
    if pinned is not None:
        _check_regression(pinned.file, loaded.config.eval.general.dataset, file)
    return config


def _check_regression(pinned: Path, like: Any, file: Path) -> None:
    """Raises a `ConfigError` with the lines of a regression set that the run could not read."""
    if not pinned.is_file():
        fix = "write rows like those of the dataset into it, such as some of `reinforge learn export`"
        raise ConfigError(Problem("train.regression.file", f"{pinned} does not exist", fix, str(file)))
    columns = {name: getattr(like, name) for name in ("id_key", "question_key", "answer_key") if hasattr(like, name)}
    try:
        FileDataset(choose_format(pinned)(file_path=pinned, **columns), pinned.parent).load()
    except ConfigError as error:
        fix = "correct the file: its rows are like those of the dataset"
        raise ConfigError([replace(each, fix=each.fix or fix) for each in error.problems]) from None


@dataclass(frozen=True, slots=True)
class Training:
    """One training of a version of a folder."""

    share: float  # of the conversations, for its model
    folder: VersionFolder
    seen: VersionState  # when it began
    base: int  # the version that is trained
    run_name: str
    rows: Path  # the dataset
    data: str  # and what it is
    overrides: list[tuple[str, str]]  # of the file of the run

    @property
    def model(self) -> Path:
        return self.folder.path(self.base)

    def add_candidate(self, summary: RunSummary) -> list[str]:
        """Adds the model of a run that was promoted as the next version; returns what to print."""
        from reinforge.serving.versions_command import add_model

        name = self.folder.name
        if not summary.promoted or summary.improvement is None:
            return [f"There is no new version of {name}, since the model was not promoted."]
        evidence = {"run": str(summary.folder.absolute()), "improvement": asdict(summary.improvement)}
        cause = Cause(summary.reason, BY, evidence)
        number = add_model(self.folder, str(summary.folder), summary.folder.parent, {"data": self.data}, cause)
        if not Cause(seen=self.seen).holds(self.folder.read()):
            return [f"Version {number} of {name} is added, and gets no share: what is served changed meanwhile."]
        self.folder.try_candidate(number, self.share, cause)
        return [f"Version {number} of {name} is the candidate, for {self.share:.0%} of the conversations."]


@contextlib.contextmanager
def open_training(
    config: TrainConfig, data_dir: Path, folder: VersionFolder, *, rated: int = 0, without: str | None = None
) -> Iterator[Training]:
    """Yields a training with its rows, which are deleted after it.

    Args:
        rated: Rated chats that must be new, as the server saw them before another training may have begun.
        without: A user, as requests name it, whose chats neither the rows nor the version to begin with may have.
    """
    import filelock

    database, use, run_name = data_dir / STORE, config.find_use(), f"{folder.name}-{secrets.token_hex(4)}"
    check_run_name(run_name, "NAME")
    if not database.is_file():
        raise ConfigError(Problem("--data_dir", f"{data_dir} has no {STORE}", "pass the one of the server"))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(filelock.FileLock(data_dir / LOCK, timeout=LOCK_S, mode=PRIVATE_FILE))
        except filelock.Timeout:
            raise StorageError(f"another training on the chats in {data_dir} runs already; wait for it") from None
        seen = folder.read()
        if seen.candidate is not None:
            message = f"version {seen.candidate} of {folder.name} is the candidate, and is compared with what is served"
            fix = f"promote it, or stop it: reinforge versions {folder.folder} --stop_candidate"
            raise ConfigError(Problem("NAME", message, fix))
        rows, num_new = data_dir.absolute() / ROWS, config.count_new(database)
        if num_new < rated:
            raise ConfigError(Problem("--rated", f"{num_new} rated chats are new, fewer than {rated}", "wait for more"))
        choice = ChatSelection(config.replay, judged=config.judged, since_s=config.since_s)
        base, data = seen.promoted, ""
        if without is not None:
            conversations, versions = find_person(database, without)
            base, data = _find_base(folder, seen, versions), ", without one user"
            choice = replace(choice, replay=1.0, without=conversations)
        stack.callback(rows.unlink, missing_ok=True)
        report = export_rows(database, rows, use, run_name, replace(choice, base=name_version(folder, base)))
        data = f"{report.num_rows:,} rows of rated chats, {num_new:,} of them new{data}"
        yield Training(config.share, folder, seen, base, run_name, rows, data, config.list_overrides())


def _find_base(folder: VersionFolder, seen: VersionState, trained: set[str]) -> int:
    """Returns the newest version that once was promoted, and is not one of those that were trained on a person."""
    promoted = {each.previous for each in folder.read_log()} | {seen.promoted}
    for number in reversed(folder.numbers()):
        if number in promoted and not {name_version(folder, number), f"{folder.name}@{number}"} & trained:
            return number
    message = f"every version of {folder.name} that was promoted is trained on chats of this user"
    fix = f"promote a model that is not: reinforge versions {folder.folder} --add MODEL"
    raise ConfigError(Problem("--retrain_without", message, fix))


def name_version(folder: VersionFolder, number: int) -> str:
    """Returns what the store calls a version: the name of its run, else `support@2`."""
    run = folder.read_version(number).run
    return Path(run).name if run else f"{folder.name}@{number}"


def is_training(data_dir: Path) -> bool:
    """Returns whether a process trains on the chats of a folder: that of this server, or another one."""
    import filelock

    try:
        with filelock.FileLock(data_dir / LOCK, timeout=0, mode=PRIVATE_FILE):
            return False
    except filelock.Timeout:
        return True


class TrainingStarter:
    """Starts `reinforge learn run` in a process of its own, when `train.when` says or somebody asks; one at a time."""

    def __init__(self, file: Path, data_dir: Path, folder: VersionFolder):
        self._file, self._changed_ns, self._config = file, file.stat().st_mtime_ns, read_train_config(file)
        self._data_dir, self._folder = data_dir, folder
        named = (str(folder.folder), "--learn", str(file.absolute()), "--data_dir", str(data_dir))
        self._command = (sys.executable, "-m", "reinforge", "learn", "run", *named)
        self._num_failed = 0  # new ratings with which a training failed: the next one needs so many more
        self._log, self._lock = data_dir / LOG, asyncio.Lock()
        self._training: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            while True:
                try:
                    if await asyncio.to_thread(self.is_due) and (when := self._config.when) is not None:
                        await self.start("--rated", str(when.rated))
                except Exception as error:  # noqa: BLE001  whatever keeps a training from starting, the server serves
                    logger.error("no training is started: %s", describe_error(error))
                await asyncio.sleep(CHECK_S)
        finally:
            if self._training is not None:
                self._training.cancel()
                await asyncio.gather(self._training, return_exceptions=True)

    def is_due(self) -> bool:
        if (changed_ns := self._file.stat().st_mtime_ns) != self._changed_ns:
            self._changed_ns = changed_ns  # a file with an error is reported once, and the one before holds
            self._config = read_train_config(self._file)
        when = self._config.when
        if when is None or self.find_obstacle():  # first: a training that ends changes what is counted below
            return False
        if self._count() < self._num_failed + when.rated:
            return False
        begun_s = read_last_start(self._data_dir / STORE)
        return begun_s is None or not 0 <= time.time() - begun_s < when.every_s  # in the future: a wrong clock

    def find_obstacle(self) -> str:
        """Returns what keeps a training from starting now, such as another one; empty: nothing does."""
        if (candidate := self._folder.read().candidate) is not None:
            return f"version {candidate} of {self._folder.name} is the candidate, and is compared with what is served"
        if self._training is not None or is_training(self._data_dir):
            return f"a training of {self._folder.name} runs already, see {self._log}"
        return ""

    async def start(self, *options: str) -> int:
        """Starts a training, and returns its process id once it runs.

        Raises:
            ApiError: Another one runs, or a candidate is compared.
        """
        async with self._lock:
            if obstacle := await asyncio.to_thread(self.find_obstacle):
                raise ApiError(409, f"{obstacle}; nothing was started", code="training_not_started")
            with open(self._log, "wb", opener=open_private) as output:
                streams: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stdout": output, "stderr": output}
                command = (*self._command, *options)
                process = await asyncio.create_subprocess_exec(*command, **streams, start_new_session=True)
            logger.warning("%s is trained on its chats: process %d, see %s", self._folder.name, process.pid, self._log)
            self._training = asyncio.create_task(self._follow(process))
            return process.pid

    def describe(self, pid: int) -> dict[str, Any]:
        return {"object": "learn.run", "model": self._folder.name, "process": pid, "log": str(self._log)}

    def _count(self) -> int:
        return self._config.count_new(self._data_dir / STORE)

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Says how a training has ended; if this is canceled, ends it."""
        try:
            code = await process.wait()
            with contextlib.suppress(StorageError):  # the next look at the store says it
                self._num_failed = await asyncio.to_thread(self._count) if code else 0
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
            raise
        finally:
            self._training = None
        name, said = self._folder.name, self._log.read_text(encoding="utf-8", errors="replace")
        if code:
            when = self._config.when
            more = f"; the next one starts after {when.rated} more ratings" if when else ""
            logger.error("the training of %s %s, see %s%s", name, describe_exit(code), self._log, more)
        else:
            logger.warning("the training of %s has ended: %s", name, said.rstrip().rpartition("\n")[2])
