"""The ingress between clients and engines that use HTTP in every way it allows, and others."""

import asyncio
import gzip

import pytest

from nearkv.ingress.app import KNOWLEDGE, build_app
from nearkv.ingress.settings import IngressSettings
from tests.integration.raw_http import deaf_client, exchange, raw_engine, request, watched
from tests.integration.stack import eventually, running_ingress

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = EVENTS.replace(b"text/event-stream", b"application/json")
BODY = b'{"model":null}'
QUICK = {"body_seconds": 1.0, "first_byte_seconds": 1.0, "idle_seconds": 0.5}
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
WEBSOCKET = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")


def in_front_of(*engines, **settings):
    static = [{"id": f"s{i}", "url": engine.url} for i, engine in enumerate(engines)]
    return running_ingress(engines=static, **settings)


def nothing_is_left(ingress):
    know = ingress.knowledge
    return know.ledger.total_requests == 0 and know.in_flight.count == 0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", [b"204 No Content"]),
        (b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\n\r\n', [b"304 Not", b'ETag: "x"']),
        (b"HTTP/1.1 307 X\r\nLocation: http://e/\r\nContent-Length: 0\r\n\r\n", [b"307", b"//e/"]),
        (OK.replace(b"\r\n\r", b"\r\nContent-Encoding: gzip\r\n\r"), [b"gzip\r\n", b"ok"]),
        (EVENTS + b"0\r\n\r\n", [b"200 OK", b"text/event-stream"]),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, [b"200 OK", b"ok"]),
        (OK.replace(b"\r\n\r", b"\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n\r"), [b"e: a\r", b"e: b"]),
    ],
    ids=["204", "304", "redirect", "encoded", "empty-stream", "continue", "cookies"],
)
async def test_unusual_answers_pass(answer, expected):
    async with raw_engine(answer) as engine, in_front_of(engine) as ingress:
        for _ in range(2):
            given = await exchange(ingress.url, request("GET /v1/x"), until=b"\r\n\r\n")
            assert all(part in given for part in expected)
            assert b"x-nearkv-engine: s0" in given
        assert nothing_is_left(ingress)


@pytest.mark.parametrize(
    ("asked", "line", "body"),
    [
        (request("PUT /v1/x", body=b"abc"), b"PUT /v1/x HTTP/1.1", b"abc"),
        (request("DELETE /v1/x"), b"DELETE /v1/x HTTP/1.1", b""),
        (request("GET /v1/x?a=1&b=%20"), b"GET /v1/x?a=1&b=%20 HTTP/1.1", b""),
        (request("GET http://evil.test/v1/x?q=1"), b"GET /v1/x?q=1 HTTP/1.1", b""),
        (request("POST /v1/x HTTP/1.0", body=BODY), b"POST /v1/x HTTP/1.1", BODY),
        (request("POST /v1/x", "Expect: 100-continue", body=BODY), b"POST /v1/x HTTP/1.1", BODY),
        (
            request("POST /v1/x", "Transfer-Encoding: chunked", "Trailer: X-T")
            + b"e\r\n" + BODY + b"\r\n0\r\nX-T: 1\r\n\r\n",
            b"POST /v1/x HTTP/1.1",
            BODY,
        ),
        (
            request("POST /v1/completions", "Content-Encoding: gzip", body=gzip.compress(BODY)),
            b"POST /v1/completions HTTP/1.1",
            BODY,
        ),
        (request("POST /v1/x", *H2C, body=BODY), b"POST /v1/x HTTP/1.1", BODY),
        (request("GET /v1/realtime", *WEBSOCKET), b"GET /v1/realtime HTTP/1.1", b""),
    ],
    ids=[
        "put", "delete", "query", "absolute-form", "http-1.0", "expect", "chunked-trailer", "gzip",
        "h2c", "websocket",
    ],
)  # fmt: skip
async def test_unusual_requests_pass(asked, line, body):
    async with raw_engine(OK) as engine, in_front_of(engine) as ingress:
        given = await exchange(ingress.url, asked, until=b"\r\n\r\nok")
        assert b" 200 OK" in given
        assert engine.lines == [line]
        head, forwarded = engine.requests[0]
        assert forwarded == body
        assert not {b"upgrade", b"expect", b"trailer", b"content-encoding"} & {
            name.split(b":")[0].lower() for name in head.split(b"\r\n")
        }
        assert nothing_is_left(ingress)


async def test_an_answer_to_head_keeps_the_length_of_the_body_it_leaves_out():
    async def answer(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")

    async with raw_engine(answer) as engine, in_front_of(engine) as ingress:
        two = request("HEAD /v1/x") + request("HEAD /v1/y", "Connection: close")
        given = await exchange(ingress.url, two, until=b"never")
        assert given.count(b"Content-Length: 1234") == 2
        assert engine.connections == 1


async def test_pipelined_requests_are_answered_in_order():
    async with raw_engine(OK) as engine, in_front_of(engine) as ingress:
        asked = [request(f"POST /v1/{i}", f"X-Request-Id: r{i}", body=BODY) for i in range(5)]
        given = await exchange(ingress.url, b"".join(asked), until=b"r4\r\n")
        assert [given.index(f"X-Request-Id: r{i}".encode()) for i in range(5)] == sorted(
            given.index(f"X-Request-Id: r{i}".encode()) for i in range(5)
        )
        assert engine.lines == [f"POST /v1/{i} HTTP/1.1".encode() for i in range(5)]


@pytest.mark.parametrize(
    "path", ["/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/..%2Fsleep", "/v1/x/../../sleep", "/v1/.."]
)
async def test_no_path_leads_out_of_v1(path):
    async with raw_engine(OK) as engine, in_front_of(engine) as ingress:
        given = await exchange(ingress.url, request(f"GET {path}"), until=b"}}")
        assert b" 400 " in given
        assert engine.requests == []
        given = await exchange(ingress.url, request("GET /v1/files/a..b"), until=b"ok")
        assert b" 200 " in given


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", b" 502 "),
        (b"SSH-2.0-nonsense\r\n\r\n", b" 502 "),
        (b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 200_000 + b"\r\n\r\n", b" 502 "),
        (EVENTS + b"ZZ\r\n", b" 502 "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", b" 504 "),
        (
            b'HTTP/1.1 200 OK\r\nContent-Length: 5018\r\n\r\n{"cached_tokens": ' + b"9" * 5000,
            b" 200 ",
        ),
    ],
    ids=["switches", "not-http", "huge-header", "bad-chunk", "short-body", "endless-number"],
)
async def test_answers_that_make_no_sense_become_clear_errors(answer, status):
    deadlines = QUICK if status == b" 504 " else {}
    async with raw_engine(answer) as engine, in_front_of(engine, deadlines=deadlines) as ingress:
        given = await exchange(ingress.url, request("POST /v1/x", body=BODY), until=b"\r\n\r\n")
        assert status in given.split(b"\r\n")[0]
        assert len(engine.requests) == 1
        await eventually(lambda: nothing_is_left(ingress), what="nothing is left")


async def test_an_answer_that_breaks_off_before_its_first_byte_was_passed_on_is_asked_for_again():
    async def half(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        writer.close()

    async with raw_engine(half) as a, raw_engine(half) as b, in_front_of(a, b) as ingress:
        given = await exchange(ingress.url, request("POST /v1/x", body=BODY), until=b"}}")
        assert b" 502 " in given
        assert [len(a.requests), len(b.requests)] == [1, 1]
        assert a.requests[0][1] == b.requests[0][1] == BODY


async def test_a_body_that_does_not_arrive_in_time_gets_408():
    async with raw_engine(OK) as engine, in_front_of(engine, deadlines=QUICK) as ingress:
        head = request("POST /v1/completions", "Content-Length: 100")
        given = await exchange(ingress.url, head + b"{", until=b"}}")
        assert b" 408 " in given
        assert b"x-nearkv-reason: body_timeout" in given
        assert engine.requests == []
        assert nothing_is_left(ingress)


async def test_an_engine_connection_that_closed_while_idle_is_not_used_again():
    async def answer_and_close(writer):
        writer.write(OK)
        writer.close()

    async with raw_engine(answer_and_close) as engine, in_front_of(engine) as ingress:
        for _ in range(5):
            given = await exchange(ingress.url, request("POST /v1/x", body=BODY), until=b"ok")
            assert b" 200 " in given
        assert engine.connections == 5


class Flood:
    """Streams megabytes as fast as they are taken."""

    def __init__(self, head, total_bytes):
        self.head = head
        self.left_bytes = total_bytes
        self.sent_bytes = 0

    async def __call__(self, writer):
        writer.write(self.head)
        piece = b"x" * (1 << 16)
        while self.left_bytes > 0:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            self.sent_bytes += len(piece)
            self.left_bytes -= len(piece)
        writer.write(b"0\r\n\r\n")


async def burst_and_die(writer):
    writer.write(EVENTS + b"%x\r\n%b\r\n" % (8 << 20, b"x" * (8 << 20)))
    await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    "answer",
    [Flood(EVENTS, 300 << 20), Flood(PLAIN, 300 << 20), burst_and_die],
    ids=["events", "plain", "engine-dies"],
)
async def test_a_client_that_takes_nothing_is_cut_off_and_holds_little(answer):
    async with raw_engine(answer) as engine:
        settings = {"engines": [{"id": "s0", "url": engine.url}], "deadlines": QUICK}
        app = await build_app(IngressSettings.model_validate(settings))
        asked = request("POST /v1/x", body=BODY)
        async with watched(app) as (url, server), deaf_client(url, asked):
            await eventually(lambda: app[KNOWLEDGE].in_flight.count, what="it is under way")
            await eventually(lambda: app[KNOWLEDGE].in_flight.count == 0, what="it is given up")
            # Closing would wait until the client has taken what is buffered.
            await eventually(lambda: not server.connections, what="it is cut off")
    if isinstance(answer, Flood):
        # What fits the sockets' buffers on the way, and not the whole stream.
        assert answer.sent_bytes < 50 << 20


async def test_a_long_stream_passes_whole():
    flood = Flood(EVENTS, total_bytes=64 << 20)
    deadlines = {"first_byte_seconds": 20.0, "idle_seconds": 5.0}
    async with raw_engine(flood) as engine, in_front_of(engine, deadlines=deadlines) as ingress:
        taken = 0
        async with ingress.session.post(ingress.url + "/v1/x", json={}) as response:
            async for piece in response.content.iter_any():
                taken += len(piece)
        assert taken == 64 << 20
        assert nothing_is_left(ingress)


async def test_a_client_slower_than_the_engine_gets_all_of_it():
    async def answer(writer):
        writer.write(EVENTS)
        for i in range(40):
            writer.write(b"%x\r\n%b\r\n" % (1 << 16, bytes([i]) * (1 << 16)))
        writer.write(b"0\r\n\r\n")

    async with raw_engine(answer) as engine, in_front_of(engine) as ingress:
        taken = bytearray()
        async with ingress.session.post(ingress.url + "/v1/x", json={}) as response:
            while piece := await response.content.read(1 << 16):
                taken += piece
                await asyncio.sleep(0.01)
        assert taken == b"".join(bytes([i]) * (1 << 16) for i in range(40))
