"""Agents that probe the paths between them, over their real peer channel and real sockets."""

import asyncio
import socket
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web

from nearkv.agent.probes.budget import PROBE_BYTES
from nearkv.agent.transfer.peer_messages import (
    PeerOpen,
    PeerProbe,
    PeerRefusal,
    PeerWithdraw,
    ProbeAnswer,
    decode,
    encode,
)
from nearkv.serving import running
from nearkv.transfer.backends.tcp_wire import PROTOCOL, Offer
from tests.doubles.kv_engine import FakeEngine
from tests.integration.kv_nodes import kv_node
from tests.integration.stack import ANY_PORT, eventually

SHARED = "between agents"
ZONE = "topology.kubernetes.io/zone"
OFTEN = {"interval_seconds": 1.0, "fresh_seconds": 0.2, "max_cpu_ratio": 1.0}
OFTEN["max_bytes_per_second"] = 1 << 30
PROBE = PeerProbe(node="n2", backends=("tcp",), require_rdma=False, wait_ms=20_000)
SELDOM = {"interval_seconds": 3600.0}
"""For tests that say themselves when there is a probe."""


def node(name, *, peers=(), zone="", shown=SHARED, paths=("tcp",), **probes):
    labels = {ZONE: zone} if zone else {}
    return kv_node(
        name,
        paths=list(paths),
        peer_token=shown,
        probes={**OFTEN, "peers": list(peers), "labels": labels, **probes},
    )


def peer_of(running, name):
    return {"node": name, "url": running.service.peer_url}


def status(running):
    return running.service.describe()


async def metrics(running):
    async with aiohttp.ClientSession() as session, session.get(running.url + "/metrics") as answer:
        return await answer.text()


def pair_from(running, source):
    return next((p for p in status(running)["pairs"] if p["source"] == source), None)


async def until_probed(running, source, *, count=1):
    await eventually(
        lambda: (pair := pair_from(running, source)) and pair["measurements"] >= count,
        what=f"the path from {source} is probed",
        seconds=20,
    )


async def test_a_node_without_transfers_learns_what_paths_cost_and_publishes_it():
    async with (
        node("n1", zone="a") as there,
        node("n2", zone="a", peers=[peer_of(there, "n1")]) as here,
    ):
        await until_probed(here, "n1", count=2)
        pair = pair_from(here, "n1")
        assert (pair["path"], pair["measured_by"], pair["pulls"]) == ("tcp", "probes", 0)
        assert 1e7 < pair["bytes_per_second"] < 1e11
        assert 0 < pair["setup_seconds"] < 1
        await eventually(
            lambda: here.state.log.paths["n1", "n2"].points >= 2, what="it is in the state stream"
        )
        # The peer said what its labels are.
        (cost,) = status(here)["probing"]["classes"]
        assert (cost["name"], cost["path"], cost["pairs"]) == (ZONE, "tcp", 1)
        text = await metrics(here)
        assert f'nearkv_agent_transfer_path_pairs{{class="{ZONE}",path="tcp"}} 1.0' in text
        assert 'nearkv_agent_transfer_probes_total{outcome="done",reason=""}' in text
        # The other direction is another path: nobody there asked.
        assert pair_from(there, "n2") is None


@pytest.mark.parametrize("what", ["no token", "off", "no transport"])
async def test_only_agents_that_know_each_other_probe(what):
    changes = {"no token": {"shown": None}, "off": {"enabled": False}, "no transport": {}}[what]
    paths = () if what == "no transport" else ("tcp",)
    async with node("n1", paths=paths, **changes) as there:
        code, body = await called(there, "probe", PROBE)
        assert (code, decode(body, PeerRefusal).reason) == (409, "peer_refused")
        assert status(there)["probing"]["off"]


async def test_a_wrong_token_is_no_way_to_make_a_node_send():
    async with (
        node("n1") as there,
        node("n2", shown="another", peers=[peer_of(there, "n1")], **SELDOM) as here,
    ):
        await here.service.probing.look()
        failed = 'nearkv_agent_transfer_probes_total{outcome="failed",reason="auth"} 1.0'
        assert failed in await metrics(here)
        assert pair_from(here, "n1") is None


async def refusal(running):
    """Ask to be let at the bytes; return the reason of the refusal, and how it begins."""
    code, body = await called(running, "probe", PROBE)
    assert code == 503
    refused = decode(body, PeerRefusal)
    return f"{refused.reason}: {' '.join(refused.message.split()[:3])}"


async def test_a_node_answers_no_more_than_its_budget_allows_and_says_so():
    async with node("n1", max_bytes_per_second=PROBE_BYTES // 100) as there:
        code, body = await called(there, "probe", PROBE)
        assert code == 200
        ticket = decode(body, ProbeAnswer).ticket
        reasons = [await refusal(there)]  # there is a reader
        await called(there, "withdraw", PeerWithdraw(ticket=ticket))
        reasons += [await refusal(there)]  # there is not
        assert reasons == ["busy: another node probes", "busy: the budget for"]
        refused = 'nearkv_agent_transfer_peer_calls_total{call="probe",reason="busy"} 2.0'
        assert refused in await metrics(there)


async def test_a_path_that_transfers_measure_is_not_probed():
    async with (
        node("n1") as there,
        node("n2", peers=[peer_of(there, "n1")], **{**SELDOM, "fresh_seconds": 3600.0}) as here,
        FakeEngine(there.socket, "p") as p,
        FakeEngine(here.socket, "d") as d,
    ):
        tokens = list(range(16))
        for _ in range(12):
            address = await p.open_lease(tokens, [1, 2, 3, 4])
            assert (await d.lookup(address, tokens)).num_tokens == 16
            assert not (await d.pull(address, [0, 1, 2, 3])).reason
            if (pair := pair_from(here, "n1"))["measured_by"] == "pulls":
                break
        assert pair["measured_by"] == "pulls"
        await here.service.probing.look()
        assert pair_from(here, "n1")["measured_by"] == "pulls"
        assert "probes_total{" not in await metrics(here)


@asynccontextmanager
async def a_reader(running, name="p"):
    """Have a reader of KV admitted at a node within the block."""
    async with FakeEngine(running.socket, name) as engine:
        address = await engine.open_lease(list(range(16)), [1, 2, 3, 4])
        question = PeerOpen(
            engine=address.engine,
            epoch=address.epoch,
            lease=address.lease,
            node="n9",
            tenant="",
            tp_rank=0,
            blocks=4,
            backends=("tcp",),
            require_rdma=False,
            wait_ms=10_000,
        )
        await called(running, "open", question)
        assert status(running)["readers"] == 1
        yield


async def called(running, call, question):
    """Call an agent as a peer; returns the body of its answer, or of its refusal."""
    url = f"{running.service.peer_url}/v1/transfer/{call}"
    headers = {"Authorization": f"Bearer {SHARED}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url, data=encode(question)) as answer,
    ):
        return answer.status, await answer.read()


@pytest.mark.parametrize("busy", ["n1", "n2"])
async def test_nodes_that_move_kv_are_left_alone(busy):
    async with (
        node("n1", **SELDOM) as there,
        node("n2", peers=[peer_of(there, "n1")], **SELDOM) as here,
    ):
        async with a_reader(there if busy == "n1" else here):
            await here.service.probing.look()
            assert pair_from(here, "n1") is None
            # A busy node asks nobody; a busy peer is asked, and says no.
            counted = 'probes_total{outcome="refused",reason="busy"} 1.0' in await metrics(here)
            assert counted == (busy == "n1")
        await eventually(
            lambda: not status(there)["readers"] and not status(here)["readers"],
            what="the reader is forgotten with its engine",
        )


async def test_a_probe_is_given_up_when_kv_is_to_be_moved():
    """The peer admits it, but sends nothing: a path that hangs."""
    silent = socket.create_server(("127.0.0.1", 0))
    offer = Offer(
        protocol=PROTOCOL,
        host="127.0.0.1",
        port=silent.getsockname()[1],
        lanes=1,
        chunk_bytes=1 << 20,
        checksums=True,
        tls=False,
    )
    answer = ProbeAnswer(backend="tcp", offer=msgspec.msgpack.encode(offer), ticket=b"t" * 32)
    withdrawn = []

    async def admit(_request):
        return web.Response(body=encode(answer))

    async def withdraw(request):
        withdrawn.append(decode(await request.read(), PeerWithdraw).ticket)
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/transfer/probe", admit)
    app.router.add_post("/v1/transfer/withdraw", withdraw)
    async with running(app, ANY_PORT) as address:
        peer = {"node": "n1", "url": address.url}
        async with node("n2", peers=[peer], **SELDOM) as here:
            looking = asyncio.create_task(here.service.probing.look())
            silent.settimeout(40)
            conn, _ = await asyncio.to_thread(silent.accept)
            async with a_reader(here):
                await looking
            cancelled = 'probes_total{outcome="cancelled",reason="cancelled"} 1.0'
            assert cancelled in await metrics(here)
            assert withdrawn == [answer.ticket]
            assert pair_from(here, "n1") is None
            conn.close()
    silent.close()
