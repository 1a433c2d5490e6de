"""The list of a run's episodes, and one episode as a chat beside its group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element

from reinforge.runs.page.chats import ChatStyle, build_chat
from reinforge.runs.page.elements import Content, build, build_section, build_table
from reinforge.runs.page.page import build_colors
from reinforge.runs.rows import EpisodeRow, ListedEpisode
from reinforge.view.documents import Live, build_anchor, build_document, build_link, build_run_path, build_trail
from reinforge.view.episode_table import FAILED, HEADER, ORDERS, EpisodeQuery, EpisodeTable, format_number

FIRST_ROWS = 100
"""Rows that the page itself holds; `view.js` asks for the others."""
MAX_OTHERS = 60


def build_episode_list(name: str, table: EpisodeTable, query: EpisodeQuery, offset: int, live: Live) -> Element:
    found = table.select(query)
    path = build_run_path(name, "episodes")
    rows = found[offset : offset + FIRST_ROWS]
    text = f"{len(found):,} of {len(table):,} episodes." if len(found) != len(table) else f"{len(table):,} episodes."
    if not len(table):
        text = "No episode has finished yet."
    content: list[Content] = [
        _build_filters(path, table, query),
        build("p", text, id="count"),
        _build_rows(name, query, rows, table, offset),
        _build_pages(path, query, offset, len(found)),
        build("p", "Keys: j and k move between rows, Enter opens one, / goes to the example filter.", class_="note"),
    ]
    return build_document(f"Episodes of {name}", content, trail=build_trail(name, "episodes"), live=live)


def _build_filters(path: str, table: EpisodeTable, query: EpisodeQuery) -> Element:
    epoch = "" if query.epoch is None else str(query.epoch)
    search = build("input", type="search", name="example", id="search")
    search.set("value", query.example)  # as it is: an id may look like a secret, which a page does not show
    outcomes = {"": "all", **({FAILED: "all but ok"} if table.outcomes else {}), **{key: key for key in table.outcomes}}
    fields = (
        ("Phase", _build_choice("phase", {"": "all", **{key: key for key in table.phases}}, query.phase)),
        ("Epoch", build("input", type="number", name="epoch", value=epoch, min="-1", step="1")),
        ("Outcome", _build_choice("outcome", outcomes, query.outcome)),
        ("Example", search),
        ("Order", _build_choice("order", ORDERS, query.order)),
    )
    labels = [build("label", f"{title} ", field) for title, field in fields]
    button = build("button", "Apply", type="submit")
    form = build("form", labels, button, method="get", role="search", class_="filters")
    form.set("action", path)
    return form


def _build_choice(name: str, choices: dict[str, str], chosen: str) -> Element:
    options = [
        build("option", text, value=value, selected="selected" if value == chosen else None)
        for value, text in choices.items()
    ]
    return build("select", options, name=name)


def _build_rows(
    name: str, query: EpisodeQuery, rows: Sequence[ListedEpisode], table: EpisodeTable, offset: int
) -> Element:
    body = build("tbody", (_build_row(name, table.build_row(episode), query) for episode in rows))
    head = build("thead", build("tr", (build("th", title, scope="col") for title in HEADER)))
    shown = build("table", build("caption", "Episodes", class_="hidden"), head, body)
    shown.set("aria-rowcount", str(len(table.select(query)) + 1))
    viewport = build("div", build("div", shown, class_="spacer"), class_="viewport", id="rows", role="region")
    viewport.set("tabindex", "0")
    viewport.set("aria-label", "Episodes")
    viewport.set("data-rows", build_link(build_run_path(name, "rows"), **query.as_dict()))
    viewport.set("data-episode", build_link(build_run_path(name, "episode"), **_describe_order(query)))
    viewport.set("data-total", str(len(table.select(query))))
    viewport.set("data-offset", str(offset))
    return viewport


def _build_row(name: str, row: Sequence[object], query: EpisodeQuery) -> Element:
    key, shown, *cells = map(str, row)
    link = build_anchor(shown, build_episode_link(name, key, query))
    return build("tr", build("td", link), (build("td", cell) for cell in cells))


def _build_pages(path: str, query: EpisodeQuery, offset: int, total: int) -> Element:
    """Returns links to the rows before and after, for browsers without scripts; `view.js` removes them."""
    links = []
    for text, start in (("Earlier rows", offset - FIRST_ROWS), ("Later rows", offset + FIRST_ROWS)):
        if 0 <= start < total or (start < 0 < offset):
            links.append(build_anchor(text, build_link(path, **query.as_dict(), offset=str(max(0, start)))))
    return build("p", links, id="pages")


def _describe_order(query: EpisodeQuery | None) -> dict[str, str]:
    return {} if query is None else query.as_dict()


def build_episode_link(name: str, key: str, query: EpisodeQuery | None = None) -> str:
    """Returns the address of an episode; with the list that it was chosen from, for its neighbors."""
    return build_link(build_run_path(name, "episode"), **_describe_order(query), key=key)


def build_episode_page(
    name: str, episode: ListedEpisode, row: EpisodeRow, table: EpisodeTable, style: ChatStyle, query: EpisodeQuery
) -> Element:
    raw = build_anchor("JSON", build_link(build_run_path(name, "episode.json"), key=episode.key))
    back = build_anchor("list", build_link(build_run_path(name, "episodes"), **query.as_dict()))
    chat = build_chat(row, style)
    chat.set("id", "chat")
    content: list[Content] = [
        build("p", _build_neighbors(name, episode, table, query), back, " · ", raw, class_="neighbors"),
        build_colors(),
        build(
            "div",
            chat,
            build("div", _build_group(name, episode, table), _build_others(name, episode, table)),
            class_="beside",
        ),
        build("p", "Keys: j or ] opens the next episode, k or [ the previous one, t sets the colors.", class_="note"),
    ]
    return build_document(f"Example {episode.example_id}", content, trail=build_trail(name, ""))


def _build_neighbors(name: str, episode: ListedEpisode, table: EpisodeTable, query: EpisodeQuery) -> list[Content]:
    found = table.select(query)
    place = next((number for number, each in enumerate(found) if each.key == episode.key), None)
    if place is None:
        return []
    links: list[Content] = []
    for text, rel, other in (("previous", "prev", place - 1), ("next", "next", place + 1)):
        if 0 <= other < len(found):
            links += [build_anchor(text, build_episode_link(name, found[other].key, query), rel=rel), " · "]
    return [f"{place + 1:,} of {len(found):,}: ", *links]


def _build_group(name: str, episode: ListedEpisode, table: EpisodeTable) -> Element | None:
    siblings = table.list_siblings(episode)
    if len(siblings) < 2:
        return None
    rows: list[tuple[Content, ...]] = []
    for each in siblings:
        relative = table.measure_relative(each)
        text = f"sample {each.generation}"
        link = text if each.key == episode.key else build_anchor(text, build_episode_link(name, each.key))
        reward = each.outcome if each.reward is None else format_number(each.reward)
        rows.append((link, reward, "" if relative is None else f"{relative:+.3g}"))
    caption = f"{len(siblings)} episodes of this example in {_describe_place(episode)}"
    table_element = build_table(("episode", "reward", "relative reward"), rows, caption)
    return build_section("Group", table_element, id="group")


def _build_others(name: str, episode: ListedEpisode, table: EpisodeTable) -> Element | None:
    others = table.list_others(episode)
    if not others:
        return None
    rows: Iterable[tuple[Content, ...]] = (
        (
            build_anchor(_describe_place(each), build_episode_link(name, each.key)),
            each.outcome if each.reward is None else format_number(each.reward),
        )
        for each in others[:MAX_OTHERS]
    )
    title = "This example elsewhere in the run"
    return build_section(title, build_table(("when", "reward"), rows, title), id="others")


def _describe_place(episode: ListedEpisode) -> str:
    where = "" if episode.phase.startswith("confirm") else ", baseline" if episode.epoch < 0 else f" {episode.epoch}"
    return f"{episode.phase}{where}" + (f", refill {episode.round}" if episode.round else "")
