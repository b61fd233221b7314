"""Headers on their way through, and the engine's own count of cached tokens."""

import json

import pytest

from nearkv.ingress.forwarding import forwarded_headers, reported_tokens, returned_headers

STRIPPED = [
    "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "TE", "Trailer",
    "Transfer-Encoding", "Upgrade", "Host", "Content-Length", "Expect",
    "X-data-parallel-rank", "X-Data-Parallel-Host-Port", "X-Prefiller-Host-Port",
    "x-prefiller-url", "X-Encoder-Hosts-Ports", "x-kv-cache-source-host-port",
    "X-Gateway-Destination-Endpoint", "X-Gateway-Destination-Endpoint-Subset",
    "x-nearkv-engine", "X-NearKV-Anything",
]  # fmt: skip
CACHED = b'"usage":{"prompt_tokens_details":{"cached_tokens": 128,"created_cache_tokens":5}}'


@pytest.mark.parametrize("name", STRIPPED)
def test_headers_that_steer_or_frame_are_not_forwarded(name):
    assert list(forwarded_headers([(name, "evil:1")], "id", None)) == ["X-Request-Id"]


@pytest.mark.parametrize(
    "name", ["Authorization", "Content-Type", "Accept", "X-Session-ID", "X-Prompt-Hash", "Baggage"]
)
def test_the_rest_goes_through(name):
    assert forwarded_headers([(name, "v")], "id", None).getall(name) == ["v"]


def test_repeated_headers_stay_repeated():
    kept = forwarded_headers([("X-A", "1"), ("x-a", "2")], "id", None)
    assert kept.getall("X-A") == ["1", "2"]


def test_request_id_and_rank_are_ours():
    given = [("x-request-id", "theirs"), ("X-Request-ID", "again"), ("X-data-parallel-rank", "9")]
    kept = forwarded_headers(given, "ours", 3)
    assert kept.getall("X-Request-Id") == ["ours"]
    assert kept.getall("X-data-parallel-rank") == ["3"]


@pytest.mark.parametrize(
    "name", ["Connection", "Transfer-Encoding", "Content-Length", "Server", "Date", "Keep-Alive"]
)
def test_framing_headers_of_the_engine_are_not_returned(name):
    assert not returned_headers([(name, "x")], {})


def test_the_engines_headers_are_returned_and_ours_win():
    answered = [
        ("Content-Type", "text/event-stream"),
        ("Set-Cookie", "a"),
        ("Set-Cookie", "b"),
        ("X-NearKV-Engine", "spoofed"),
    ]
    kept = returned_headers(answered, {"x-nearkv-engine": "e1"})
    assert kept["content-type"] == "text/event-stream"
    assert kept.getall("set-cookie") == ["a", "b"]
    assert kept.getall("x-nearkv-engine") == ["e1"]


def claiming(content):
    """Return an answer whose content talks of cached tokens."""
    return json.dumps({"choices": [{"text": content}]}).encode()


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        pytest.param(b"{" + CACHED + b"}", 128, id="whole"),
        pytest.param(b"data: {" + CACHED + b"}\n\ndata: [DONE]\n\n", 128, id="stream"),
        pytest.param(b'{"cached_tokens":0}', 0, id="zero"),
        pytest.param(b'{"cached_tokens":null}', None, id="null"),
        pytest.param(b'{"usage":{}}', None, id="not reported"),
        pytest.param(b"", None, id="empty"),
        pytest.param(b'{"cached_tokens":1}{"cached_tokens":2}', 2, id="the last one counts"),
        pytest.param(claiming('"cached_tokens": 7'), None, id="escaped in content"),
        pytest.param(claiming("cached_tokens: 7"), None, id="unquoted in content"),
        pytest.param(
            b"{" + CACHED + b"," + claiming('{"cached_tokens": 7}')[1:], 128, id="content after it"
        ),
        pytest.param(b'{"created_cached_tokens": 7}', None, id="another name"),
    ],
)
def test_only_the_engines_own_count_is_taken(tail, expected):
    assert reported_tokens(tail)[0] == expected


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'{"usage":{"prompt_tokens":9,"completion_tokens": 3}}', (None, 3)),
        (b'{"usage":{"input_tokens":9,"cache_read_input_tokens":4,"output_tokens":2}}', (4, 2)),
        (b'"completion_tokens":1} {"completion_tokens":7,"cached_tokens":8}', (8, 7)),
    ],
    ids=["nothing cached", "another dialect", "the last ones count"],
)
def test_tokens_answered_are_taken_in_the_same_look(tail, expected):
    assert reported_tokens(tail) == expected
