"""Dialogues of several agents as a person reads them: who said what to whom, what was decided, what each earned.

    dialogue:                         branches:              of a tree: what may be said next, and after each what then
    - round: 0                        - said:
      channel: main                     - round: 0 ...
      agent: verifier                     worth: 0.5
      text: Is cell 3 red?              branches:
    decision: accept                    - said: ...
    rewards: {verifier: 1.0}              decision: accept

They are made of the journal alone, so nothing is lost where none were written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from reinforge.config.schema import TranscriptsConfig
from reinforge.errors import StorageError, boundary
from reinforge.files import replace_file, to_json
from reinforge.runs.journal import read_rows

STAGES = {
    "COLLECT": "collect",
    "BASELINE": "validate",
    "VALIDATE": "validate",
    "CONFIRM_BASE": "confirm_base",
    "CONFIRM_TUNED": "confirm_tuned",
}
"""The phase of the episodes of each stage that has some."""

SUFFIXES = {"yaml": "yml", "json": "json"}
LOOKED_AT = 16
"""Episodes of a stage by which it is told whether a protocol ran: some may have been cut off before anybody spoke."""

_OF_PROTOCOL = "json_type(data, '$.output.protocol') = 'text' AND json_type(data, '$.output.branches') = 'array'"
_PREFIXES = {"collect": "epoch", "validate": "validation"}


def write_transcripts(folder: Path, stage: str, epoch: int | None, config: TranscriptsConfig) -> Path | None:
    """Writes what was said in a stage below the run folder; returns the file, or None if it was no protocol that ran.

    Args:
        folder: The run folder, whose journal holds the stage's episodes.
        stage: That has ended.
        epoch: Its epoch; None: before the first, or after the last.
        config: How many, and as what.
    """
    phase = STAGES[stage]
    held = None if phase.startswith("confirm") else -1 if epoch is None else epoch
    if not _is_protocol(folder, phase, held):
        return None
    found = read_transcripts(folder, phase, held, limit=config.max_episodes)
    name = phase if held is None else "baseline" if held < 0 else f"{_PREFIXES[phase]}-{held:04d}"
    path = folder / "transcripts" / f"{name}.{SUFFIXES[config.format]}"
    with boundary(StorageError, f"making {path.parent}"):
        path.parent.mkdir(exist_ok=True)
    replace_file(path, transcripts_text(found, config.format))
    return path


def read_transcripts(folder: Path, phase: str, epoch: int | None = None, limit: int | None = None) -> dict[str, Any]:
    """Returns the transcripts of a phase's episodes in the order of their keys, and how many episodes there are.

    Args:
        folder: The run folder.
        phase: `collect`, `validate`, `confirm_base` or `confirm_tuned`.
        epoch: Of this epoch only; -1 is the baseline; None: of all.
        limit: At most so many; None: all. Episodes that were cut off before anybody spoke have none.
    """
    where, values = _where(phase, epoch)
    with boundary(StorageError, f"reading {folder / 'run.sqlite'}"):
        [[total]] = read_rows(folder, f"SELECT count(*) FROM episodes WHERE {where}", values)
        order = "ORDER BY epoch, example_id, generation, round LIMIT ?"
        query = f"SELECT key, data FROM episodes WHERE {where} AND {_OF_PROTOCOL} {order}"
        rows = read_rows(folder, query, (*values, -1 if limit is None else limit))
    found = [transcript(key, json.loads(data)) for key, data in rows]
    head = {"phase": phase, **({} if epoch is None else {"epoch": epoch})}
    return {**head, "num_episodes": total, "num_shown": len(found), "transcripts": found}


def _is_protocol(folder: Path, phase: str, epoch: int | None) -> bool:
    """Returns False if none of the first episodes was one of a protocol, so that no others need be read."""
    where, values = _where(phase, epoch)
    query = f"SELECT 1 FROM (SELECT data FROM episodes WHERE {where} LIMIT {LOOKED_AT}) WHERE {_OF_PROTOCOL} LIMIT 1"
    with boundary(StorageError, f"reading {folder / 'run.sqlite'}"):
        return bool(read_rows(folder, query, values))


def _where(phase: str, epoch: int | None) -> tuple[str, tuple[str | int, ...]]:
    return ("phase = ?", (phase,)) if epoch is None else ("phase = ? AND epoch = ?", (phase, epoch))


def transcript(key: str, data: dict[str, Any]) -> dict[str, Any]:
    """Returns one episode of a protocol, as the journal keeps it, as a person reads it."""
    output = data["output"]
    worth = {mark["call_id"]: mark["step_reward"] for mark in data["marks"] if mark["step_reward"] is not None}
    told: dict[str, Any] = {"episode": key, "protocol": output["protocol"], "outcome": data["outcome"]}
    if data["reason"]:
        told["reason"] = data["reason"]
    told |= {"reward": data["reward"], "question": output["question"], "truth": output["truth"]}
    if output["stances"]:
        told["stances"] = _Inline(output["stances"])
    if len(output["branches"]) > 1:
        before = [_message(message, worth) for message in output["messages"] if not message["path"]]
        return {**told, **({"said": before} if before else {}), "branches": _branches(output, [], worth)}
    said = [_message(message, worth) for message in output["messages"]]
    return {**told, "dialogue": said, **_end(output["branches"][0])}


def transcripts_text(found: dict[str, Any], format_: str) -> str:
    """Returns transcripts as YAML or JSON, text of several lines as several lines."""
    if format_ == "json":
        return json.dumps(json.loads(to_json(found)), indent=2, ensure_ascii=False) + "\n"
    return yaml.dump(found, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _branches(output: dict[str, Any], path: Sequence[int], worth: dict[str, float]) -> list[dict[str, Any]]:
    """Returns what may follow a path, each with what follows from it."""
    depth = len(path)
    below = [each["path"] for each in (*output["messages"], *output["branches"]) if each["path"][:depth] == path]
    found = []
    for index in sorted({each[depth] for each in below if len(each) > depth}):
        here = [*path, index]
        said = [_message(message, worth) for message in output["messages"] if message["path"] == here]
        end = next((branch for branch in output["branches"] if branch["path"] == here), None)
        then = {"branches": _branches(output, here, worth)} if end is None else _end(end)
        found.append({"said": said, **then})
    return found


def _message(message: dict[str, Any], worth: dict[str, float]) -> dict[str, Any]:
    told = {name: message[name] for name in ("round", "channel", "agent", "text")}
    if message.get("refused"):
        told["refused"] = message["refused"]
    elif message["shown"] != message["text"]:
        told["shown"] = message["shown"]
    if message["num_retries"]:
        told["num_retries"] = message["num_retries"]
    if message["call_id"] in worth:
        told["worth"] = worth[message["call_id"]]
    return told


def _end(branch: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"decision": branch["decision"]}
    if branch.get("answer") is not None:
        told = {"answer": branch["answer"]}
    if branch["terminated"]:
        told["terminated"] = True
    if branch["failed"]:
        told["failed"] = ": ".join(branch["failed"])
    return {**told, "rewards": _Inline(branch["rewards"])}


class _Inline(dict[str, Any]):
    """Written on one line."""


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and never the same object as a reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _represent_inline(dumper: yaml.SafeDumper, value: _Inline) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(_Inline, _represent_inline)
