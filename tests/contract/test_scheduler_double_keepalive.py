"""Connections: one is kept for all calls, and used again after 80 s of silence."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from nearkv.extender.settings import LimitSettings
from nearkv.serving import Transport, running
from nearkv.settings import Address
from tests.contract.scheduler_stage import make_node, make_pod
from tests.doubles.scheduler import ExtenderConfig, Outcome, SchedulerConfig, SchedulerDouble
from tests.doubles.scheduler.clocks import ShiftedLoop
from tests.doubles.scheduler.cluster import Cluster
from tests.doubles.scheduler.scripted_extender import ScriptedExtender

ANY_PORT = Address("127.0.0.1", 0)


def in_shifted_loop(main):
    """Run a test in a loop whose clock can jump."""
    with asyncio.Runner(loop_factory=ShiftedLoop) as runner:
        return runner.run(main(runner.get_loop()))


def scheduler_of(url, loop, *, notices_close):
    cluster = Cluster()
    for index in range(5):
        cluster.set_node(make_node(f"n{index}"))
    entry = ExtenderConfig(
        url_prefix=url,
        filter_verb="filter",
        prioritize_verb="prioritize",
        weight=1,
        node_cache_capable=True,
    )
    config = SchedulerConfig(extenders=[entry])
    return SchedulerDouble(cluster, config, now=loop.time, notices_close=notices_close)


async def place_after_silence(loop, url, *, silent_seconds, notices_close):
    """Place a pod, be silent, place another; return its outcome and the connections used."""
    scheduler = scheduler_of(url, loop, notices_close=notices_close)
    try:
        scheduler.cluster.set_pod(make_pod("p"))
        assert (await scheduler.step()).outcome is Outcome.PLACED
        await loop.jump(silent_seconds)
        scheduler.cluster.set_pod(make_pod("q"))
        placement = await scheduler.step()
        return placement, scheduler.extenders[0].client.dialled
    finally:
        scheduler.close()


@pytest.mark.parametrize(
    ("keepalive", "silent", "notices", "outcome", "dialled"),
    [
        (75.0, 80.0, False, Outcome.ERROR, 1),
        (75.0, 80.0, True, Outcome.PLACED, 2),
        (120.0, 80.0, False, Outcome.PLACED, 1),
        (120.0, 89.0, False, Outcome.PLACED, 1),
        (120.0, 91.0, False, Outcome.PLACED, 2),
        (75.0, 70.0, False, Outcome.PLACED, 1),
    ],
    ids=[
        "75 s: the close crosses the POST",
        "75 s: the close was noticed",
        "120 s: used again after 80 s",
        "120 s: used again after 89 s",
        "the client gives up after 90 s",
        "75 s: used again after 70 s",
    ],
)
def test_a_connection_after_silence(keepalive, silent, notices, outcome, dialled):
    async def main(loop):
        async with ScriptedExtender().serving(keepalive) as extender:
            placement, connections = await place_after_silence(
                loop, extender.url, silent_seconds=silent, notices_close=notices
            )
        assert (placement.outcome, connections) == (outcome, dialled)
        if outcome is Outcome.ERROR:
            assert "server closed idle connection" in placement.describe()

    in_shifted_loop(main)


def test_the_failed_post_is_not_sent_twice():
    async def main(loop):
        async with ScriptedExtender().serving(75.0) as extender:
            await place_after_silence(loop, extender.url, silent_seconds=80, notices_close=False)
            assert extender.verbs == ["filter", "prioritize"]

    in_shifted_loop(main)


EXTENDERS_OWN = LimitSettings().keepalive_seconds


@pytest.mark.parametrize(
    ("keepalive", "survives"),
    [(None, False), (EXTENDERS_OWN, True)],
    ids=["what others are served", "what the extender serves"],
)
def test_our_way_to_serve_with_the_extenders_keepalive(keepalive, survives):

    async def main(loop):
        extender = ScriptedExtender()
        app = web.Application()
        app.router.add_route("POST", "/{verb}", extender.handle)
        transport = Transport() if keepalive is None else Transport(keepalive_seconds=keepalive)
        async with AsyncExitStack() as stack:
            address = await stack.enter_async_context(running(app, ANY_PORT, transport=transport))
            placement, _ = await place_after_silence(
                loop, address.url, silent_seconds=80, notices_close=False
            )
        assert (placement.outcome is Outcome.PLACED) is survives

    in_shifted_loop(main)
