"""Pods placed by a scheduler with a real ``nearkv-extender``: bursts, healing, failures.

Each scenario takes a cluster without nodes; whether doubles or real binaries make it is not its
concern.
"""

import asyncio
import json
from typing import Any

from tests.integration.scheduling_site import (
    DEADLINE_SECONDS,
    GPU,
    ExtenderProcess,
    Site,
)

_WAKE = "nearkv.io/room-changed-at"


async def near_the_kv(cluster: Site) -> None:
    """A decode pod lands in the rack of its prefill."""
    for index in range(6):
        await cluster.add_node(f"n{index}", rack=f"r{index // 2}")
    await cluster.add_running("prefill", "n4")
    extender = await cluster.start_extender()
    names = [f"decode-{index}" for index in range(3)]
    async with cluster.scheduler(extender.url):
        for name in names:
            await cluster.add_pod(name)
        placed = await cluster.bound(*names)
    assert set(placed.values()) <= {"n4", "n5"}
    assert await cluster.calls(extender) == {"filter": 3, "prioritize": 3}


async def one_of_fifty(cluster: Site) -> None:
    """The one node of fifty that is near the KV and has room gets the pod; without extender any."""
    for index in range(50):
        near = index in {30, 31}
        await cluster.add_node(
            f"n{index}", rack=f"r{index // 2}", devices=1 if index == 30 else 8, agent=near
        )
    await cluster.add_running("prefill", "n30")  # takes the only device there
    extender = await cluster.start_extender()
    async with cluster.scheduler(extender.url):
        await cluster.add_pod("decode")
        assert await cluster.bound("decode") == {"decode": "n31"}
        await extender.stop()
        await cluster.add_pod("alone")
        await cluster.bound("alone")


async def burst(cluster: Site) -> None:
    """Fifty pods in a second over ten equal nodes: at most six on one.

    A pod takes too little of a node's cpu for the scheduler's own scores to tell nodes apart.
    """
    for index in range(10):
        await cluster.add_node(f"n{index}", devices=16)
    extender = await cluster.start_extender()
    names = [f"burst-{index}" for index in range(50)]
    async with cluster.scheduler(extender.url):
        for name in names:
            await cluster.add_pod(name)
            await asyncio.sleep(1 / len(names))
        await cluster.bound(*names)
    assert max((await cluster.counts("burst")).values()) <= 6


async def heals(cluster: Site) -> None:
    """All nodes are rejected, then healed: the agent's annotation wakes the pod."""
    for index in range(3):
        await cluster.add_node(f"n{index}")
    extender = await cluster.start_extender()
    for gpus in cluster.gpus.values():
        gpus.used_ratio = 0.9  # nobody's pod: foreign memory
    async with cluster.scheduler(extender.url):
        await _rejects_everything(cluster, extender)
        await cluster.add_pod("waiting")
        assert await cluster.not_placed("waiting") == "Unschedulable"
        for gpus in cluster.gpus.values():
            gpus.used_ratio = 0.0
        # The flush comes after five minutes.
        await cluster.bound("waiting", seconds=40.0)
    annotations = [node["metadata"].get("annotations") or {} for node in await cluster.nodes()]
    assert any(_WAKE in one for one in annotations)


async def _rejects_everything(cluster: Site, extender: ExtenderProcess) -> None:
    """Wait until the extender has heard that no device can be used."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (await _ask(cluster, extender, "filter"))["NodeNames"]:  # noqa: ASYNC110 (it is a process)
            await asyncio.sleep(0.05)


async def _ask(cluster: Site, extender: ExtenderProcess, verb: str) -> Any:
    """Ask as the scheduler would for another pod."""
    labels = {"nearkv.io/group": "g", "nearkv.io/role": "decode"}
    pod = {
        "metadata": {"name": "next", "namespace": "default", "uid": "next", "labels": labels},
        "spec": {"containers": [{"resources": {"requests": {GPU: "1"}}}]},
    }
    body = json.dumps({"Pod": pod, "Nodes": None, "NodeNames": sorted(cluster.gpus)})
    async with cluster.session.post(f"{extender.url}/v1/{verb}", data=body) as response:
        return await response.json()


async def extender_down(cluster: Site) -> None:
    """Pods bind while the extender is down, and are scored again when it is back."""
    for index in range(4):
        await cluster.add_node(f"n{index}", rack=f"r{index // 2}")
    await cluster.add_running("prefill", "n0")
    extender = await cluster.start_extender()
    async with cluster.scheduler(extender.url):
        await cluster.add_pod("before")
        assert (await cluster.bound("before"))["before"] in {"n0", "n1"}
        await extender.stop()
        await cluster.add_pod("during")
        await cluster.bound("during")
        again = await cluster.start_extender("--listen", extender.address)
        await cluster.add_pod("after")
        assert (await cluster.bound("after"))["after"] in {"n0", "n1"}
    assert await cluster.calls(again) == {"filter": 1, "prioritize": 1}


async def extender_needed(cluster: Site) -> None:
    """An extender that is not ignorable and down holds pods back until it is up."""
    for index in range(2):
        await cluster.add_node(f"n{index}")
    extender = await cluster.start_extender()
    await extender.stop()
    async with cluster.scheduler(extender.url, ignorable=False):
        await cluster.add_pod("held")
        assert await cluster.not_placed("held") == "SchedulerError"
        await cluster.start_extender("--listen", extender.address)
        await cluster.bound("held")


async def replicas(cluster: Site) -> None:
    """Two replicas give equal scores, whichever of them placed the pods before."""
    for index in range(6):
        await cluster.add_node(f"n{index}", rack=f"r{index // 2}")
    await cluster.add_running("prefill", "n2")
    both = [await cluster.start_extender() for _ in range(2)]
    names = [f"decode-{index}" for index in range(4)]
    async with cluster.scheduler(both[0].url):
        for name in names:
            await cluster.add_pod(name)
        await cluster.bound(*names)
    for replica in both:
        await cluster.until(replica, lambda known: known["devices"]["requested"] == 5)
    answers = [await _ask(cluster, replica, "prioritize") for replica in both]
    assert answers[0] == answers[1]
    assert len({one["Score"] for one in answers[0]}) > 1


async def not_ours(cluster: Site) -> None:
    """Pods without our labels get equal scores; those without devices are not even sent."""
    for index in range(4):
        await cluster.add_node(f"n{index}", rack=f"r{index // 2}")
    await cluster.add_running("prefill", "n0")
    extender = await cluster.start_extender()
    async with cluster.scheduler(extender.url):
        await cluster.add_pod("stranger", labels={"app": "training"}, gpus=8)
        await cluster.add_pod("no-devices", labels={}, gpus=0)
        placed = await cluster.bound("stranger", "no-devices")
    # The node with the KV has a device less, so that eight only fit elsewhere.
    assert placed["stranger"] != "n0"
    assert await cluster.calls(extender) == {"filter": 1, "prioritize": 1}


async def whole_nodes(cluster: Site) -> None:
    """Whole nodes instead of names lead to the same place."""
    for index in range(4):
        await cluster.add_node(f"n{index}", rack=f"r{index // 2}")
    await cluster.add_running("prefill", "n3")
    extender = await cluster.start_extender()
    async with cluster.scheduler(extender.url, node_cache_capable=False):
        await cluster.add_pod("decode")
        assert (await cluster.bound("decode"))["decode"] in {"n2", "n3"}
    assert await cluster.calls(extender) == {"filter": 1, "prioritize": 1}


SCENARIOS = (
    *(
        near_the_kv,
        one_of_fifty,
        burst,
        heals,
        extender_down,
        extender_needed,
        replicas,
        not_ours,
        whole_nodes,
    ),
)
