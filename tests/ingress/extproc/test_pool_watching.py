"""Following a pool and its pods, with an API server that has its troubles."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

from nearkv.ingress.extproc.pool_watching import PoolWatch, make_pool_watch
from nearkv.ingress.extproc.settings import PoolSettings
from nearkv.kube.access import ApiAccess
from nearkv.kube.resuming import PauseLimits
from nearkv.kube.watching import WatchLimits
from tests.doubles.api_server import ApiServerConfig, ApiServerDouble, pod_object
from tests.doubles.api_server.resources import PODS, Resource
from tests.integration.stack import eventually

POOLS = Resource("InferencePool", "inferencepools", "inference.networking.k8s.io")
QUICK = WatchLimits(pauses=PauseLimits(first_pause_seconds=0.01, longest_pause_seconds=0.05))


def pool_object(port=8000, *, name="pool", **labels):
    return {
        "apiVersion": POOLS.api_version,
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "selector": {"matchLabels": labels or {"app": "vllm"}},
            "targetPorts": [{"number": port}],
        },
    }


def member(number, **labels):
    ip = f"10.0.0.{number}"
    return pod_object(f"pod-{number}", node="n1", pod_ip=ip, labels=labels or {"app": "vllm"})


class Followed:
    """A watch that runs, and what it counted."""

    def __init__(self, api, watch, failures):
        self.api = api
        self.watch = watch
        self.failures = failures

    async def has(self, *endpoints):
        await eventually(
            lambda: sorted(self.watch.membership().endpoints()) == sorted(endpoints),
            what=f"members are {endpoints}",
        )


@asynccontextmanager
async def following(*objects):
    async with ApiServerDouble(ApiServerConfig(resources=(PODS, POOLS))) as api:
        api.put_all(objects)
        failures = Counter()
        async with ApiAccess.plain(api.url) as access:
            watch = PoolWatch(
                access,
                name="pool",
                namespace="default",
                count_failure=lambda trouble: failures.update([trouble]),
                limits=QUICK,
            )
            task = asyncio.create_task(watch.run())
            try:
                yield Followed(api, watch, failures)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def test_members_stay_while_the_api_server_is_away_and_follow_when_it_is_back():
    async with following(member(1), member(2), pool_object()) as it:
        await it.has("10.0.0.1:8000", "10.0.0.2:8000")
        await it.api.stop()
        await eventually(lambda: it.failures["unreachable"] > 1, what="it is noticed")
        await it.has("10.0.0.1:8000", "10.0.0.2:8000")
        it.api.delete("Pod", "pod-1")
        await it.api.start()
        await it.has("10.0.0.2:8000")


async def test_another_selector_or_port_means_other_members():
    async with following(member(1), member(2, app="other"), pool_object()) as it:
        await it.has("10.0.0.1:8000")
        it.api.put(pool_object(9000))
        await it.has("10.0.0.1:9000")
        it.api.put(pool_object(9000, app="other"))
        await it.has("10.0.0.2:9000")
        # The watch of the former selector has ended.
        await eventually(lambda: it.api.open_watches == 2, what="one watch of pods, one of pools")


async def test_a_pool_that_is_missing_or_useless_says_so_and_has_no_members():
    async with following(member(1)) as it:
        await eventually(lambda: "does not exist" in it.watch.problem, what="it is told")
        assert it.watch.was_read
        it.api.put(pool_object(name="another"))
        it.api.put(pool_object(0))
        await eventually(lambda: "targetPorts has 0" in it.watch.problem, what="it is told")
        await it.has()
        it.api.put(pool_object())
        await it.has("10.0.0.1:8000")
        assert it.watch.problem == ""


async def test_a_pool_that_cannot_be_read_changes_nothing():
    async with following(member(1), pool_object()) as it:
        await it.has("10.0.0.1:8000")
        broken = pool_object()
        broken["spec"]["targetPorts"] = "8000"
        it.api.put(broken)
        await eventually(lambda: it.failures["unreadable_object"] == 1, what="it is counted")
        await it.has("10.0.0.1:8000")


async def test_rights_that_are_missing_are_named():
    async with following(member(1), pool_object()) as it:
        await it.has("10.0.0.1:8000")
        it.api.allow({"inferencepools": ["list", "watch"], "pods": []})
        await it.api.restart()
        await eventually(lambda: it.failures["forbidden"] > 0, what="it is counted")
        await it.has("10.0.0.1:8000")


def test_no_pool_is_no_watch():
    assert make_pool_watch(PoolSettings(), print) == (None, None)
