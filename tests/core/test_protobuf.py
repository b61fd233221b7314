"""The wire format: both ways, and bytes that are no message."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.protobuf import (
    WireError,
    bytes_field,
    fields_of,
    message_at,
    messages_of,
    nested,
    text,
    text_at,
    text_field,
    varint_field,
)

NUMBERS = st.integers(1, 2**29 - 1)


def read(data):
    return [
        (number, content if isinstance(content, int) else bytes(content))
        for number, content in fields_of(memoryview(data))
    ]


@given(
    st.lists(
        st.tuples(NUMBERS, st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=300))),
        max_size=20,
    )
)
def test_what_is_written_is_read_back(fields):
    written = b"".join(
        varint_field(number, value) if isinstance(value, int) else bytes_field(number, value)
        for number, value in fields
    )
    assert read(written) == fields


@given(st.binary(max_size=200))
def test_any_bytes_are_fields_or_an_error(data):
    with contextlib.suppress(WireError):
        read(data)


def test_fixed_numbers_are_passed_over():
    assert read(b"\x09" + b"12345678" + b"\x15" + b"1234" + b"\x18\x01") == [
        (1, b"12345678"),
        (2, b"1234"),
        (3, 1),
    ]


@pytest.mark.parametrize(
    "data",
    [b"\x0a", b"\x0a\x05abc", b"\x08\xff", b"\x08" + b"\xff" * 10 + b"\x01", b"\x0b", b"\x09123"],
)
def test_what_is_cut_or_of_an_unknown_kind_is_an_error(data):
    with pytest.raises(WireError):
        read(data)


def test_contents_are_views_of_what_was_given():
    data = bytes_field(1, b"x" * 1000)
    content = message_at(memoryview(data), 1)
    assert content.obj is data


def test_the_last_of_equal_fields_counts_and_none_is_none():
    data = memoryview(text_field(1, "a") + varint_field(1, 7) + text_field(1, "b"))
    assert bytes(message_at(data, 1)) == b"b"
    assert message_at(data, 2) is None


def test_fields_of_another_kind_than_expected_are_errors():
    with pytest.raises(WireError, match="number"):
        text(7)
    with pytest.raises(WireError, match="number"):
        nested(7)
    with pytest.raises(WireError, match="UTF-8"):
        text(memoryview(b"\xff"))


def test_fields_of_all_wire_types():
    data = bytes.fromhex("0896 01 11 0102030405060708 1a02 6869 25 01020304")
    assert read(data) == [
        (1, 150),
        (2, bytes(range(1, 9))),
        (3, b"hi"),
        (4, bytes(range(1, 5))),
    ]


@pytest.mark.parametrize(
    "data", ["0a05 61", "08", "0b", "08 ffffffffffffffffffffff", "25 0102", "0a ff ff ff ff 0f"]
)
def test_what_is_no_message(data):
    with pytest.raises(WireError):
        read(bytes.fromhex(data))


def test_a_text_that_is_none():
    with pytest.raises(WireError):
        text_at(memoryview(bytes.fromhex("0a01ff")), 1)


def test_the_last_text_of_a_number_counts_and_all_messages_are_found():
    data = memoryview(
        text_field(1, "a") + varint_field(1, 5) + text_field(2, "x") + text_field(1, "b")
    )
    assert text_at(data, 1) == "b"
    assert text_at(data, 3) == ""
    assert [bytes(found) for found in messages_of(data, 1)] == [b"a", b"b"]
