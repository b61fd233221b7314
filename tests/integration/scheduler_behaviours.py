"""What a scheduler does with answers and events, shown through the API: real ones and the double.

Each behaviour takes a cluster of five nodes and an extender whose answers it writes.
"""

import asyncio
from collections.abc import Awaitable, Callable

from tests.doubles.scheduler.scripted_extender import CLOSE, HANG, Answer, ScriptedExtender
from tests.integration.scheduling_site import GPU, NODES, PODS, Site

NAMES = tuple(f"n{index}" for index in range(5))
FILTER_FAILURES = {
    "500": Answer(status=500),
    "201": Answer({"NodeNames": NAMES}, status=201),
    "malformed": Answer(body=b'{"NodeNames": ['),
    "empty": Answer(body=b""),
    "closed": Answer(instead=CLOSE),
    "error": Answer({"NodeNames": NAMES, "Error": "out of order"}),
    "unknown-node": Answer({"NodeNames": ["n0", "n9"]}),
    "timeout": Answer(instead=HANG),
}
SCORE_FAILURES = {
    "500": Answer(status=500),
    "malformed": Answer(body=b"["),
    "float": Answer(body=b'[{"Host":"n3","Score":10.0}]'),
    "string": Answer([{"Host": "n3", "Score": "10"}]),
    "null": Answer(None),
}
_REJECT = Answer({"NodeNames": [], "FailedNodes": dict.fromkeys(NAMES, "no headroom")})
_WEIGHT = 15
"""A score of 10 then outranks all default plugins."""


async def failed_filter(cluster: Site, extender: ScriptedExtender, failure: str) -> None:
    """A failed filter is a SchedulerError, tried again by time."""
    extender.answers["filter"] = FILTER_FAILURES[failure]
    async with cluster.scheduler(extender.url, ignorable=False, timeout_seconds=2.0):
        await cluster.add_pod("p")
        assert await cluster.not_placed("p") == "SchedulerError"
        extender.heal()
        await cluster.bound("p")


async def ignored_filter(cluster: Site, extender: ScriptedExtender, failure: str) -> None:
    """A failed filter of an ignorable extender is skipped; its scores count nevertheless."""
    extender.answers["filter"] = FILTER_FAILURES[failure]
    extender.answers["prioritize"] = Answer([{"Host": "n3", "Score": 10}])
    async with cluster.scheduler(extender.url, weight=_WEIGHT, timeout_seconds=2.0):
        await cluster.add_pod("p")
        assert await cluster.bound("p") == {"p": "n3"}


async def failed_scores(cluster: Site, extender: ScriptedExtender, failure: str) -> None:
    """Failed scores are dropped without a word."""
    extender.answers["prioritize"] = SCORE_FAILURES[failure]
    async with cluster.scheduler(extender.url, weight=_WEIGHT):
        await cluster.add_pod("p")
        await cluster.bound("p")


async def added_scores(cluster: Site, extender: ScriptedExtender) -> None:
    """Scores of a host add up, missing ones are 0, strangers are passed over."""
    scores = [("n1", 6), ("n3", 5), ("stranger", 10), ("n3", 5)]
    answer = [{"Host": host, "Score": score} for host, score in scores]
    extender.answers["prioritize"] = Answer(answer)
    async with cluster.scheduler(extender.url, weight=_WEIGHT):
        await cluster.add_pod("p")
        assert await cluster.bound("p") == {"p": "n3"}


async def one_node(cluster: Site, extender: ScriptedExtender) -> None:
    """A single node is not asked about a second time."""
    extender.answers["filter"] = Answer({"NodeNames": ["n2"]})
    async with cluster.scheduler(extender.url):
        await cluster.add_pod("p")
        assert await cluster.bound("p") == {"p": "n2"}
    assert extender.verbs == ["filter"]


async def _annotate(cluster: Site) -> None:
    await cluster.patch(f"{NODES}/n0", {"metadata": {"annotations": {"a/b": "1"}}})


async def _label(cluster: Site) -> None:
    await cluster.patch(f"{NODES}/n0", {"metadata": {"labels": {"a/b": "1"}}})


async def _allocate(cluster: Site) -> None:
    room = {"cpu": "7", "memory": "64Gi", "pods": "110", GPU: "8"}
    await cluster.patch(f"{NODES}/n0/status", {"status": {"allocatable": room}})


async def _change_pod(cluster: Site) -> None:
    await cluster.patch(f"{PODS}/p", {"metadata": {"annotations": {"a/b": "1"}}})


async def _delete_another(cluster: Site) -> None:
    await cluster.delete_pod("there")


WAKES: dict[str, Callable[[Site], Awaitable[None]]] = {
    "node-annotation": _annotate,
    "node-label": _label,
    "node-allocatable": _allocate,
    "own-annotation": _change_pod,
    "another-deleted": _delete_another,
}


async def woken(cluster: Site, extender: ScriptedExtender, event: str) -> None:
    """A pod that the extender rejected is tried again at once after this event."""
    await cluster.add_running("there", "n2")
    extender.answers["filter"] = _REJECT
    async with cluster.scheduler(extender.url):
        await cluster.add_pod("p")
        assert await cluster.not_placed("p") == "Unschedulable"
        extender.heal()
        await WAKES[event](cluster)
        await cluster.bound("p", seconds=10.0)


async def not_woken(cluster: Site, extender: ScriptedExtender) -> None:
    """A heartbeat that changes only times wakes nobody."""
    extender.answers["filter"] = _REJECT
    async with cluster.scheduler(extender.url):
        await cluster.add_pod("p")
        assert await cluster.not_placed("p") == "Unschedulable"
        extender.heal()
        extender.requests.clear()
        node = await cluster.request("GET", f"{NODES}/n0")
        conditions = node["status"]["conditions"]
        for condition in conditions:
            condition["lastHeartbeatTime"] = "2026-11-29T12:00:00Z"
        await cluster.patch(f"{NODES}/n0/status", {"status": {"conditions": conditions}})
        # That nothing happens takes time to see: longer than a woken pod would back off.
        await asyncio.sleep(1.5)
        assert extender.requests == []


BEHAVIOURS = (
    *((failed_filter, (failure,)) for failure in FILTER_FAILURES),
    *((ignored_filter, (failure,)) for failure in FILTER_FAILURES),
    *((failed_scores, (failure,)) for failure in SCORE_FAILURES),
    *((woken, (event,)) for event in WAKES),
    (added_scores, ()),
    (one_node, ()),
    (not_woken, ()),
)
