"""Crash points for tests: `REINFORGE_CRASH_AT=<site>:<n>` kills the process when it reaches a site for the n-th time.

The durability tests kill a run at a site with SIGKILL and resume it. Without the variable a site costs one comparison.
"""

from __future__ import annotations

import os
import signal

SITES = (
    "rollout.before_journal",
    "rollout.after_journal",
    "reward.after",
    "batch.sealed",
    "submit.after_intent",
    "submit.after_send",
    "submit.after_id",
    "step.after_backward",
    "step.after_optim",
    "ckpt.after_tensor",
    "ckpt.after_manifest",
    "ckpt.after_rename",
    "db.before_commit",
    "db.after_commit",
    "publish.before",
    "publish.mid",
    "gc.mid_delete",
    "export.mid",
    "manifest.before",
)
VARIABLE = "REINFORGE_CRASH_AT"


class _CrashSite:
    """The site at which the process dies, and after how many visits."""

    site: str | None = None
    remaining: int = 0


def arm(spec: str | None) -> None:
    """Sets the site at which the process dies: `site` or `site:n`; None or empty: no site."""
    site, _, count = (spec or "").partition(":")
    if site and site not in SITES:
        raise ValueError(f"{VARIABLE}: unknown site {site!r}; allowed: {', '.join(SITES)}")
    _CrashSite.site, _CrashSite.remaining = site or None, int(count or 1)


def crash_point(site: str) -> None:
    """Kills the process, without any cleanup, if this is the site that was set."""
    if _CrashSite.site != site:
        return
    _CrashSite.remaining -= 1
    if _CrashSite.remaining == 0:
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows: SIGTERM kills at once


arm(os.environ.get(VARIABLE))
