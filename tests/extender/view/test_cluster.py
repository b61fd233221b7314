"""The view over a real API server double and real agents: what is seen becomes a snapshot."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from nearkv.extender.view.cluster import ClusterView, ViewConfig, levels_reader
from nearkv.extender.view.directory import AgentDiscovery
from nearkv.extender.view.nodes import NodeRules
from nearkv.extender.view.polling import CollectLimits
from nearkv.kube.access import ApiAccess
from nearkv.kube.listing import ListLimits
from nearkv.kube.resuming import PauseLimits
from nearkv.kube.watching import WatchLimits
from tests.doubles.api_server import (
    ApiServerConfig,
    ApiServerDouble,
    Faults,
    node_object,
    pod_object,
    worker_status_object,
)
from tests.extender.view.agents import serving_agents
from tests.extender.view.test_collecting import FAST
from tests.extender.view.test_state import Told
from tests.extender.view.things import LEVELS, device, group
from tests.integration.stack import eventually

INFINITY = float("inf")


def config(**options):
    return ViewConfig(
        levels=LEVELS,
        nodes=NodeRules(levels_of=levels_reader(LEVELS)),
        publish_seconds=0.01,
        sweep_seconds=0.02,
        watch=WatchLimits(
            listing=ListLimits(page_objects=2),
            pauses=PauseLimits(
                first_pause_seconds=0.02, longest_pause_seconds=0.1, relist_jitter_seconds=0.02
            ),
        ),
        collect=CollectLimits(**FAST),
        **options,
    )


class Watched:
    """A cluster with a view of it."""

    def __init__(self, api, view, told):
        self.api = api
        self.view = view
        self.told = told

    @property
    def snapshot(self):
        return self.view.snapshot()

    def of(self, node, field):
        return getattr(self.snapshot, field)[self.snapshot.rows[node]]

    async def until(self, condition, what):
        await eventually(lambda: self.snapshot is not None and condition(), what=what)


@asynccontextmanager
async def watched(*objects, api_config=None, faults=None, **options):
    async with ApiServerDouble(api_config) as api:
        api.put_all(objects)
        if faults is not None:
            api.inject(faults)
        async with ApiAccess.plain(api.url) as access:
            told = Told()
            view = ClusterView(access, config(**options), told)
            task = asyncio.create_task(view.run())
            try:
                yield Watched(api, view, told)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def synced(*objects, **options):
    async with watched(*objects, **options) as cluster:
        async with asyncio.timeout(30):
            await cluster.view.wait_until_synced()
        yield cluster


def engine(name, node="n1", role="prefill", **fields):
    return pod_object(
        name, node=node, labels={"nearkv.io/group": "g", "nearkv.io/role": role}, **fields
    )


NODES = tuple(
    node_object(f"n{number}", labels={"rack": f"r{number // 2}", "zone": "z"})
    for number in range(5)
)


async def test_all_pages_of_nodes_and_pods_are_in_the_first_snapshot():
    pods = [engine("p0"), engine("p1", "n1", gpus=2), engine("d0", "n4", "decode")]
    async with synced(*NODES, *pods) as cluster:
        assert set(cluster.snapshot.names) == {f"n{number}" for number in range(5)}
        assert cluster.of("n1", "requested") == 3
        assert cluster.of("n1", "devices") == 8
        rows = cluster.snapshot.rows
        found = cluster.snapshot.groups["g"]
        assert (found.prefill.tolist(), found.prefill_pods.tolist()) == ([rows["n1"]], [2])
        assert found.decode.tolist() == [rows["n4"]]
        stats = cluster.view.stats()
        assert (stats.nodes, stats.pods, stats.groups, stats.problems) == (5, 3, 1, ())
        assert {news[0] for news in cluster.told.news} == {"bound"}


async def test_before_all_is_listed_there_is_no_snapshot():
    async with watched(*NODES, faults=Faults(resources=("pods",), status=403)) as cluster:
        await eventually(
            lambda: cluster.view.stats().watch_failures.get(("pods", "forbidden"), 0) >= 2,
            what="pods cannot be listed",
        )
        assert not cluster.view.synced
        assert cluster.snapshot is None
        assert cluster.view.stats().problems[0].startswith("pods: 403")
        cluster.api.inject(Faults())
        await cluster.until(lambda: len(cluster.snapshot.names) == 5, "all is listed")


async def test_nodes_come_go_and_move():
    async with synced(*NODES) as cluster:
        cluster.api.put(node_object("n9", labels={"rack": "r0"}, gpus=4))
        await cluster.until(lambda: "n9" in cluster.snapshot.rows, "a new node")
        assert cluster.of("n9", "devices") == 4
        cluster.api.edit("Node", "n9", {"metadata": {"labels": {"rack": "r2", "zone": "z"}}})
        await cluster.until(
            lambda: cluster.of("n9", "labels").tolist() == cluster.of("n4", "labels").tolist(),
            "a node has moved",
        )
        cluster.api.delete("Node", "n0")
        await cluster.until(lambda: "n0" not in cluster.snapshot.rows, "a node is gone")


async def test_a_heartbeat_of_a_node_makes_no_new_snapshot():
    async with synced(*NODES) as cluster:
        before = cluster.snapshot
        heard_at = cluster.view.stats().nodes_heard_at
        cluster.api.edit("Node", "n0", {"metadata": {"annotations": {"heart": "beat"}}})
        await eventually(
            lambda: cluster.view.stats().nodes_heard_at > heard_at, what="the heartbeat is heard"
        )
        assert cluster.snapshot is before


async def test_a_pod_is_bound_runs_terminates_and_is_gone():
    async with synced(*NODES) as cluster:
        cluster.api.put(engine("p", "", gpus=4))
        cluster.api.bind("p", "n2")
        await cluster.until(lambda: cluster.of("n2", "requested") == 4, "it is bound")
        uid = cluster.api.get("Pod", "p")["metadata"]["uid"]
        assert ("bound", uid, "n2") in cluster.told.news
        cluster.api.run_pod("p")
        await cluster.until(lambda: "g" in cluster.snapshot.groups, "its engine counts")
        cluster.api.terminate("p")
        await cluster.until(lambda: cluster.of("n2", "left_at") == INFINITY, "it is terminating")
        assert cluster.of("n2", "requested") == 4
        assert "g" not in cluster.snapshot.groups
        cluster.api.delete("Pod", "p")
        await cluster.until(lambda: cluster.of("n2", "requested") == 0, "it is gone")
        assert 0 < cluster.of("n2", "left_at") < INFINITY
        assert ("forget", uid) in cluster.told.news


async def test_a_finished_pod_gives_its_devices_back():
    async with synced(*NODES, engine("p", "n2", gpus=4)) as cluster:
        assert cluster.of("n2", "requested") == 4
        cluster.api.edit("Pod", "p", {"status": {"phase": "Succeeded"}})
        await cluster.until(lambda: cluster.of("n2", "requested") == 0, "it is finished")


async def test_an_api_server_that_fails_empties_nothing():
    async with synced(*NODES, engine("p")) as cluster:
        before = cluster.snapshot
        cluster.api.inject(Faults(status=500))
        cluster.api.break_connections()
        await eventually(
            lambda: cluster.view.stats().watch_failures.get(("nodes", "server_error"), 0) >= 2,
            what="errors are counted",
        )
        assert cluster.snapshot is before
        cluster.api.delete("Node", "n0")
        cluster.api.compact()
        cluster.api.inject(Faults())
        await cluster.until(lambda: "n0" not in cluster.snapshot.rows, "it has caught up")
        assert cluster.of("n1", "requested") == 1


async def test_a_selector_of_nodes_is_the_servers_to_apply():
    special = node_object("gpu", labels={"pool": "gpu"})
    async with synced(*NODES, special, node_selector="pool=gpu") as cluster:
        assert cluster.snapshot.names == ("gpu",)


# -- Agents ----------------------------------------------------------------------------------


async def test_agents_are_found_by_their_pods_and_speak_for_their_nodes():
    async with serving_agents() as agents:
        agents.at_root = agents.add("n1")
        host, port = agents.base.removeprefix("http://").split(":")
        app = {"labels": {"app": "nearkv-agent"}, "gpus": 0, "pod_ip": host}
        agent = pod_object("agent-n1", node="n1", namespace="nearkv", **app)
        stranger = pod_object("agent-n2", node="n2", namespace="else", **app)
        discovery = AgentDiscovery(selector="app=nearkv-agent", namespace="nearkv", port=int(port))
        async with synced(*NODES, agent, stranger, agents=discovery) as cluster:
            await cluster.until(lambda: cluster.of("n1", "reported_at") > 0, "it has reported")
            assert cluster.view.stats().agents == 1
            assert cluster.of("n1", "report_seconds") == 30.0
            cluster.api.delete("Pod", "agent-n1", namespace="nearkv")
            await cluster.until(lambda: cluster.of("n1", "report_seconds") == 5.0, "it is gone")
            assert cluster.view.stats().agents == 0


async def test_agents_are_found_by_their_hosts():
    async with serving_agents() as agents:
        agents.at_root = agents.add("n9")
        host, port = agents.base.removeprefix("http://").split(":")
        discovery = AgentDiscovery(template=f"http://{{host_ip}}:{port}")
        async with synced(*NODES, agents=discovery) as cluster:
            cluster.api.put(node_object("n9", internal_ip=host))
            await cluster.until(
                lambda: "n9" in cluster.snapshot.rows and cluster.of("n9", "reported_at") > 0,
                "it has reported",
            )


async def test_reports_of_agents_are_in_the_snapshot_with_their_age():
    async with serving_agents() as agents:
        agent = agents.add("n1", devices=(device(0, 0.5),), groups=(group(held=7),), rdma=True)
        async with synced(*NODES, agents=AgentDiscovery(urls=(agents.url("n1"),))) as cluster:
            await cluster.until(lambda: cluster.of("n1", "reported_at") > 0, "it has reported")
            assert cluster.of("n1", "free_ratio").tolist() == [0.5]
            assert cluster.of("n1", "rdma") == 1
            assert cluster.of("n2", "reported_at") == -INFINITY
            found = cluster.snapshot.groups["g"]
            assert found.holders.tolist() == [cluster.snapshot.rows["n1"]]
            uid = "pod-uid"
            agent.change(pods=(uid,), devices=(device(0, 0.5, health="failed"),))
            await cluster.until(lambda: cluster.of("n1", "device_ok") == [0], "news has come")
            assert ("covered", uid) in cluster.told.news
            agent.trouble = "hangs"
            agent.tell()
            assert cluster.view.stats().reports == 1


async def test_worker_statuses_stand_in_and_their_absence_is_no_failure():
    said = {"node": "n1", "devices": [{"id": "G", "totalBytes": 4, "usedBytes": 1}]}
    async with synced(*NODES, worker_status_object("w", said)) as cluster:
        await cluster.until(lambda: cluster.of("n1", "from_status") == 1, "it stands in")
        assert cluster.of("n1", "free_ratio").tolist() == [0.75]
    without = ApiServerConfig(resources=ApiServerConfig().resources[:2])
    async with synced(*NODES, api_config=without) as cluster:
        assert len(cluster.snapshot.names) == 5
        await eventually(
            lambda: cluster.view.stats().watch_failures.get(("workerstatuses", "not_found")),
            what="it is counted",
        )


@pytest.mark.parametrize("broken", ["nodes", "pods"])
async def test_a_broken_watch_says_so(broken):
    async with synced(*NODES) as cluster:
        cluster.api.inject(Faults(resources=(broken,), status=500))
        cluster.api.break_connections()
        await eventually(
            lambda: any(each.startswith(broken) for each in cluster.view.stats().problems),
            what="the problem is shown",
        )
        cluster.api.inject(Faults())
        cluster.api.put(node_object("n9"))
        cluster.api.put(engine("late", "n9"))
        await eventually(lambda: not cluster.view.stats().problems, what="all is well")
