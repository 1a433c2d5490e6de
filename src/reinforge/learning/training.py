"""Trainings on the chats of a store: `reinforge learn run`, and the server that starts it by `train.when`.

    rated chats that no version was trained on >= 200  =>  rows, a run of `reinforge finetune`, a candidate if promoted

The chats are recorded as trained before the run starts, so that a process that is killed at any point trains nothing
twice. The clock starts nothing: only ratings do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from reinforge.config.finetuning_blocks import Block
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError, Problem, StorageError, describe_error
from reinforge.files import PRIVATE_FILE, open_private
from reinforge.learning.export import count_new, export_rows
from reinforge.learning.store import STORE
from reinforge.rollout.isolation.processes import describe_exit
from reinforge.routing.live_comparison import LiveTest
from reinforge.runs.run_folder import check_run_name
from reinforge.serving.recording import RecordConfig, read_blocks
from reinforge.serving.version_folder import DEFAULT_SHARE, Cause, VersionFolder, VersionState

if TYPE_CHECKING:
    from reinforge.runs.summary import RunSummary

logger = logging.getLogger(__name__)
ROWS, LOG, LOCK = "training.jsonl", "training.log", "training.lock"
CHECK_S = 10.0  # seconds between two times at which the server counts ratings
STOP_S = 20.0  # seconds that a training has to end when the server stops
PREFERENCES = ("dpo", "ipo", "orpo", "simpo")
BY = "reinforge learn run"


class WhenConfig(Block):
    """When the server starts a training; each condition must hold."""

    rated: int = Field(ge=1, description="Rated chats that the algorithm can use and that no version was trained on.")


class TrainConfig(Block):
    """How `reinforge learn run` trains the promoted version."""

    config: Path = Field(description="File of `reinforge finetune`; its model and dataset are replaced.")
    when: WhenConfig | None = Field(default=None, description="Null: only people start trainings.")
    share: float = Field(default=DEFAULT_SHARE, gt=0, le=1, description="Of the conversations, for the candidate.")
    replay: float = Field(
        default=1.0, ge=0, le=1, description="Share of the users whose chats are trained on again, of those before."
    )

    def find_use(self) -> str:
        """Returns the rows that the algorithm of the file trains on: all, sft, kto or dpo."""
        algorithm = getattr(load_config(self.config).config.finetuning.algorithm, "static_type", "")
        return "dpo" if algorithm in PREFERENCES else algorithm if algorithm in ("kto", "sft") else "all"


BLOCKS: dict[str, type[BaseModel]] = {"record": RecordConfig, "compare": LiveTest, "train": TrainConfig}


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
    return config.model_copy(update={"config": path})


@dataclass(frozen=True, slots=True)
class Training:
    """One training of the promoted version of a folder."""

    share: float  # of the conversations, for its model
    folder: VersionFolder
    seen: VersionState  # when it began
    run_name: str
    rows: Path  # the dataset
    data: str  # and what it is

    @property
    def model(self) -> Path:
        return self.folder.path(self.seen.promoted)

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
def open_training(config: TrainConfig, data_dir: Path, folder: VersionFolder) -> Iterator[Training]:
    """Yields a training with its rows, which are deleted after it."""
    import filelock

    database, seen, use = data_dir / STORE, folder.read(), config.find_use()
    run_name = f"{folder.name}-{secrets.token_hex(4)}"
    check_run_name(run_name, "NAME")
    if not database.is_file():
        raise ConfigError(Problem("--data_dir", f"{data_dir} has no {STORE}", "pass the one of the server"))
    if seen.candidate is not None:
        message = f"version {seen.candidate} of {folder.name} is the candidate, and is compared with what is served"
        fix = f"promote it, or stop it: reinforge versions {folder.folder} --stop_candidate"
        raise ConfigError(Problem("NAME", message, fix))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(filelock.FileLock(data_dir / LOCK, timeout=0, mode=PRIVATE_FILE))
        except filelock.Timeout:
            raise StorageError(f"another training on the chats in {data_dir} runs already; wait for it") from None
        rows, num_new = data_dir.absolute() / ROWS, count_new(database, use)
        stack.callback(rows.unlink, missing_ok=True)
        report = export_rows(database, rows, use, run_name, config.replay)
        data = f"{report.num_rows:,} rows of rated chats, {num_new:,} of them new"
        yield Training(config.share, folder, seen, run_name, rows, data)


class TrainingStarter:
    """Starts `reinforge learn run` in a process of its own once there are enough new ratings, one at a time."""

    def __init__(self, file: Path, data_dir: Path, folder: VersionFolder):
        config = read_train_config(file)
        assert config.when is not None
        self._rated, self._use, self._data_dir, self._folder = config.when.rated, config.find_use(), data_dir, folder
        named = (str(folder.folder), "--learn", str(file.absolute()), "--data_dir", str(data_dir))
        self._command = (sys.executable, "-m", "reinforge", "learn", "run", *named)
        self._num_failed = 0  # new ratings with which a training failed: the next one needs so many more

    async def run(self) -> None:
        while True:
            try:
                if await asyncio.to_thread(self.is_due):
                    await self._train()
            except Exception as error:  # noqa: BLE001  whatever keeps a training from starting, the server serves
                logger.error("no training is started: %s", describe_error(error))
            await asyncio.sleep(CHECK_S)

    def is_due(self) -> bool:
        return self._folder.read().candidate is None and self._count() >= self._num_failed + self._rated

    def _count(self) -> int:
        return count_new(self._data_dir / STORE, self._use)

    async def _train(self) -> None:
        log = self._data_dir / LOG
        with open(log, "wb", opener=open_private) as output:
            streams: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stdout": output, "stderr": output}
            process = await asyncio.create_subprocess_exec(*self._command, **streams, start_new_session=True)
        logger.warning("%s is trained on its chats: process %d, see %s", self._folder.name, process.pid, log)
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
            raise
        name, last = self._folder.name, log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
        self._num_failed = await asyncio.to_thread(self._count) if code else 0
        if code:
            message = "the training of %s %s, see %s; the next one starts after %d more ratings"
            logger.error(message, name, describe_exit(code), log, self._rated)
        else:
            logger.warning("the training of %s has ended: %s", name, last)
