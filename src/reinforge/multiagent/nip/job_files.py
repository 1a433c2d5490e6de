"""The files of a shared-model group: a killed process resumes its job, and no job is created twice.

GROUPS_DIR/RUN_ID/GROUP/
  state.json                      fine_tune_job_id, fine_tuned_model_name, and the last job
  jobs/JOB/trajectories.json      the job's training data, written before the job is submitted
  jobs/JOB/job.json               the job, and its reference at the backend once that has accepted it
  jobs/JOB/model/                 the trained model, if it is trained in this process
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from reinforge.errors import StorageError, boundary
from reinforge.files import make_staging_path, read_json_file, storage_boundary, to_json, write_json
from reinforge.runs.journal.episode_json import dump_tokens, parse_tokens
from reinforge.types.job import TrainingJobRef
from reinforge.types.request import ChatPrompt, TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection

Method = Literal["supervised", "dpo"]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job of a group."""

    name: str  # hash of the training data and settings, and the number of the attempt
    method: Method
    job_name: str | None  # the caller's name for it
    starts_from: str  # the model that was served when the job was created
    ref: dict[str, Any] | None = None
    """The backend's reference to it; None if it is not known whether the backend received the job."""
    failed: str | None = None  # why the job produced no model, once that is known
    cancelled: bool = False

    @property
    def training_ref(self) -> TrainingJobRef | None:
        return None if self.ref is None else TrainingJobRef(**self.ref)


class GroupFiles:
    """The folder of one group, which is created on the first write; writing raises `StorageError` if it fails."""

    def __init__(self, folder: Path):
        self.folder, self.jobs = folder, folder / "jobs"

    def read_state(self) -> dict[str, Any]:
        return _read_json(self.folder / "state.json") or {}

    def write_state(self, **state: Any) -> None:
        self._write(self.folder / "state.json", state)

    def read_job(self, name: str) -> JobRecord | None:
        data = _read_json(self.jobs / name / "job.json")
        return None if data is None else JobRecord(**data)

    def write_job(self, job: JobRecord) -> None:
        self._write(self.jobs / job.name / "job.json", asdict(job))

    def write_trajectories(self, name: str, collection: TrajectoryCollection) -> None:
        data = {
            **collection.model_dump(exclude={"trajectories"}),
            "trajectories": [[_dump_trajectory(each) for each in siblings] for siblings in collection.trajectories],
        }
        self._write(self.jobs / name / "trajectories.json", data)

    def read_trajectories(self, name: str) -> TrajectoryCollection | None:
        data = _read_json(self.jobs / name / "trajectories.json")
        if data is None:
            return None
        groups = [[_parse_trajectory(each) for each in siblings] for siblings in data.pop("trajectories")]
        return TrajectoryCollection(trajectories=groups, **data)

    def copy_job(self, folder: Path) -> None:
        staged = make_staging_path(self.jobs)
        with storage_boundary(staged):
            self.jobs.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder, staged)
            staged.rename(self.jobs / folder.name)

    def _write(self, path: Path, value: Any) -> None:
        with storage_boundary(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)


def _read_json(path: Path) -> Any:
    if not path.is_file():
        return None
    with boundary(StorageError, f"cannot read {path}"):
        return read_json_file(path)


def _dump_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    data = trajectory.model_dump(exclude={"episode"})
    data["episode"] = [
        {
            "role": item.role.value,
            "content": item.content,
            "trained": item.trained,
            "tokens": None if item.tokens is None else dump_tokens(item.tokens),
            "prompt": None if item.prompt is None else asdict(item.prompt),
        }
        for item in trajectory.episode
        if isinstance(item, EpisodeItem)
    ]
    return dict(json.loads(to_json(data)))


def _parse_trajectory(data: dict[str, Any]) -> Trajectory:
    items = []
    for item in data.pop("episode"):
        tokens, prompt = item.pop("tokens"), item.pop("prompt")
        known: TokenLogprobs | ChatPrompt | None = None if tokens is None else parse_tokens(tokens)
        if prompt is not None and known is None:
            messages, tools = tuple(prompt.pop("messages")), prompt.pop("tools")
            known = ChatPrompt(messages, None if tools is None else tuple(tools), **prompt)
        items.append({**item, "logprobs": known})
    return Trajectory(episode=items, **data)
