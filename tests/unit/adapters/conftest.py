"""No pauses between attempts."""

from collections.abc import Iterator

import pytest
import stamina


@pytest.fixture(autouse=True)
def _no_backoff() -> Iterator[None]:
    with stamina.set_testing(True, attempts=10, cap=True):
        yield
