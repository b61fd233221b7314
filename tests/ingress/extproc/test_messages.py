"""Envoy's messages, and our answers to them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.ingress.extproc.messages import (
    BodyMode,
    Mutation,
    Part,
    body_answer,
    decode_message,
    headers_answer,
    immediate_answer,
    plain_answer,
)
from nearkv.protobuf import WireError, bytes_field, fields_of, varint_field
from tests.ingress.extproc import wire_messages as wire


def tree(data):
    """Return a message's fields, numbers or bytes, by number; the last counts."""
    return {
        number: content if isinstance(content, int) else bytes(content)
        for number, content in fields_of(memoryview(data))
    }


def test_the_head_of_a_request_is_read_with_metadata_and_modes():
    metadata = {"envoy.lb.subset_hint": {"key": "10.0.0.1:1"}}
    message = decode_message(wire.request_headers({"x-a": "\u00e9"}, metadata=metadata))
    assert message.part is Part.REQUEST_HEADERS
    assert ("x-a", "\u00e9") in message.headers
    assert message.metadata == metadata
    assert message.modes.request is BodyMode.FULL_DUPLEX_STREAMED
    assert not message.end_of_stream


def test_values_that_are_no_utf_8_pass():
    header = bytes_field(1, bytes_field(1, b"x-a") + bytes_field(3, b"\xff\xfe"))
    message = decode_message(bytes_field(2, bytes_field(1, header)))
    ((name, value),) = message.headers
    assert (name, value.encode("utf-8", "surrogateescape")) == ("x-a", b"\xff\xfe")
    assert b"\xff\xfe" in headers_answer(Part.REQUEST_HEADERS, Mutation(set=[(name, value)]))


def test_the_older_field_of_a_header_is_read_too():
    header = bytes_field(1, bytes_field(1, b"x-a") + bytes_field(2, b"1"))
    assert decode_message(bytes_field(2, bytes_field(1, header))).headers == [("x-a", "1")]


@pytest.mark.parametrize(
    ("data", "part", "ends"),
    [
        (wire.request_headers(ends=True), Part.REQUEST_HEADERS, True),
        (wire.body(b"x"), Part.REQUEST_BODY, False),
        (wire.body(b"x", ends=True), Part.REQUEST_BODY, True),
        (wire.body(b"", ends=True, answer=True), Part.RESPONSE_BODY, True),
        (bytes_field(5, varint_field(3, 1)), Part.RESPONSE_BODY, True),
        (wire.trailers(), Part.REQUEST_TRAILERS, True),
        (wire.trailers(answer=True), Part.RESPONSE_TRAILERS, True),
        (bytes_field(99, b""), None, False),
        (b"", None, False),
    ],
)
def test_parts_and_their_ends(data, part, ends):
    message = decode_message(data)
    assert (message.part, message.end_of_stream) == (part, ends)


def test_attributes_are_read_by_their_owner():
    data = wire.response_headers(
        attributes={"envoy.filters.http.ext_proc": {"upstream.address": "10.0.0.1:1"}}
    )
    assert decode_message(data).attributes == {
        "envoy.filters.http.ext_proc": {"upstream.address": "10.0.0.1:1"}
    }


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(data):
    with contextlib.suppress(WireError):
        decode_message(data)


def test_an_unknown_body_mode_is_an_error():
    with pytest.raises(WireError, match="mode"):
        decode_message(wire.request_headers(modes=(77, 0)))


def test_headers_are_set_by_overwriting_and_removed_by_name():
    answer = headers_answer(
        Part.REQUEST_HEADERS, Mutation(set=[("a", "1")], remove=["b"]), reroute=True
    )
    common = tree(tree(tree(answer)[1])[1])
    assert common[5] == 1
    mutation = tree(common[2])
    assert mutation[2] == b"b"
    option = tree(mutation[1])
    assert option[3] == 2
    assert tree(option[1]) == {1: b"a", 3: b"1"}


def test_a_piece_of_a_body_says_whether_it_is_the_last():
    for part, field, ends in ((Part.REQUEST_BODY, 3, False), (Part.RESPONSE_BODY, 4, True)):
        common = tree(tree(tree(body_answer(part, b"x", end_of_stream=ends))[field])[1])
        streamed = tree(tree(common[3])[3])
        assert streamed == ({1: b"x", 2: 1} if ends else {1: b"x"})


def test_each_part_is_answered_by_its_own_field():
    assert [next(iter(tree(plain_answer(part)))) for part in Part] == [1, 2, 3, 4, 5, 6]


def test_an_answer_of_our_own_has_status_headers_and_body():
    content = tree(tree(immediate_answer(503, [("a", "1")], b"{}", "why"))[7])
    assert tree(content[1]) == {1: 503}
    assert (content[3], content[5]) == (b"{}", b"why")
