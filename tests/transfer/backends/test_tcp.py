"""What networks do to ``tcp``, and offers that cannot be meant."""

import socket
import threading

import msgspec
import pytest

from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.backends.tcp import TcpBackend
from nearkv.transfer.backends.tcp_wire import (
    Offer,
)
from nearkv.transfer.errors import PullError, Reason
from tests.transfer.backends.kinds import CHUNK_BYTES
from tests.transfer.backends.rig import PATIENCE_MS, HookedStop, patient, reason_of
from tests.transfer.backends.tcp_proxy import Proxy


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


def test_a_server_that_cannot_listen_says_so(make_tcp):
    rig = make_tcp()
    with pytest.raises(PullError, match=r"cannot listen on 127\.0\.0\.1") as caught:
        TcpBackend(port=rig.server.port).serve(rig.source)
    assert caught.value.reason is Reason.NO_PATH


def test_a_reader_that_gets_no_thread_is_turned_away_and_the_next_is_served(make_tcp, monkeypatch):
    rig = make_tcp()
    start = threading.Thread.start
    tries = []

    def scarce(thread):
        if thread.name == "nearkv-tcp-send":
            tries.append(thread)
            if len(tries) == 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    grant = rig.grant([0, 1])
    assert reason_of(lambda: rig.pull(grant, [5, 6])) in {Reason.BUSY, Reason.PEER_LOST}
    rig.pull(grant, [5, 6])
    assert len(tries) == 2


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
