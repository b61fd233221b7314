"""The scenarios and behaviours of the doubles, on real binaries; skipped where there are none."""

import pytest

from tests.cluster.binaries import VARIABLE, find_binaries
from tests.cluster.plane import real_plane
from tests.doubles.scheduler.scripted_extender import ScriptedExtender
from tests.integration.scheduler_behaviours import BEHAVIOURS, NAMES
from tests.integration.scheduling_scenarios import SCENARIOS
from tests.integration.scheduling_site import site_over

pytestmark = [
    pytest.mark.skipif(not find_binaries().usable, reason=f"{VARIABLE} has no binaries"),
    pytest.mark.timeout(300),
]


@pytest.fixture
async def cluster():
    async with real_plane(find_binaries()) as plane, site_over(plane) as cluster:
        yield cluster


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda it: it.__name__)
async def test_placing_with_the_extender(cluster, scenario):
    await scenario(cluster)


@pytest.mark.parametrize(
    ("behaviour", "arguments"),
    BEHAVIOURS,
    ids=["-".join((it.__name__, *arguments)) for it, arguments in BEHAVIOURS],
)
async def test_the_scheduler_behaves_as_the_double(cluster, behaviour, arguments):
    for name in NAMES:
        await cluster.add_node(name, agent=False)
    async with ScriptedExtender().serving() as extender:
        await behaviour(cluster, extender, *arguments)
