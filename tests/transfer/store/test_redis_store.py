"""The Redis tier on a real server: expiry, full, killed, silent, and refusing."""

import os
import signal
import socket
import tempfile
import threading

import pytest

from nearkv.transfer.backends.contract import Stop, monotonic_ms
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.store.redis_store import RedisSettings, RedisTier
from tests.transfer.store.stores import Engine, layout, prefix, stop

KEY, VALUE = "ab" * 20, bytes(range(256)) * 4
BIG = bytes(9 << 20)


def tier_of(server, **options):
    return RedisTier(RedisSettings(**({"url": server.url, "call_seconds": 20} | options)))


def refused(reason, call, *arguments):
    with pytest.raises(PullError) as error:
        call(*arguments)
    assert error.value.reason is reason
    return str(error.value)


def test_values_expire_and_a_touch_begins_anew(make_redis):
    server = make_redis()
    tier = tier_of(server, ttl_seconds=1000)
    for value in (VALUE, BIG):
        tier.put(KEY, [value], stop())
        with server.client() as client:
            assert 990_000 < client.pttl(f"nearkv:kv:{KEY}") <= 1_000_000
            client.pexpire(f"nearkv:kv:{KEY}", 5000)
            assert tier.touch(KEY, stop())
            assert client.pttl(f"nearkv:kv:{KEY}") > 990_000
            client.pexpire(f"nearkv:kv:{KEY}", 0)  # its time is over
        assert tier.get(KEY, len(BIG), stop()) is None
        assert not tier.touch(KEY, stop())
        assert tier.present([KEY], stop()) == [False]


@pytest.mark.parametrize("value", [VALUE, BIG], ids=["one-call", "in-pieces"])
def test_a_value_that_is_there_is_left_alone(make_redis, value):
    server = make_redis()
    tier = tier_of(server)
    tier.put(KEY, [b"first"], stop())
    tier.put(KEY, [value], stop())
    assert tier.get(KEY, len(value), stop()) == b"first"
    with server.client() as client:
        assert client.keys("*") == [f"nearkv:kv:{KEY}".encode()]


def test_a_short_time_to_live_is_kept(make_redis):
    tier = tier_of(make_redis(), ttl_seconds=0.001)
    tier.put(KEY, [VALUE], stop())
    until = stop(20)
    while tier.present([KEY], until) == [True]:
        pass  # each look is a round trip; the deadline ends it
    assert tier.get(KEY, len(VALUE), stop()) is None


@pytest.mark.parametrize("value", [VALUE * 1024, BIG], ids=["one-call", "in-pieces"])
def test_a_server_out_of_memory_is_full_and_keeps_no_part(make_redis, value):
    server = make_redis("--maxmemory-policy", "noeviction")
    tier = tier_of(server)
    with server.client() as client:
        client.set("filler", bytes(1_500_000))
        client.config_set("maxmemory", "2mb")
        refused(Reason.STORE_FULL, tier.put, KEY, [value], stop())
        assert client.keys("*") == [b"filler"]


def test_a_server_that_evicts_only_loses_values(make_redis):
    server = make_redis("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    tier = tier_of(server)
    memory = layout(block_bytes=64 << 10)
    writer = Engine(tier, memory, seed=1)
    for seed in range(8):
        assert writer.put(prefix(4, seed=seed), range(4)).reason is None
    reports = []
    for seed in range(8):
        reader = Engine(tier, memory)
        reports.append(reader.pull(prefix(4, seed=seed), range(4)))
        if reports[-1].blocks:
            assert reader.block(3) == writer.block(3)
    assert {report.reason for report in reports} == {None, Reason.NOT_STORED}


def test_a_killed_server_is_no_path(make_redis):
    server = make_redis()
    engine = Engine(tier_of(server), seed=1)
    assert engine.put(prefix(4), range(4)).reason is None
    server.end()
    for report in (engine.put(prefix(4), range(4)), engine.pull(prefix(4), range(4))):
        assert (report.blocks, report.reason) == (0, Reason.NO_PATH)


class KillingStop(Stop):
    """Ends the server at the ``nth`` look: in the middle of a value."""

    def __init__(self, server, nth):
        super().__init__(monotonic_ms() + 30_000)
        self.server, self.nth = server, nth

    def check(self):
        self.nth -= 1
        if not self.nth:
            self.server.end()
        super().check()


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_server_killed_in_the_middle_of_a_value_is_a_lost_peer(make_redis, call):
    server = make_redis()
    tier = tier_of(server)
    if call == "put":
        refused(Reason.PEER_LOST, tier.put, KEY, [BIG], KillingStop(server, 3))
    else:
        tier.put(KEY, [BIG], stop())
        refused(Reason.PEER_LOST, tier.get, KEY, len(BIG), KillingStop(server, 3))


def test_a_server_that_hangs_ends_by_the_deadline(make_redis):
    server = make_redis()
    engine = Engine(tier_of(server), seed=1)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        assert engine.put(prefix(4), range(4), stop(0.2)).reason is Reason.DEADLINE
        assert engine.pull(prefix(4), range(4), stop(0.2)).reason is Reason.DEADLINE
        patient = Engine(tier_of(server, call_seconds=0.1), seed=1)
        assert patient.pull(prefix(4), range(4)).reason in {Reason.PEER_LOST, Reason.NO_PATH}
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert engine.put(prefix(4), range(4)).reason is None


def test_no_server_is_no_path_and_a_bad_url_does_not_show_its_password():
    with socket.socket() as closed:  # bound, so that nobody else takes the port, not listening
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        tier = RedisTier(RedisSettings(url=f"redis://127.0.0.1:{port}"))
        refused(Reason.NO_PATH, tier.get, KEY, 10, stop())
        assert not tier.probe(stop()).usable
    for url in ("nonsense://:hush@x", "redis://:hush@host:port"):
        settings = RedisSettings(url=url)
        assert "hush" not in refused(Reason.NO_PATH, RedisTier(settings).get, KEY, 10, stop())
        assert "hush" not in repr(settings)


def test_a_wrong_password_is_a_refusal(make_redis):
    server = make_redis()
    with server.client() as client:
        client.config_set("requirepass", "right")
    wrong = server.url.replace("unix://", "unix://:wrong@")
    refused(Reason.PEER_REFUSED, tier_of(server, url=wrong).get, KEY, 10, stop())
    refused(Reason.PEER_REFUSED, tier_of(server).get, KEY, 10, stop())
    right = tier_of(server, url=server.url.replace("unix://", "unix://:right@"))
    assert right.probe(stop()).usable


def test_a_key_of_another_type_is_a_refusal(make_redis):
    server = make_redis()
    with server.client() as client:
        client.lpush(f"nearkv:kv:{KEY}", b"x")
    refused(Reason.PEER_REFUSED, tier_of(server).get, KEY, 10, stop())


def test_values_over_the_limit_are_refused_before_a_connection_is_made():
    settings = RedisSettings(url="unix:///nowhere/redis.sock", max_value_bytes=1000)
    message = refused(Reason.TOO_LARGE, RedisTier(settings).put, KEY, [bytes(1001)], stop())
    assert "1001" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [("ttl_seconds", 0), ("call_seconds", -1), ("max_value_bytes", (512 << 20) + 1)],
)
def test_settings_that_cannot_be_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        RedisSettings(url="redis://localhost", **{field: value})


def test_a_server_that_talks_nonsense_is_a_lost_peer():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/s")
        server.listen()

        def answer():
            peer, _ = server.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        tier = RedisTier(RedisSettings(url=f"unix://{folder}/s"))
        with pytest.raises(PullError) as error:
            tier.get(KEY, 10, stop())
        thread.join()
        assert error.value.reason in {Reason.PEER_LOST, Reason.NO_PATH}
