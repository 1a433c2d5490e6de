"""What a group keeps on disk, so that a job goes on after a kill and is never created twice.

GROUPS_DIR/RUN_ID/GROUP/
  state.json                      fine_tune_job_id, fine_tuned_model_name, and the job that was created last
  jobs/JOB/trajectories.json      what it trains on, written before anybody is asked to train
  jobs/JOB/job.json               what it is, and how the backend names it once it has taken it
  jobs/JOB/model/                 what it made, where the model is trained here
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from reinforge.errors import StorageError, boundary
from reinforge.files import to_json, write_json, writing
from reinforge.runs.episode_json import tokens_json, tokens_of
from reinforge.types.job import TrainingJobRef
from reinforge.types.request import ChatPrompt, TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection

Method = Literal["supervised", "dpo"]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job of a group.

    Attributes:
        name: Names it here: a hash of what it trains on and how, and which attempt it is.
        method: How it trains.
        job_name: What the caller calls it.
        starts_from: The model that served when it was created.
        ref: How the backend names it; None: nobody knows whether it was told.
        failed: Why no model came of it, once that is known.
        cancelled: It was cancelled, rather than failed.
    """

    name: str
    method: Method
    job_name: str | None
    starts_from: str
    ref: dict[str, Any] | None = None
    failed: str | None = None
    cancelled: bool = False

    @property
    def training_ref(self) -> TrainingJobRef | None:
        """The reference for the adapter."""
        return None if self.ref is None else TrainingJobRef(**self.ref)

    def but(self, **changes: Any) -> Self:
        """Returns the same with some fields changed."""
        return replace(self, **changes)


@dataclass(slots=True)
class GroupFiles:
    """The folder of one group.

    Args:
        folder: It is made when something is written.
    """

    folder: Path
    jobs: Path = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = self.folder / "jobs"

    def read_state(self) -> dict[str, Any]:
        """Returns what `write_state` wrote last; empty where nothing was."""
        return _read(self.folder / "state.json") or {}

    def write_state(self, **state: Any) -> None:
        """Writes where the group stands.

        Raises:
            StorageError: It cannot be written.
        """
        self._write(self.folder / "state.json", state)

    def read_job(self, name: str) -> JobRecord | None:
        """Returns a job, or None where there is none of that name."""
        found = _read(self.jobs / name / "job.json")
        return None if found is None else JobRecord(**found)

    def write_job(self, job: JobRecord) -> None:
        """Writes what is known of a job.

        Raises:
            StorageError: It cannot be written.
        """
        self._write(self.jobs / job.name / "job.json", asdict(job))

    def write_trajectories(self, name: str, collection: TrajectoryCollection) -> None:
        """Writes what a job trains on.

        Raises:
            StorageError: It cannot be written.
        """
        data = {
            **collection.model_dump(exclude={"trajectories"}),
            "trajectories": [[_trajectory_json(each) for each in siblings] for siblings in collection.trajectories],
        }
        self._write(self.jobs / name / "trajectories.json", data)

    def read_trajectories(self, name: str) -> TrajectoryCollection | None:
        """Returns what a job trains on, or None where that is not there."""
        found = _read(self.jobs / name / "trajectories.json")
        if found is None:
            return None
        siblings = [[_trajectory_of(each) for each in siblings] for siblings in found.pop("trajectories")]
        return TrajectoryCollection(trajectories=siblings, **found)

    def _write(self, path: Path, value: Any) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    with boundary(StorageError, f"read {path}"):
        return json.loads(path.read_text(encoding="utf-8"))


def _trajectory_json(trajectory: Trajectory) -> dict[str, Any]:
    """Returns a trajectory with its tokens or prompts, ready for JSON."""
    data = trajectory.model_dump(exclude={"episode"})
    data["episode"] = [_item_json(item) for item in trajectory.episode if isinstance(item, EpisodeItem)]
    return dict(json.loads(to_json(data)))


def _item_json(item: EpisodeItem) -> dict[str, Any]:
    return {
        "role": item.role.value,
        "content": item.content,
        "trained": item.trained,
        "tokens": None if item.tokens is None else tokens_json(item.tokens),
        "prompt": None if item.prompt is None else asdict(item.prompt),
    }


def _trajectory_of(data: dict[str, Any]) -> Trajectory:
    items = []
    for item in data.pop("episode"):
        tokens, prompt = item.pop("tokens"), item.pop("prompt")
        known: TokenLogprobs | ChatPrompt | None = None if tokens is None else tokens_of(tokens)
        if prompt is not None and known is None:
            tools = prompt.pop("tools")
            messages = tuple(prompt.pop("messages"))
            known = ChatPrompt(messages, None if tools is None else tuple(tools), **prompt)
        items.append({**item, "logprobs": known})
    return Trajectory(episode=items, **data)
