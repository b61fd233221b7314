"""Letting readers of other nodes at leases, with movers that a test scripts."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from nearkv.agent.transfer.leasing import LeaseLimits
from nearkv.agent.transfer.metrics import TransferMetrics
from nearkv.agent.transfer.peer_messages import PeerOpen
from nearkv.agent.transfer.registry import Registry
from nearkv.agent.transfer.sourcing import SourceDesk, SourceRules
from nearkv.transfer.backends.contract import Probe, monotonic_ms
from nearkv.transfer.errors import PullError, Reason, TransferError
from nearkv.transfer.manifest import Prefix
from nearkv.transfer.messages import PROTOCOL, OpenLease, RegisterScheduler, RegisterWorker
from tests.doubles.kv_engine import KvShape, pack

BACKENDS = ("ucx", "tcp")


class Movers:
    """What the desk needs of a pool; an offer by ``ucx`` runs ``meanwhile`` and cannot be made."""

    def __init__(self):
        self.offers = []
        self.withdrawn = []
        self.counts = SimpleNamespace(started=SimpleNamespace(total=int))
        self.meanwhile = {}

    async def offer(self, memory, backend, _grant):
        self.offers.append((memory.key, backend))
        await asyncio.sleep(0)
        self.meanwhile.get(backend, lambda: None)()
        if backend == "ucx":
            raise PullError(Reason.NO_PATH, "not here")
        return b"offer"

    async def withdraw(self, _key, ticket):
        self.withdrawn.append(ticket)


class Line:
    def send(self, message):
        pass


class Rig:
    def __init__(self):
        self.movers = Movers()
        self.registry = Registry(LeaseLimits())
        self.worker, self.scheduler = Line(), Line()
        shape = KvShape()
        self.registry.add_worker(
            RegisterWorker(
                protocol=PROTOCOL, engine="p", epoch="e",
                compatibility=shape.compatibility(), memory=shape.memory,
            ),
            10, self.worker,
        )  # fmt: skip
        hello = RegisterScheduler(protocol=PROTOCOL, engine="p", epoch="e", slots=64)
        self.registry.add_scheduler(hello, 9, self.scheduler)
        self.desk = SourceDesk(
            self.registry,
            self.movers,
            SimpleNamespace(get=self._probes),
            SourceRules(node="n1", backends=BACKENDS),
            TransferMetrics(CollectorRegistry()),
        )
        self.engine = self.registry.engines["p"]
        prefix = Prefix(token_ids=pack(range(8)), num_tokens=8, block_keys=b"")
        self.desk.lease_opened(
            self.engine,
            OpenLease(
                lease="l1", slot=3, generation=7, expires_at_ms=monotonic_ms() + 30_000,
                block_ids=(4, 5), prefix=prefix,
            ),
        )  # fmt: skip

    async def _probes(self):
        return {name: Probe(name=name, usable=True) for name in BACKENDS}

    async def open(self):
        return await self.desk.open(
            PeerOpen(
                engine="p", epoch="e", lease="l1", node="n2", tenant="", tp_rank=0, blocks=2,
                backends=BACKENDS, require_rdma=False, wait_ms=1000,
            )
        )  # fmt: skip


async def test_the_next_transport_is_tried_where_one_cannot_serve():
    rig = Rig()
    assert (await rig.open()).backend == "tcp"
    assert rig.desk.grants == 1


async def test_a_descriptor_of_an_engine_that_went_during_a_try_is_not_handed_on():
    rig = Rig()
    rig.movers.meanwhile["ucx"] = lambda: rig.registry.remove(rig.worker)
    with pytest.raises(TransferError) as raised:
        await rig.open()
    assert raised.value.reason is Reason.NO_SOURCE
    assert [backend for _, backend in rig.movers.offers] == ["ucx"]
    assert rig.desk.grants == 0


async def test_a_grant_on_a_lease_that_ended_during_the_offer_is_withdrawn():
    rig = Rig()
    rig.movers.meanwhile["tcp"] = lambda: rig.desk.lease_closed(rig.engine, "l1", "expired")
    with pytest.raises(TransferError) as raised:
        await rig.open()
    assert raised.value.reason is Reason.EXPIRED
    await rig.desk.close()
    assert len(rig.movers.withdrawn) == 2  # too early, and when there was something to withdraw
    assert rig.desk.grants == 0
