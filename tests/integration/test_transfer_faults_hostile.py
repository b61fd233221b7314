"""Whoever talks nonsense, or lies, at an agent's socket or to its peers, harms nobody else."""

import asyncio
import fcntl
import http.client
import itertools
import os
import random
import socket
import time
from contextlib import closing, suppress
from urllib.parse import urlsplit

import msgspec
import pytest

from nearkv.agent.transfer.peer_messages import (
    LOOKUP,
    OPEN,
    PATH_PREFIX,
    RELEASE,
    RENEW,
    WITHDRAW,
    PeerLookup,
    PeerOpen,
    PeerRelease,
    PeerRenew,
    PeerWithdraw,
)
from nearkv.transfer.connector.params import lease_params
from nearkv.transfer.framing import encode_frame, send_with_fds
from nearkv.transfer.manifest import Prefix
from nearkv.transfer.memory import create_memory, create_slots
from nearkv.transfer.messages import (
    PROTOCOL,
    CancelPull,
    LeaseAddress,
    LeaseClosed,
    Lookup,
    OpenLease,
    Refused,
    RegisterScheduler,
    RegisterWorker,
    StartPull,
)
from tests.doubles.agent_line import Line
from tests.doubles.connector_engine import ConnectorEngine
from tests.doubles.kv_engine import FakeEngine, KvShape, pack
from tests.integration.kv_nodes import kv_node
from tests.integration.kv_service import scripted_service
from tests.integration.kv_site import Place, Site
from tests.integration.stack import eventually

ROUNDS = 120
TOKENS = tuple(range(33))
BLOCKS = tuple(range(8))
ANSWERS = {200, 400, 404, 409, 413, 503}


@pytest.fixture
def site():
    """Two nodes that do not wait for leases which nobody has heard of."""
    place = Place(transfer={"lease_wait_seconds": 0.02})
    site = Site(nodes=2, places={"n1": place, "n2": place}, lookup_seconds=5.0)
    with site.case():
        yield site
    site.close()


def damaged(data, chance):
    """Return bytes with some of them lost, doubled, or changed."""
    data = bytearray(data)
    where = chance.randrange(len(data))
    match chance.randrange(5):
        case 0:
            data[where] ^= 1 << chance.randrange(8)
        case 1:
            del data[where:]
        case 2:
            del data[where : where + chance.randrange(1, 9)]
        case 3:
            data[where:where] = chance.randbytes(chance.randrange(1, 9))
        case 4:
            data[where:] = chance.randbytes(len(data) - where)
    return bytes(data)


# -- At the agent's socket -------------------------------------------------------------------


def conversations(params):
    """Return what an engine says, as worker and as scheduler, with the message to damage."""
    shape = KvShape()
    address = LeaseAddress(
        lease=params["remote_lease_id"],
        engine=params["remote_engine_id"],
        epoch=params["remote_epoch"],
        node=params["remote_node"],
        agent=params["remote_agent"],
    )
    deadline_ms = time.monotonic_ns() // 1_000_000 + 1000
    hello = RegisterWorker(
        protocol=PROTOCOL,
        engine="evil",
        epoch="e",
        compatibility=shape.compatibility(),
        memory=shape.memory,
    )
    other = RegisterScheduler(protocol=PROTOCOL, engine="evil", epoch="e", slots=64)
    prefix = Prefix(token_ids=pack(TOKENS[:32]), num_tokens=32, block_keys=b"")
    lease = OpenLease(
        lease="evil", slot=0, generation=0, expires_at_ms=deadline_ms, block_ids=BLOCKS,
        prefix=prefix,
    )  # fmt: skip
    pull = StartPull(
        id=1, address=address, first_block=0, target_blocks=BLOCKS, deadline_ms=deadline_ms
    )
    ask = Lookup(id=1, address=address, token_ids=pack(TOKENS), deadline_ms=deadline_ms)
    as_worker = ([hello], [hello, pull], [hello, pull, CancelPull(id=1)])
    as_scheduler = (
        [other],
        [other, lease],
        [other, lease, LeaseClosed(lease="evil", why="")],
        [other, ask],
        [other, ask, LeaseClosed(lease=address.lease, why="")],
    )
    return [*((talk, "kv") for talk in as_worker), *((talk, "slots") for talk in as_scheduler)]


def test_damaged_messages_end_their_own_connection_and_nothing_else(site):
    chance = random.Random(3)
    memories = {"kv": create_memory(KvShape().memory.size), "slots": create_slots(64)}
    talks = conversations(site.prefill())
    for (talk, kind), _ in zip(itertools.cycle(talks), range(ROUNDS), strict=False):
        *before, last = map(encode_frame, talk)
        fds = [memories[kind].fd] * chance.choice([1, 1, 1, 0, 2, 8])
        with socket.socket(socket.AF_UNIX) as sock, suppress(ConnectionError):
            sock.settimeout(40)
            sock.connect(str(site.p_agent.socket))
            send_with_fds(sock, b"".join(before) + damaged(last, chance), fds)
            if chance.randrange(2):
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
    assert site.p.get("expire") <= 1  # one of the messages may have given it back
    for memory in memories.values():
        memory.close()


# -- At the listener for other agents --------------------------------------------------------


def post(url, path, body):
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)) as connection:
        connection.request("POST", path, body)
        with suppress(ConnectionError):  # it need not read all of what is too large
            return connection.getresponse().status
        return 413


def test_damaged_calls_of_peers_are_refused(site):
    chance = random.Random(4)
    params = site.prefill()
    name = {
        "engine": params["remote_engine_id"],
        "epoch": params["remote_epoch"],
        "lease": params["remote_lease_id"],
    }
    reader = {"node": "evil", "tenant": "", "wait_ms": 50}
    open_it = PeerOpen(**name, **reader, tp_rank=0, blocks=8, backends=("tcp",), require_rdma=False)
    calls = [
        (LOOKUP, PeerLookup(**name, **reader)),
        (OPEN, open_it),
        (RENEW, PeerRenew(**name)),
        (WITHDRAW, PeerWithdraw(ticket=b"x" * 32)),
        (RELEASE, PeerRelease(**name, why="pulled")),
    ]
    url = params["remote_agent"]
    for (call, message), _ in zip(itertools.cycle(calls), range(ROUNDS), strict=False):
        body = damaged(msgspec.msgpack.encode(message), chance)
        assert post(url, PATH_PREFIX + call, body) in ANSWERS
    for call, message in calls:
        for odd in (b"", b"\x91" * 60_000, b"\xdd\xff\xff\xff\xff", os.urandom(1 << 20)):
            assert post(url, PATH_PREFIX + call, odd) in ANSWERS - {200}
        wild = msgspec.structs.replace(message, **dict.fromkeys(wild_fields(message), 1 << 62))
        if wild != message:
            body = msgspec.msgpack.encode(wild)
            assert post(url, PATH_PREFIX + call, body) in ANSWERS
    site.p.get("expire")


def wild_fields(message):
    """Return the fields that hold numbers."""
    return [f for f in message.__struct_fields__ if type(getattr(message, f)) is int]


# -- Engines that lie ------------------------------------------------------------------------

LIES = {
    "blocks beyond the memory": ({"block_ids": tuple(range(10_000, 10_008))}, "load/layout"),
    "blocks before the memory": ({"block_ids": tuple(range(-8, 0))}, "load/layout"),
    "blocks of no size": ({"block_ids": (1 << 62,) * 8}, "load/layout"),
    "another generation": ({"generation": 77}, "load/stale"),
    "a slot that is closed": ({"slot": 5}, "load/stale"),
    "no such slot": ({"slot": 1 << 20}, "lookup/unknown_lease"),
    "an end that has passed": ({"expires_at_ms": 1}, "lookup/expired"),
    "more tokens than there are": (
        {"prefix": Prefix(token_ids=pack(TOKENS[:32]), num_tokens=1 << 40, block_keys=b"")},
        "lookup/prefix",
    ),
    "more blocks than tokens": ({"block_ids": tuple(range(40))}, "lookup/range"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lease_that_lies_costs_a_request_only_the_transfer(lie):
    change, reason = LIES[lie]
    async with kv_node(lease_wait_seconds=0.1) as node, FakeEngine(node.socket, "liar") as liar:
        extra = {"engine": "d", "socket": str(node.socket), "lookup_seconds": 10.0}
        with ConnectorEngine(extra) as d:
            await eventually(lambda: d.status().result(40).registered, what="it registers")
            told = liar.lease(TOKENS, BLOCKS)
            liar.scheduler.send(msgspec.structs.replace(told, **change))
            params = lease_params(liar.address(told.lease), 32)
            outcome = await wrapped(d.decode(TOKENS, params))
            assert (outcome.right, outcome.loaded) == (True, 0)
            tally = d.status().result(40).tally
            assert reason in tally, tally
        await eventually(lambda: node.leases["open"] == 0, what="the lease is over", seconds=20)
        assert node.service.describe()["pulls"] == 0


async def wrapped(future):
    return await asyncio.wrap_future(future)


# -- Memory that does not stay ---------------------------------------------------------------

SEALS = {
    "no seals": 0,
    "may shrink": fcntl.F_SEAL_GROW,
    "may grow": fcntl.F_SEAL_SHRINK,
}


def poor_memory(size_bytes, seals):
    fd = os.memfd_create("nearkv-kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("of", ["worker", "scheduler"])
@pytest.mark.parametrize("seals", SEALS)
async def test_memory_that_could_be_taken_away_is_refused(seals, of):
    async with scripted_service() as node:
        engine = FakeEngine(node.socket)
        hello = engine.worker_hello() if of == "worker" else engine.scheduler_hello()
        assert (await answer(node, hello, poor_memory(1 << 20, SEALS[seals]))).reason == "memory"
        await engine.close()


@pytest.mark.parametrize("of", ["worker", "scheduler"])
async def test_memory_that_was_shrunk_before_is_refused(of):
    async with scripted_service() as node:
        engine = FakeEngine(node.socket)
        hello = engine.worker_hello() if of == "worker" else engine.scheduler_hello()
        fd = poor_memory(512, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        assert (await answer(node, hello, fd)).reason == "memory"
        await engine.close()


async def answer(node, hello, fd):
    """Return the agent's refusal."""
    line = Line(node.socket)
    line.connect()
    try:
        line.send(hello, [fd])
        refused = await line.next()
        assert isinstance(refused, Refused)
        return refused
    finally:
        os.close(fd)
        await line.close()


async def test_memory_that_is_registered_cannot_be_taken_away():
    async with scripted_service() as node, FakeEngine(node.socket) as engine:
        for fd in (engine.memories[0].fd, engine.slots_fd):
            for size_bytes in (0, 4096, 1 << 30):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size_bytes)
