"""Agents that find each other by Kubernetes, learn where they are, and probe the paths."""

import re
from contextlib import AsyncExitStack, asynccontextmanager
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import aiohttp
import pytest

from nearkv.agent.app import NODE_STATE, TRANSFER, build_app
from nearkv.agent.settings import AgentSettings
from nearkv.path_class import BEYOND
from nearkv.serving import running
from nearkv.state.codec import FrameReader
from nearkv.state.model import SnapshotBegin
from tests.agent.kubernetes.things import SLICES, slice_of
from tests.doubles.api_server import ApiServerConfig, ApiServerDouble, Faults, node_object
from tests.integration.stack import ANY_PORT, FAST_AGENT, eventually

ZONE, REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
PROBES = {
    "service": "nearkv-agent",
    "namespace": "nearkv",
    "refresh_seconds": 0.2,
    "interval_seconds": 1.0,
    "fresh_seconds": 0.2,
    "max_cpu_ratio": 1.0,
    "max_bytes_per_second": 1 << 30,
}


class Agent:
    """An agent that serves on loopback."""

    def __init__(self, name, app, url):
        self.name = name
        self.url = url
        self.state = app[NODE_STATE]
        self.service = app[TRANSFER]

    @property
    def port(self):
        return urlsplit(self.service.peer_url).port

    @property
    def listing(self):
        return self.state.parts["peer_listing"]

    def measured(self):
        """Return the nodes that paths were measured from, by class."""
        book = self.service.probing._book
        sources = {
            source
            for (source, _), reading in self.state.log.paths.items()
            if reading.points and source != self.name
        }
        return {source: book.class_of(source) for source in sources}

    async def get(self, path):
        async with aiohttp.ClientSession() as client, client.get(self.url + path) as answer:
            return await answer.read()

    async def snapshot(self):
        frames = FrameReader().feed(await self.get("/v1/state"))
        return next(frame for frame in frames if isinstance(frame, SnapshotBegin))


@asynccontextmanager
async def agent(api, name, folder, **probes):
    settings = {
        **FAST_AGENT,
        "node": name,
        "gpu": {"enabled": "off"},
        "links": {"enabled": False},
        "worker_status": {"enabled": "off"},
        "kubernetes": {"kubeconfig": str(folder / "kubeconfig")},
    }
    with TemporaryDirectory(prefix="nkv-", dir="/tmp") as directory:
        settings["transfer"] = {
            "socket_dir": directory,
            "peer_listen": "127.0.0.1:0",
            "peer_token": "between agents",
            "paths": ["tcp"],
            "probes": {**PROBES, **probes},
        }
        app = build_app(AgentSettings.model_validate(settings))
        async with running(app, ANY_PORT) as address:
            found = Agent(name, app, address.url)
            yield found


def place(zone, region="r"):
    return {ZONE: zone, REGION: region}


@pytest.fixture
async def api(tmp_path):
    kinds = (*ApiServerConfig().resources, SLICES)
    async with ApiServerDouble(ApiServerConfig(resources=kinds)) as double:
        double.write_kubeconfig(tmp_path / "kubeconfig")
        double.put_all(
            [
                node_object("n1", labels=place("a")),
                node_object("n2", labels=place("a")),
                node_object("n3", labels=place("b", "other")),
            ]
        )
        yield double


async def test_three_agents_find_each_other_and_publish_what_paths_cost(api, tmp_path):
    async with AsyncExitStack() as stack:
        agents = {
            name: await stack.enter_async_context(agent(api, name, tmp_path))
            for name in ("n1", "n2", "n3")
        }
        for one in agents.values():
            zone = "b" if one.name == "n3" else "a"
            api.put(slice_of(one.name, one.port, zone=zone))
        expected = {
            "n1": {"n2": ZONE, "n3": BEYOND},
            "n2": {"n1": ZONE, "n3": BEYOND},
            "n3": {"n1": BEYOND, "n2": BEYOND},
        }
        for name, classes in expected.items():
            await eventually(
                lambda one=agents[name], classes=classes: one.measured() == classes,
                what=f"{name} has measured the paths from the others, and knows how near they are",
                seconds=45,
            )
        first = agents["n1"]
        await eventually(
            lambda: {ZONE, BEYOND} <= {cost.name for cost in first.service.probing.class_costs()},
            what="there are costs by class",
        )
        await eventually(
            lambda: (told := first.state.log.path_classes) and len(told.costs) == 2,
            what="they are published",
        )
        begin = await first.snapshot()
        assert begin.path_classes.labels == place("a")
        assert {cost.name for cost in begin.path_classes.costs} == {ZONE, BEYOND}
        assert all(cost.count and cost.age_seconds < 60 for cost in begin.path_classes.costs)
        assert {path.source for path in begin.paths if path.points} == {"n2", "n3"}
        metrics = (await first.get("/metrics")).decode()
        assert re.search(r'kubernetes_peer_lists_total\{outcome="listed"\} [1-9]', metrics)
        assert first.listing.describe()["agents"] == 3
    lists = api.record.all("list", "endpointslices")
    assert lists
    for seen in lists:
        assert seen.query["labelSelector"] == "kubernetes.io/service-name=nearkv-agent"
        assert seen.query["resourceVersion"] == "0"
        assert seen.path.startswith("/apis/discovery.k8s.io/v1/namespaces/nearkv/")
    assert api.record.all("watch", "endpointslices") == []


async def test_what_is_known_stays_while_the_list_fails_or_cannot_be_true(api, tmp_path):
    async with agent(api, "n1", tmp_path, interval_seconds=3600.0) as one:
        listing = one.listing
        neighbours = listing._neighbours

        async def until(outcome):
            await eventually(
                lambda before=listing.outcomes[outcome]: listing.outcomes[outcome] > before,
                what=f"a list ends with {outcome}",
            )

        def known():
            return [peer.node for peer in neighbours.peers]

        # Nobody yet: not the own agent either, so that is no answer.
        await until("empty")
        assert "this agent is not among its 0 endpoints" in listing.problem
        api.put_all([slice_of("n1", one.port), slice_of("n2", 1, zone="a")])
        await until("listed")
        assert (known(), listing.problem) == (["n2"], "")
        api.delete("EndpointSlice", "nearkv-agent-n1", namespace="nearkv")
        api.delete("EndpointSlice", "nearkv-agent-n2", namespace="nearkv")
        await until("empty")
        assert known() == ["n2"]
        api.inject(Faults(verbs=("list",), resources=("endpointslices",), status=403))
        await until("forbidden")
        assert known() == ["n2"]
        assert any(text.startswith("other agents: ") for text in listing.problems())
        assert b"other agents: " in await one.get("/v1/status")
        api.inject(Faults(verbs=("list",), resources=("endpointslices",), body=b"<html>"))
        await until("garbage")
        assert known() == ["n2"]
        api.inject(Faults())
        api.put_all([slice_of("n1", one.port), slice_of("n3", 1, zone="b")])
        await until("listed")
        assert (known(), listing.problems()) == (["n3"], [])


async def test_configured_labels_and_peers_win(api, tmp_path):
    configured = {
        "labels": {ZONE: "mine"},
        "peers": [{"node": "n2", "url": "http://127.0.0.1:2", "labels": {ZONE: "mine"}}],
        "interval_seconds": 3600.0,
    }
    async with agent(api, "n1", tmp_path, **configured) as one:
        api.put_all([slice_of("n1", one.port), slice_of("n2", 1, zone="a")])
        await eventually(lambda: one.listing.outcomes["listed"], what="agents are listed")
        book = one.service.probing._book
        await eventually(lambda: REGION in book.labels, what="the Node is known")
        assert book.labels == {ZONE: "mine", REGION: "r"}
        book.refresh()
        assert book.class_of("n2") == ZONE
        assert [peer.url for peer in book.chosen()[ZONE]] == ["http://127.0.0.1:2"]


async def test_without_a_service_nobody_asks(api, tmp_path):
    async with agent(api, "n1", tmp_path, service="") as one:
        assert one.listing.describe() == {"enabled": False, "agents": None, "age_seconds": None}
        await eventually(lambda: one.service.probing._book.labels, what="the Node is known")
        assert api.record.all("list", "endpointslices") == []
