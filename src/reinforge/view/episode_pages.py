"""The list of a run's episodes, and one episode as a chat beside its group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from xml.etree.ElementTree import Element

from reinforge.runs.page.chats import ChatStyle, build_chat
from reinforge.runs.page.differences import mark_difference
from reinforge.runs.page.elements import Content, build, build_details, build_section, build_table
from reinforge.runs.page.page import COLORS, MODEL_COLORS, build_colors
from reinforge.runs.rows import EpisodeRow, ListedEpisode
from reinforge.view.documents import Live, build_anchor, build_document, build_link, build_run_path, build_trail
from reinforge.view.episode_table import (
    COLUMNS,
    DEFAULT_ORDER,
    FAILED,
    Column,
    EpisodeQuery,
    EpisodeTable,
    describe_place,
    format_number,
    name_epoch,
    name_split,
)

FIRST_ROWS = 100  # rows that the page itself holds; `view.js` asks for the others
MAX_OTHERS, MAX_PROMPTS = 60, 3


def build_episode_list(name: str, table: EpisodeTable, query: EpisodeQuery, offset: int, live: Live) -> Element:
    found = table.select(query)
    path = build_run_path(name, "episodes")
    text = f"{len(found):,} of {len(table):,} episodes." if len(found) != len(table) else f"{len(table):,} episodes."
    if not len(table):
        text = "No episode has finished yet."
    content: list[Content] = [
        _build_filters(path, table, query),
        build("p", text, id="count", role="status"),
        _build_rows(name, query, table, offset),
        _build_pages(path, query, offset, len(found)),
        build("p", "Keys: j and k move between rows, Enter opens one, / goes to the search.", class_="note", id="keys"),
    ]
    return build_document(f"Episodes of {name}", content, trail=build_trail(name, "episodes"), live=live)


def _build_filters(path: str, table: EpisodeTable, query: EpisodeQuery) -> Element:
    """Returns the fields that shorten the list: `view.js` applies them while they change, the button without it."""
    outcomes = {**({FAILED: "all but ok"} if table.outcomes else {}), **{key: key for key in table.outcomes}}
    epochs = {name_epoch(epoch): name_epoch(epoch) for epoch in sorted(table.epochs)}
    fields = {
        "Search": _build_input("text", query.text, "search", id="search", placeholder="question, reply, expected"),
        "Split": _build_choice("phase", {key: name_split(key) for key in table.phases}, query.phase),
        "Epoch": _build_choice("epoch", epochs, "" if query.epoch is None else name_epoch(query.epoch)),
        "Outcome": _build_choice("outcome", outcomes, query.outcome),
        "Reward from": _build_input("low", query.as_dict().get("low", ""), "number", step="any"),
        "to": _build_input("high", query.as_dict().get("high", ""), "number", step="any"),
        "Example": _build_input("example", query.example, "search", class_="short"),
    }
    for name, known, chosen in (("agent", table.agents, query.agent), ("worker", table.workers, query.worker)):
        if len(known) > 1 or chosen:
            fields[name.capitalize()] = _build_choice(name, {key: key for key in sorted(known)}, chosen)
    order = _build_input("order", query.order, "hidden") if query.order != DEFAULT_ORDER else None
    labels = [build("label", f"{title} ", field) for title, field in fields.items()]
    button = build("noscript", build("button", "Filter", type="submit"))
    form = build("form", labels, order, button, method="get", role="search", class_="filters", id="filters")
    form.set("action", path)
    return form


def _build_input(name: str, value: str, kind: str, **attributes: str) -> Element:
    field = build("input", type=kind, name=name, **attributes)
    field.set("value", value)  # as it is: an id may look like a secret, which a page does not show
    return field


def _build_choice(name: str, choices: Mapping[str, str], chosen: str) -> Element:
    known = {"": "all", **choices, **({chosen: chosen} if chosen not in choices and chosen else {})}
    options = []
    for value, text in known.items():
        option = build("option", text, selected="selected" if value == chosen else None)
        option.set("value", value)
        options.append(option)
    return build("select", options, name=name)


def _build_rows(name: str, query: EpisodeQuery, table: EpisodeTable, offset: int) -> Element:
    found, path = table.select(query), build_run_path(name, "episodes")
    rows = table.build_rows(found[offset : offset + FIRST_ROWS])
    body = build("tbody", (_build_row(name, row, query) for row in rows))
    heads = (_build_head(path, key, column, query) for key, column in COLUMNS.items())
    shown = build("table", build("caption", "Episodes", class_="hidden"), build("thead", build("tr", heads)), body)
    shown.set("aria-rowcount", str(len(found) + 1))
    viewport = build("div", build("div", shown, class_="spacer"), class_="viewport", id="rows", role="region")
    viewport.set("tabindex", "0")
    viewport.set("aria-label", "Episodes")
    viewport.set("data-rows", build_link(build_run_path(name, "rows"), **query.as_dict()))
    viewport.set("data-episode", build_link(build_run_path(name, "episode"), **query.as_dict()))
    viewport.set("data-total", str(len(found)))
    viewport.set("data-offset", str(offset))
    return viewport


def _build_head(path: str, key: str, column: Column, query: EpisodeQuery) -> Element:
    """Returns the head of a column, a link that sorts by it: numbers from the greatest on, and the other way round."""
    first, other = (f"-{key}", key) if column.is_number else (key, f"-{key}")
    link = build_anchor(
        column.title, build_link(path, **replace(query, order=other if query.order == first else first).as_dict())
    )
    sort = {key: "ascending", f"-{key}": "descending"}.get(query.order)
    return build("th", link, scope="col", aria_sort=sort, class_=name_class(key))


def _build_row(name: str, row: Sequence[str], query: EpisodeQuery) -> Element:
    key, shown, *cells = row
    parts = [build_anchor("", build_episode_link(name, key, query)), *(build("span") for _ in cells)]
    for part, text in zip(parts, (shown, *cells), strict=True):
        part.text = text  # made printable with the row
    outcome = row[1 + list(COLUMNS).index("outcome")]
    named = zip(COLUMNS, parts, strict=True)
    return build("tr", (build("td", part, class_=name_class(each)) for each, part in named), data_outcome=outcome)


def name_class(column: str) -> str:
    return f"of-{column} num" if COLUMNS[column].is_number else f"of-{column}"


def _build_pages(path: str, query: EpisodeQuery, offset: int, total: int) -> Element:
    """Returns links to the rows before and after, for browsers without scripts; `view.js` removes them."""
    links = []
    for text, start in (("Earlier rows", offset - FIRST_ROWS), ("Later rows", offset + FIRST_ROWS)):
        if 0 <= start < total or (start < 0 < offset):
            links.append(build_anchor(text, build_link(path, **query.as_dict(), offset=str(max(0, start)))))
    return build("p", links, id="pages")


def build_episode_link(name: str, key: str, query: EpisodeQuery | None = None) -> str:
    """Returns the address of an episode; with the list that it was chosen from, for its neighbors."""
    return build_link(build_run_path(name, "episode"), **({} if query is None else query.as_dict()), key=key)


def build_episode_page(
    name: str,
    episode: ListedEpisode,
    row: EpisodeRow,
    table: EpisodeTable,
    style: ChatStyle,
    query: EpisodeQuery,
    models: str | None,
) -> Element:
    """Returns the page of one episode.

    Args:
        models: Which models the scores of the style are of; empty: it has none, and the page
            offers them; None: there are no models to ask.
    """
    raw = build_anchor("JSON", build_link(build_run_path(name, "episode.json"), key=episode.key))
    back = build_anchor("list", build_link(build_run_path(name, "episodes"), **query.as_dict()))
    chat = build_chat(row, style)
    chat.set("id", "chat")
    scored = build_link(build_run_path(name, "episode"), **query.as_dict(), key=episode.key, models="1")
    ask = build_anchor("Color by entropy, or by what training changed", scored)
    asked = build("span", ask, ": loads the models from before and after training.")
    content: list[Content] = [
        build("p", _build_neighbors(name, episode, table, query), back, " · ", raw, class_="neighbors"),
        _build_group(name, episode, table),
        build_colors({**MODEL_COLORS, **COLORS} if models else COLORS),
        build("p", models or asked, class_="note") if models is not None else None,
        build("div", chat, build("div", _build_others(name, episode, table)), class_="beside"),
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
    table.read_excerpts(siblings)
    for each in siblings:
        relative, found = table.measure_relative(each), table.excerpt(each)
        text = f"sample {each.generation}"
        link = (
            build("strong", text) if each.key == episode.key else build_anchor(text, build_episode_link(name, each.key))
        )
        reward = each.outcome if each.reward is None else format_number(each.reward)
        rows.append(
            (link, found.reply, reward, "" if relative is None else f"{relative:+.3g}", str(found.tokens or ""))
        )
    caption = f"{len(siblings)} episodes of this example in {describe_place(episode)}"
    header = ("episode", "reply", "reward", "relative reward", "tokens")
    return build_section(
        "Group", build_table(header, rows, caption), _build_prompts(episode, siblings, table), id="group"
    )


def _build_prompts(episode: ListedEpisode, siblings: Sequence[ListedEpisode], table: EpisodeTable) -> Element | None:
    """Returns how the first prompts of siblings differ from that of the episode; None: they are all equal."""
    prompts = table.read_prompts(siblings)
    own = prompts.get(episode.number, "")
    others = {prompt: each for each in siblings if (prompt := prompts.get(each.number, own)) != own}
    if not others:
        return None
    parts = []
    for prompt, each in list(others.items())[:MAX_PROMPTS]:
        pair = zip(("this episode", f"sample {each.generation}"), mark_difference(own, prompt), strict=True)
        parts.append(
            build("div", (build("div", build("h4", title), build("pre", text)) for title, text in pair), class_="side")
        )
    return build_details(f"{len(others) + 1} different prompts in this group", *parts, open="open")


def _build_others(name: str, episode: ListedEpisode, table: EpisodeTable) -> Element | None:
    others = table.list_others(episode)
    if not others:
        return None
    rows: Iterable[tuple[Content, ...]] = (
        (
            build_anchor(describe_place(each), build_episode_link(name, each.key)),
            each.outcome if each.reward is None else format_number(each.reward),
        )
        for each in others[:MAX_OTHERS]
    )
    title = "This example elsewhere in the run"
    return build_section(title, build_table(("when", "reward"), rows, title), id="others")
