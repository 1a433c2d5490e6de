"""Writes `report.html`, the HTML report of a run: one file that works offline and can be sent to a colleague.

It has no script and asks for nothing: its policy forbids both, and what a model or a user wrote is text in a tree of
elements. Charts are SVG, colors of tokens are radio buttons and a style sheet.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote
from xml.etree.ElementTree import Element

from reinforge.config.document import ABSENT
from reinforge.evaluation.changes import MetricChange
from reinforge.evaluation.statistics import format_interval
from reinforge.files import replace_file, to_json
from reinforge.runs.episodes import (
    ComparedExample,
    EpisodeExcerpt,
    choose_changed,
    count_changes,
    find_question,
    find_reply,
    make_excerpt,
)
from reinforge.runs.page.chats import ChatStyle, build_chat
from reinforge.runs.page.content import MAX_EXAMPLES, EpisodeGroup, PageContent, read_content
from reinforge.runs.page.differences import ChangedReply, build_change, mark_difference
from reinforge.runs.page.elements import (
    Content,
    Line,
    Point,
    build,
    build_details,
    build_section,
    build_table,
    draw_chart,
    draw_interval,
    find_bounds,
    to_html,
)
from reinforge.runs.rows import MISSING, EpisodeHead, EpochMetrics, fill_gaps
from reinforge.runs.summary import RunSummary, is_from_python
from reinforge.types.evaluation import MetricSummary, count_examples
from reinforge.version import __version__

PAGE = "report.html"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What the page may load or run: its own style sheet, and nothing else."""
NUM_CHANGED = 5  # examples before and after training in a notebook
EPISODE_HEADER = (
    *("question", "reply", "expected", "reward", "relative reward"),
    *("evaluators", "outcome", "turns", "tokens", "time, s"),
)
MAX_QUOTE = 300  # characters of a prompt or an answer on the first screen
NOTED = ("promoted", "reason", "transfer", "warning", "guard", "ignored", "why", "try", "next")
"""Facts that stand beside the verdict."""
COLORS = {
    "logprob": "log-prob: the redder, the less likely",
    "relative": "relative reward: green is above the mean of the group, red below",
    "mask": "tokens that training uses: underlined",
    "nothing": "no colors",
}
MODEL_COLORS = {
    "entropy": "entropy of the trained model: the redder, the less certain",
    "change": "change of log-prob by training: green became likelier, red less likely",
}
"""Need both models, so only a page that has loaded them offers these."""


def write_page(folder: Path, summary: RunSummary | None = None, path: Path | None = None) -> Path:
    """Writes the HTML report of a run, `report.html` in its folder or `path`, and returns its path.

    Args:
        summary: How the run ended; None: read it from the folder.
    """
    target = path or folder / PAGE
    replace_file(target, to_html(build_page(read_content(folder, summary))))
    return target


def build_page(content: PageContent) -> Element:
    parts = {
        "Verdict": build_verdict(content),
        "Reward": build_rewards(content),
        "Before and after": build_pairs(content),
        "Scores": build_scores(content),
        "Training": build_measures(content),
        "What changed": build_examples(content),
        "Groups": build_groups(content),
        "Episodes": build_episodes(content),
        "Failures": build_outcomes(content),
        "Details": build_facts(content),
        "Settings": build_settings(content),
    }
    sections: list[Element | None] = list(parts.values())
    if content.rows:  # before the first section with chats; it stays in view below that
        sections.insert(list(parts).index("What changed"), build_colors())
    return build_document(f"Run {content.summary.run_id}", _describe_origin(content), parts, sections)


def build_document(
    title: str, note: str, parts: Mapping[str, Element | None], sections: Sequence[Element | None] | None = None
) -> Element:
    """Returns a whole page.

    Args:
        parts: Name -> section, for the links to them.
        sections: What the page shows; None: the parts.
    """
    links = [(name, part.get("id")) for name, part in parts.items() if part is not None]
    body = build(
        "body",
        build("header", build("h1", title), build("p", note, class_="note")),
        build(
            "nav",
            build("ul", (build("li", build("a", name, href=f"#{id_}")) for name, id_ in links)),
            aria_label="Sections",
        ),
        build("main", parts.values() if sections is None else sections),
    )
    return _build_document(title, body)


def format_excerpt(summary: RunSummary) -> str:
    """Returns the verdict, the curve and the examples that changed most, as a document of its own."""
    content = read_content(summary.folder, summary)
    changed = sorted(content.examples, key=lambda example: -abs(example.change))[:NUM_CHANGED]
    changes = _build_changes(content, "Changed most", [example for example in changed if example.change])
    body = build("body", build("main", build_verdict(content), build_rewards(content), build_scores(content), changes))
    return to_html(_build_document(f"Run {summary.run_id}", body))


def _build_document(title: str, body: Element) -> Element:
    head = build(
        "head",
        build("meta", charset="utf-8"),
        build("meta", http_equiv="Content-Security-Policy", content=POLICY),
        build("meta", name="viewport", content="width=device-width, initial-scale=1"),
        build("meta", name="referrer", content="no-referrer"),
        build("title", f"{title} - reinforge"),
    )
    style = Element("style")
    style.text = files("reinforge.runs.page").joinpath("page.css").read_text(encoding="utf-8")
    head.append(style)
    return build("html", head, body, lang="en")


def _describe_rerun(content: PageContent) -> str:
    folder = content.overview.folder
    if is_from_python(folder):
        return "reinforge.finetune(...) with the same agent, dataset and reward"
    return f"reinforge finetune {shlex.quote(str(folder / 'config.yml'))}"


def _describe_origin(content: PageContent) -> str:
    record = content.overview.record
    versions = (record.facts.get("provenance") or {}).get("versions", {}) if record is not None else {}
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("torch", "transformers"))
    return f"Written by reinforge {__version__}{f' with {named}' if named else ''}. Intervals are 95 %."


def build_colors(colors: Mapping[str, str] = COLORS) -> Element:
    buttons = []
    for number, (name, text) in enumerate(colors.items()):
        button = build("input", type="radio", name="color", id=f"by-{name}", checked="" if number == 0 else None)
        buttons.append(build("label", button, f" {text}"))
    return build("fieldset", build("legend", "Color the tokens of replies by"), buttons)


MEASURES = (
    ("entropy", "Entropy, nats a token", "Near 0 the model always samples the same replies and stops learning."),
    ("approx_kl", "KL divergence of a job, nats a token", "How far one job moved the model."),
    ("clip_fraction", "Share of clipped tokens", "Above about 0.3 the steps are too large."),
    ("grad_norm", "Gradient norm", "Before clipping. Jumps point to unusual data."),
    ("mismatch_kl", "Sampler against learner, nats a token", "Above 0.01 what is trained is not what was sampled."),
    ("samples_per_episode", "Samples of an episode", "1: one conversation. More: it was rewritten, or has sub-agents."),
    ("loss", "Loss", "Of policy gradients its size says little; of SFT and DPO it should fall."),
)
"""Metrics of the training jobs that get a chart: name in `training_metrics.jsonl`, title, and how to read it."""


def build_verdict(content: PageContent) -> Element:
    """Returns the verdict in a sentence, its interval as a drawing, and what to know before it is believed."""
    summary, overview, change = content.summary, content.overview, content.summary.improvement
    tone = "good" if summary.promoted and not summary.is_incomplete else "bad" if summary.status == "failed" else "mild"
    headline, drawing = summary.headline(), None
    if content.is_running:
        headline = f"is running: {overview.epochs_done or 0} of {overview.num_epochs or '?'} epochs are done"
    elif change is not None and not summary.smoke and summary.confirm_base and summary.confirm_tuned:
        metric, on = summary.confirm_tuned.metric, count_examples(change.num_pairs, change.num_clusters)
        means = [each.mean for each in (summary.confirm_base, summary.confirm_tuned)]
        moved = "" if None in means else f" from {means[0]:.3f} to {means[1]:.3f}"
        headline += f": {metric}{moved}, {change} on {on.replace(' ', ' confirm ', 1)}"
        how = f"95 % interval of the change, {change.format_p_value()}; left of the mark is worse, right is better"
        drawing = draw_interval(change, find_bounds([change]), how, width=360)
    noted = [(name, text) for name, text in _list_facts(content) if name in NOTED]
    return build(
        "section",
        build("p", f"{summary.run_id} {headline}.", class_=f"verdict {tone}"),
        drawing,
        _build_list(noted) if noted else None,
        id="verdict",
    )


def _list_facts(content: PageContent) -> list[tuple[str, str]]:
    hidden = ("report", "saved", "resume", *(("promoted", "reason", "improvement") if content.is_running else ()))
    return [(name, text) for name, text in content.summary.facts() if text and name not in hidden]


def _build_list(facts: Iterable[tuple[str, str]]) -> Element:
    return build("dl", (part for name, text in facts for part in (build("dt", name), build("dd", text))))


def build_facts(content: PageContent) -> Element | None:
    facts = [(name, text) for name, text in _list_facts(content) if name not in NOTED]
    return build_section("Details", _build_list(facts), id="facts") if facts else None


def build_pairs(content: PageContent) -> Element | None:
    """Returns some examples of the verdict with the agent's answers before and after training, as text."""
    found = [pair for example in content.pairs if (pair := _build_pair(content, example)) is not None]
    if not found:
        return None
    note = f"The largest changes of {content.metric}, up and down."
    return build_section(
        "Before and after",
        build("p", note, class_="note"),
        build("div", found, class_="pairs"),
        id="pairs",
        class_="narrow",
    )


def _build_pair(content: PageContent, example: ComparedExample) -> Element | None:
    rows = [row for key in example.keys if (row := content.rows.get(key)) is not None]
    if len(rows) < 2:
        return None
    tones = ("", "" if not example.change else "good" if example.change > 0 else "bad")
    marked = mark_difference(*(_quote(find_reply(row.data)) for row in rows))
    parts = [build("p", _quote(find_question(rows[0].data)), class_="clip note")]
    for name, score, tone, text in zip(
        ("before", "after"), (example.first, example.second), tones, marked, strict=True
    ):
        head = build("dt", f"{name} ", build("span", f"{score:.3g}", class_=f"value {tone}"))
        parts.append(build("dl", head, build("dd", text, class_="clip")))
    return build("article", build("h3", f"Example {example.example_id}"), parts, class_="pair")


def _quote(text: str) -> str:
    return text[:MAX_QUOTE] + (" …" if len(text) > MAX_QUOTE else "") or "(no text)"


def build_rewards(content: PageContent) -> Element:
    training = [Point(row.epoch, row.avg_reward, row.ci_low, row.ci_high) for row in fill_gaps(content.metrics)]
    kept = [Point(row.epoch, row.filtered_avg_reward) for row in fill_gaps(content.metrics)]
    select = [Point(row.epoch, row.avg_reward, row.ci_low, row.ci_high) for row in content.validations]
    lines = [
        Line("training reward, all groups", "training", training, is_band=True),
        Line("training reward, groups kept", "kept", kept, is_band=True),
        Line("validation reward (select)", "validation", select),
    ]
    return build_section(
        "Reward", draw_chart("Reward by epoch, with 95 % intervals", lines), id="reward", class_="wide"
    )


def build_scores(content: PageContent) -> Element | None:
    changes = content.summary.evaluators
    return build_section("Scores", build_changes(changes), id="scores") if changes else None


def build_changes(changes: Sequence[MetricChange], before: str = "base model", after: str = "trained model") -> Element:
    bounds = find_bounds(change.improvement for change in changes)
    rows = [
        (
            change.metric,
            change.split,
            _format_mean(change.before),
            _format_mean(change.after),
            draw_interval(change.improvement, bounds),
        )
        for change in changes
    ]
    header = ("evaluator", "split", before, after, "change, 95 % interval")
    return build_table(header, rows, "Every evaluator before and after training")


def _format_mean(summary: MetricSummary | None) -> str:
    return "" if summary is None else format_interval(summary.mean, summary.ci_low, summary.ci_high)


def build_measures(content: PageContent, measures: Sequence[tuple[str, str, str]] = MEASURES) -> Element | None:
    charts = []
    for key, title, meaning in measures:
        points = [Point(row.epoch, read_measure(row, key)) for row in fill_gaps(content.metrics)]
        if sum(point.is_known for point in points) > 1:
            chart = draw_chart(f"{title} by epoch", [Line(title, "job", points)], width=340, height=170)
            charts.append(build("div", build("h3", title), chart, build("p", meaning, class_="note")))
    if not charts:
        return None
    return build_section("Training", build("div", charts, class_="grid"), id="training")


def read_measure(row: EpochMetrics, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def build_examples(content: PageContent) -> Element | None:
    """Returns what changed on the examples of the verdict; None: there was no verdict."""
    if not content.examples:
        return None
    better, worse = choose_changed(content.examples, MAX_EXAMPLES)
    up, same, down = count_changes(content.examples)
    text = (
        f'Of {len(content.examples):,} confirm examples, {up:,} score higher in "{content.metric}" than with '
        f"the base model, {same:,} the same and {down:,} lower."
    )
    return build_section(
        "What changed",
        build("p", text),
        *_build_changes(content, "Better", better),
        *_build_changes(content, "Worse", worse),
        id="examples",
    )


def _build_changes(content: PageContent, title: str, examples: list[ComparedExample]) -> list[Element]:
    if not examples:
        return []
    names, parts = ("base model", "trained model"), [build("h3", title)]
    for example in examples:
        rows = [row.data for key in example.keys if (row := content.rows.get(key)) is not None]
        before, after = map(find_reply, rows) if len(rows) == 2 else ("", "")
        replies = (
            ChangedReply(f"{names[0]}: {example.first:.3g}", before),
            ChangedReply(f"{names[1]}: {example.second:.3g}", after),
        )
        arms = (
            build("div", build("h4", name), _build_episode(content, key))
            for name, key in zip(names, example.keys, strict=True)
        )
        chats = build_details("both conversations", build("div", arms, class_="side"))
        title = f"Example {example.example_id}: {example.change:+.3g}"
        parts.append(build_change(title, find_question(rows[0]) if rows else "", replies, chats))
    return parts


def build_groups(content: PageContent) -> Element | None:
    if not content.groups:
        return None
    return build_section(
        "Groups",
        build(
            "p",
            f"Episodes of one example, compared with each other in epoch {content.groups[0].epoch}; the groups whose "
            "rewards differ most. The relative reward is the reward minus the mean of its group.",
        ),
        (_build_group(content, group) for group in content.groups),
        id="groups",
    )


def _build_group(content: PageContent, group: EpisodeGroup) -> Element:
    ranked = sorted(group.episodes, key=lambda head: -(head.reward if head.reward is not None else -1e300))
    caption = f"Example {group.example_id}, mean reward {group.mean:.3g}"
    return _list_episodes(content, ranked, caption)


def build_episodes(content: PageContent) -> Element | None:
    """Returns the best, the worst and the most surprising episodes; None: none was evaluated."""
    if not content.chosen:
        return None
    parts = [_list_episodes(content, heads, title) for title, heads in content.chosen.items() if heads]
    phase = next(heads[0].key.partition("/")[0] for heads in content.chosen.values() if heads)
    which = "the verdict (confirm)" if phase == "confirm_tuned" else "the last validation (select)"
    return build_section("Episodes", build("p", f"Of {which}."), *parts, id="episodes")


def _list_episodes(content: PageContent, heads: Sequence[EpisodeHead], caption: str) -> Element:
    """Returns episodes in a row each, and below them their conversations, to which the questions lead."""
    rows: list[tuple[Content, ...]] = []
    chats = []
    for head in heads:
        found, mean = content.rows.get(head.key), content.baselines.get(head.key)
        excerpt = EpisodeExcerpt() if found is None else make_excerpt(found.data)
        place = f"{caption} {head.key}".replace(" ", "-")
        rows.append(
            (
                build("a", build("span", excerpt.question or head.example_id, class_="clip"), href=f"#{quote(place)}"),
                build("span", excerpt.reply, class_="clip"),
                build("span", excerpt.expected, class_="clip"),
                "missing" if head.reward is None else f"{head.reward:.3g}",
                "" if head.reward is None or mean is None else f"{head.reward - mean:+.3g}",
                excerpt.evaluators,
                head.outcome,
                *(f"{count:,}" for count in (excerpt.turns, excerpt.tokens)),
                f"{excerpt.seconds:.2f}",
            )
        )
        chats.append(
            build_details(f"conversation: {head.key}", build("div", _build_episode(content, head.key), id=place))
        )
    return build("div", build_table(EPISODE_HEADER, rows, caption), chats)


def _build_episode(content: PageContent, key: str) -> Element:
    row = content.rows.get(key)
    if row is None:
        return build("p", "This episode cannot be read; `reinforge runs verify` shows why.", class_="note")
    style = ChatStyle(content.texts, content.trained, content.baselines.get(key))
    return build_chat(row, style)


def build_outcomes(content: PageContent) -> Element:
    """Returns how the episodes ended that did not end well, by reason."""
    title = "Failed and dropped episodes"
    if not content.outcomes:
        return build_section(title, build("p", "No episode failed or was dropped."), id="outcomes")
    rows = [
        (name, "dropped" if name in MISSING else "kept, with its penalty", reason or "", f"{count:,}")
        for name, reason, count in content.outcomes
    ]
    table = build_table(("outcome", "in training", "reason", "episodes"), rows, "Outcomes by reason")
    return build_section(title, table, id="outcomes")


def build_settings(content: PageContent) -> Element:
    rows = [(change.path, format_setting(change.new), format_setting(change.old)) for change in content.settings]
    return build_section(
        "Settings",
        build("p", "Run it again with:"),
        build("pre", _describe_rerun(content)),
        build_table(("setting", "value", "default"), rows, "Settings that differ from their default") if rows else None,
        build_details("all settings", build("pre", content.config)) if content.config else None,
        id="settings",
    )


def format_setting(value: object) -> str:
    return "" if value is ABSENT else to_json(value)
