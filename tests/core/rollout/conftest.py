"""What several tests of rollouts share."""

import pytest

from reinforge.rollout.gateway import Gateway


@pytest.fixture
async def gateway():
    async with Gateway() as gateway:
        yield gateway
