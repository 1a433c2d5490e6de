"""What the tests of servers share."""

from tests.serving.conftest import _counts_no_frozen_objects

__all__ = ["_counts_no_frozen_objects"]
