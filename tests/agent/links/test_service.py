"""Links in the agent: readings that fail or hang, status, series, settings."""

import asyncio
import json
import re
import threading
import time

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

from nearkv.agent.app import LINKS, build_app
from nearkv.agent.links.following import LinkWatch
from nearkv.agent.links.metrics import LinkCollector
from nearkv.agent.links.model import NodeLinks
from nearkv.agent.links.reading import read_links
from nearkv.agent.links.service import LinkService
from nearkv.agent.links.settings import LinkSettings
from nearkv.agent.settings import AgentSettings
from tests.agent.links.sysfs_tree import GPU_0, GPU_1, NIC_0, SWITCH_0, two_sockets


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


class Node:
    """A service over a tree, looked at by hand."""

    def __init__(self, tree, **settings):
        self.tree = tree
        self.clock = Clock()
        self.settings = LinkSettings(root=tree.root, device_dir=tree.devices, **settings)
        self.service = LinkService(self.settings, now=self.clock)

    def look(self):
        limit = self.settings.max_devices
        self.service.watch.take(
            read_links(self.tree.root, self.settings.device_dir, max_devices=limit)
        )
        return json.loads(json.dumps(self.service.describe()))

    def samples(self):
        registry = CollectorRegistry()
        registry.register(LinkCollector(self.service))
        lines = generate_latest(registry).decode().splitlines()
        return dict(
            line.removeprefix("nearkv_agent_").rsplit(" ", 1) for line in lines if line[0] != "#"
        )


def test_the_status_of_a_node_with_two_sockets(sockets):
    node = Node(sockets)
    status = node.look()
    assert status["rdma"] == {"usable": True, "reason": "usable: mlx5_0, mlx5_1"}
    assert [pair["adapter"] for pair in status["affinity"]] == ["mlx5_1", "mlx5_0"]
    first = status["rdma_ports"][0]
    assert first | {"errors": None} == {
        "link": "mlx5_0/1",
        "kind": "infiniband",
        "state": "ACTIVE",
        "phys_state": "LinkUp",
        "speed_gbps": 400,
        "gids": 1,
        "gid_types": [],
        "netdevs": [],
        "firmware": "28.39.1002",
        "virtual_function_of": None,
        "openable": True,
        "pci": "0000:98:00.0",
        "pci_path": "pci0000:96/0000:96:01.0/0000:98:00.0",
        "numa_node": 1,
        "health": "ok",
        "faults": [],
        "errors": None,
        "recent_errors": {},
    }
    assert node.service.problems() == []
    assert node.service.adapter_of(GPU_1) == "mlx5_0"
    assert node.service.adapter_of("0000:ff:00.0") is None


def test_before_the_first_reading_all_is_unknown(tree):
    node = Node(tree)
    described = node.service.describe()
    assert described["rdma"]["usable"] is None
    assert (described["age_seconds"], described["omitted"], described["network"]) == (
        None,
        None,
        [],
    )
    assert "rdma_usable" not in node.samples()
    assert "links_age_seconds" not in node.samples()


def test_a_host_without_rdma_has_no_problem(tree):
    tree.net("eth0", NIC_0)
    node = Node(tree)
    assert node.look()["rdma"] == {"usable": False, "reason": "no RDMA device"}
    assert node.service.problems() == []
    assert node.samples()["rdma_usable"] == "0.0"


def test_a_fault_degrades_its_link_for_the_window(sockets):
    node = Node(sockets, error_window_seconds=60)
    node.look()
    sockets.write("class/infiniband/mlx5_0/ports/1/counters/symbol_error", "4")
    node.clock.seconds += 10
    port = node.look()["rdma_ports"][0]
    assert (port["health"], port["faults"], port["errors"]) == (
        "degraded",
        ["symbol_error +4"],
        {"symbol_error": 4},
    )
    assert node.service.problems() == ["mlx5_0/1: symbol_error +4 lately"]
    sound = 'link_sound{kind="infiniband",link="mlx5_0/1"}'
    assert node.samples()[sound] == "0.0"
    node.clock.seconds += 61
    assert node.look()["rdma_ports"][0]["health"] == "ok"
    assert node.samples()[sound] == "1.0"


def test_series_of_a_node(tmp_path):
    tree = two_sockets(tmp_path, link_layer="Ethernet", netdev="eth0")
    tree.net("eth0", NIC_0, speed=400_000)
    node = Node(tree)
    node.look()
    samples = node.samples()
    assert samples["rdma_usable"] == "1.0"
    assert samples['link_up{kind="roce",link="mlx5_0/1"}'] == "1.0"
    assert float(samples['link_speed_bytes_per_second{kind="ethernet",link="eth0"}']) == 50e9
    assert samples['link_errors_total{error="symbol_error",link="mlx5_0/1"}'] == "0.0"
    assert samples[f'gpu_adapter{{adapter="mlx5_1",gpu="{GPU_0}",nearness="switch"}}'] == "1.0"
    assert samples['link_reading_failures_total{reason="slow"}'] == "0.0"


def test_a_port_that_is_down_has_no_speed(tree):
    tree.rdma("mlx5_0", NIC_0, state="1: DOWN", rate="2.5 Gb/sec (1X SDR)")
    node = Node(tree)
    node.look()
    assert node.samples()['link_up{kind="infiniband",link="mlx5_0/1"}'] == "0.0"
    assert not [name for name in node.samples() if name.startswith("link_speed")]


def test_series_are_bound_by_the_limit_of_devices(tree):
    for index in range(40):
        tree.rdma(f"mlx5_{index}", f"{SWITCH_0}/0000:18:{index:02x}.0")
    node = Node(tree, max_devices=4)
    assert len(node.look()["rdma_ports"]) == 4
    assert node.samples()["links_omitted"] == "36.0"
    assert len([name for name in node.samples() if "mlx5" in name]) == 4 * 4


def test_names_follow_prometheus_rules(sockets):
    node = Node(sockets)
    node.look()
    families = list(LinkCollector(node.service).collect())
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert re.fullmatch(r"nearkv_agent_[a-z_]+", family.name)
        assert family.documentation.endswith(".")


def test_displaced_gpus_and_wrong_overrides_are_problems(sockets):
    sockets.write("class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    node = Node(sockets, affinity=("00000000:FF:00.0=mlx5_0",))
    node.look()
    assert node.service.problems() == [
        "links.affinity names what is not there: 0000:ff:00.0=mlx5_0",
        f"GPU {GPU_0}: mlx5_1 beside it cannot be used, so mlx5_0 is taken",
    ]


# -- Readings that go wrong ------------------------------------------------------------------


def watching(read, **settings):
    return LinkWatch(LinkSettings(**settings), now=time.monotonic, read=read)


async def test_a_reading_that_fails_is_counted_and_the_next_one_heals():
    answers = [ValueError("odd driver"), NodeLinks(rdma=())]

    def read(*_, **__):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = watching(read)
    await watch.look()
    assert "odd driver" in watch.problem
    assert (watch.counts.failures["failed"], watch.rdma.usable) == (1, None)
    await watch.look()
    assert (watch.problem, watch.counts.readings, watch.rdma.usable) == (None, 1, False)


async def test_a_driver_that_hangs_holds_up_nobody_and_gets_no_second_thread():
    release, calls = threading.Event(), []

    def read(*_, **__):
        calls.append(threading.current_thread())
        release.wait(30)
        return NodeLinks(rdma=())

    watch = watching(read, timeout_seconds=0.05)
    try:
        for _ in range(3):
            await watch.look()
        assert (len(calls), watch.counts.failures["slow"]) == (1, 3)
        assert calls[0].daemon, "the agent can end while it hangs"
    finally:
        release.set()
    await asyncio.to_thread(calls[0].join, 10)
    await asyncio.sleep(0)  # what the thread left on the loop
    await watch.look()
    assert (watch.problem, watch.rdma.usable) == (None, False)


def test_a_verdict_that_is_too_old_is_not_known(sockets):
    node = Node(sockets)
    node.look()
    assert node.service.rdma.usable is True
    node.clock.seconds += 60
    assert node.service.rdma.usable is True
    node.service.watch._fail("slow", "sysfs still does not answer")
    node.clock.seconds += 10
    assert node.service.rdma.usable is None
    assert "sysfs still does not answer" in node.service.rdma.reason
    assert "rdma_usable" not in node.samples()
    node.look()
    assert node.service.rdma.usable is True


async def test_the_agent_shows_its_links(sockets):
    links = {"root": str(sockets.root), "device_dir": str(sockets.devices)}
    app = build_app(AgentSettings(links=links | {"interval_seconds": 0.02}))
    async with TestClient(TestServer(app)) as client, asyncio.timeout(30):
        while True:
            status = await (await client.get("/v1/status")).json()
            if app[LINKS].watch.counts.readings > 1:
                break
        assert status["links"]["rdma"]["usable"] is True
        assert "nearkv_agent_rdma_usable 1.0" in await (await client.get("/metrics")).text()
    assert app[LINKS].rdma.usable is True


async def test_links_can_be_left_alone(sockets):
    app = build_app(AgentSettings(links={"root": str(sockets.root), "enabled": False}))
    async with TestClient(TestServer(app)) as client:
        status = await (await client.get("/v1/status")).json()
    assert status["links"]["rdma"] == {"usable": None, "reason": "links.enabled is off"}
    assert app[LINKS].watch.counts.readings == 0


# -- Settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"affinity": ("mlx5_0",)},
        {"affinity": ("0000:17:00.0=",)},
        {"affinity": ("0000:17:00.0=a", "00000000:17:00.0=b")},
        {"interval_seconds": 0},
        {"max_devices": 0},
    ],
    ids=["no-gpu", "no-adapter", "twice", "no-interval", "no-devices"],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        LinkSettings(**wrong)


def test_overrides_are_by_the_address_that_sysfs_writes():
    settings = LinkSettings(affinity=("00000000:AB:00.0=mlx5_1",))
    assert settings.adapter_of_gpu == {"0000:ab:00.0": "mlx5_1"}
