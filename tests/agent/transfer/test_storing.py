"""The desk of the shared store, with movers that a test scripts."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from nearkv.agent.transfer.leasing import LeaseLimits
from nearkv.agent.transfer.metrics import TransferMetrics
from nearkv.agent.transfer.peer_messages import LeaseName
from nearkv.agent.transfer.registry import Registry
from nearkv.agent.transfer.store_health import StoreHealth
from nearkv.agent.transfer.storing import StoreDesk, StoreRules
from nearkv.transfer.backends.contract import Probe, monotonic_ms
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.manifest import Prefix
from nearkv.transfer.messages import (
    PROTOCOL,
    Lookup,
    OpenLease,
    RegisterScheduler,
    RegisterWorker,
    in_store,
)
from nearkv.transfer.store.contract import StoreReport
from tests.doubles.kv_engine import KvShape, pack
from tests.integration.stack import eventually

TOKENS = list(range(40))
DONE = StoreReport(blocks=10, segments=3, size_bytes=20_480, seconds=0.01)


class Movers:
    """What the desk needs of a pool; each put waits for ``go`` and ends as ``result`` says."""

    def __init__(self):
        self.puts = []
        self.questions = []
        self.go = asyncio.Event()
        self.go.set()
        self.result = DONE
        self.found = 10
        self.works = Probe(name="store", usable=True)

    async def put(self, job):
        self.puts.append(job)
        await self.go.wait()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def ask_store(self, subject, first_block, deadline_ms):
        self.questions.append((subject, first_block, deadline_ms))
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    async def probe_store(self, _deadline_ms):
        if isinstance(self.works, Exception):
            raise self.works
        return self.works


class Rig:
    """A desk with one registered engine; ``released`` is what it let go of."""

    def __init__(self, *, shape=None, tenant="", **rules):
        self.movers = Movers()
        self.registry = CollectorRegistry()
        self.released = []
        rules = {"min_tokens": 8, "write": "leased", "max_puts": 2, **rules}
        self.desk = StoreDesk(
            self.movers,
            StoreRules(node="n1", tier="files", url="file:///x", **rules),
            TransferMetrics(self.registry),
            StoreHealth(lambda: 1.0),
            release=lambda name, why: self.released.append((name.lease, why)),
        )
        shape = shape or KvShape()
        engines = Registry(LeaseLimits())
        for rank in range(shape.tp_size):
            hello = RegisterWorker(
                protocol=PROTOCOL, engine="p", epoch="e", tenant=tenant,
                compatibility=shape.compatibility(rank), memory=shape.memory,
            )  # fmt: skip
            engines.add_worker(hello, 10 + rank, object())
        engines.add_scheduler(
            RegisterScheduler(protocol=PROTOCOL, engine="p", epoch="e", slots=64), 9, object()
        )
        self.engine = engines.engines["p"]

    def open(self, lease="l1", *, tokens=40, for_store=False, seconds=30):
        self.desk.lease_opened(
            self.engine,
            OpenLease(
                lease=lease, slot=3, generation=7,
                expires_at_ms=monotonic_ms() + int(seconds * 1000),
                block_ids=tuple(range(tokens // 4)),
                prefix=Prefix(
                    token_ids=pack(TOKENS[:tokens]), num_tokens=tokens, block_keys=b""
                ),
                for_store=for_store,
            ),
        )  # fmt: skip

    async def find(self, tokens=40, *, first_block=0, seconds=5.0):
        message = Lookup(
            id=1, address=in_store("r1"), token_ids=pack(TOKENS[:tokens]), first_block=first_block
        )
        return await self.desk.find(self.engine, message, seconds=seconds)

    async def settle(self):
        """Let puts that may end do so."""
        await eventually(
            lambda: not self.desk.describe()["puts_under_way"], what="nothing is being stored"
        )

    def keeps(self, lease="l1", why="pulled"):
        return self.desk.keeps(LeaseName(engine="p", epoch="e", lease=lease), why)

    def count(self, name, outcome, reason=""):
        labels = {"outcome": outcome, "reason": reason}
        name = f"nearkv_agent_transfer_store_{name}_total"
        return self.registry.get_sample_value(name, labels) or 0


# -- Puts ----------------------------------------------------------------------------------


async def test_a_lease_is_stored_under_its_fence():
    rig = Rig(put_seconds=5)
    rig.open()
    await rig.settle()
    (job,) = rig.movers.puts
    assert (job.fence.slot, job.fence.generation) == (3, 7)
    assert job.block_ids == tuple(range(10))
    assert job.subject.token_ids == pack(TOKENS)
    assert 4_000 < job.deadline_ms - monotonic_ms() <= 5_000
    assert rig.count("puts", "done") == 1
    assert rig.registry.get_sample_value("nearkv_agent_transfer_store_put_bytes_total") == 20_480
    assert rig.released == []  # its reader does that


async def test_every_rank_stores_its_share():
    rig = Rig(shape=KvShape(tp_size=2))
    rig.open()
    await rig.settle()
    assert [job.subject.own.parallelism.tp_rank for job in rig.movers.puts] == [0, 1]
    assert len({job.source.key for job in rig.movers.puts}) == 2
    assert rig.count("puts", "done") == 1


async def test_a_put_lasts_no_longer_than_its_lease():
    rig = Rig(put_seconds=60)
    rig.open(seconds=2)
    await rig.settle()
    assert rig.movers.puts[0].deadline_ms - monotonic_ms() <= 2_000


@pytest.mark.parametrize(
    ("write", "for_store", "is_stored"),
    [
        ("leased", False, True),
        ("leased", True, False),
        ("all", False, True),
        ("all", True, True),
        ("none", False, False),
        ("none", True, False),
    ],
)
async def test_what_is_stored(write, for_store, is_stored):
    rig = Rig(write=write)
    rig.open(for_store=for_store)
    await rig.settle()
    assert bool(rig.movers.puts) == is_stored
    why = "stored" if is_stored else "unused"
    assert rig.released == ([("l1", why)] if for_store else [])


async def test_short_prefixes_are_neither_stored_nor_looked_for():
    rig = Rig(min_tokens=20)
    rig.open(tokens=16)
    await rig.settle()
    with pytest.raises(PullError) as error:
        await rig.find(tokens=19)
    assert error.value.reason is Reason.NOT_STORED
    assert (rig.movers.puts, rig.movers.questions) == ([], [])


async def test_a_reader_that_is_done_first_waits_for_the_put():
    rig = Rig()
    rig.movers.go.clear()
    rig.open()
    await asyncio.sleep(0)
    assert rig.keeps()
    assert rig.released == []
    rig.movers.go.set()
    await rig.settle()
    assert rig.released == [("l1", "pulled")]
    assert not rig.keeps()


@pytest.mark.parametrize(
    "result",
    [
        PullError(Reason.STALE, "reused"),
        PullError(Reason.STORE_FULL, "no room"),
        StoreReport(blocks=4, segments=1, size_bytes=9, seconds=0.1, reason=Reason.DEADLINE),
        ZeroDivisionError(),
    ],
    ids=["stale", "store_full", "deadline", "internal"],
)
async def test_a_put_that_fails_lets_go_as_well_and_is_counted(result, request):
    rig = Rig(write="all")
    rig.movers.result = result
    rig.open(for_store=True)
    await rig.settle()
    reason = request.node.callspec.id
    assert rig.released == [("l1", "stored")]
    assert rig.count("puts", "partly" if reason == "deadline" else "failed", reason) == 1


async def test_puts_over_the_bound_are_skipped():
    rig = Rig(max_puts=2, write="all")
    rig.movers.go.clear()
    for number in range(4):
        rig.open(f"l{number}", for_store=True)
    await eventually(lambda: len(rig.movers.puts) == 2, what="two are being stored")
    assert rig.count("puts", "skipped", "busy") == 2
    assert rig.released == [("l2", "unused"), ("l3", "unused")]
    rig.movers.go.set()
    await rig.settle()
    rig.open("l5")
    await rig.settle()
    assert len(rig.movers.puts) == 3


async def test_an_engine_that_is_not_complete_is_passed_over():
    rig = Rig()
    rig.engine.memories = {}
    rig.open()
    assert rig.count("puts", "skipped", "no_source") == 1


async def test_closing_ends_puts_and_lets_go():
    rig = Rig()
    rig.movers.go.clear()
    rig.open()
    await asyncio.sleep(0)
    rig.keeps(why="aborted")
    await rig.desk.close()
    assert rig.released == [("l1", "aborted")]
    assert rig.desk.describe()["puts_under_way"] == 0


# -- Lookups -------------------------------------------------------------------------------


async def test_what_the_store_has_is_told():
    rig = Rig(lookup_seconds=0.5)
    blocks, subject = await rig.find(first_block=2, seconds=60)
    assert (blocks, subject.token_ids) == (10, pack(TOKENS))
    (_, first_block, deadline_ms), *_ = rig.movers.questions
    assert first_block == 2
    assert deadline_ms - monotonic_ms() <= 500
    assert rig.count("lookups", "found") == 1


async def test_no_more_blocks_are_told_than_the_request_fills():
    rig = Rig()
    rig.movers.found = 1_000
    assert (await rig.find(tokens=39))[0] == 9


async def test_nothing_is_no_failure():
    rig = Rig()
    rig.movers.found = 0
    with pytest.raises(PullError):
        await rig.find()
    assert rig.count("lookups", "nothing") == 1
    assert rig.desk.describe()["usable"]


async def test_a_store_that_does_not_answer_is_left_alone():
    rig = Rig()
    rig.movers.found = PullError(Reason.DEADLINE, "no answer")
    reasons = Counter()
    for _ in range(3):
        with pytest.raises(PullError) as error:
            await rig.find()
        reasons[error.value.reason] += 1
    assert reasons == {Reason.DEADLINE: 1, Reason.NO_PATH: 2}
    assert len(rig.movers.questions) == 1
    assert (
        rig.count("lookups", "failed", "deadline"),
        rig.count("lookups", "skipped", "no_path"),
    ) == (1, 2)
    rig.open()
    assert rig.count("puts", "skipped", "no_path") == 1
    assert "does not work (deadline: no answer)" in rig.desk.problems()[0]


async def test_a_lookup_that_has_no_time_left_says_nothing_of_the_store():
    rig = Rig()
    with pytest.raises(PullError):
        await rig.find(seconds=0.01)
    assert rig.count("lookups", "skipped", "deadline") == 1
    assert rig.desk.describe()["usable"] is None


async def test_an_engine_that_goes_during_a_put_says_nothing_of_the_store():
    rig = Rig()
    rig.movers.go.clear()
    rig.movers.result = PullError(Reason.PEER_LOST, "the engine is gone")
    rig.open()
    rig.engine.memories = {}
    rig.movers.go.set()
    await rig.settle()
    assert rig.count("puts", "failed", "no_source") == 1
    assert rig.desk.describe()["usable"] is None


@pytest.mark.parametrize("gone", [False, True])
async def test_a_pull_that_fails_is_the_stores_fault_unless_the_engine_went(gone):
    rig = Rig()
    order = SimpleNamespace(reader=rig.engine, rank=0, target=rig.engine.memories[0])
    if gone:
        rig.engine.memories = {}
    with pytest.raises(PullError), rig.desk.pulling(order):
        raise PullError(Reason.PEER_LOST, "the server, or the engine")
    assert rig.desk.describe()["usable"] is (None if gone else False)
    assert rig.desk.describe()["pulls_failed"] == 1


@pytest.mark.parametrize(("allowed", "tenant"), [(False, "blue"), (True, "")])
async def test_tenants_have_entries_of_their_own_unless_they_may_share(allowed, tenant):
    rig = Rig(tenant="blue", allow_cross_tenant=allowed)
    _, subject = await rig.find()
    assert subject.tenant == tenant


async def test_the_probe_says_whether_it_works():
    rig = Rig()
    assert rig.desk.describe()["usable"] is None
    assert rig.desk.problems() == []
    rig.movers.works = Probe(name="store", usable=False, detail="others may write into it")
    await rig.desk.probe()
    assert rig.desk.describe()["usable"] is False
    assert "others may write" in rig.desk.problems()[0]
    rig.movers.works = Probe(name="store", usable=True)
    await rig.desk.probe()
    assert rig.desk.problems() == []


@pytest.mark.parametrize(
    ("reason", "usable"), [(Reason.BUSY, None), (Reason.MOVER_LOST, None), (Reason.DEADLINE, False)]
)
async def test_a_probe_that_is_not_answered(reason, usable):
    rig = Rig()
    rig.movers.works = PullError(reason, "no answer")
    await rig.desk.probe()
    assert rig.desk.describe()["usable"] is usable


async def test_the_store_is_tried_until_it_works():
    rig = Rig()
    rig.movers.works = PullError(Reason.BUSY, "still starting")
    trying = asyncio.create_task(rig.desk.keep_trying())
    await asyncio.sleep(0)
    rig.movers.works = Probe(name="store", usable=True)
    await eventually(lambda: rig.desk.describe()["usable"], what="it was tried again")
    trying.cancel()
