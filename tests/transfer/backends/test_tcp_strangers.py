"""Strangers at a ``tcp`` server's door, and readers that want more than they were granted."""

import contextlib
import select
import socket
import time

import msgspec
import pytest

from nearkv.transfer.backends import tcp_server
from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.backends.tcp_wire import (
    DATA,
    DIGEST,
    END,
    HEADER,
    LENGTH,
    End,
    Request,
    pack_message,
)
from nearkv.transfer.errors import Reason
from tests.transfer.backends.rig import (
    PATIENCE_MS,
    HookedStop,
    patient,
    reason_of,
    slow_layout,
)
from tests.transfer.backends.tls import contexts, missing_openssl


def stranger(rig):
    return socket.create_connection((rig.server.host, rig.server.port), timeout=PATIENCE_MS / 1000)


def taken(sock, size):
    """Return so many bytes."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(1 << 20, size - len(data)))
        assert part, f"closed after {len(data)} of {size} bytes"
        data += part
    return bytes(data)


def answer_of(sock):
    """Return the reason of the END that a server sends before it closes the connection."""
    data = b""
    while part := sock.recv(1 << 16):
        data += part
    if not data:
        return None
    kind, length = HEADER.unpack_from(data)
    assert (kind, length) == (END, len(data) - HEADER.size)
    return Reason(msgspec.msgpack.decode(data[HEADER.size :], type=End).reason)


def ask(**changes):
    fields = {
        "protocol": 1, "ticket": b"x" * 16, "first_block": 0, "count": 1, "begin": 0, "end": 2,
        "layers": 2, "block_bytes": 32768,
    }  # fmt: skip
    return pack_message(Request(**{**fields, **changes}))


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", Reason.MALFORMED),
        (b"\xff" * 4, Reason.MALFORMED),
        (LENGTH.pack(1 << 31), Reason.MALFORMED),
        (LENGTH.pack(1025), Reason.MALFORMED),
        (LENGTH.pack(0), Reason.MALFORMED),
        (LENGTH.pack(3) + b"\x93\x01\x02", Reason.MALFORMED),
        (LENGTH.pack(900) + b"\x91" * 900, Reason.MALFORMED),
        (ask(ticket="text"), Reason.MALFORMED),
        (ask(count="many"), Reason.MALFORMED),
        (ask(protocol=9), Reason.VERSION),
        (ask(), Reason.AUTH),
        (ask(ticket=b""), Reason.AUTH),
    ],
    ids=range(12),
)
def test_what_is_no_request_is_refused_and_the_connection_closed(make_tcp, sent, reason):
    rig = make_tcp()
    grant = rig.grant([0, 1])
    with stranger(rig) as sock:
        sock.sendall(sent)
        # What a server had not read yet, the kernel may answer by a reset.
        try:
            assert answer_of(sock) in (reason, None)
        except ConnectionResetError:
            assert len(sent) > LENGTH.size
    rig.pull(grant, [5, 6])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"begin": -1}, Reason.RANGE),
        ({"begin": 3, "end": 2}, Reason.RANGE),
        ({"end": 3}, Reason.RANGE),
        ({"first_block": -1}, Reason.RANGE),
        ({"first_block": 2}, Reason.RANGE),
        ({"count": 3}, Reason.RANGE),
        ({"count": -1}, Reason.RANGE),
        ({"first_block": 1 << 63, "count": 1}, Reason.RANGE),
        ({"layers": 1}, Reason.LAYOUT),
        ({"block_bytes": 1}, Reason.LAYOUT),
    ],
    ids=str,
)
def test_a_reader_with_a_ticket_still_gets_nothing_but_its_blocks(make_tcp, changes, reason):
    rig = make_tcp()
    grant = rig.grant([0, 1])
    with stranger(rig) as sock:
        sock.sendall(ask(ticket=grant.ticket, **changes))
        assert answer_of(sock) is reason


@pytest.mark.parametrize(
    ("sent", "reason"),
    [(b"", None), (b"\x20\x00", None), (ask()[:20], Reason.DEADLINE)],
    ids=["nothing", "half a length", "half a request"],
)
def test_a_stranger_that_takes_its_time_is_shown_out(make_tcp, sent, reason):
    rig = make_tcp(handshake_seconds=0.05)
    with stranger(rig) as sock:
        sock.sendall(sent)
        assert answer_of(sock) is reason


@pytest.mark.parametrize("checksums", [True, False], ids=["digest", "no-digest"])
def test_a_reader_hears_why_when_its_lease_ends_while_it_takes_nothing(
    make_tcp, monkeypatch, checksums
):
    monkeypatch.setattr(tcp_server, "_LAST_WORDS_SECONDS", PATIENCE_MS / 1000)
    chunk = slow_layout().block_bytes * slow_layout().blocks  # more than any buffer takes
    rig = make_tcp(lanes=1, chunk_bytes=2 * chunk, checksums=checksums)
    slots = rig.source.slots
    grant = rig.grant(range(slow_layout().blocks))
    slots.nth, slots.hook = slots.looks + 2, lambda: rig.engine_slots.close(0)
    whole = {"count": slow_layout().blocks, "end": 2 * slow_layout().blocks}
    with stranger(rig) as sock:
        sock.sendall(ask(ticket=grant.ticket, block_bytes=slow_layout().block_bytes, **whole))
        end = time.monotonic() + PATIENCE_MS / 1000
        while slots.looks <= slots.nth:  # it has found the lease closed, in the middle of sending
            assert time.monotonic() < end
            time.sleep(0.001)
        kind, size = HEADER.unpack(taken(sock, HEADER.size))
        assert kind == DATA
        taken(sock, size + (DIGEST.size if checksums else 0))
        assert answer_of(sock) is Reason.STALE


@pytest.mark.parametrize("settings", [{"handshake_seconds": 0.05}, {"idle_seconds": 0.05}], ids=str)
def test_a_link_may_wait_for_longer_than_a_server_keeps_its_lanes(make_tcp, settings):
    rig = make_tcp(lanes=1, **settings)
    grant = rig.grant([0, 1])
    link = rig.connect(grant)
    if "idle_seconds" in settings:
        link.pull(rig.request(grant, [5, 6]), patient())
    assert has_ended(link._idle[0]._socket, within_seconds=PATIENCE_MS / 1000)
    link.pull(rig.request(grant, [7, 8]), patient())
    places = [5, 6, 7, 8] if "idle_seconds" in settings else [7, 8]
    assert (rig.target_bytes == rig.expected([0, 1] * (len(places) // 2), places)).all()


def test_strangers_that_only_wait_do_not_keep_readers_out(make_tcp):
    rig = make_tcp(max_connections=2, lanes=1)
    waiting = [stranger(rig) for _ in range(10)]
    rig.pull(rig.grant([0, 1]), [5, 6])
    for sock in waiting:
        sock.close()
    end = time.monotonic() + PATIENCE_MS / 1000
    while len(rig.server._roster._connections) > 3:  # those that were told to leave take a moment
        assert time.monotonic() < end
        time.sleep(0.001)


def test_more_pulls_than_places_are_refused_as_busy(make_tcp):
    rig = make_tcp(max_connections=1, lanes=1)
    blocks = range(rig.source.region.layout.blocks)
    grant = rig.grant(blocks)
    reasons = []

    def pull_as_well():
        reasons.append(reason_of(lambda: rig.pull(grant, blocks)))

    stop = HookedStop(monotonic_ms() + PATIENCE_MS, hook=pull_as_well)
    rig.pull(grant, blocks, stop=stop)
    assert reasons == [Reason.BUSY]
    assert (rig.target_bytes == rig.source_bytes).all()


def test_a_lane_that_the_server_closed_meanwhile_is_replaced(make_tcp):
    rig = make_tcp(max_connections=1, lanes=1)
    grant = rig.grant([0, 1])
    link = rig.connect(grant)
    link.pull(rig.request(grant, [5, 6]), patient())
    with contextlib.ExitStack() as strangers:
        # Whoever comes before the server has noticed that the pull is over is refused.
        while not has_ended(link._idle[0]._socket, within_seconds=0.2):
            strangers.enter_context(stranger(rig))
        link.pull(rig.request(grant, [7, 8]), patient())
    assert (rig.target_bytes == rig.expected([0, 1, 0, 1], [5, 6, 7, 8])).all()


def has_ended(sock, *, within_seconds):
    if not select.select([sock], [], [], within_seconds)[0]:
        return False
    assert sock.recv(1, socket.MSG_PEEK) == b""
    return True


@pytest.fixture
def tls():
    if missing_openssl():
        pytest.skip(missing_openssl())
    return contexts()


def test_a_stranger_that_speaks_no_tls_is_shown_out(make_tcp, tls):
    rig = make_tcp(server_tls=tls[0], client_tls=tls[1])
    grant = rig.grant([0])
    with stranger(rig) as sock:
        sock.sendall(ask(ticket=grant.ticket))
        try:
            while sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
    rig.pull(grant, [1])
