"""Which transports are tried, which peers are asked, and how much may be on its way."""

import asyncio
import ipaddress

import pytest

from nearkv.agent.transfer.backend_choice import BackendProbes, retry_backends, usable_backends
from nearkv.agent.transfer.inflight import InflightLimit
from nearkv.agent.transfer.peer_urls import check_peer_url
from nearkv.transfer.backends.contract import Probe
from nearkv.transfer.errors import PullError, Reason

PROBES = {
    "nixl": Probe(name="nixl", usable=False, detail="not installed"),
    "ucx": Probe(name="ucx", usable=True, rdma=True),
    "tcp": Probe(name="tcp", usable=True),
}


def choose(*preferred, require_rdma=False, probes=None):
    return usable_backends(preferred, probes or PROBES, require_rdma=require_rdma)


def test_usable_transports_keep_their_order():
    assert choose("nixl", "tcp", "ucx") == ["tcp", "ucx"]
    assert choose("tcp", "ucx", require_rdma=True) == ["ucx"]


def test_no_transport_says_what_is_against_each():
    with pytest.raises(PullError, match="nixl: not installed") as raised:
        choose("nixl")
    assert raised.value.reason is Reason.NO_PATH
    with pytest.raises(PullError, match="tcp") as raised:
        choose("nixl", "tcp", require_rdma=True)
    assert raised.value.reason is Reason.RDMA_REQUIRED


@pytest.mark.parametrize(
    ("failed", "reason", "again"),
    [
        ("ucx", Reason.PEER_LOST, ["tcp"]),
        ("ucx", Reason.NO_PATH, ["tcp"]),
        ("tcp", Reason.PEER_LOST, ["tcp"]),
        ("tcp", Reason.CORRUPT, ["tcp"]),
        ("tcp", Reason.NO_PATH, []),
        ("ucx", Reason.STALE, []),
        ("ucx", Reason.DEADLINE, []),
    ],
)
def test_another_try_is_made_where_it_can_help(failed, reason, again):
    assert retry_backends(["ucx", "tcp"], failed, reason) == again


async def test_transports_are_probed_once_whoever_asks():
    asked = []
    gate = asyncio.Event()

    async def probe(name):
        asked.append(name)
        await gate.wait()
        return PROBES[name]

    probes = BackendProbes(["nixl", "tcp"], probe)
    first, second = asyncio.create_task(probes.get()), asyncio.create_task(probes.get())
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert set(await second) == {"nixl", "tcp"}
    await probes.get()
    assert asked == ["nixl", "tcp"]
    await probes.close()


async def test_a_probe_under_way_ends_with_the_service():
    async def probe(_name):
        await asyncio.Event().wait()

    probes = BackendProbes(["tcp"], probe)
    task = asyncio.create_task(probes.get())
    await asyncio.sleep(0)
    await probes.close()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- Peers ---------------------------------------------------------------------------------

NETWORKS = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8")]


@pytest.mark.parametrize(
    ("url", "tls", "networks"),
    [
        ("http://10.1.2.3:9471", False, []),
        ("https://node-a:9471/", True, []),
        ("http://127.0.0.1:1", True, []),
        ("http://localhost:1", True, []),
        ("http://[::1]:1", True, []),
        ("http://10.1.2.3:9471", False, NETWORKS),
        ("https://[fd00::1]:9471", True, NETWORKS),
    ],
)
def test_peers_that_may_be_asked(url, tls, networks):
    assert check_peer_url(url, tls=tls, networks=networks) == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "tls", "networks", "reason"),
    [
        ("", False, [], Reason.NO_SOURCE),
        ("ftp://x", False, [], Reason.NO_SOURCE),
        ("http://user:pw@x", False, [], Reason.NO_SOURCE),
        ("http://x?q=1", False, [], Reason.NO_SOURCE),
        ("http://x:99999", False, [], Reason.NO_SOURCE),
        ("http://[::1", False, [], Reason.NO_SOURCE),
        ("http://" + "x" * 600, False, [], Reason.NO_SOURCE),
        ("http://10.1.2.3:9471", True, [], Reason.AUTH),
        ("http://192.168.0.1", False, NETWORKS, Reason.PEER_REFUSED),
        ("http://node-a", False, NETWORKS, Reason.PEER_REFUSED),
    ],
)
def test_peers_that_are_not_asked(url, tls, networks, reason):
    with pytest.raises(PullError) as raised:
        check_peer_url(url, tls=tls, networks=networks)
    assert raised.value.reason is reason


# -- Bounds --------------------------------------------------------------------------------


class Holder:
    """Tasks that hold amounts until they are let go."""

    def __init__(self, limit):
        self.limit = InflightLimit(limit, what="bytes")
        self.order = []
        self.gates = {}
        self.tasks = {}

    async def start(self, name, amount, key="k", seconds=10.0):
        gate = self.gates[name] = asyncio.Event()

        async def hold():
            async with self.limit.hold(key, amount, seconds=seconds):
                self.order.append(name)
                await gate.wait()

        self.tasks[name] = asyncio.create_task(hold())
        await asyncio.sleep(0)

    async def finish(self, name):
        self.gates[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)


async def test_what_does_not_fit_waits_in_order():
    holder = Holder(10)
    for name, amount in (("a", 6), ("b", 6), ("c", 1)):
        await holder.start(name, amount)
    assert holder.order == ["a"]
    assert holder.limit.taken("k") == 6
    await holder.finish("a")
    assert holder.order == ["a", "b", "c"]
    await holder.finish("b")
    await holder.finish("c")
    assert holder.limit.total == 0


async def test_what_is_larger_than_the_limit_goes_alone():
    holder = Holder(10)
    await holder.start("a", 1)
    await holder.start("big", 100)
    assert holder.order == ["a"]
    await holder.finish("a")
    assert holder.order == ["a", "big"]
    await holder.finish("big")


async def test_keys_have_nothing_to_do_with_each_other():
    holder = Holder(10)
    await holder.start("a", 10, key="x")
    await holder.start("b", 10, key="y")
    assert holder.order == ["a", "b"]
    await holder.finish("a")
    await holder.finish("b")


async def test_waiting_ends_at_the_deadline_as_busy_and_lets_the_next_go():
    holder = Holder(10)
    await holder.start("a", 6)
    await holder.start("late", 9, seconds=0.01)
    await holder.start("small", 2)
    with pytest.raises(PullError) as raised:
        await holder.tasks["late"]
    assert raised.value.reason is Reason.BUSY
    await asyncio.sleep(0)
    assert holder.order == ["a", "small"]
    await holder.finish("a")
    await holder.finish("small")
    assert holder.limit.total == 0


async def test_a_cancelled_waiter_takes_nothing():
    holder = Holder(10)
    await holder.start("a", 10)
    await holder.start("gone", 10)
    await holder.start("b", 10)
    holder.tasks["gone"].cancel()
    await holder.finish("a")
    await asyncio.sleep(0)
    assert holder.order == ["a", "b"]
    await holder.finish("b")
    assert holder.limit.total == 0


async def test_one_that_is_cancelled_as_its_turn_comes_gives_it_on():
    holder = Holder(10)
    await holder.start("a", 10)
    await holder.start("gone", 10)
    await holder.start("b", 10)
    holder.gates["a"].set()
    await holder.tasks["a"]  # "gone" has its turn now, and has not run yet
    holder.tasks["gone"].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert holder.order in (["a", "b"], ["a", "gone", "b"])
    await asyncio.gather(holder.tasks["gone"], return_exceptions=True)
    await holder.finish("b")
    assert holder.limit.total == 0


async def test_only_so_many_wait():
    holder = Holder(1)
    for number in range(257):
        await holder.start(number, 1)
    await holder.start("more", 1)
    with pytest.raises(PullError) as raised:
        await holder.tasks["more"]
    assert raised.value.reason is Reason.BUSY
    for number in range(257):
        await holder.finish(number)
