"""Two agents: what they tell each other, whom they trust, and what becomes of silence."""

import asyncio
import shutil
import socket
import ssl
import subprocess
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web

from nearkv.agent.errors import PeerTlsError
from nearkv.agent.transfer.peer_messages import PeerLookup, PeerRefusal, PeerWithdraw, encode
from nearkv.errors import ListenError
from nearkv.serving import running
from nearkv.transfer.errors import Reason
from nearkv.transfer.manifest import LeaseRef, Manifest, Prefix, Source
from nearkv.transfer.messages import LeaseClosed
from nearkv.transfer.packet import encode_head
from tests.doubles.authority import MISSING, Authority
from tests.doubles.kv_engine import FakeEngine, KvShape, pack
from tests.integration.kv_service import scripted_service
from tests.integration.stack import ANY_PORT, eventually

TOKENS = list(range(16))
SHARED = "a secret"


@asynccontextmanager
async def two_nodes(*, here=None, there=None, p=None, d=None, **both):
    """Yield engine p on the first node, engine d on the second, and both services."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        one = await enter(scripted_service("n1", **both, **(here or {})))
        two = await enter(scripted_service("n2", **both, **(there or {})))
        first = await enter(FakeEngine(one.socket, "p", **(p or {})))
        second = await enter(FakeEngine(two.socket, "d", **(d or {})))
        yield first, second, one, two


async def looked_up(first, second, tokens=TOKENS, **options):
    """Return what the second engine learns of a lease of the first."""
    address = await first.open_lease(TOKENS, [1, 2, 3, 4])
    return await second.lookup(address, tokens, **options)


# -- Lookups ---------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, b"secret"])
async def test_a_lease_of_another_node_is_found(secret):
    async with two_nodes(secret=secret) as (p, d, _, two):
        assert (await looked_up(p, d)).num_tokens == 16
        assert two.count("lookups", outcome="found", reason="") == 1
        await eventually(
            lambda: ("n1", "n2") in two.state.log.paths, what="the pair is published with its prior"
        )


@pytest.mark.parametrize(
    ("shape", "reason", "field"),
    [
        (KvShape(config_hash="other"), Reason.MODEL, "config_hash"),
        (KvShape(kv_dtype="float16"), Reason.DTYPE, "kv_dtype"),
        (KvShape(layout="LBHNC"), Reason.LAYOUT, "name"),
        (KvShape(block_size=8), Reason.LAYOUT, "block_size"),
        (KvShape(tp_size=2), Reason.TOPOLOGY, "tp_size"),
    ],
)
async def test_another_kind_of_engine_is_told_what_differs(shape, reason, field):
    async with two_nodes(d={"shape": shape}) as (p, d, _, two):
        found = await looked_up(p, d)
        assert (found.num_tokens, found.reason, field in found.message) == (0, reason, True)
        assert two.count("lookups", outcome="nothing", reason=reason) == 1


async def test_other_tokens_salts_and_adapters_get_nothing():
    async with two_nodes() as (p, d, _, _):
        for tokens, options in (
            ([9, *TOKENS[1:]], {}),
            (TOKENS, {"cache_salt": "s"}),
            (TOKENS, {"lora": "l"}),
        ):
            found = await looked_up(p, d, tokens, **options)
            assert (found.num_tokens, found.reason) == (0, Reason.PREFIX)


async def test_tenants_are_kept_apart_unless_that_is_allowed():
    async with two_nodes(p={"tenant": "a"}, d={"tenant": "b"}) as (p, d, _, two):
        address = await p.open_lease(TOKENS, [1, 2, 3, 4])
        found = await d.lookup(address, TOKENS)
        assert (found.num_tokens, found.reason) == (0, Reason.TENANT)
        # Nor can the other tenant end the lease: the next lookup overtakes nothing.
        d.give_back(address)
        assert (await d.lookup(address, TOKENS)).reason == Reason.TENANT
        assert (await d.pull(address, [1])).reason == Reason.UNKNOWN_LEASE
        assert p.releases == []
        assert two.movers.jobs == []
    async with two_nodes(p={"tenant": "a"}, d={"tenant": "b"}, allow_cross_tenant=True) as (
        p,
        d,
        _,
        _,
    ):
        assert (await looked_up(p, d)).num_tokens == 16


async def test_a_lease_that_is_on_its_way_is_waited_for():
    async with two_nodes(lease_wait_seconds=60.0) as (p, d, _, _):
        message = p.lease(TOKENS, [1, 2, 3, 4])
        asked = asyncio.create_task(d.lookup(p.address(message.lease), TOKENS, seconds=15.0))
        other = asyncio.create_task(d.lookup(p.address("0"), TOKENS, seconds=0.3))
        assert (await other).reason == Reason.DEADLINE
        assert not asked.done()
        p.scheduler.send(message)
        assert (await asked).num_tokens == 16


async def test_a_lease_that_does_not_come_is_unknown():
    async with two_nodes(lease_wait_seconds=0.05) as (p, d, _, _):
        assert (await d.lookup(p.address("0"), TOKENS)).reason == Reason.UNKNOWN_LEASE


async def test_leases_that_are_not_there_have_their_reasons():
    async with two_nodes(lease_wait_seconds=0.0) as (p, d, _, _):
        address = await p.open_lease(TOKENS, [1, 2, 3, 4])
        change = msgspec.structs.replace
        for wrong, reason in (
            (change(address, lease="nobody"), Reason.UNKNOWN_LEASE),
            (change(address, epoch="earlier"), Reason.EPOCH),
            (change(address, engine="x"), Reason.NO_SOURCE),
            (change(address, agent="ftp://x"), Reason.NO_SOURCE),
            (change(address, agent=""), Reason.NO_SOURCE),
        ):
            assert (await d.lookup(wrong, TOKENS)).reason == reason
        here = change(address, node="n2")  # the reader's own node has no such engine
        assert (await d.lookup(here, TOKENS)).reason == Reason.NO_SOURCE


async def test_an_expired_lease_is_expired_for_readers_too():
    async with two_nodes() as (p, d, one, _):
        address = await p.open_lease(TOKENS, [1, 2, 3, 4], ttl_seconds=0.3)
        assert (await d.lookup(address, TOKENS)).reason in ("", Reason.EXPIRED)
        await eventually(lambda: p.releases, what="the engine is told")
        assert p.releases[0].why == "expired"
        await eventually(
            lambda: one.count("lease_ends", why="expired") == 1, what="its end is counted"
        )
        assert (await d.lookup(address, TOKENS)).reason == Reason.EXPIRED


async def test_a_lease_is_closing_until_its_engine_says_that_it_is_closed():
    async with two_nodes() as (p, d, one, _):
        p.obeys = False
        address = await p.open_lease(TOKENS, [1, 2, 3, 4])
        await d.lookup(address, TOKENS)
        d.give_back(address)
        await eventually(lambda: one.service.gauges().leases["closing"], what="it is closing")
        assert one.service.gauges().leases["open"] == 0
        p.scheduler.send(LeaseClosed(lease=address.lease, why="whatever"))
        await eventually(lambda: one.count("lease_ends", why="pulled") == 1, what="it ended")
        assert one.service.gauges().leases["closing"] == 0


async def test_a_reader_that_is_done_ends_the_lease_at_its_owner():
    async with two_nodes() as (p, d, one, _):
        address = await p.open_lease(TOKENS, [1, 2, 3, 4])
        await d.lookup(address, TOKENS)
        assert (await d.pull(address, [1])).reason == ""
        d.give_back(address, "pulled")
        await eventually(lambda: one.count("lease_ends", why="pulled") == 1, what="it ended")
        assert [release.why for release in p.releases] == ["pulled"]
        assert dict(one.service.gauges().leases) == {"open": 0, "closing": 0}
        assert (await d.pull(address, [1])).reason == Reason.UNKNOWN_LEASE


async def test_a_reader_that_dies_ends_the_leases_that_it_looked_up():
    async with two_nodes() as (p, d, one, _):
        address = await p.open_lease(TOKENS, [1, 2, 3, 4])
        await d.lookup(address, TOKENS)
        await d.disconnect()
        await eventually(lambda: one.count("lease_ends", why="reader_gone") == 1, what="it ended")


async def test_an_agent_that_stops_leaves_the_leases_that_its_engines_looked_up():
    async with AsyncExitStack() as stack, AsyncExitStack() as readers_node:
        enter = stack.enter_async_context
        one = await enter(scripted_service("n1"))
        two = await readers_node.enter_async_context(scripted_service("n2"))
        p = await enter(FakeEngine(one.socket, "p"))
        d = await enter(FakeEngine(two.socket, "d"))
        address = await p.open_lease(TOKENS, [1, 2, 3, 4])
        await d.lookup(address, TOKENS)
        await readers_node.aclose()
        assert one.service.gauges().leases == {"open": 1, "closing": 0}
        assert p.releases == []


# -- Trust -----------------------------------------------------------------------------------


async def test_peers_with_the_right_token_are_served_and_others_not():
    async with two_nodes(peer_token=SHARED) as (p, d, _, _):
        assert (await looked_up(p, d)).num_tokens == 16
    async with two_nodes(here={"peer_token": "t"}, there={"peer_token": "x"}) as (p, d, _, _):
        found = await looked_up(p, d)
        assert (found.reason, "peer_token" in found.message) == (Reason.AUTH, True)


async def test_packets_of_another_secret_are_refused():
    async with two_nodes(here={"secret": b"one"}, there={"secret": b"two"}) as (p, d, _, _):
        assert (await looked_up(p, d)).reason == Reason.AUTH
    async with two_nodes(there={"secret": b"two"}) as (p, d, _, _):
        assert (await looked_up(p, d)).reason == Reason.AUTH


async def test_peers_outside_the_networks_are_not_asked():
    async with two_nodes(there={"peer_networks": ["10.0.0.0/8"]}) as (p, d, one, _):
        assert (await looked_up(p, d)).reason == Reason.PEER_REFUSED
        assert one.count("peer_calls", call="lookup", reason="") == 0


def make_certificates(folder):
    """Make a CA and a certificate for loopback; returns the settings that name them."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl program is not installed")

    def run(*arguments):
        subprocess.run([openssl, *map(str, arguments)], check=True, capture_output=True, timeout=30)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    ca, ca_key, key, request, cert = (
        folder / name for name in ("ca.pem", "ca.key", "key.pem", "request.pem", "cert.pem")
    )
    run(
        *("req", "-x509", *curve, "-days", "2", "-subj", "/CN=ca", "-keyout", ca_key, "-out", ca),
        *("-addext", "keyUsage=critical,keyCertSign"),
    )
    run("req", *curve, "-subj", "/CN=node", "-keyout", key, "-out", request)
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1\n")
    run(
        *("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial"),
        *("-days", "2", "-extfile", extensions, "-out", cert),
    )
    return {"cert": str(cert), "key": str(key), "ca": str(ca)}


async def test_with_tls_both_sides_show_certificates(tmp_path):
    files = make_certificates(tmp_path)
    async with two_nodes(peer_tls=files) as (p, d, one, _):
        assert one.service.peer_url.startswith("https://")
        assert (await looked_up(p, d)).num_tokens == 16
        stranger = ssl.create_default_context(cafile=files["ca"])
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.post(one.service.peer_url + "/v1/transfer/lookup", ssl=stranger)
            plain = one.service.peer_url.replace("https", "http")
            with pytest.raises(aiohttp.ClientError):
                await session.post(plain + "/v1/transfer/lookup")


@pytest.fixture
def authority(tmp_path):
    if MISSING:
        pytest.skip(MISSING)
    return Authority(tmp_path, "ours")


async def test_all_peers_may_have_one_certificate_for_one_name(authority):
    issued = authority.issue("agent", names="DNS:agents.example").shown()
    async with two_nodes(peer_tls=issued | {"name": "agents.example"}) as (p, d, *_):
        assert (await looked_up(p, d)).num_tokens == 16
    async with two_nodes(peer_tls=issued) as (p, d, *_):
        assert (await looked_up(p, d)).reason == Reason.PEER_LOST


async def test_a_renewed_certificate_of_a_peer_is_taken_over(authority, tmp_path):
    folder = tmp_path / "mounted"
    folder.mkdir()
    placed = authority.issue("old", names="DNS:old.example").copy_to(folder)
    new = {"name": "new.example", "reload_seconds": 0.02}
    async with two_nodes(
        here={"peer_tls": placed.shown() | new},
        there={"peer_tls": authority.issue("reader").shown() | new},
    ) as (p, d, one, _):
        assert (await looked_up(p, d)).reason == Reason.PEER_LOST
        authority.issue("new", names="DNS:new.example").copy_to(folder)
        await eventually(
            lambda: one.count("peer_certificate_loads", outcome="reloaded") >= 1,
            what="it is taken over",
        )
        assert (await looked_up(p, d)).num_tokens == 16


async def test_a_certificate_that_cannot_be_read_ends_the_start(tmp_path):
    files = {"cert": str(tmp_path / "no.pem"), "key": str(tmp_path / "no.key")}
    with pytest.raises(PeerTlsError, match=r"no\.pem"):
        async with scripted_service(peer_tls=files):
            pass


async def test_a_peer_address_in_use_ends_the_start_with_its_name():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=str(port)):
            async with scripted_service(peer_listen=f"127.0.0.1:{port}"):
                pass


async def test_a_listener_without_any_guard_is_a_problem():
    async with scripted_service(peer_listen="0.0.0.0:0", peer_url="http://127.0.0.1:1") as node:
        assert any("hands KV to whoever asks" in text for text in node.service.problems())
    async with scripted_service(
        peer_listen="0.0.0.0:0", peer_url="http://127.0.0.1:1", peer_token=SHARED
    ) as node:
        assert node.service.problems() == []


# -- Peers that misbehave ----------------------------------------------------------------------


@asynccontextmanager
async def reader_of(handler):
    """Yield an engine, and the address of a lease whose agent is ``handler``."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with (
        running(app, ANY_PORT) as address,
        scripted_service("n2") as node,
        FakeEngine(node.socket, "d") as d,
    ):
        lease = msgspec.structs.replace(
            d.address("lease"), engine="p", node="n1", agent=address.url
        )
        yield node, d, lease


def packet(shape=None, **changes):
    """Return a packet that fits, but for the changes."""
    fields = {
        "compatibility": (shape or KvShape()).compatibility(),
        "source": Source(engine="p", epoch="", node="n1"),
        "prefix": Prefix(token_ids=pack(TOKENS), num_tokens=16, block_keys=b""),
        "block_ids": (1, 2, 3, 4),
        "lease": LeaseRef(id="lease", slot=0, generation=0, ttl_ms=1000),
    }
    return Manifest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, Reason.EPOCH),
        ({"lease": None}, Reason.MALFORMED),
        ({"lease": LeaseRef(id="x", slot=0, generation=0, ttl_ms=1)}, Reason.MALFORMED),
        ({"source": Source(engine="x", epoch="")}, Reason.MALFORMED),
    ],
)
async def test_a_packet_about_something_else_is_refused(changes, reason):
    async def answer(_request):
        return web.Response(body=encode_head(packet(**changes)))

    async with reader_of(answer) as (_, d, lease):
        assert (await d.lookup(lease, TOKENS)).reason == reason


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"body": b"x" * 100}, Reason.MALFORMED),
        ({"body": b""}, Reason.TRUNCATED),
        ({"body": b"x" * (5 << 20)}, Reason.TOO_LARGE),
        ({"status": 404}, Reason.PEER_REFUSED),
        ({"status": 500, "body": b"\xff"}, Reason.PEER_REFUSED),
        ({"status": 302, "headers": {"Location": "http://127.0.0.1:1"}}, Reason.PEER_REFUSED),
        (
            {"status": 409, "body": encode(PeerRefusal(reason="stale", message="m"))},
            Reason.STALE,
        ),
        (
            {"status": 409, "body": encode(PeerRefusal(reason="of-tomorrow", message="m"))},
            Reason.PEER_REFUSED,
        ),
    ],
)
async def test_a_peers_bad_answer_is_a_reason(response, reason):
    async def answer(_request):
        return web.Response(**response)

    async with reader_of(answer) as (_, d, lease):
        assert (await d.lookup(lease, TOKENS)).reason == reason


async def test_a_peer_that_does_not_answer_costs_no_more_than_the_deadline():
    async def answer(_request):
        await asyncio.Event().wait()

    async with reader_of(answer) as (_, d, lease):
        assert (await d.lookup(lease, TOKENS, seconds=0.3)).reason == Reason.DEADLINE


async def test_a_peer_that_is_gone_is_lost():
    async with scripted_service("n2") as node, FakeEngine(node.socket, "d") as d:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            lease = msgspec.structs.replace(d.address("l"), node="n1", agent=url)
            found = await d.lookup(lease, TOKENS)
        assert (found.reason, url in found.message) == (Reason.PEER_LOST, True)


async def test_a_peer_that_goes_away_before_a_pull_fails_it_and_nothing_stays():
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        two = await enter(scripted_service("n2"))
        d = await enter(FakeEngine(two.socket, "d"))
        async with scripted_service("n1") as one, FakeEngine(one.socket, "p") as p:
            address = await p.open_lease(TOKENS, [1, 2, 3, 4])
            assert (await d.lookup(address, TOKENS)).num_tokens == 16
        done = await d.pull(address, [1], seconds=5)
        assert done.reason == Reason.PEER_LOST
        assert two.count("pulls", path="none", outcome="retried", reason="peer_lost") == 1
        assert two.service.gauges().inflight_bytes == 0


# -- Callers that misbehave --------------------------------------------------------------------


async def post(node, call, body, **options):
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{node.service.peer_url}/v1/transfer/{call}", data=body, **options) as answer,
    ):
        return answer.status, await answer.read()


async def test_nonsense_from_a_peer_is_refused_and_counted():
    async with scripted_service() as node:
        for call in ("lookup", "open", "renew", "release", "withdraw"):
            status, body = await post(node, call, b"\xff")
            refusal = msgspec.msgpack.decode(body, type=PeerRefusal)
            assert (status, refusal.reason) == (400, Reason.MALFORMED)
            assert node.count("peer_calls", call=call, reason="malformed") == 1
        assert (await post(node, "lookup", b"x" * (1 << 20)))[0] == 413
        assert (await post(node, "nothing", b""))[0] == 404
        assert (await post(node, "withdraw", encode(PeerWithdraw(ticket=b"?"))))[0] == 200


async def test_a_peer_asking_for_nonsense_gets_its_reason():
    async with two_nodes() as (p, _, one, _):
        address = await p.open_lease(TOKENS, [1, 2, 3, 4])
        name = {"engine": "p", "epoch": p.epoch, "lease": address.lease}
        base = {"node": "n2", "tenant": "", "wait_ms": 100}
        opening = {"tp_rank": 0, "blocks": 4, "backends": ("tcp",), "require_rdma": False}
        for change, reason in (
            ({}, None),
            ({"tp_rank": 1}, Reason.TOPOLOGY),
            ({"blocks": 5}, Reason.RANGE),
            ({"blocks": 0}, Reason.RANGE),
            ({"backends": ("ucx",)}, Reason.NO_PATH),
            ({"require_rdma": True}, Reason.RDMA_REQUIRED),
            ({"tenant": "x"}, Reason.TENANT),
            ({"lease": "x"}, Reason.UNKNOWN_LEASE),
            ({"epoch": "x"}, Reason.EPOCH),
            ({"wait_ms": 1 << 60}, None),
            ({"wait_ms": -(1 << 60)}, None),
        ):
            message = {**name, **base, **opening, **change}
            status, body = await post(one, "open", msgspec.msgpack.encode(message))
            if reason is None:
                assert status == 200
            else:
                assert (status, msgspec.msgpack.decode(body)["reason"]) == (409, reason)
        assert len(one.movers.grants) == 3
        await eventually(lambda: len(one.movers.grants) < 3, what="an old grant is withdrawn")
        await post(one, "release", msgspec.msgpack.encode({**name, "why": "x" * 999}))
        await eventually(lambda: not one.movers.grants, what="grants end with their lease")
        assert p.releases[0].why == "other"


async def test_a_lookup_of_a_peer_waits_no_longer_than_it_may():
    async with two_nodes(lease_wait_seconds=0.05) as (p, _, one, _):
        message = PeerLookup(
            engine="p", epoch=p.epoch, lease="x", node="n2", tenant="", wait_ms=1 << 60
        )
        status, body = await post(one, "lookup", encode(message))
        assert (status, msgspec.msgpack.decode(body)["reason"]) == (409, Reason.UNKNOWN_LEASE)
