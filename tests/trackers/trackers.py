"""A tracker that keeps what it is sent, and readers of what the real ones wrote: points of (metric, step, value)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from reinforge.interfaces import Tracker

Points = list[tuple[str, int, float]]


class ListTracker(Tracker):
    """Keeps what it is sent; may fail or wait, and tells `known` when it starts."""

    def __init__(self, known: dict[str, int] | None = None, fail: Any = lambda what: None):
        self.known, self.fail = known, fail
        self.points, self.statuses, self.runs = [], [], []

    def start(self, run):
        self.fail("start")
        self.runs.append(run)
        return self.known

    def log(self, point):
        self.fail("log")
        self.points += [(name, point.step, value) for name, value in point.metrics.items()]

    def finish(self, status):
        self.fail("finish")
        self.statuses.append(status)


def read_tensorboard(folder: Path) -> Points:
    from tensorboardX.proto.event_pb2 import Event

    points = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while len(data) >= 12:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + size :]
    return points


def read_mlflow(uri: str, key: str) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("reinforge")
    [run] = client.search_runs([experiment.experiment_id], f"tags.`reinforge.run` = '{key}'")
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    return [(each.key, each.step, each.value) for history in histories for each in history]


def read_trackio(project: str, key: str) -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(project, run_id=key)
    return [
        (name, row["step"], value) for row in rows for name, value in row.items() if name not in ("step", "timestamp")
    ]


def split_records(data: bytes) -> list[bytes]:
    """Each block has parts with their checksum, size and kind (1: whole, 2: first, 3: middle, 4: last)."""
    records, place, parts = [], 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        if left < 7 or kind == 0:
            place += left
            continue
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            records.append(parts)
            parts = b""
    return records


def read_wandb(folder: Path) -> Points:
    """Reads the files of every process that worked on the run: records in blocks of 32 KiB, as in a LevelDB log."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    points = []
    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        for record in split_records(file.read_bytes()):
            items = Record.FromString(record).history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            step = row.pop("optimizer_step", None)
            points += [(name, step, value) for name, value in row.items() if not name.startswith("_")]
    return points
