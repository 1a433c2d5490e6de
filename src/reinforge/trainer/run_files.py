"""The files that a run leaves at its end, however it ends: summary, page, report and plot."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from reinforge.errors import describe_error
from reinforge.runs.guard_events import list_guard_events
from reinforge.runs.page.page import write_page
from reinforge.runs.plot import NEEDS_MATPLOTLIB, can_draw_plots, draw_reward_plot
from reinforge.runs.report import write_report
from reinforge.runs.rows import EpochMetrics
from reinforge.runs.summary import RunSummary, write_summary
from reinforge.trainer.context import END, RunContext

logger = logging.getLogger("reinforge")


def write_run_files(context: RunContext, summary: RunSummary, history: Sequence[EpochMetrics]) -> None:
    """Writes summary, page, report and plot from the results so far, and ends the session in the journal."""
    context.begin_stage(END)
    context.wall_time_s.pop("START", None)
    summary.episodes, summary.tokens = dict(context.episodes), dict(context.tokens)
    summary.missing_reason = context.missing.find_commonest()
    summary.wall_time_s = {name: round(seconds, 3) for name, seconds in context.wall_time_s.items()}
    summary.policy_versions = context.policy_versions
    summary.guards = list_guard_events(context.journal.stages())
    write_summary(context.folder / "summary.json", summary)
    _write_page(context, summary)
    write_report(context.folder / "report.md", summary, history, context.validations)
    arms = {"base": summary.confirm_base, "tuned": summary.confirm_tuned}
    if can_draw_plots():
        draw_reward_plot(
            context.folder / "reward_plot.png", history, context.validations, title=context.run_id, confirm=arms
        )
    else:
        context.progress.note(f"no reward plot: {NEEDS_MATPLOTLIB}")
    context.journal.set_facts(status=summary.status, reason=summary.reason, can_resume=summary.can_resume)
    context.journal.end_session(summary.status if not summary.reason else f"{summary.status}: {summary.reason}")
    for line in summary.closing_lines(color=False):
        logger.info(line)


def _write_page(context: RunContext, summary: RunSummary) -> None:
    """Writes `report.html`; a run whose results are safe does not fail for want of it."""
    try:
        write_page(context.folder, summary)
    except Exception as error:
        logger.exception("report.html was not written")
        command = f"`reinforge report {context.folder}` writes it again"
        context.progress.note(f"no report.html: {describe_error(error)}; {command}")
