"""Connections on which the system itself notices that the other host is gone."""

import socket
from typing import Any


def probed_socket(
    address: tuple[Any, ...],
    *,
    after_seconds: int,
    every_seconds: int,
    probes: int,
    unheard_seconds: int | None = None,
) -> socket.socket:
    """Return a socket for an address (as of ``getaddrinfo``) that probes a silent peer.

    The first probe goes out after ``after_seconds`` of silence, others every ``every_seconds``;
    after ``probes`` without an answer the connection is broken. So it is when what was sent is
    not taken for ``unheard_seconds``, which no probe would notice (RFC 5482).
    """
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", after_seconds),
        ("TCP_KEEPINTVL", every_seconds),
        ("TCP_KEEPCNT", probes),
    ):
        if hasattr(socket, option):  # names and presence differ by system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if unheard_seconds is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unheard_seconds * 1000)
    return made
