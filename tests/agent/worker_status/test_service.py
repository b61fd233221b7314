"""WorkerStatuses written to an API server double, by a service whose clock tests move by hand."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from nearkv.agent.kubernetes.pod_engines import PodRules, read_engine
from nearkv.agent.settings import AgentSettings
from nearkv.agent.summary import Hardware
from nearkv.agent.worker_status.prefixes import NamedPrefix
from nearkv.agent.worker_status.service import WorkerStatusService
from nearkv.kube.access import ApiAccess
from nearkv.kube.patching import Patcher, PatchLimits
from tests.agent.kubernetes.things import engine_pod, read_as_pod
from tests.agent.worker_status.test_observing import READING, STORE, Node
from tests.agent.worker_status.things import complaints, devices, schema_of_status
from tests.doubles.api_server import ApiServerDouble, Faults

RULES = {"workerstatuses": ["patch"], "workerstatuses/status": ["patch"]}


class Pods:
    """Stands for the service that follows pods."""

    is_on = True
    is_known = True

    def __init__(self):
        self.engines = {}


class Site:
    """A node's state, a service over it, and an API server."""

    def __init__(self, api, access, **settings):
        self.api = api
        self.node = Node()
        self.pods = Pods()
        self.hardware = Hardware(devices=devices(2), rdma=True)
        self.settings = AgentSettings(**{"node": "n1", **settings})
        self.random = random.Random(3)
        self.patcher = Patcher(access, limits=PatchLimits(attempts=1, deadline_seconds=5.0))
        self.begin()

    def begin(self):
        """Begin anew, as an agent that was restarted does."""
        self.service = WorkerStatusService(
            self.settings,
            self.node,
            self.pods,
            hardware=lambda: self.hardware,
            time_of_day=lambda: 1_800_000_000 + self.node.seconds,
            draw=self.random.random,
        )

    def add(self, name="e", **fields):
        """Run a pod with an engine that answers; return the tracker of the engine."""
        stored = self.api.put(engine_pod(name, **fields))
        engine = read_engine(read_as_pod(stored), PodRules())
        self.pods.engines[engine.uid] = engine
        return self.node.add_rank(engine.uid)

    async def run(self, seconds, step=5.0, *, read=True):
        """Let time pass: engines are read, and what is due is written."""
        end = self.node.seconds + seconds
        while self.node.seconds < end:
            if read:
                for tracker in self.node.trackers.values():
                    self.read(tracker, tracker.last_reading)
            self.service.look()
            await self.service._write_due(self.patcher)
            self.node.seconds += step

    def read(self, tracker, reading):
        tracker.on_reading(reading, start_time_seconds=1.0, boot="b", now=self.node.seconds)

    def status(self, name="e"):
        return self.api.get("WorkerStatus", name).get("status")

    def condition(self, kind, name="e"):
        (found,) = [each for each in self.status(name)["conditions"] if each["type"] == kind]
        return found

    def reports(self):
        return [
            seen for seen in self.api.record.all("patch") if seen.subresource and seen.status == 200
        ]


@asynccontextmanager
async def making(**settings):
    async with ApiServerDouble() as api:
        api.allow(RULES)
        async with ApiAccess.plain(api.url) as access:
            yield Site(api, access, **settings)


@pytest.fixture
async def site():
    async with making() as made:
        made.tracker = made.add()
        await made.run(405)  # its moment has come twice
        yield made


def varied(ratio, **fields):
    return READING.__class__(
        **{**{name: getattr(READING, name) for name in READING.__slots__}, "kv_used_ratio": ratio}
        | fields
    )


async def test_what_is_written_fits_the_schema_and_goes_with_the_pod(site):
    found = site.api.get("WorkerStatus", "e")
    assert list(complaints(found["status"], schema_of_status())) == []
    (owner,) = found["metadata"]["ownerReferences"]
    uid = site.api.get("Pod", "e")["metadata"]["uid"]
    assert owner == {"apiVersion": "v1", "kind": "Pod", "name": "e", "uid": uid}
    assert {entry["manager"] for entry in found["metadata"]["managedFields"]} == {"nearkv-agent"}
    assert site.condition("Ready")["status"] == "True"
    assert site.status()["kvCacheUsedPercent"] == 25
    assert len(site.status()["devices"]) == 2


async def test_the_rights_it_needs(site):
    assert site.api.record.rules == {
        ("patch", "workerstatuses"),
        ("patch", "workerstatuses/status"),
    }
    assert all(seen.query["fieldManager"] == "nearkv-agent" for seen in site.api.record)


async def test_ten_minutes_of_noise_write_no_more_than_the_heartbeats(site):
    before = len(site.reports())
    draw = random.Random(5)
    for number in range(120):
        site.read(
            site.tracker,
            varied(
                0.25 + draw.uniform(-0.08, 0.08),
                requests_running=draw.randrange(40),
                requests_waiting=draw.randrange(5),
            ),
        )
        site.tracker.on_message(number + 1, STORE, site.node.seconds)
        site.hardware = Hardware(
            devices=[
                device.__class__(
                    id=device.id,
                    total_bytes=device.total_bytes,
                    used_bytes=device.used_bytes + draw.randrange(-(1 << 30), 1 << 30),
                    health="ok",
                    why=draw.choice(["", "clocks are down: heat"]),
                )
                for device in devices(2)
            ],
            rdma=True,
        )
        await site.run(5, read=False)
    assert len(site.reports()) - before <= 2


async def test_a_lasting_change_is_written_on_its_way_and_when_it_is_there(site):
    before = len(site.reports())
    site.read(site.tracker, varied(0.95))
    await site.run(500)
    assert site.condition("KVPressure")["status"] == "True"
    assert site.status()["kvCacheUsedPercent"] >= 90
    assert len(site.reports()) - before <= 3


async def test_an_engine_that_is_away_is_told_within_seconds_with_the_time_it_went(site):
    ready_since = site.condition("Ready")["lastTransitionTime"]
    site.tracker.on_unreachable()
    await site.run(30, read=False)
    ready = site.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Unreachable")
    assert ready["lastTransitionTime"] > ready_since
    await site.run(120)
    assert site.condition("Ready")["status"] == "True"


async def test_old_readings_are_not_fresh_and_say_nothing_of_the_cache(site):
    await site.run(700, read=False)
    assert site.condition("Fresh")["reason"] == "ReadingsOld"
    assert site.condition("KVPressure")["status"] == "Unknown"
    assert "kvCacheUsedPercent" not in site.status()


async def test_named_prefixes(site):
    site.service.prefixes = lambda _: [NamedPrefix("report", 3), NamedPrefix("manual", 5)]
    await site.run(405)
    assert site.status()["cachedPrefixes"] == ["manual", "report"]
    assert site.status()["cachedPrefixCount"] == 2


async def test_one_of_several_engines_speaks_for_the_node(site):
    site.add("e2")
    await site.run(1200)
    assert sum("devices" in site.status(name) for name in ("e", "e2")) == 1
    speaker = next(name for name in ("e", "e2") if "devices" in site.status(name))
    uid = site.api.get("Pod", speaker)["metadata"]["uid"]
    site.node.trackers.pop(uid)
    site.pods.engines.pop(uid)
    await site.run(1200)
    other = "e2" if speaker == "e" else "e"
    assert len(site.status(other)["devices"]) == 2
    assert site.status(other)["intervalSeconds"] == 400


async def test_an_agent_that_starts_again_leaves_things_as_they_are(site):
    before = site.api.get("WorkerStatus", "e")
    site.begin()
    site.api.record.clear()
    # Its look at the object comes within 200 s; the heartbeat would come after that.
    for _ in range(60):
        if site.api.record.all("patch"):
            break
        await site.run(5)
    await site.run(10)
    assert [seen.subresource for seen in site.api.record.all("patch")] == [""]
    assert site.api.get("WorkerStatus", "e") == before
    site.tracker.on_unreachable()
    await site.run(60, read=False)
    assert site.condition("Ready")["status"] == "False"
    fresh = [each for each in before["status"]["conditions"] if each["type"] == "CacheParity"]
    assert [site.condition("CacheParity")] == fresh


async def test_an_object_that_somebody_deleted_is_made_anew(site):
    site.api.delete("WorkerStatus", "e")
    await site.run(1200)
    assert site.condition("Ready")["status"] == "True"
    assert site.service.writes["vanished"] == 1


async def test_an_object_of_an_earlier_pod_of_this_name_is_taken_over(site):
    (uid,) = site.pods.engines
    site.pods.engines.clear()
    site.node.trackers.clear()
    site.api.delete("Pod", "e")
    site.add("e")
    await site.run(60)
    (owner,) = site.api.get("WorkerStatus", "e")["metadata"]["ownerReferences"]
    assert owner["uid"] == next(iter(site.pods.engines)) != uid


async def test_one_that_was_given_back_to_an_earlier_pod_is_noticed(site):
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "e", "uid": "old"}
    site.api.edit("WorkerStatus", "e", {"metadata": {"ownerReferences": [owner]}})
    await site.run(1200)
    (found,) = site.api.get("WorkerStatus", "e")["metadata"]["ownerReferences"]
    assert found["uid"] == next(iter(site.pods.engines))


# -- Trouble ---------------------------------------------------------------------------------


async def test_throttling_is_honoured(site):
    site.api.record.clear()
    site.api.inject(Faults(verbs=("patch",), status=429, retry_after_seconds=1000))
    site.tracker.on_unreachable()
    began = site.node.seconds
    await site.run(990, read=False)
    assert len(site.api.record.all("patch")) == 1
    assert site.service.writes["throttled"] == 1
    assert site.service.describe()["behind"]
    site.api.inject(Faults())
    await site.run(400, read=False)
    assert site.condition("Ready")["status"] == "False"
    assert site.node.seconds - began > 1000
    assert site.service.problems() == []


@pytest.mark.parametrize(
    ("faults", "remedy"),
    [
        (Faults(verbs=("patch",), status=403, reason="Forbidden"), "docs/worker-status.md"),
        (Faults(verbs=("patch",), status=404, reason="NotFound"), "CRD"),
        (Faults(verbs=("patch",), body=b"<html>"), "the answer"),
    ],
)
async def test_what_will_not_pass_by_itself_is_told_and_tried_seldom(faults, remedy):
    async with making() as site:
        site.api.inject(faults)
        site.add()
        await site.run(3600)
        (problem,) = site.service.problems()
        assert remedy in problem
        assert 5 <= len(site.api.record.all("patch")) <= 20


async def test_an_api_server_that_hangs_holds_up_one_look_only():
    async with making() as site:
        site.patcher._limits = PatchLimits(attempts=1, deadline_seconds=0.05)
        site.add()
        site.api.inject(Faults(verbs=("patch",), hang=True))
        await site.run(400)
        assert site.service.writes["silent"] >= 1
        site.api.inject(Faults())
        await site.run(900)
        assert site.condition("Ready")["status"] == "True"


async def test_after_five_minutes_without_an_api_server_many_nodes_write_on_without_a_storm():
    """The real services of 50 nodes, with their own clocks in step; the plan alone knows 5,000."""
    async with ApiServerDouble() as api, ApiAccess.plain(api.url) as access:
        sites = []
        for number in range(50):
            site = Site(api, access, node=f"n{number}")
            site.random.seed(number)
            site.tracker = site.add(f"e{number}")
            sites.append(site)

        async def pass_time(seconds, step=5.0):
            busiest = 0
            for _ in range(int(seconds / step)):
                before = len(api.record.all("patch"))
                await asyncio.gather(*(site.run(step) for site in sites))
                busiest = max(busiest, len(api.record.all("patch")) - before)
            return busiest / step

        await pass_time(900)
        api.kill()
        for site in sites:
            site.read(site.tracker, varied(0.95))
        await pass_time(300)
        assert all(site.node.log.gauges for site in sites)
        await api.start()
        # 5,000 nodes would be allowed 50 writes a second, so these may write one in two.
        assert await pass_time(900) <= 1.0
        pressed = [site.condition("KVPressure", f"e{n}")["status"] for n, site in enumerate(sites)]
        assert set(pressed) == {"True"}
