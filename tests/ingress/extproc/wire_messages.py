"""Messages as Envoy sends them, for tests; made by the same rules from the other side."""

from nearkv.ingress.extproc.structs import encode_struct
from nearkv.protobuf import bytes_field, text_field, varint_field


def header_map(headers):
    return b"".join(
        bytes_field(1, text_field(1, name) + bytes_field(3, value.encode()))
        for name, value in headers.items()
    )


def request_headers(headers=None, *, ends=False, modes=(4, 4), metadata=None):
    given = {":method": "POST", ":path": "/v1/completions", **(headers or {})}
    content = bytes_field(1, header_map(given)) + (varint_field(3, 1) if ends else b"")
    message = bytes_field(2, content)
    if metadata:
        message += bytes_field(8, structs_map(1, metadata))
    if modes:
        message += bytes_field(11, varint_field(1, modes[0]) + varint_field(2, modes[1]))
    return message


def response_headers(status=200, *, ends=False, metadata=None, attributes=None, headers=None):
    given = {":status": str(status), **(headers or {})}
    content = bytes_field(1, header_map(given)) + (varint_field(3, 1) if ends else b"")
    message = bytes_field(3, content)
    if metadata:
        message += bytes_field(8, structs_map(1, metadata))
    return message + structs_map(9, attributes or {})


def structs_map(number, values):
    return b"".join(
        bytes_field(number, text_field(1, name) + bytes_field(2, encode_struct(content)))
        for name, content in values.items()
    )


def body(data, *, ends=False, answer=False):
    content = bytes_field(1, data) + (varint_field(2, 1) if ends else b"")
    return bytes_field(5 if answer else 4, content)


def trailers(*, answer=False):
    return bytes_field(7 if answer else 6, bytes_field(1, header_map({"x-t": "1"})))
