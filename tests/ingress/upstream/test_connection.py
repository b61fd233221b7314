"""What a connection makes of the bytes that come, however they are cut."""

import asyncio

import aiohttp
import pytest

from nearkv.ingress.upstream.errors import AnswerBrokenError, EngineLeftError
from tests.ingress.upstream.wire import Wire

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
PLAIN = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\nContent-Length: 5\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\nX-Early: 1\r\n\r\nHTTP/1.1 103 Early\r\nLink: a\r\n\r\n"

WHOLE = {
    "plain": (PLAIN, 200, b"hello", True),
    "chunked": (CHUNKED, 200, b"abcdefg", True),
    "interim": (INTERIM + PLAIN, 200, b"hello", True),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "304": (b"HTTP/1.1 304 X\r\nContent-Length: 9\r\n\r\n", 304, b"", True),
    "empty": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", True),
    "close": (PLAIN.replace(b"X-A: 1", b"Connection: close"), 200, b"hello", False),
    "http 1.0": (PLAIN.replace(b"1.1", b"1.0", 1), 200, b"hello", False),
}


async def taken(answer):
    async with asyncio.timeout(10):
        await answer.begun()
        return answer.status, await answer.read()


def cuts(data):
    """Return ways to cut bytes: once at each place, and at all."""
    yield [data[i : i + 1] for i in range(len(data))]
    for at in range(len(data)):
        yield [part for part in (data[:at], data[at:]) if part]


@pytest.mark.parametrize(("data", "status", "body", "is_kept"), WHOLE.values(), ids=WHOLE)
async def test_an_answer_is_the_same_however_it_is_cut(data, status, body, is_kept):
    for parts in cuts(data):
        wire = Wire()
        answer = wire.ask()
        assert wire.written == b"head|body"
        wire.arrive(*parts)
        assert await taken(answer) == (status, body)
        assert "X-Early" not in answer.headers
        assert "X-Trailer" not in answer.headers
        assert (wire.freed == [wire.connection]) == is_kept
        assert wire.is_aborted != is_kept


@pytest.mark.parametrize("data", [PLAIN, CHUNKED, INTERIM + PLAIN], ids=["plain", "chunked", "1xx"])
async def test_an_answer_that_is_cut_off_is_never_taken_for_whole(data):
    for length in range(len(data)):
        wire = Wire()
        answer = wire.ask()
        wire.arrive(*filter(None, [data[:length]]))
        wire.hang_up()
        with pytest.raises(AnswerBrokenError if length else EngineLeftError):
            await taken(answer)
        assert wire.lost == [wire.connection]
        assert not wire.freed


async def test_headers_keep_their_order_and_names():
    wire = Wire()
    answer = wire.ask()
    wire.arrive(PLAIN)
    await answer.begun()
    assert list(answer.headers.items()) == [("X-A", "1"), ("x-a", "2"), ("Content-Length", "5")]
    assert answer.content_length == 5


async def test_an_answer_without_a_length_ends_with_its_connection():
    wire = Wire()
    answer = wire.ask()
    wire.arrive(b"HTTP/1.1 200 OK\r\n\r\n", b"abc")
    await answer.begun()
    assert answer.content_length is None
    assert await answer.read_some() == b"abc"
    wire.arrive(b"def")
    wire.hang_up()
    assert (await answer.read_some(), await answer.read_some()) == (b"def", b"")
    assert not wire.freed


async def test_an_answer_without_a_length_whose_connection_breaks_is_broken():
    wire = Wire()
    answer = wire.ask()
    wire.arrive(b"HTTP/1.1 200 OK\r\n\r\nabc")
    wire.hang_up(ConnectionResetError("reset"))
    assert await answer.read_some() == b"abc"
    with pytest.raises(AnswerBrokenError, match="reset"):
        await answer.read_some()


async def test_head_requests_get_no_body_and_leave_the_connection_fit_for_use():
    wire = Wire()
    for _ in range(2):
        answer = wire.ask("HEAD")
        wire.arrive(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")
        assert await taken(answer) == (200, b"")
        assert answer.content_length == 1234
    answer = wire.ask()
    wire.arrive(PLAIN)
    assert await taken(answer) == (200, b"hello")
    assert len(wire.freed) == 3


@pytest.mark.parametrize("surplus", [PLAIN, b"x", b"\0\0"])
async def test_what_comes_behind_an_answer_ends_the_connection_and_harms_nobody(surplus):
    wire = Wire()
    answer = wire.ask()
    wire.arrive(PLAIN + surplus)
    assert await taken(answer) == (200, b"hello")
    assert wire.is_aborted
    assert not wire.freed
    later = Wire()
    answer = later.ask()
    later.arrive(PLAIN, surplus)
    assert await taken(answer) == (200, b"hello")
    assert later.is_aborted


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\na",
        CHUNKED.replace(b"\r\n", b"\r\nContent-Length: 1\r\n", 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    ],
    ids=["ssh", "length", "two lengths", "length and chunks", "chunk", "endless"],
)
async def test_what_is_no_http_breaks_the_answer(data):
    wire = Wire()
    answer = wire.ask()
    wire.arrive(data)
    with pytest.raises(aiohttp.ClientPayloadError, match="no HTTP"):
        await taken(answer)
    assert wire.is_aborted


@pytest.mark.parametrize(
    "part", [b"X-A: " + b"a" * 1000 + b"\r\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 50]
)
async def test_heads_have_a_limit(part):
    wire = Wire()
    answer = wire.ask()
    if part.startswith(b"X"):
        wire.arrive(b"HTTP/1.1 200 OK\r\n")
    for _ in range(80):
        wire.arrive(part)
    with pytest.raises(AnswerBrokenError, match="head is over"):
        await taken(answer)
    assert wire.is_aborted


async def test_whoever_reads_slowly_makes_the_engine_wait():
    wire = Wire()
    answer = wire.ask()
    wire.arrive(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    wire.arrive(b"a" * 200_000)
    assert not wire.is_paused
    wire.arrive(b"a" * 200_000)
    assert wire.is_paused
    assert len(await answer.read_some()) == 400_000
    assert not wire.is_paused
    wire.arrive(b"a" * 600_000)  # the end, which nobody has to make room for
    assert not wire.is_paused
    assert wire.freed
    assert len(await answer.read()) == 600_000


async def test_leaving_an_answer_closes_its_connection_but_not_after_its_end():
    wire = Wire()
    answer = wire.ask()
    wire.arrive(PLAIN[:-1])
    answer.close()
    assert wire.is_aborted
    wire.hang_up()
    other = Wire()
    answer = other.ask()
    other.arrive(PLAIN)
    answer.close()
    answer.close()
    assert not other.is_aborted


async def test_a_wait_that_others_end_raises_what_they_say():
    wire = Wire()
    answer = wire.ask()
    asyncio.get_running_loop().call_soon(answer.be_overdue, TimeoutError())
    with pytest.raises(TimeoutError):
        await taken(answer)
    answer.be_overdue(ValueError())  # the first reason counts
    with pytest.raises(TimeoutError):
        await answer.read_some()
    answer.close()
    assert wire.is_aborted


async def test_what_has_come_is_in_time_whatever_others_say():
    wire = Wire()
    answer = wire.ask()
    wire.arrive(PLAIN[:-2])
    answer.be_overdue(TimeoutError())
    await answer.begun()
    assert await answer.read_some() == b"hel"
    answer.be_in_time()
    wire.arrive(PLAIN[-2:])
    assert (await answer.read_some(), await answer.read_some()) == (b"lo", b"")
    assert wire.freed


async def test_an_answer_that_is_given_up_late_does_not_harm_the_next_one():
    """It ended, and its connection went to another request, before its reader gave it up."""
    wire = Wire()
    late = wire.ask()
    wire.arrive(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"a" * 1_000_000)
    late.be_overdue(TimeoutError())
    answer = wire.ask()
    wire.arrive(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"a" * 500_000)
    assert wire.is_paused
    assert len(await late.read_some()) == 1_000_000
    late.close()
    assert wire.is_paused
    assert not wire.is_aborted
    wire.arrive(b"a" * 500_000)
    assert len((await taken(answer))[1]) == 1_000_000


async def test_a_connection_whose_answer_failed_is_not_used_again():
    wire = Wire()
    answer = wire.ask()
    answer.fail(AnswerBrokenError("said otherwise"))
    wire.arrive(PLAIN)
    assert not wire.freed
    assert wire.is_aborted


async def test_an_engine_that_answers_before_it_has_the_whole_request_gets_no_other():
    wire = Wire()
    answer = wire.ask()
    wire.unsent_bytes = 1
    wire.arrive(PLAIN)
    assert await taken(answer) == (200, b"hello")
    assert wire.is_aborted
    assert not wire.freed


async def test_switching_protocols_ends_the_answer_and_the_connection():
    wire = Wire()
    answer = wire.ask()
    wire.arrive(b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nframes")
    assert await taken(answer) == (101, b"")
    assert wire.is_aborted
    assert not wire.freed


async def test_a_connection_takes_one_request_at_a_time():
    wire = Wire()
    wire.ask()
    with pytest.raises(RuntimeError, match="not free"):
        wire.ask()


async def test_a_large_body_is_sent_whole():
    wire = Wire()
    wire.connection.send("POST", b"head|", b"b" * 1_000_000)
    assert wire.written == b"head|" + b"b" * 1_000_000
