"""Engines and pools that are ended after each test."""

import pytest

from nearkv.agent.movers.limits import MoverLimits
from nearkv.agent.movers.pool import MoverPool
from tests.agent.movers.engines import make_engine

PATIENT = {
    "start_seconds": 30.0,
    "cancel_seconds": 15.0,
    "forget_seconds": 15.0,
    "offer_seconds": 20.0,
}
"""How long movers that do what they are told may take to it on a machine that is busy."""


@pytest.fixture
def engine():
    """Return a function that makes engine ranks."""
    made = []

    def make(key):
        made.append(make_engine(key))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
async def pool_of():
    """Return a function that makes pools: limits, and whatever else a pool takes."""
    pools = []

    def make(command=None, options=None, **limits):
        given = {} if command is None else {"command": command}
        pools.append(MoverPool(MoverLimits(**(PATIENT | limits)), options=options, **given))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()
        assert all(status.pid is None for status in pool.describe())


@pytest.fixture
def pool(pool_of):
    return pool_of()
