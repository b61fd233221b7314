"""The first lines of a request, and where they go (pure)."""

from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec

_PORTS = {"http": 80, "https": 443}


class Origin(msgspec.Struct, frozen=True):
    """An engine's address: ``authority`` is what its requests name as host."""

    host: str
    port: int
    authority: str
    is_tls: bool
    path: str


def origin_of(url: str) -> Origin:
    """Return where an engine's URL leads; raises ``ValueError`` for one that leads nowhere."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or any(map(str.isspace, parts.path)):
        raise ValueError(f"{url!r} is no http(s) URL with a host")
    parts.hostname.encode("idna")  # or looking it up would raise this, too
    port = parts.port if parts.port is not None else _PORTS[parts.scheme]
    authority = parts.netloc.rpartition("@")[2]
    return Origin(parts.hostname, port, authority, parts.scheme == "https", parts.path.rstrip("/"))


def encode_head(
    method: str,
    origin: Origin,
    target: str,
    headers: Iterable[tuple[str, str]],
    body_length: int | None,
) -> bytes:
    """Return request line and headers; ``headers`` name neither host nor length.

    Bytes that are no UTF-8 leave as they came. Raises ``ValueError`` where a value would break
    out of its line.
    """
    lines = [f"{method} {origin.path}{target} HTTP/1.1", f"Host: {origin.authority}"]
    if body_length is not None:
        lines.append(f"Content-Length: {body_length}")
    lines += [f"{name}: {value}" for name, value in headers]
    text = "\r\n".join(lines)
    breaks = len(lines) - 1
    if text.count("\n") != breaks or text.count("\r") != breaks or "\0" in text:
        raise ValueError("a header holds a line break")
    return (text + "\r\n\r\n").encode("utf-8", "surrogateescape")
