"""The node's summary: what it says, what of it is news, and how it is served."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web

from nearkv.agent.engine_metrics import RankReading
from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.node_state import NodeState
from nearkv.agent.state_log import StateLog
from nearkv.agent.summary import (
    Hardware,
    SummaryBuilder,
    SummarySequence,
    SummaryTiming,
    has_drifted,
    is_urgent,
)
from nearkv.agent.summary_api import SummaryService
from nearkv.health import Readiness
from nearkv.node_summary import DeviceSummary, GroupSummary, NodeSummary, PathSummary
from nearkv.serving import running
from nearkv.settings.address import Address
from nearkv.state.model import PathReading
from tests.integration.stack import eventually

READING = RankReading(
    kv_used_ratio=0.25,
    requests_running=2,
    requests_waiting=3,
    kv_total_tokens=1000,
    kv_total_bytes=100_000,
    block_size=2,
    awake=True,
)
STORE = msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [1, 2], 2]], 0])


class Node(NodeState):
    """A node's state with a clock that tests move by hand."""

    def __init__(self):
        self.seconds = 100.0
        log = StateLog(boot="b", node="n", version="1")
        super().__init__(log, boot="b", flush_seconds=0.0, now=lambda: self.seconds)
        self.builder = SummaryBuilder(self, node="n", interval_seconds=5.0)

    def add_engine(self, name="e", *, group="g", role="both", events=True, reading=READING, **more):
        identity = EngineIdentity(
            name, f"http://{name}", "n", "tiny", ("tiny",), group=group, role=role, **more
        )
        tracker = EngineTracker(identity, self.log, secret=b"", table_limit_bytes=1 << 20)
        self.add(tracker)
        if events:
            tracker.on_message(0, STORE, self.seconds)
        if reading is not None:
            tracker.on_reading(reading, start_time_seconds=1.0, boot="b", now=self.seconds)
        return tracker

    def build(self, **hardware):
        return self.builder.build(Hardware(**hardware))

    def group(self):
        (group,) = self.build().groups
        return group


@pytest.fixture
async def node():
    return Node()


# -- What it says ----------------------------------------------------------------------------


async def test_engines_of_a_group_add_up(node):
    node.add_engine("a", role="prefill")
    node.add_engine("b", role="decode")
    group = node.group()
    assert (group.group, group.engines, group.roles) == ("g", 2, ("decode", "prefill"))
    # One block of two tokens each, of 100 bytes.
    assert (group.held_bytes, group.free_bytes, group.total_bytes) == (400, 150_000, 200_000)
    assert (group.kv_bytes_per_token, group.requests_waiting) == (100.0, 6)


async def test_groups_are_apart_and_engines_without_one_are_left_out(node):
    node.add_engine("a", group="g")
    node.add_engine("b", group="h")
    node.add_engine("c", group="")
    assert [group.group for group in node.build().groups] == ["g", "h"]


async def test_what_is_not_known_is_null_with_a_reason(node):
    node.add_engine(events=False, reading=None)
    summary = node.build()
    (group,) = summary.groups
    assert (group.held_bytes, group.free_bytes, group.kv_bytes_per_token) == (None, None, None)
    assert (summary.devices, summary.rdma, summary.pods) == (None, None, None)
    assert summary.reasons["devices"] == summary.reasons["rdma"] == "not read yet"
    assert summary.reasons["groups.g.held_bytes"] == "unknown of 1 of 1 engines"


async def test_what_some_engines_say_counts_and_what_is_missing_is_told(node):
    node.add_engine("a")
    node.add_engine("b", events=False)
    summary = node.build()
    assert summary.groups[0].held_bytes == 200
    assert summary.reasons["groups.g.held_bytes"] == "unknown of 1 of 2 engines"
    assert "groups.g.free_bytes" not in summary.reasons


async def test_an_engine_that_does_not_answer_offers_nothing(node):
    node.add_engine().on_unreachable()
    group = node.group()
    assert (group.engines, group.held_bytes, group.free_bytes) == (0, None, None)


async def test_bytes_per_token_come_from_the_configuration_first(node):
    node.add_engine(kv_bytes_per_token=7)
    assert (node.group().kv_bytes_per_token, node.group().held_bytes) == (7, 14)


async def test_measured_paths_to_this_node_are_told_with_their_age(node):
    def measured(source, target="n", points=9, age_seconds=0.0):
        reading = PathReading(
            source=source,
            target=target,
            path="tcp",
            setup_seconds=0.01,
            bytes_per_second=1e9,
            points=points,
            age_seconds=age_seconds,
        )
        node.log.put_path(reading, node.seconds)

    measured("m1")
    measured("prior", points=0)
    measured("m2", target="other")
    (path,) = node.build().paths
    assert (path.source, path.transport, path.count, path.age_seconds) == ("m1", "tcp", 9, 0.0)
    node.seconds += 60
    measured("m3")
    assert [(path.source, path.age_seconds) for path in node.build().paths] == [
        ("m3", 0.0),
        ("m1", 60.0),
    ]
    measured("m1", points=10, age_seconds=0.5)
    measured("m4", age_seconds=90.0)
    assert [(path.source, path.age_seconds) for path in node.build().paths] == [
        ("m3", 0.0),
        ("m1", 0.5),
        ("m4", 90.0),
    ]


async def test_the_paths_measured_last_are_told_if_there_are_many(node):
    for number in range(100):
        node.log.put_path(
            PathReading(
                source=f"m{number}",
                target="n",
                path="tcp",
                setup_seconds=0.0,
                bytes_per_second=1e9,
                points=5,
            ),
            node.seconds,
        )
        node.seconds += 1
        node.build()
    paths = node.build().paths
    assert (len(paths), paths[0].source, paths[-1].source) == (64, "m99", "m36")


async def test_pods_that_have_a_device_are_named(node):
    def device(number, **fields):
        return DeviceSummary(id=f"G{number}", **fields)

    some = [device(0, pod_uid="v"), device(1, pod_uid="u"), device(2), device(3, pod_uid="u")]
    assert node.build(devices=some).pods == ("u", "v")
    assert node.build(devices=[device(0)]).pods is None
    assert node.build(devices=[device(0)]).reasons["pods"] == "no device is mapped to a pod"


# -- What is news ----------------------------------------------------------------------------


def summary(**fields):
    return NodeSummary(node="n", boot="b", seq=0, interval_seconds=5.0, **fields)


def of_group(**fields):
    return summary(groups=(GroupSummary(**{"group": "g", "total_bytes": 100_000, **fields}),))


def of_device(**fields):
    return summary(devices=(DeviceSummary(**{"id": "G", "total_bytes": 1000, **fields}),))


def of_path(**fields):
    known = {"source": "m", "transport": "tcp", "setup_seconds": 0.01, "bytes_per_second": 1e9}
    return summary(paths=(PathSummary(**{**known, **fields}),))


@pytest.mark.parametrize(
    ("before", "after", "urgent"),
    [
        (of_device(), of_device(health="failed"), True),
        (of_device(), of_device(pod_uid="u"), True),
        (of_device(used_bytes=0), of_device(used_bytes=9), False),
        (of_device(used_bytes=0), of_device(used_bytes=11), True),
        (of_device(used_bytes=0), of_device(), True),
        (of_device(), summary(), True),
        (summary(devices=()), of_device(), True),
        (summary(), summary(rdma=True), True),
        (summary(), summary(pods=("u",)), True),
        (of_group(), summary(), True),
        (of_group(engines=1), of_group(engines=2), True),
        (of_group(roles=("prefill",)), of_group(roles=("both",)), True),
        (of_group(held_bytes=0), of_group(held_bytes=90_000), False),
        (of_path(), summary(), False),
        (summary(), summary(reasons={"a": "b"}), False),
    ],
)
def test_what_decides_where_a_pod_can_run_is_urgent(before, after, urgent):
    assert is_urgent(before, after) is urgent
    assert not is_urgent(after, after)


@pytest.mark.parametrize(
    ("before", "after", "drifted"),
    [
        (of_group(held_bytes=0), of_group(held_bytes=5000), False),
        (of_group(held_bytes=0), of_group(held_bytes=5001), True),
        (of_group(free_bytes=9000), of_group(free_bytes=0), True),
        (of_group(held_bytes=None), of_group(held_bytes=0), True),
        (of_group(requests_waiting=0), of_group(requests_waiting=50), False),
        (
            of_group(prefill_tokens_per_second=1000.0),
            of_group(prefill_tokens_per_second=1100.0),
            False,
        ),
        (
            of_group(prefill_tokens_per_second=1000.0),
            of_group(prefill_tokens_per_second=1300.0),
            True,
        ),
        (of_group(kv_bytes_per_token=1.0), of_group(kv_bytes_per_token=2.0), True),
        (summary(), of_path(), True),
        (of_path(), of_path(transport="ucx"), True),
        (of_path(), of_path(bytes_per_second=1.1e9, age_seconds=50.0, count=900), False),
        (of_path(), of_path(bytes_per_second=2e9), True),
        (of_path(), of_path(setup_seconds=0.02), True),
    ],
)
def test_a_cost_drifts_when_it_moves_by_more_than_a_tolerance(before, after, drifted):
    assert has_drifted(before, after) is drifted
    assert not has_drifted(after, after)


def test_the_number_grows_at_once_for_the_urgent_and_later_for_the_rest():
    sequence = SummarySequence(SummaryTiming(drift_seconds=30.0, heartbeat_seconds=300.0))
    assert sequence.offer(of_group(held_bytes=0), 0.0)
    assert not sequence.offer(of_group(held_bytes=0), 1.0)
    assert not sequence.offer(of_group(held_bytes=90_000), 29.0)
    assert sequence.offer(of_group(held_bytes=90_000), 30.0)
    assert sequence.offer(of_group(held_bytes=90_000, engines=1), 31.0)
    assert not sequence.offer(of_group(held_bytes=90_000, engines=1), 330.0)
    assert sequence.offer(of_group(held_bytes=90_000, engines=1), 331.0)
    assert sequence.seq == 4


def test_a_path_that_is_another_one_now_is_told_sooner():
    sequence = SummarySequence(SummaryTiming(drift_seconds=30.0, heartbeat_seconds=300.0))
    assert sequence.offer(of_path(bytes_per_second=1e9), 0.0)
    assert not sequence.offer(of_path(bytes_per_second=1.4e9), 29.0)
    assert not sequence.offer(of_path(bytes_per_second=0.5e9), 9.0)
    assert sequence.offer(of_path(bytes_per_second=0.5e9), 10.0)
    assert not sequence.offer(of_path(bytes_per_second=0.9e9), 19.0)
    assert sequence.offer(of_path(bytes_per_second=0.9e9), 20.0)
    assert sequence.offer(of_path(bytes_per_second=0.9e9, transport="ucx"), 30.0)
    assert not sequence.offer(of_path(bytes_per_second=1.2e9, transport="ucx"), 59.0)


def test_noise_around_a_step_is_not_news_again_and_again():
    sequence = SummarySequence(SummaryTiming(drift_seconds=0.0, heartbeat_seconds=1e9))
    for second in range(600):
        sequence.offer(of_group(held_bytes=50_000 + 4_000 * (second % 2)), float(second))
    assert sequence.seq == 1


# -- How it is served ------------------------------------------------------------------------


class Served:
    """A summary served, with a session to ask for it."""

    def __init__(self, node, service, readiness, url, session):
        self.node, self.service, self.readiness = node, service, readiness
        self._url, self._session = url, session

    async def ask(self, *, headers=None, **query):
        query = {name: str(value) for name, value in query.items()}
        url = self._url + "/v1/summary"
        async with self._session.get(url, params=query, headers=headers) as response:
            return response, await response.read()


@asynccontextmanager
async def served(hardware=Hardware, **options):
    node = Node()
    readiness = Readiness()
    timing = SummaryTiming(interval_seconds=0.02, drift_seconds=1e6, heartbeat_seconds=1e6)
    service = SummaryService(node, readiness, node="n", timing=timing, hardware=hardware, **options)
    app = web.Application()
    service.add_routes(app)
    task = asyncio.create_task(service.run())
    try:
        async with running(app, Address("127.0.0.1", 0)) as address, aiohttp.ClientSession() as s:
            yield Served(node, service, readiness, address.url, s)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_summary_has_a_number_and_is_not_sent_twice():
    async with served() as agent:
        response, body = await agent.ask()
        found = msgspec.json.decode(body, type=NodeSummary)
        assert (found.node, found.boot, found.seq) == ("n", "b", 1)
        assert response.headers["ETag"] == '"b:1"'
        response, body = await agent.ask(after="b:1")
        assert (response.status, body) == (304, b"")
        response, _ = await agent.ask(headers={"If-None-Match": '"b:1"'})
        assert response.status == 304
        response, _ = await agent.ask(after="older:7")
        assert response.status == 200


async def test_a_request_is_held_back_until_there_is_news():
    async with served() as agent:
        await agent.ask()
        waiting = asyncio.create_task(agent.ask(after="b:1", wait_seconds=30))
        await eventually(lambda: agent.service.waiting, what="it is held back")
        agent.node.add_engine()
        _, body = await waiting
        found = msgspec.json.decode(body, type=NodeSummary)
        assert (found.seq, found.groups[0].engines) == (2, 1)
        assert agent.service.waiting == 0


async def test_without_news_it_is_answered_when_the_time_is_up():
    async with served() as agent:
        await agent.ask()
        response, _ = await agent.ask(after="b:1", wait_seconds=0.05)
        assert (response.status, response.headers["ETag"]) == (304, '"b:1"')


async def test_whoever_asks_gets_the_newest_figures_under_the_last_number():
    async with served() as agent:
        agent.node.add_engine()
        await agent.ask()
        tracker = next(iter(agent.node.trackers.values()))
        tracker.on_reading(
            RankReading(
                kv_used_ratio=0.9, kv_total_tokens=1000, kv_total_bytes=100_000, awake=True
            ),
            start_time_seconds=1.0,
            boot="b",
            now=agent.node.now(),
        )
        _, body = await agent.ask()
        found = msgspec.json.decode(body, type=NodeSummary)
        assert (found.groups[0].free_bytes, found.seq) == (10_000, agent.service.refresh().seq)


async def test_requests_held_back_are_bounded():
    async with served(max_waiting=1) as agent:
        await agent.ask()
        first = asyncio.create_task(agent.ask(after="b:1", wait_seconds=30))
        await eventually(lambda: agent.service.waiting, what="one is held back")
        response, _ = await agent.ask(after="b:1", wait_seconds=30)
        assert (response.status, response.headers["Retry-After"]) == (503, "5")
        agent.node.add_engine()
        assert (await first)[0].status == 200


async def test_a_client_that_leaves_is_not_waited_for():
    async with served() as agent:
        await agent.ask()
        gone = asyncio.create_task(agent.ask(after="b:1", wait_seconds=30))
        await eventually(lambda: agent.service.waiting, what="it is held back")
        gone.cancel()
        agent.node.add_engine()
        await eventually(lambda: not agent.service.waiting, what="it is let go")


async def test_an_agent_that_stops_lets_go_who_waits():
    async with served() as agent:
        await agent.ask()
        waiting = asyncio.create_task(agent.ask(after="b:1", wait_seconds=30))
        await eventually(lambda: agent.service.waiting, what="it is held back")
        agent.readiness.start_draining()
        async with asyncio.timeout(30):
            assert (await waiting)[0].status == 304


@pytest.mark.parametrize("wait", ["soon", "-1", "nan", "inf", "601"])
async def test_a_wait_that_makes_no_sense_is_refused(wait):
    async with served() as agent:
        response, body = await agent.ask(wait_seconds=wait)
        assert response.status == 400
        assert body.startswith(b"wait_seconds: expected 0 to 600")


async def test_hardware_comes_from_its_reader_and_what_lacks_has_its_reason():
    read = Hardware(devices=[DeviceSummary(id="G", used_bytes=1)], why={"rdma": "links are off"})
    async with served(lambda: read) as agent:
        _, body = await agent.ask()
        found = msgspec.json.decode(body, type=NodeSummary)
        assert found.devices[0].used_bytes == 1
        assert found.reasons["rdma"] == "links are off"
        assert "devices" not in found.reasons
        read = Hardware(devices=[], rdma=True)
        _, body = await agent.ask()
        found = msgspec.json.decode(body, type=NodeSummary)
        assert (found.devices, found.rdma) == ((), True)
