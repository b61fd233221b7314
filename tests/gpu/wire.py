"""Commands and answers between the check and its players: JSON with a length, and descriptors."""

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from nearkv.transfer.framing import receive_with_fds, send_with_fds

_LENGTH = struct.Struct("<I")


class ClosedError(Exception):
    """The other end is gone."""


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message with its descriptors, which stay the caller's."""
    body = json.dumps(message).encode()
    try:
        send_with_fds(sock, _LENGTH.pack(len(body)) + body, fds)
    except OSError as error:
        raise ClosedError(str(error)) from error


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for one message; raises :class:`ClosedError` at the end, or when it takes too long."""
    data, fds = b"", list[int]()
    while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
        try:
            more, more_fds = receive_with_fds(sock)
        except OSError as error:
            close_fds(fds)
            raise ClosedError(str(error) or type(error).__name__) from error
        fds += more_fds
        if not more:
            close_fds(fds)
            raise ClosedError("the process ended")
        data += more
    message: dict[str, Any] = json.loads(data[_LENGTH.size :])
    return message, fds


def close_fds(fds: list[int]) -> None:
    """Close descriptors."""
    while fds:
        os.close(fds.pop())
