"""What only ``tcp`` can suffer: networks, strangers, and peers in other processes."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from nearkv.transfer.backends.contract import Fence, PullRequest, Stop, monotonic_ms
from nearkv.transfer.backends.tcp import TcpBackend
from nearkv.transfer.backends.tcp_wire import (
    END,
    HEADER,
    LENGTH,
    End,
    Offer,
    Request,
    pack_message,
)
from nearkv.transfer.errors import PullError, Reason, TransferError
from tests.transfer.backends.kinds import CHUNK_BYTES, Kind
from tests.transfer.backends.rig import PATIENCE_MS, UNTOUCHED, HookedStop, Rig, patient
from tests.transfer.backends.tcp_proxy import Proxy
from tests.transfer.backends.test_contract import slow_layout
from tests.transfer.backends.tls import contexts, missing_openssl

ROOT = Path(__file__).parents[3]


def reason_of(call):
    with pytest.raises(TransferError) as caught:
        call()
    return caught.value.reason


@pytest.fixture
def make_tcp():
    """Make a rig whose backend has other settings than those of the contract suite."""
    rigs = []

    def make(source_layout=None, **settings):
        settings = {"chunk_bytes": CHUNK_BYTES, "buffer_bytes": CHUNK_BYTES, **settings}
        kind = Kind("tcp", lambda: TcpBackend(**settings), "tcp")
        rigs.append(Rig(kind, source_layout or slow_layout()))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def make_proxy():
    proxies = []

    def make(offer, **changes):
        proxies.append(Proxy(offer, **changes))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


def pull_through(rig, grant, proxy, places, stop=None):
    stop = stop or patient()
    link = rig.backend.connect(proxy.offer, rig.target, stop)
    try:
        return link.pull(rig.request(grant, places), stop)
    finally:
        link.close()


# A lane's answer begins with 8 bytes of header, a chunk, and 8 bytes of digest.
SPOILED = {
    "the kind of a chunk": (0, Reason.MALFORMED),
    "the length of a chunk": (5, Reason.MALFORMED),
    "the first byte": (8, Reason.CORRUPT),
    "a byte in the middle": (8 + CHUNK_BYTES // 2, Reason.CORRUPT),
    "a digest": (8 + CHUNK_BYTES, Reason.CORRUPT),
    "a byte of a later chunk": (5 * (CHUNK_BYTES + 16) + 77, Reason.CORRUPT),
}


@pytest.mark.parametrize(("at", "reason"), SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("bit", [0, 7])
def test_a_bit_that_flips_on_the_way_is_noticed(make_tcp, make_proxy, at, reason, bit):
    rig = make_tcp()
    places = range(rig.source.region.layout.blocks)
    grant = rig.grant(places)
    proxy = make_proxy(rig.offer_of(grant), at=at, spoil="flip", bit=bit)
    noticed = reason_of(lambda: pull_through(rig, grant, proxy, places))
    # A chunk's length and kind may also look like something else that does not fit.
    assert noticed in (reason, Reason.MALFORMED)
    rig.pull(grant, places)
    assert (rig.target_bytes == rig.source_bytes).all()


def test_without_checksums_a_flipped_bit_is_not_noticed(make_tcp, make_proxy):
    """Shows that the digests are what notices, and what one gives up without them."""
    rig = make_tcp(checksums=False)
    places = range(rig.source.region.layout.blocks)
    grant = rig.grant(places)
    proxy = make_proxy(rig.offer_of(grant), at=1000, spoil="flip")
    pull_through(rig, grant, proxy, places)
    assert (rig.target_bytes != rig.source_bytes).sum() == 1


@pytest.mark.parametrize("at", [0, 3, 8, 5000, CHUNK_BYTES + 8, 3 * CHUNK_BYTES])
def test_a_connection_cut_at_any_place_is_a_lost_peer(make_tcp, make_proxy, at):
    rig = make_tcp()
    places = range(rig.source.region.layout.blocks)
    grant = rig.grant(places)
    proxy = make_proxy(rig.offer_of(grant), at=at, spoil="cut")
    assert reason_of(lambda: pull_through(rig, grant, proxy, places)) is Reason.PEER_LOST


def test_a_connection_that_goes_silent_ends_at_the_deadline(make_tcp, make_proxy):
    rig = make_tcp()
    places = range(rig.source.region.layout.blocks)
    grant = rig.grant(places)
    proxy = make_proxy(rig.offer_of(grant), at=3 * CHUNK_BYTES, spoil="hold")
    stop = HookedStop(monotonic_ms() + PATIENCE_MS)

    def hurry():
        stop.deadline_ms = monotonic_ms() + 100

    stop.hook, stop.nth = hurry, 2
    assert reason_of(lambda: pull_through(rig, grant, proxy, places, stop)) is Reason.DEADLINE


def test_nobody_listening_is_a_lost_peer(make_tcp):
    rig = make_tcp()
    grant = rig.grant([0])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    offer = msgspec.msgpack.decode(rig.offer_of(grant), type=Offer)
    nowhere = msgspec.msgpack.encode(msgspec.structs.replace(offer, port=port))
    assert reason_of(lambda: rig.backend.connect(nowhere, rig.target, patient())) is (
        Reason.PEER_LOST
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"host": "some.name.example"}, Reason.MALFORMED),
        ({"port": 0}, Reason.MALFORMED),
        ({"port": 1 << 16}, Reason.MALFORMED),
        ({"lanes": 0}, Reason.MALFORMED),
        ({"lanes": 1000}, Reason.MALFORMED),
        ({"chunk_bytes": 0}, Reason.MALFORMED),
        ({"protocol": 2}, Reason.VERSION),
        ({"tls": True}, Reason.AUTH),
    ],
    ids=str,
)
def test_offers_that_cannot_be_meant_are_refused(make_tcp, change, reason):
    rig = make_tcp()
    offer = msgspec.msgpack.decode(rig.offer_of(rig.grant([0])), type=Offer)
    changed = msgspec.msgpack.encode(msgspec.structs.replace(offer, **change))
    assert reason_of(lambda: rig.backend.connect(changed, rig.target, patient())) is reason


# -- Peers in other processes ---------------------------------------------------------------


@pytest.fixture
def source_process():
    command = [sys.executable, "-m", "tests.transfer.backends.tcp_source_program"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


@pytest.fixture
def remote(source_process, make_tcp):
    """Return a call that pulls everything from the other process."""
    offer = bytes.fromhex(source_process.stdout.readline().decode())
    rig = make_tcp()
    layout = rig.source.region.layout
    everything = tuple(range(layout.blocks))
    request = PullRequest(
        ticket=b"x" * 16, first_block=0, source_blocks=everything, source_layout=layout,
        target_blocks=everything, fence=Fence(0, 0),
    )  # fmt: skip

    def pull(stop):
        link = rig.backend.connect(offer, rig.target, stop)
        try:
            return link.pull(request, stop)
        finally:
            link.close()
            rig.target_bytes[:] = rig.target_bytes  # nobody else writes any more

    pull.rig = rig
    return pull


def test_a_pull_from_another_process(remote):
    remote(patient())
    assert (remote.rig.target_bytes == 0x5A).all()


def test_a_source_killed_in_the_middle_is_a_lost_peer(remote, source_process):
    def kill():
        source_process.kill()
        source_process.wait()

    stop = HookedStop(monotonic_ms() + PATIENCE_MS, hook=kill)
    assert reason_of(lambda: remote(stop)) is Reason.PEER_LOST
    assert stop.looks >= stop.nth


def test_a_source_that_was_killed_before_is_a_lost_peer(remote, source_process):
    source_process.kill()
    source_process.wait()
    assert reason_of(lambda: remote(patient())) is Reason.PEER_LOST


def test_a_source_that_is_stopped_in_the_middle_runs_into_the_deadline(remote, source_process):
    stop = HookedStop(monotonic_ms() + PATIENCE_MS)

    def freeze():
        os.kill(source_process.pid, signal.SIGSTOP)
        stop.deadline_ms = monotonic_ms() + 200

    stop.hook = freeze
    assert reason_of(lambda: remote(stop)) is Reason.DEADLINE


def test_a_pull_from_a_stopped_source_can_be_cancelled(remote, source_process):
    stopped = threading.Event()

    def freeze():
        os.kill(source_process.pid, signal.SIGSTOP)
        stopped.set()

    stop = HookedStop(monotonic_ms() + PATIENCE_MS, hook=freeze)

    def cancel_later():
        stopped.wait()
        stop.cancel()

    canceller = threading.Thread(target=cancel_later)
    canceller.start()
    assert reason_of(lambda: remote(stop)) is Reason.CANCELLED
    canceller.join()


def test_a_source_that_is_stopped_before_is_found_out_when_asked(remote, source_process):
    """The kernel still takes connections for it, so connecting tells nothing."""
    os.kill(source_process.pid, signal.SIGSTOP)
    assert reason_of(lambda: remote(Stop(monotonic_ms() + 200))) is Reason.DEADLINE


# -- Strangers -----------------------------------------------------------------------------


def stranger(rig):
    return socket.create_connection((rig.server.host, rig.server.port), timeout=PATIENCE_MS / 1000)


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


@pytest.mark.parametrize("sent", [b"", b"\x20\x00", ask()[:20]], ids=len)
def test_a_stranger_that_takes_its_time_is_shown_out(make_tcp, sent):
    rig = make_tcp(handshake_seconds=0.05)
    with stranger(rig) as sock:
        sock.sendall(sent)
        assert answer_of(sock) is Reason.DEADLINE


def test_strangers_that_only_wait_do_not_keep_readers_out(make_tcp):
    rig = make_tcp(max_connections=2, lanes=1)
    waiting = [stranger(rig) for _ in range(10)]
    rig.pull(rig.grant([0, 1]), [5, 6])
    for sock in waiting:
        sock.close()
    assert len(rig.server._connections) <= 3


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
    with stranger(rig):
        wait_for_the_end(link._idle[0]._socket)
        link.pull(rig.request(grant, [7, 8]), patient())
    assert (rig.target_bytes == rig.expected([0, 1, 0, 1], [5, 6, 7, 8])).all()


def wait_for_the_end(sock):
    while True:
        try:
            assert sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            continue
        return


def test_a_server_that_cannot_listen_says_so(make_tcp):
    rig = make_tcp()
    with pytest.raises(PullError, match=r"cannot listen on 127\.0\.0\.1") as caught:
        TcpBackend(port=rig.server.port).serve(rig.source)
    assert caught.value.reason is Reason.NO_PATH


def test_an_advertised_address_goes_into_the_offer(make_tcp):
    rig = make_tcp(host="0.0.0.0", advertise="127.0.0.2")
    grant = rig.grant([0, 1])
    assert msgspec.msgpack.decode(rig.offer_of(grant), type=Offer).host == "127.0.0.2"
    rig.pull(grant, [5, 6])


@pytest.mark.parametrize("settings", [{"lanes": 9}, {"lanes": -1}, {"advertise": "a.name"}])
def test_settings_that_cannot_be_are_refused(settings):
    with pytest.raises(ValueError, match=r"lanes|a\.name"):
        TcpBackend(**settings)


def test_small_pulls_take_one_lane_and_large_ones_all(make_tcp):
    rig = make_tcp(lanes=3)
    blocks = range(rig.source.region.layout.blocks)
    grant = rig.grant(blocks)
    link = rig.connect(grant)
    link.pull(rig.request(grant, [0]), patient())
    assert len(link._idle) == 1
    link.pull(rig.request(grant, blocks), patient())
    assert len(link._idle) == 3


# -- TLS -----------------------------------------------------------------------------------


@pytest.fixture
def tls():
    if missing_openssl():
        pytest.skip(missing_openssl())
    return contexts()


def test_without_tls_nothing_is_pulled_from_a_server_with_it(make_tcp, tls):
    rig = make_tcp(server_tls=tls[0], client_tls=tls[1])
    offer = rig.offer_of(rig.grant([0]))
    for backend in (TcpBackend(), TcpBackend(client_tls=tls[1], tls_name="another.name")):
        assert reason_of(lambda b=backend: b.connect(offer, rig.target, patient())) is Reason.AUTH


def test_a_reader_that_wants_tls_does_not_make_do_without(make_tcp, tls):
    rig = make_tcp()
    offer = rig.offer_of(rig.grant([0]))
    backend = TcpBackend(client_tls=tls[1])
    assert reason_of(lambda: backend.connect(offer, rig.target, patient())) is Reason.AUTH


def test_a_reader_without_a_certificate_gets_nothing(make_tcp, tls):
    rig = make_tcp(server_tls=tls[0], client_tls=tls[1])
    grant = rig.grant([0])
    anonymous = ssl.create_default_context()
    anonymous.load_verify_locations(
        cadata="".join(map(ssl.DER_cert_to_PEM_cert, tls[1].get_ca_certs(binary_form=True)))
    )
    backend = TcpBackend(client_tls=anonymous)

    def attempt():
        link = backend.connect(rig.offer_of(grant), rig.target, patient())
        try:
            link.pull(rig.request(grant, [0]), patient())
        finally:
            link.close()

    assert reason_of(attempt) in (Reason.AUTH, Reason.PEER_LOST)
    assert (rig.target_bytes == UNTOUCHED).all()


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
