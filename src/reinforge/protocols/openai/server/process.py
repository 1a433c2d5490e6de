"""The process of one fine-tuning job: `python -m reinforge.protocols.openai.server.process FOLDER`.

It runs `FOLDER/config.json` as `reinforge finetune` runs a file: a new run, or the one that is in the folder, from its
last checkpoint. It writes how it ended to `FOLDER/ended.json`. The server holds the other end of its standard input:
when that closes, however the server exited, the run is stopped as by SIGTERM, and can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import filelock

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError, Interrupted, OutOfMemory, ReinforgeError, StorageError
from reinforge.files import remove_folder, write_json
from reinforge.protocols.openai.server.plan import RUN
from reinforge.rollout.isolation.processes import kill_descendants
from reinforge.runs.journal.reader import JOURNAL
from reinforge.runs.progress import SilentProgress
from reinforge.trainer.builders.dataset import LEFT_OUT
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_config

CONFIG, ENDED, NOTE, LOCK = "config.json", "ended.json", "note.json", ".process.lock"
STOP_S = 15.0  # seconds that the run has to stop once the server is gone
LOCK_S = 60.0  # seconds for which the process of an earlier server may still be ending
INTERRUPTED = "interrupted"


def main(folder: Path) -> int:
    threading.Thread(target=_watch_server, name="watch-server", daemon=True).start()
    try:
        with filelock.FileLock(folder / LOCK, timeout=LOCK_S):
            (folder / ENDED).unlink(missing_ok=True)
            ended = run_job(folder)
            write_json(folder / ENDED, ended)
    except filelock.Timeout:
        sys.stderr.write(f"another process still works on {folder}\n")
        return StorageError.exit_code
    return int(ended["exit_code"])


class ClientNotes(SilentProgress):
    """Keeps for the client that rows of its file are left out."""

    def __init__(self, folder: Path):
        self._note = folder / NOTE

    def note(self, text: str) -> None:
        if LEFT_OUT in text:  # other notes speak to the operator, with the server's own paths
            with contextlib.suppress(StorageError):
                write_json(self._note, {"left_out": text})


def run_job(folder: Path) -> dict[str, Any]:
    """Runs the job in a folder and returns how it ended: `exit_code`, `code` and `message`."""
    run = folder / RUN
    resumed = run if (run / JOURNAL).is_file() else None
    options = RunOptions(run_name=RUN, resume=resumed, progress=ClientNotes(folder))
    try:
        if options.resume is None and run.exists():
            remove_folder(run)  # its process died before it had a journal
        loaded = build_config(json.loads((folder / CONFIG).read_text(encoding="utf-8")))  # expands no ${VARIABLE}
        summary = run_config(loaded, options)
    except Interrupted as error:
        return _describe(error, INTERRUPTED)
    except ConfigError as error:
        return _describe(error, "invalid_file")
    except (OutOfMemory, MemoryError) as error:
        return _describe(error, "out_of_memory")
    except ReinforgeError as error:
        return _describe(error, "storage_error" if isinstance(error, StorageError) else "training_failed")
    except Exception as error:  # noqa: BLE001  the last handler: the server must learn how the job ended
        return {"exit_code": 1, "code": "server_error", "message": f"{type(error).__name__}: {error}"}
    return {"exit_code": 0, "code": summary.status, "message": summary.reason}


def _describe(error: BaseException, code: str) -> dict[str, Any]:
    return {"exit_code": getattr(error, "exit_code", 4), "code": code, "message": str(error)}


def _watch_server() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_S)
    kill_descendants()
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    kill_descendants()
    os._exit(code)  # all files are written, and a thread that still loads a model would abort an orderly exit
