"""Bodies and clients that no scheduler would be: a clear refusal each, counted, no harm done."""

import asyncio
import gzip
import json
import tracemalloc

import pytest

from tests.integration.extender_site import (
    captured,
    question,
    running_extender,
    small_cluster,
    until,
)
from tests.integration.raw_http import deaf_client, exchange, request

NAMES = [f"gpu-0000{i}" for i in range(4)]
VERBS = ("filter", "prioritize", "preempt")


@pytest.fixture
async def extender():
    limits = {
        "max_body_bytes": 8 << 20,
        "max_bodies_bytes": 9 << 20,
        "body_seconds": 0.5,
        "answer_seconds": 0.5,
    }
    async with running_extender(small_cluster(), preempt=True, limits=limits) as running:
        yield running
        # Whatever was sent to it: the next scheduler is answered as ever, and nothing failed.
        scores = await running.scores(question(NAMES))
        assert scores["gpu-00000"] > scores["gpu-00002"]
        assert await running.series("internal_failures_total") == {}


async def reasons(extender):
    """Return the counted reasons."""
    found = await extender.series("bad_requests_total")
    return {labels.partition('reason="')[2].partition('"')[0]: n for labels, n in found.items()}


def with_(**fields):
    return json.dumps(json.loads(question(NAMES)) | fields).encode()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        pytest.param(b"", 400, "not_json", id="empty"),
        pytest.param(b"null", 400, "wrong_type", id="null"),
        pytest.param(b"[]", 400, "wrong_type", id="array"),
        pytest.param(b"<html>", 400, "not_json", id="html"),
        pytest.param(question(NAMES)[:-9], 400, "not_json", id="truncated"),
        pytest.param(b'{"Pod":{},"x":' + b"[" * 200_000, 400, "too_deep", id="deep"),
        pytest.param(b'{"Pod":{},"x":NaN}', 400, "not_json", id="nan"),
        pytest.param(b"\xff\xfe\x00", 400, "not_json", id="utf-16"),
        pytest.param(b" " * (9 << 20), 413, "too_large", id="huge"),
        pytest.param(b"\0" * 1000, 400, "not_json", id="zeros"),
    ],
)
async def test_bodies_that_nobody_could_answer(extender, verb, body, status, reason):
    got, answer = await extender.post(verb, body)
    assert (got, answer["reason"]) == (status, reason)
    assert answer["error"]
    assert await reasons(extender) == {reason: 1}


@pytest.mark.parametrize("verb", ["filter", "prioritize"])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(with_(NodeNames=None), "no_nodes", id="both-null"),
        pytest.param(with_(Nodes={"items": []}), "both_modes", id="both-given"),
        pytest.param(with_(NodeNames=["a", 1]), "wrong_type", id="number-as-name"),
        pytest.param(with_(NodeNames=[1.5]), "wrong_type", id="float-as-name"),
        pytest.param(with_(NodeNames={}), "wrong_type", id="object-as-names"),
        pytest.param(with_(Pod=None), "wrong_type", id="no-pod"),
        pytest.param(with_(Pod=[]), "wrong_type", id="array-as-pod"),
        pytest.param(question(NAMES, gpus="1.5x"), "bad_quantity", id="quantity"),
    ],
)
async def test_what_is_wrong_is_named(extender, verb, body, reason):
    status, answer = await extender.post(verb, body)
    assert (status, answer["reason"]) == (400, reason)
    assert await reasons(extender) == {reason: 1}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([], id="none"),
        pytest.param(["gpu-00000"], id="one"),
        pytest.param(["gpu-00000"] * 3 + ["gpu-00002"], id="duplicates"),
        pytest.param(["nobody", *NAMES, ""], id="unknown"),
        pytest.param(["n" * 100_000, '\u00e9\n"\\\u2028', "\U0001f680"], id="odd-names"),
        pytest.param([f"node-{i}" for i in range(100_000)], id="100k"),
    ],
)
async def test_odd_questions_get_valid_answers(extender, names):
    status, answer = await extender.post("filter", question(names))
    assert (status, answer["NodeNames"]) == (200, names)
    status, answer = await extender.post("prioritize", question(names))
    assert status == 200
    assert [entry["Host"] for entry in answer] == names
    assert all(type(entry["Score"]) is int and 0 <= entry["Score"] <= 10 for entry in answer)
    assert await reasons(extender) == {}


async def test_a_compressed_body_is_refused_before_it_can_grow(extender):
    bomb = gzip.compress(b" " * (64 << 20))
    status, answer = await extender.post("filter", bomb, **{"Content-Encoding": "gzip"})
    assert (status, answer["reason"]) == (415, "content_encoding")


async def test_an_announced_size_over_the_limit_is_refused_unread(extender):
    head = request("POST /v1/filter", "Content-Length: 99999999999")
    assert b" 413 " in await exchange(extender.url, head, until=b"too_large")
    assert await reasons(extender) == {"too_large": 1}


async def test_a_chunked_body_is_bound_by_the_limit_as_well(extender):
    head = request("POST /v1/filter", "Transfer-Encoding: chunked")
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    assert b" 413 " in await exchange(extender.url, head + chunk * 9, until=b"too_large")


async def test_a_chunked_body_is_read(extender):
    body = question(NAMES)
    head = request("POST /v1/prioritize", "Transfer-Encoding: chunked")
    cut = [body[i : i + 50] for i in range(0, len(body), 50)]
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut)
    answer = await exchange(extender.url, head + pieces + b"0\r\n\r\n", until=b"]")
    assert b" 200 " in answer
    assert b'"Host":"gpu-00000"' in answer


async def test_a_client_too_slow_to_send_gets_408(extender):
    head = request("POST /v1/filter", "Content-Length: 1000")
    answer = await exchange(extender.url, head + b'{"Pod":', until=b"too_slow")
    assert b" 408 " in answer
    assert await reasons(extender) == {"too_slow": 1}


async def test_a_client_that_takes_nothing_is_let_go(extender):
    pad = {"metadata": {"name": "gpu-00000"}, "pad": "x" * (7 << 20)}
    body = question(nodes=[pad])
    data = request("POST /v1/filter", body=body)
    async with deaf_client(extender.url, data):

        async def is_counted():
            return "answer_not_taken" in await reasons(extender)

        await until(is_counted, what="the client is let go")


async def test_bodies_have_so_much_room_together(extender):
    """Of two that are too much together one is refused; both give back what they took."""
    part = request("POST /v1/filter", "Content-Length: 8000000") + b" " * (7 << 20)
    async with deaf_client(extender.url, part), deaf_client(extender.url, part):
        await until_counted(extender, "no_room")
        await until_counted(extender, "too_slow")
    status, _ = await extender.post("prioritize", question(NAMES) + b" " * (7 << 20))
    assert status == 200


async def test_a_body_that_is_only_announced_takes_no_memory(extender):
    host, port = extender.url.removeprefix("http://").split(":")
    head = request("POST /v1/filter", f"Content-Length: {8 << 20}")
    tracemalloc.start()
    try:
        clients = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        for _, writer in clients:
            writer.write(head + b'{"Pod":')
            await writer.drain()
        await until_counted(extender, "too_slow", times=8)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        for _, writer in clients:
            writer.close()
    assert peak_bytes < 16 << 20


async def until_counted(extender, reason, *, times=1):
    async def is_counted():
        return (await reasons(extender)).get(reason, 0) >= times

    await until(is_counted, what=f"{reason} is counted")


async def test_a_connection_closed_in_the_middle_of_a_body_is_counted(extender):
    host, port = extender.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(request("POST /v1/filter", "Content-Length: 1000") + b'{"Pod":')
    await writer.drain()
    writer.close()

    async def is_counted():
        return (await reasons(extender)).keys() & {"client_gone", "broken_off"}

    await until(is_counted, what="the broken body is counted")


async def half_closed(extender, *data):
    """Send pieces, then close the sending half; return all that is answered."""
    host, port = extender.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for piece in data:
        writer.write(piece)
        await writer.drain()
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


async def test_a_client_that_stops_sending_gets_its_answers(extender):
    asked = request("POST /v1/prioritize", body=question(NAMES))
    assert (await half_closed(extender, asked)).startswith(b"HTTP/1.1 200")
    assert (await half_closed(extender, asked[:50], asked[50:])).startswith(b"HTTP/1.1 200")
    assert await reasons(extender) == {}


@pytest.mark.parametrize("missing", [1, 20, 100])
async def test_half_a_body_from_a_client_that_stops_sending_is_refused(extender, missing):
    asked = request("POST /v1/prioritize", body=question(NAMES))
    answer = await half_closed(extender, asked[:-missing])
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"broke off" in answer
    assert await reasons(extender) == {"broken_off": 1}


async def test_nothing_asked_nothing_answered(extender):
    assert await half_closed(extender) == b""
    assert await half_closed(extender, b"POST /v1/fil") == b""


async def test_garbage_instead_of_http(extender):
    tls_hello = b"\x16\x03\x01\x02\x00\x01"
    for data in (tls_hello, b"GET\r\n\r\n", b"\r\n\r\n\r\n", b"POST /v1/filter\r\n"):
        host, port = extender.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert answer == b"" or answer.startswith(b"HTTP/1.")
        assert b" 500 " not in answer


async def test_requests_on_one_connection_are_answered_in_order(extender):
    bad = request("POST /v1/filter", body=b"{")
    good = request("POST /v1/prioritize", body=captured("prioritize_nodeCacheCapable_true"))
    last = good.replace(b"Host: test", b"Host: test\r\nConnection: close")
    answer = await exchange(extender.url, bad + good + bad + last, until=b"never")
    assert answer.count(b"HTTP/1.1 400") == 2
    assert answer.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("mode", ["true", "false"])
async def test_truncated_bodies_of_a_real_scheduler(extender, mode):
    body = captured(f"prioritize_nodeCacheCapable_{mode}")
    for length in range(0, len(body) - 2, max(1, len(body) // 40)):
        status, _ = await extender.post("prioritize", body[:length])
        assert status == 400
