import asyncio
import sys

import pytest

from tests.core.e2e.test_reporting import LearningRun, by_version
from tests.core.runs.test_page import HOSTILE


@pytest.fixture(scope="package")
def made(tmp_path_factory):
    """Two runs; what the agent of the second says is hostile."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("plain", "hostile"):
        run = LearningRun(folder, count=24, reward=by_version)
        if name == "hostile":
            policy = run.adapter.server
            policy.script = lambda request, policy=policy: f"form {policy.version} {HOSTILE}{request.sampling.seed % 7}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "matplotlib", None)
            asyncio.run(run.run())
        (folder / "r").rename(folder / name)
    return folder
