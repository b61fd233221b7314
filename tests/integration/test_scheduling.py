"""Scheduling scenarios on doubles of API server and scheduler, with real extender processes."""

import pytest

from tests.doubles.scheduler.scripted_extender import ScriptedExtender
from tests.integration.scheduler_behaviours import BEHAVIOURS, NAMES
from tests.integration.scheduling_scenarios import SCENARIOS
from tests.integration.scheduling_site import doubles, site_over


@pytest.fixture
async def cluster(tmp_path):
    async with doubles(tmp_path) as plane, site_over(plane) as cluster:
        yield cluster


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda it: it.__name__)
async def test_placing_with_the_extender(cluster, scenario):
    await scenario(cluster)


def each_behaviour():
    """The first case of each behaviour belongs to the fast lane; contract tests have them all."""
    seen = set()
    for behaviour, arguments in BEHAVIOURS:
        marks = [pytest.mark.slow] if behaviour in seen else []
        seen.add(behaviour)
        name = "-".join((behaviour.__name__, *arguments))
        yield pytest.param(behaviour, arguments, id=name, marks=marks)


@pytest.mark.parametrize(("behaviour", "arguments"), list(each_behaviour()))
async def test_the_scheduler_behaves_over_the_api(cluster, behaviour, arguments):
    for name in NAMES:
        await cluster.add_node(name, agent=False)
    async with ScriptedExtender().serving() as extender:
        await behaviour(cluster, extender, *arguments)
