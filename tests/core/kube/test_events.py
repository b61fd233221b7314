import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.kube.errors import ApiError, Trouble
from nearkv.kube.events import Bookmark, Change, EventReader, LineSplitter, name_of


def line(kind, **metadata):
    return json.dumps({"type": kind, "object": {"metadata": metadata}}).encode()


def refused(call, *arguments):
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value


def test_page():
    body = {
        "kind": "NodeList",
        "metadata": {"resourceVersion": "7", "continue": "t"},
        "items": [{}],
    }
    page = EventReader().page(json.dumps(body).encode())
    assert (page.version, page.more, [bytes(item) for item in page.items]) == ("7", "t", [b"{}"])


def test_list_of_nothing():
    for items in ("[]", "null"):
        page = EventReader().page(
            b'{"metadata":{"resourceVersion":"7"},"items":%b}' % items.encode()
        )
        assert (page.items, page.more) == ([], "")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"<html>",
        b'{"metadata":{"resourceVersion":"7"}}',
        b'{"metadata":{},"items":[]}',
        b'{"metadata":{"resourceVersion":""},"items":[]}',
        b'{"metadata":{"resourceVersion":"0"},"items":[]}',
        b'{"metadata":{"resourceVersion":"7"},"items":{}}',
        b'{"metadata":{"resourceVersion":"7"},"items":[{}',
        b'{"kind":"Status","status":"Failure","metadata":{},"code":500}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_list_is_never_an_empty_one(body):
    assert refused(EventReader().page, body).trouble is Trouble.GARBAGE


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
def test_change(kind):
    event = EventReader().event(line(kind, resourceVersion="9", name="n"))
    assert isinstance(event, Change)
    assert (event.kind, event.version) == (kind, "9")
    assert json.loads(bytes(event.raw))["metadata"]["name"] == "n"


def test_bookmark_and_an_unknown_type():
    assert EventReader().event(line("BOOKMARK", resourceVersion="9")) == Bookmark("9")
    assert EventReader().event(line("NOVELTY", resourceVersion="9")) is None


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        ({"code": 410, "reason": "Expired"}, Trouble.EXPIRED),
        ({"code": 410, "reason": "Gone"}, Trouble.EXPIRED),
        ({"reason": "Expired"}, Trouble.EXPIRED),
        ({"code": 429, "reason": "TooManyRequests"}, Trouble.THROTTLED),
        ({"code": 500, "reason": "InternalError"}, Trouble.SERVER_ERROR),
        ({"code": 504, "reason": "Timeout"}, Trouble.SERVER_ERROR),
        ({"code": 403}, Trouble.FORBIDDEN),
    ],
)
def test_error_event_is_raised(status, trouble):
    event = {"type": "ERROR", "object": {"kind": "Status", "message": "too old", **status}}
    error = refused(EventReader().event, json.dumps(event).encode())
    assert error.trouble is trouble
    assert "too old" in str(error)


def test_error_event_says_when_to_come_back():
    event = {"type": "ERROR", "object": {"code": 429, "details": {"retryAfterSeconds": 3}}}
    assert refused(EventReader().event, json.dumps(event).encode()).retry_after_seconds == 3


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"}{",
        b"[]",
        b'{"type":"ADDED"}',
        b'{"type":"ADDED","object":{}}',
        b"\xff",
        b"[" * 9999,
        b'{"type":"ADDED","object":{"metadata":{"resourceVersion":5}}}',
    ],
)
def test_what_is_no_event_is_garbage(data):
    assert refused(EventReader().event, data).trouble is Trouble.GARBAGE


@given(
    st.lists(st.binary(min_size=1, max_size=9).filter(lambda b: b"\n" not in b and b.strip())),
    st.data(),
)
def test_lines_do_not_depend_on_how_they_arrive(lines, data):
    stream = b"".join(item + b"\n" for item in lines)
    splitter, found = LineSplitter(100), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += splitter.feed(stream[:size])
        stream = stream[size:]
    assert found == lines
    assert not splitter.is_within_line


def test_empty_lines_are_nothing_and_a_begun_line_is_known():
    splitter = LineSplitter(100)
    assert list(splitter.feed(b"\n\r\n \na\nb")) == [b"a"]
    assert splitter.is_within_line


@pytest.mark.parametrize(
    "pieces", [[b"x" * 11], [b"x" * 6, b"x" * 5], [b"x" * 6, b"x" * 5 + b"\n"]]
)
def test_long_lines_are_refused(pieces):
    splitter = LineSplitter(10)
    *first, last = pieces
    for piece in first:
        assert list(splitter.feed(piece)) == []
    assert refused(lambda: list(splitter.feed(last))).trouble is Trouble.TOO_LARGE


def test_name_of_a_broken_object():
    assert name_of(b'{"metadata":{"name":"n","namespace":"a","labels":7}}') == "a/n"
    assert name_of(b'{"metadata":{"name":"n"}}') == "n"
    assert name_of(b'{"metadata":{"name":7}}') == name_of(b"{") == ""
