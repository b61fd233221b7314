"""When a pod is tried again: what wakes a rejected one, backoff of a failed one, the flush."""

import asyncio
import copy

import pytest

from tests.contract.scheduler_stage import GPU, make_node, make_pod, staged
from tests.doubles.scheduler import Outcome
from tests.doubles.scheduler.scripted_extender import Answer

REJECTS = {
    "FailedNodes": Answer({"NodeNames": [], "FailedNodes": {"n0": "no headroom"}}),
    "FailedAndUnresolvableNodes": Answer({"FailedAndUnresolvableNodes": {"n0": "broken"}}),
}
each_kind = pytest.mark.parametrize("kind", REJECTS)


def changed(stage, change):
    document = copy.deepcopy(stage.cluster.nodes["n0"].document)
    change(document)
    stage.cluster.set_node(document)


def heartbeat(stage):
    def change(node):
        node["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-11-29T00:05:00Z"
        node["metadata"]["resourceVersion"] = "4711"

    changed(stage, change)


def annotate_node(stage):
    changed(stage, lambda node: node["metadata"]["annotations"].update({"a/b": "1"}))


def label_node(stage):
    changed(stage, lambda node: node["metadata"]["labels"].update({"a/b": "1"}))


def change_allocatable(stage):
    changed(stage, lambda node: node["status"].update(allocatable={"cpu": "3", GPU: "8"}))


def lose_a_condition(stage):
    changed(stage, lambda node: node["status"].update(conditions=[]))


def taint_node(stage):
    changed(stage, lambda node: node["spec"].update(unschedulable=True))


def add_node(stage):
    stage.cluster.set_node(make_node("n9"))


def delete_node(stage):
    stage.cluster.delete_node("n4")


def change_pod(part):
    def change(stage):
        document = make_pod("p")
        document["metadata"][part] = {"a": "b"}
        stage.cluster.set_pod(document)

    change.__name__ = f"own {part}"
    return change


def note_own_status(stage):
    document = make_pod("p")
    document["status"]["conditions"] = [{"type": "PodScheduled", "status": "False"}]
    document["metadata"]["resourceVersion"] = "4711"
    stage.cluster.set_pod(document)


def bind_another(stage):
    stage.cluster.set_pod(make_pod("other", node="n1"))


def delete_another(stage):
    stage.cluster.delete_pod("uid-there")


def finish_another(stage):
    done = make_pod("there", node="n2")
    done["status"]["phase"] = "Succeeded"
    stage.cluster.set_pod(done)


def create_another(stage):
    stage.cluster.set_pod(make_pod("waiting", schedulerName="else"))


WAKING = [
    *(annotate_node, label_node, change_allocatable, lose_a_condition, taint_node),
    *(add_node, delete_node, change_pod("labels"), change_pod("annotations")),
    *(bind_another, delete_another, finish_another),
]
SILENT = [heartbeat, note_own_status, create_another, lambda _: None]


async def rejected(stage, kind):
    """Bring a pod to where the extender has rejected it, and heal the extender."""
    stage.cluster.set_pod(make_pod("there", node="n2"))
    stage.extender.answers["filter"] = REJECTS[kind]
    assert (await stage.place(make_pod("p"))).outcome is Outcome.UNSCHEDULABLE
    stage.extender.heal()
    assert await stage.later(15.0) == []


@each_kind
@pytest.mark.parametrize("happens", WAKING, ids=lambda it: it.__name__)
async def test_what_wakes_a_pod_that_the_extender_rejected(happens, kind):
    async with staged() as stage:
        await rejected(stage, kind)
        happens(stage)
        assert [one.outcome for one in await stage.scheduler.drain()] == [Outcome.PLACED]


@each_kind
@pytest.mark.parametrize("happens", SILENT, ids=["heartbeat", "own status", "new pod", "nothing"])
async def test_what_does_not_wake_it(happens, kind):
    async with staged() as stage:
        await rejected(stage, kind)
        happens(stage)
        assert await stage.later(200.0) == []
        assert "uid-p" in stage.scheduler.queue.rejected


async def test_the_flush_comes_after_five_minutes_with_the_half_minute_beat():
    async with staged() as stage:
        await rejected(stage, "FailedNodes")
        waited = 15
        while not await stage.later(1.0):
            waited += 1
        assert 300 < waited + 1 <= 330


async def test_an_early_event_waits_for_the_end_of_backoff():
    async with staged() as stage:
        stage.extender.answers["filter"] = REJECTS["FailedNodes"]
        await stage.place(make_pod("p"))
        stage.extender.heal()
        annotate_node(stage)
        assert await stage.scheduler.drain() == []
        assert len(await stage.later(1.0)) == 1


async def test_an_event_during_the_cycle_is_not_lost():
    async with staged() as stage:
        answer = REJECTS["FailedNodes"]
        stage.extender.answers["filter"] = Answer(answer.value, then=lambda: annotate_node(stage))
        await stage.place(make_pod("p"))
        stage.extender.heal()
        assert len(await stage.later(1.0)) == 1


async def test_a_pod_that_only_lacks_room_is_woken_by_room_and_not_by_an_annotation():
    async with staged(1) as stage:
        stage.cluster.set_pod(make_pod("there", devices=8, node="n0"))
        await stage.place(make_pod("p"))
        annotate_node(stage)
        assert await stage.later(20.0) == []
        delete_another(stage)
        assert len(await stage.scheduler.drain()) == 1


async def test_failed_pods_are_tried_after_1_2_4_8_10_10_seconds():
    async with staged() as stage:
        stage.extender.answers["filter"] = Answer(status=500)
        await stage.place(make_pod("p"))
        gaps, waited = [], 0
        while len(gaps) < 6:
            waited += 1
            if await stage.later(1.0):
                gaps.append(waited)
                waited = 0
        assert gaps == [1, 2, 4, 8, 10, 10]
        annotate_node(stage)  # events do not hasten it
        assert await stage.later(5.0) == []


async def test_higher_priority_is_tried_first_then_the_older_one():
    async with staged() as stage:
        for name, priority in (("a", 0), ("b", 5), ("c", 0)):
            stage.cluster.set_pod(make_pod(name, priority=priority))
        assert [one.pod.name for one in await stage.scheduler.drain()] == ["b", "a", "c"]


async def test_a_pod_deleted_while_it_waits_or_backs_off_is_forgotten():
    async with staged() as stage:
        await rejected(stage, "FailedNodes")
        stage.cluster.delete_pod("uid-p")
        stage.extender.answers["filter"] = Answer(status=500)
        await stage.place(make_pod("q"))
        stage.cluster.delete_pod("uid-q")
        assert await stage.later(500.0) == []
        assert len(stage.scheduler.queue) == 0


async def test_run_places_pods_as_they_come_and_stops_when_cancelled():
    async with staged() as stage:
        running = asyncio.create_task(stage.scheduler.run())
        for index in range(3):
            stage.cluster.set_pod(make_pod(f"p{index}"))
            async with asyncio.timeout(30):
                while f"p{index}" not in stage.bound:  # noqa: ASYNC110 (it offers no event)
                    await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
