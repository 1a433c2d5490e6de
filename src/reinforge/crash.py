"""Named places at which a process can be made to die: `REINFORGE_CRASH_AT=<site>:<n>`, on the n-th passing.

The tests of durability kill a run exactly there, with SIGKILL, and continue it; without the variable a place costs one
comparison.
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
)
VARIABLE = "REINFORGE_CRASH_AT"


class _Armed:
    """Where the process dies, and how many passings are left."""

    site: str | None = None
    left: int = 0


def arm(spec: str | None) -> None:
    """Sets where the process dies.

    Args:
        spec: `site` or `site:n`; None or empty: nowhere.

    Raises:
        ValueError: There is no such site.
    """
    site, _, count = (spec or "").partition(":")
    if site and site not in SITES:
        raise ValueError(f"{VARIABLE}: there is no site {site!r}; there are {', '.join(SITES)}")
    _Armed.site, _Armed.left = site or None, int(count or 1)


def crash_point(site: str) -> None:
    """Dies here if this is the place, without any chance to clean up."""
    if _Armed.site != site:
        return
    _Armed.left -= 1
    if _Armed.left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get(VARIABLE))
