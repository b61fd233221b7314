"""Structs: those that gateways send, and hostile ones."""

import pytest

from nearkv.ingress.extproc.structs import decode_struct, encode_struct, texts_of
from nearkv.protobuf import WireError, bytes_field, text_field, varint_field


def struct_of(name, value):
    return memoryview(bytes_field(1, text_field(1, name) + bytes_field(2, value)))


def test_texts_and_structs_come_back():
    values = {"a": "b", "c": {"d": "e", "f": {}}}
    assert decode_struct(memoryview(encode_struct(values))) == values


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (b"", None),
        (varint_field(1, 0), None),
        (b"\x11" + b"\x00\x00\x00\x00\x00\x00\xf8\x3f", 1.5),
        (text_field(3, "x"), "x"),
        (varint_field(4, 1), True),
        (bytes_field(6, bytes_field(1, text_field(3, "x")) * 2), ["x", "x"]),
    ],
)
def test_every_kind_of_value_is_read(value, read):
    assert decode_struct(struct_of("k", value)) == {"k": read}


def test_a_struct_that_nests_for_ever_is_an_error():
    value = b""
    for _ in range(100):
        value = bytes_field(5, bytes(struct_of("k", value)))
    with pytest.raises(WireError, match="deep"):
        decode_struct(struct_of("k", value))


def test_a_number_of_the_wrong_size_is_an_error():
    with pytest.raises(WireError):
        decode_struct(struct_of("k", bytes_field(2, b"123")))


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("a:1, b:2 ,", ("a:1", "b:2")),
        (["a:1", " b:2", 7, None, ""], ("a:1", "b:2")),
        (None, ()),
        (1.5, ()),
        ("", ()),
    ],
)
def test_endpoints_come_as_a_list_or_with_commas(value, texts):
    assert texts_of(value) == texts
