"""The page of a run's checkpoints, with the commands that use them."""

from __future__ import annotations

import shlex
from pathlib import Path
from xml.etree.ElementTree import Element

from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.page.elements import Content, build, build_section, build_table
from reinforge.runs.run_folder import RunOverview, format_size, measure_size
from reinforge.view.documents import build_anchor, build_link, build_run_path
from reinforge.view.episode_table import EpisodeTable, format_number, name_epoch

USES = ("chat", "serve")  # commands that take the folder of a checkpoint


def build_checkpoint_page(overview: RunOverview, table: EpisodeTable) -> list[Content]:
    names = Checkpoints(overview.folder).names()
    if not names:
        text = "The run has written no checkpoint yet, or its backend keeps the weights."
        return [build_section("Checkpoints", build("p", text), id="checkpoints")]
    return [_build_checkpoints(overview, names), _build_commands(overview)]


def _build_checkpoints(overview: RunOverview, names: list[str]) -> Element:
    record, summary, path = overview.record, overview.summary, build_run_path(overview.folder.name, "episodes")
    epochs = {row.checkpoint: row.epoch for row in record.snapshots} if record is not None else {}
    scores = {row.checkpoint: row for row in record.validations} if record is not None else {}
    rows: list[tuple[Content, ...]] = []
    for name in names:
        score, folder = scores.get(name), overview.folder / name
        epoch = score.epoch if score is not None else epochs.get(name)
        reward: Content = None
        if score is not None and score.avg_reward is not None:
            link = build_link(path, phase="validate", epoch=name_epoch(score.epoch))
            reward = build_anchor(format_number(score.avg_reward), link)
        marks = []
        if summary is not None and summary.checkpoint == name:
            marks = [("promoted", "good")] if summary.promoted else [("best, not promoted", "warn")]
        badges = [build("span", text, class_=f"badge {tone}") for text, tone in marks]
        size = format_size(measure_size(folder))
        commands = [build("pre", f"reinforge {each} {shlex.quote(str(folder))}", class_="copy") for each in USES]
        rows.append(
            (
                Path(name).name,
                "" if epoch is None else name_epoch(epoch),
                reward,
                size,
                build("span", badges),
                build("div", commands),
            )
        )
    header = ("checkpoint", "epoch", "score on select", "size", "status", "use it")
    table = build_table(header, rows, "Checkpoints, the oldest first")
    return build_section("Checkpoints", table, id="checkpoints")


def _build_commands(overview: RunOverview) -> Element | None:
    """Returns the commands for the model of the run; None: it has ended, and no checkpoint is better than the base."""
    folder, summary = shlex.quote(str(overview.folder)), overview.summary
    commands = [
        f"reinforge chat {folder}",
        f"reinforge serve {folder}",
        f"reinforge export {folder}",
        f"reinforge export {folder} --format gguf --quantize q8_0",
    ]
    which = "the best checkpoint so far"
    if summary is not None and summary.checkpoint is None:
        return None
    if summary is not None:
        which = "the promoted model" if summary.promoted else "the best checkpoint, which the run did not promote"
        commands = [*([verdict] if (verdict := summary.find_verdict_command()) else []), *commands]
    parts = [build("pre", command, class_="copy") for command in commands]
    text = f"These commands use {which}. Only the verdict of its run promotes a checkpoint."
    return build_section("The model of the run", build("p", text), parts, id="commands")
