"""Waking parked pods: when room is told, and how rarely."""

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from nearkv.agent.waking import ROOM_ANNOTATION, RoomAnnouncer, RoomWatch, WakingLimits
from nearkv.kube.access import ApiAccess
from nearkv.kube.patching import Patcher, PatchLimits
from nearkv.node_summary import DeviceSummary
from tests.doubles.api_server import ApiServerDouble, Faults, node_object
from tests.integration.stack import eventually

LIMITS = WakingLimits(min_seconds=60.0, settle_seconds=2.0, jitter_seconds=2.0, clean_ratio=0.1)


def device(used=0, **fields):
    return DeviceSummary(
        id="G", **{"total_bytes": 100, "used_bytes": used, "health": "ok", **fields}
    )


CLEAN = device()
FOREIGN = device(50)
FAILED = device(health="failed")
OF_A_POD = device(50, pod_uid="u")
UNREAD = device(None)


class Told:
    """A watch on one device, a second at a time."""

    def __init__(self):
        self.watch = RoomWatch(LIMITS)
        self.now = 0.0
        self.written_at = []

    def see(self, *devices, seconds=1, draw=0.0):
        for _ in range(seconds):
            for each in devices:
                self.watch.observe(None if each is None else [each], self.now)
            if self.watch.is_due(self.now, draw):
                self.watch.written(self.now)
                self.written_at.append(self.now)
            self.now += 1.0
        return self


@pytest.mark.parametrize("blocked", [FOREIGN, FAILED], ids=["foreign", "failed"])
def test_room_is_told_once_a_moment_after_it_appeared(blocked):
    told = Told().see(blocked, seconds=5).see(CLEAN, seconds=100)
    assert told.written_at == [7.0]


@pytest.mark.parametrize(
    "seen",
    [
        (CLEAN,),
        (OF_A_POD, CLEAN),
        (FOREIGN, OF_A_POD),
        (FAILED, FOREIGN),
        (FAILED, UNREAD),
        (FOREIGN, None),
        (UNREAD, CLEAN),
        (None, CLEAN),
    ],
)
def test_what_is_no_new_room_is_not_told(seen):
    told = Told()
    for each in seen:
        told.see(each, seconds=10)
    assert told.written_at == []


@pytest.mark.parametrize("gap", [UNREAD, None], ids=["unread", "nothing"])
def test_a_reading_that_failed_in_between_loses_nothing(gap):
    told = Told().see(FOREIGN, seconds=2).see(gap, seconds=3).see(CLEAN, seconds=5)
    assert told.written_at == [7.0]


def test_room_that_is_gone_again_is_not_told():
    told = Told().see(FOREIGN).see(CLEAN).see(FOREIGN, seconds=10)
    assert told.written_at == []
    assert told.see(FOREIGN).see(CLEAN).see(OF_A_POD, seconds=10).written_at == []


def test_a_device_that_comes_and_goes_all_the_time_is_told_once_a_minute():
    told = Told()
    random_ = random.Random(5)
    for _ in range(600):
        told.see(random_.choice([CLEAN, FOREIGN, FAILED]), seconds=3)
    gaps = [later - sooner for sooner, later in pairwise(told.written_at)]
    assert len(told.written_at) >= 10
    assert min(gaps) >= 60.0


def test_room_in_the_quiet_minute_is_told_after_it():
    told = Told().see(FOREIGN).see(CLEAN, seconds=10)
    assert told.written_at == [3.0]
    told.see(FOREIGN).see(CLEAN, seconds=100)
    assert told.written_at == [3.0, 63.0]


def test_nodes_that_are_freed_together_do_not_write_together():
    told = Told().see(FOREIGN).see(CLEAN, seconds=10, draw=1.0)
    assert told.written_at == [5.0]


def test_devices_are_told_apart():
    watch = RoomWatch(LIMITS)
    one, other = DeviceSummary(id="1", health="failed"), device()
    watch.observe([one, other], 0.0)
    watch.observe([one, device(50)], 1.0)
    assert not watch.is_due(100.0, 0.0)


def test_room_that_came_just_before_a_write_is_told_by_the_next_one():
    watch = RoomWatch(LIMITS)
    first, second = DeviceSummary(id="1", health="failed"), DeviceSummary(id="2", health="failed")
    freed = [DeviceSummary(id=name, total_bytes=100, used_bytes=0, health="ok") for name in "12"]
    watch.observe([first, second], 0.0)
    assert watch.observe([freed[0], second], 1.0)
    assert not watch.observe([freed[0], second], 2.0)
    assert watch.observe(freed, 2.5)
    assert watch.is_due(3.0, 0.0)
    watch.written(3.0)
    assert not watch.is_due(62.0, 0.0)
    assert watch.is_due(63.0, 0.0)
    watch.written(63.0)
    assert not watch.is_due(1000.0, 0.0)


# -- Writing ---------------------------------------------------------------------------------


class Readings:
    def __init__(self):
        self.devices = [FOREIGN]

    def __call__(self):
        return self.devices


@asynccontextmanager
async def announcing(**limits):
    async with ApiServerDouble() as api:
        api.put(node_object("n1", labels={"rack": "r1"}))
        readings = Readings()
        outcomes = Counter()
        async with ApiAccess.plain(api.url) as access:
            announcer = RoomAnnouncer(
                Patcher(access, limits=PatchLimits(attempts=1)),
                node="n1",
                devices=readings,
                interval_seconds=0.01,
                count=lambda outcome: outcomes.update([outcome]),
                publish=lambda: outcomes.update(["published"]),
                limits=WakingLimits(settle_seconds=0.0, jitter_seconds=0.0, **limits),
            )
            task = asyncio.create_task(announcer.run())
            await asyncio.sleep(0)
            try:
                yield api, outcomes, readings
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def stamp(api):
    return api.get("Node", "n1")["metadata"].get("annotations", {}).get(ROOM_ANNOTATION)


async def test_the_annotation_of_the_own_node_changes_and_nothing_else():
    async with announcing() as (api, outcomes, readings):
        before = api.get("Node", "n1")
        readings.devices = [CLEAN]
        await eventually(lambda: stamp(api), what="it is written")
        after = api.get("Node", "n1")
        assert stamp(api).endswith("+00:00")
        assert (after["spec"], after["status"]) == (before["spec"], before["status"])
        assert after["metadata"]["labels"] == before["metadata"]["labels"]
        await eventually(lambda: outcomes["written"] == 1, what="it is counted")
        assert outcomes["published"] == 1


async def test_a_write_that_failed_is_counted_and_tried_again_later():
    async with announcing(min_seconds=0.05) as (api, outcomes, readings):
        api.inject(Faults(verbs=("patch",), status=403, times=1))
        readings.devices = [CLEAN]
        await eventually(lambda: outcomes["forbidden"] == 1, what="it has failed")
        await eventually(lambda: stamp(api), what="it is written after all")
        await eventually(lambda: outcomes["written"] == 1, what="it is counted")
