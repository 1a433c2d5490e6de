"""The page of a model that learns while it is served: its chats, how its versions are rated, and a way back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import httpx

from reinforge.errors import ConfigError
from reinforge.evaluation.statistics import compute_mean_interval, format_interval
from reinforge.learning.overview import DAY_S, ChatCounts, StoreOverview, read_overview
from reinforge.learning.store import STORE
from reinforge.runs.page.elements import (
    Content,
    Line,
    Point,
    build,
    build_details,
    build_section,
    build_table,
    draw_chart,
)
from reinforge.runs.run_folder import RunOverview, format_local_time
from reinforge.serving.version_folder import DEFAULT_FOLDER, VersionFolder, is_version_folder
from reinforge.view.documents import Live, build_anchor, build_document, build_learning_path, build_run_path
from reinforge.view.library import hash_version, measure_file

LOOK_S, PAUSE = 5.0, 20  # a store that changes is read again after so many seconds, or times of what that took
ANSWER_S = 2.0  # seconds that the server has to tell how the comparison stands
MAX_SHOWN = 60  # days, and changes
DECISIONS = ("promote", "rollback", "stop")
FindRun = Callable[[str], RunOverview | None]
"""Name of a run -> the run; None: it is not in the folder of runs."""


@dataclass(slots=True)
class LearningSource:
    """Folders of versions, the store of the server that serves them, and that server."""

    versions_dir: Path = DEFAULT_FOLDER
    data_dir: Path = Path(".reinforge/serve")
    server: str = "http://127.0.0.1:8000"
    token: str | None = None
    _seen: object = None
    _due_s: float = 0.0
    _read: dict[str, tuple[object, StoreOverview]] = field(default_factory=dict)

    def list_names(self) -> list[str]:
        return sorted(path.name for path in self.versions_dir.expanduser().glob("*") if is_version_folder(path))

    def find(self, name: str) -> VersionFolder:
        """Returns the folder of a served name; a `ConfigError` if there is none."""
        if name not in self.list_names():
            raise ConfigError(f"There is no folder of versions named {name!r} in {self.versions_dir}.")
        return VersionFolder(self.versions_dir / name)

    def read_version(self, name: str) -> str:
        """Returns what changes with the page."""
        if time.monotonic() >= self._due_s:
            store = self.data_dir.expanduser() / STORE
            self._seen = measure_file(store), measure_file(store.with_name(f"{STORE}-wal"))
            self._due_s = time.monotonic() + LOOK_S
        return hash_version((self._seen, measure_file(self.find(name).state_file)))

    def read_overview(self, name: str) -> StoreOverview:
        """Returns what the store had when `read_version` looked, or has had since."""
        store, begun = self.data_dir.expanduser() / STORE, time.monotonic()
        if name not in self._read or self._read[name][0] != self._seen:
            self._read[name] = self._seen, read_overview(store, name) if store.is_file() else StoreOverview()
            self._due_s = max(self._due_s, begun + (time.monotonic() - begun) * PAUSE)
        return self._read[name][1]

    def ask_server(self, name: str) -> dict[str, Any]:
        """Returns what `GET /v1/learn` tells of a served name, or `error`."""
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            answer = httpx.get(f"{self.server}/v1/learn", headers=headers, timeout=ANSWER_S, trust_env=False)
            found = {each["name"]: each for each in answer.raise_for_status().json()["versions"]}
            return dict(found.get(name, {"error": "it serves other models"}))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            return {"error": str(error)}


def build_learning_page(source: LearningSource, name: str, find_run: FindRun) -> Element:
    """Returns the page of a served name; empty: of the first one, or what to do to have one."""
    names = source.list_names()
    if not (name or names):
        return _build_empty(source)
    name = name or names[0]
    live, folder = Live(build_learning_path(name, "version"), source.read_version(name)), source.find(name)
    overview = source.read_overview(name)
    parts = [
        _build_state(folder, overview, find_run),
        _build_comparison(source, folder),
        _build_chats(source, overview),
        _build_versions(folder, overview, find_run),
        _build_log(folder),
    ]
    trail = [(each, build_learning_path(each) if each != name else None) for each in names]
    return build_document(f"{name} learns from its chats", parts, trail=[("Runs", "/"), *trail], live=live)


def _build_empty(source: LearningSource) -> Element:
    text = f"There is no folder of versions in {source.versions_dir}. Make one, and let its server keep the chats:"
    commands = "reinforge versions NAME --add RUN", f"reinforge serve {source.versions_dir}/NAME --learn learn.yml"
    more = build("p", "`reinforge view --versions_dir FOLDER` shows the versions of another folder.")
    parts = build("p", text), (build("pre", each, class_="copy") for each in commands), more
    return build_document("Learning", [build("section", *parts)], trail=[("Runs", "/"), ("Learning", None)])


def _show_time(at: str) -> str:
    return format_local_time(datetime.fromisoformat(at).timestamp())


def _link_run(run: RunOverview | None, name: str) -> Content:
    return build_anchor(name, build_run_path(name)) if run is not None else name


def _build_state(folder: VersionFolder, overview: StoreOverview, find_run: FindRun) -> Element:
    state, run = folder.read(), find_run(overview.training)
    decision = next((each for each in reversed(folder.read_log()) if each.action in DECISIONS), None)
    candidate = f"version {state.candidate}, for {state.share:.0%} of the conversations" if state.candidate else "none"
    facts: dict[str, Content] = {"serves": f"version {state.promoted}", "candidate": candidate}
    if decision is not None:
        why = f": {decision.reason}" if decision.reason else ""
        who = f"{decision.action} {decision.version}, by {decision.by}"
        facts["last decision"] = f"{who}, {_show_time(decision.at)}{why}"
    facts["waiting"] = f"{overview.num_new:,} rated chats that no version was trained on"
    if overview.training:
        status = f", {run.status}" if run is not None else ""
        facts["newest training"] = build("span", _link_run(run, overview.training), status)
    rows = (part for name, value in facts.items() for part in (build("dt", name), build("dd", value)))
    return build_section("Now", build("dl", rows), _build_rollback(folder), id="state")


def _build_rollback(folder: VersionFolder) -> Element:
    promoted, to = folder.read().promoted, folder.find_earlier()
    if to is None:
        return build("p", "There is no earlier version to roll back to.", class_="note")
    return build(
        "form",
        build("input", type="hidden", name="promoted", value=promoted),
        build("label", "Why ", build("input", name="reason", maxlength=500, autocomplete="off")),
        build("button", f"Roll back to version {to}", type="submit", class_="main"),
        build("output"),
        id="rollback",
        class_="filters",
        data_post=build_learning_path(folder.name, "rollback"),
        data_ask=f"Roll {folder.name} back from version {promoted} to version {to}? A candidate loses its share.",
    )


def _build_comparison(source: LearningSource, folder: VersionFolder) -> Element | None:
    state = folder.read()
    if state.candidate is None:
        return None
    told = source.ask_server(folder.name)
    found = told.get("comparison")
    title, id_ = f"Version {state.candidate} against {state.promoted}", "comparison"
    if found is None:
        why = "The server's file has no `compare:` block, so feedback decides nothing; promote or stop it by hand."
        if "error" in told:
            why = f"{source.server} does not tell how it stands: {told['error']}. See `--server` and `--token_file`."
        return build_section(title, build("p", why), id=id_, class_="half")

    def show(row: dict[str, Any], mean: str) -> str:
        return format_interval(row[mean], row["ci_low"], row["ci_high"])

    sides = ((str(state.candidate), found["candidate"]), (str(state.promoted), found["served"]))
    rows = [(name, f"{each['users']:,}", f"{each['conversations']:,}", show(each, "mean")) for name, each in sides]
    table = build_table(("version", "users", "conversations", "mean over users"), rows, "Scores of both versions")
    paused = build("p", f"Promotion is paused: {found['paused']}", class_="warn") if found.get("paused") else None
    guards = [
        build("li", f"Guard {name}: {each['state']}, {show(each, 'value')}; limit {each['limit']:g}")
        for name, each in (found.get("guards") or {}).items()
    ]
    outcome = "Not decided" if found["outcome"] == "continue" else f"Decided: {found['outcome']}"
    text = build("p", f"{outcome}: {found['reason']}.")
    return build_section(title, text, paused, table, build("ul", guards), id=id_, class_="half")


def _build_versions(folder: VersionFolder, overview: StoreOverview, find_run: FindRun) -> Element:
    state, rows, points = folder.read(), list[tuple[Content, ...]](), list[Point]()
    for number in reversed(folder.numbers()):
        version, counts = folder.read_version(number), overview.versions.get(f"{folder.name}@{number}", ChatCounts())
        run, scores = Path(version.run or "").name, counts.list_scores()
        mean = compute_mean_interval(scores) if scores else (None, None, None)
        points.insert(0, Point(number, *mean))
        badge = {state.promoted: ("promoted", "good"), state.candidate: ("candidate", "running")}.get(number)
        rows.append(
            (
                str(number),
                build("span", badge[0], class_=f"badge {badge[1]}") if badge else None,
                format_interval(*mean) if scores else None,
                *(f"{each:,}" for each in (len(scores), counts.rated, counts.chats)),
                _link_run(find_run(run), run),
                version.data,
                build("span", _show_time(version.created), class_="value"),
            )
        )
    chart = None
    if sum(each.is_known for each in points) > 1:
        chart = draw_chart("Score by version", [Line("score", "validation", points)], axis="version")
    header = ("version", "", "score", "users", "rated", "chats", "run", "trained on", "added")
    note = "Score: the mean over users of what they say of a version's replies, with its 95 % interval."
    table = build_table(header, rows, "Versions, the newest first")
    return build_section("Versions", build("p", note, class_="note"), chart, table, id="versions")


def _build_chats(source: LearningSource, overview: StoreOverview) -> Element:
    chats, rated = (sum(getattr(each, name) for each in overview.days.values()) for name in ("chats", "rated"))
    if not chats:
        text = f"No chats are kept in {source.data_dir}. See `reinforge serve --learn`, and `--data_dir` of `view`."
        return build_section("Chats", build("p", text), id="chats", class_="half")
    rows = [
        (f"{datetime.fromtimestamp(day * DAY_S, UTC):%Y-%m-%d}", f"{each.chats:,}", f"{each.rated / each.chats:.1%}")
        for day, each in sorted(overview.days.items())[: -MAX_SHOWN - 1 : -1]
    ]
    text = f"{chats:,} chats are kept; {rated / chats:.1%} of them are rated."
    table = build_table(("day (UTC)", "chats", "rated"), rows, "Chats by day, the newest first")
    return build_section("Chats", build("p", text), table, id="chats", class_="half")


def _build_log(folder: VersionFolder) -> Element:
    rows = []
    for event in folder.read_log()[: -MAX_SHOWN - 1 : -1]:
        evidence = build("pre", json.dumps(event.evidence, indent=2))
        why = build("div", event.reason, build_details("evidence", evidence) if event.evidence else None)
        time_ = build("span", _show_time(event.at), class_="value")
        rows.append((time_, event.action, str(event.version), event.by, why))
    table = build_table(("time", "change", "version", "by", "why"), rows, "Changes, the newest first")
    return build_section("Changes", table, id="log")
