"""Dialogues between agents as readable files: who said what, what was decided, and each agent's reward.

    dialogue:                         branches:              of a tree: every alternative, with what follows from it
    - round: 0                        - said:
      channel: main                     - round: 0 ...
      agent: verifier                     worth: 0.5
      text: Is cell 3 red?              branches:
    decision: accept                    - said: ...
    rewards: {verifier: 1.0}              decision: accept

They are built from the journal alone, so they can be made at any time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from reinforge.config.finetuning_blocks import TranscriptsConfig
from reinforge.errors import StorageError, boundary
from reinforge.files import make_private_folder, replace_file, to_json
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.rows import PHASES
from reinforge.safe_text import escape_controls

SUFFIXES = {"yaml": "yml", "json": "json"}
NUM_PROBED = 16
"""Episodes of a stage that are checked for a dialogue: the first ones may have failed before any agent spoke."""

_PREFIXES = {"collect": "epoch", "validate": "validation"}


def write_transcripts(folder: Path, stage: str, epoch: int | None, config: TranscriptsConfig) -> Path | None:
    """Writes the dialogues of a stage to the run folder; returns the file, or None if there were no dialogues."""
    phase = PHASES[stage]
    of_epoch = None if phase.startswith("confirm") else -1 if epoch is None else epoch
    if not JournalReader(folder).has_dialogues(phase, of_epoch, NUM_PROBED):
        return None
    found = read_transcripts(folder, phase, of_epoch, limit=config.max_episodes)
    name = phase if of_epoch is None else "baseline" if of_epoch < 0 else f"{_PREFIXES[phase]}-{of_epoch:04d}"
    path = folder / "transcripts" / f"{name}.{SUFFIXES[config.format]}"
    with boundary(StorageError, f"cannot create {path.parent}"):
        make_private_folder(path.parent)
    replace_file(path, format_transcripts(found, config.format))
    return path


def read_transcripts(folder: Path, phase: str, epoch: int | None = None, limit: int | None = None) -> dict[str, Any]:
    """Returns the transcripts of a phase in the order of their keys, and the number of its episodes.

    An episode that failed before any agent spoke has no transcript; epoch -1 is the baseline.
    """
    reader = JournalReader(folder)
    total = reader.count_episodes(phase, epoch)
    found = [build_transcript(row.key, row.data) for row in reader.dialogues(phase, epoch, limit)]
    head = {"phase": phase, **({} if epoch is None else {"epoch": epoch})}
    return {**head, "num_episodes": total, "num_shown": len(found), "transcripts": found}


def build_transcript(key: str, data: dict[str, Any]) -> dict[str, Any]:
    """Returns the readable form of one episode of a protocol, as the journal holds it."""
    output = data["output"]
    step_rewards = {mark["call_id"]: mark["step_reward"] for mark in data["marks"] if mark["step_reward"] is not None}
    built: dict[str, Any] = {"episode": key, "protocol": output["protocol"], "outcome": data["outcome"]}
    if data["reason"]:
        built["reason"] = data["reason"]
    built |= {"reward": data["reward"], "question": output["question"], "truth": output["truth"]}
    if output["stances"]:
        built["stances"] = _FlowMapping(output["stances"])
    if len(output["branches"]) > 1:
        before = [_build_message(message, step_rewards) for message in output["messages"] if not message["path"]]
        return {**built, **({"said": before} if before else {}), "branches": _build_branches(output, [], step_rewards)}
    said = [_build_message(message, step_rewards) for message in output["messages"]]
    return {**built, "dialogue": said, **_build_end(output["branches"][0])}


def format_transcripts(found: dict[str, Any], format_: str) -> str:
    """Returns transcripts as YAML, with strings of several lines as blocks, or as JSON."""
    if format_ == "json":
        return json.dumps(json.loads(to_json(found)), indent=2) + "\n"
    text = yaml.dump(found, Dumper=_TranscriptDumper, sort_keys=False, allow_unicode=True, width=120)
    return escape_controls(text)  # in double quotes, where `_represent_text` puts them, these are YAML's own escapes


def _build_branches(
    output: dict[str, Any], path: Sequence[int], step_rewards: dict[str, float]
) -> list[dict[str, Any]]:
    depth = len(path)
    below = [each["path"] for each in (*output["messages"], *output["branches"]) if each["path"][:depth] == path]
    found = []
    for index in sorted({each[depth] for each in below if len(each) > depth}):
        here = [*path, index]
        said = [_build_message(message, step_rewards) for message in output["messages"] if message["path"] == here]
        end = next((branch for branch in output["branches"] if branch["path"] == here), None)
        then = {"branches": _build_branches(output, here, step_rewards)} if end is None else _build_end(end)
        found.append({"said": said, **then})
    return found


def _build_message(message: dict[str, Any], step_rewards: dict[str, float]) -> dict[str, Any]:
    built = {name: message[name] for name in ("round", "channel", "agent", "text")}
    if message.get("refused"):
        built["refused"] = message["refused"]
    elif message["shown"] != message["text"]:
        built["shown"] = message["shown"]
    if message["num_retries"]:
        built["num_retries"] = message["num_retries"]
    if message["call_id"] in step_rewards:
        built["worth"] = step_rewards[message["call_id"]]
    return built


def _build_end(branch: dict[str, Any]) -> dict[str, Any]:
    built: dict[str, Any] = {"decision": branch["decision"]}
    if branch.get("answer") is not None:
        built = {"answer": branch["answer"]}
    if branch["terminated"]:
        built["terminated"] = True
    if branch["failed"]:
        built["failed"] = ": ".join(branch["failed"])
    return {**built, "rewards": _FlowMapping(branch["rewards"])}


class _FlowMapping(dict[str, Any]):
    """A mapping that is written on one line."""


class _TranscriptDumper(yaml.SafeDumper):
    """Writes strings of several lines as blocks, and repeated objects in full instead of as aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if escape_controls(text) != text else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_flow_mapping(dumper: yaml.SafeDumper, value: _FlowMapping) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), flow_style=True)


_TranscriptDumper.add_representer(str, _represent_text)
_TranscriptDumper.add_representer(_FlowMapping, _represent_flow_mapping)
