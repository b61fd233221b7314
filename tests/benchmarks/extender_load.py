"""Bodies as kube-scheduler sends them, and a client that adds next to nothing of its own."""

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CAPTURED = Path(__file__).parents[1] / "data" / "kube-scheduler"
_READ_BYTES = 1 << 20
_DEADLINE_SECONDS = 60.0


@dataclass(slots=True)
class Answer:
    """What came back: the first part of it, how long all of it took, how long it is."""

    seconds: float
    status: int
    size_bytes: int
    start: bytes


class Connection:
    """One kept-alive connection, as kube-scheduler holds; blocking, so that nothing is between."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray(_READ_BYTES)

    def post(self, path: str, body: bytes, *, keep: bool = False) -> Answer:
        """Send a request and take the whole answer; of a long one only the start, unless kept."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: bench\r\nUser-Agent: Go-http-client/1.1\r\n"
            f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n"
            "Accept-Encoding: gzip\r\n\r\n"
        ).encode()
        began = time.perf_counter()
        self._socket.sendall(head + body if len(body) < _READ_BYTES else head)
        if len(body) >= _READ_BYTES:
            self._socket.sendall(body)
        start, total, length = b"", 0, -1
        while length < 0 or total < length:
            count = self._socket.recv_into(self._buffer)
            if not count:
                raise ConnectionError("the server closed the connection")
            if length < 0 or keep:
                start += self._buffer[:count]
            if length < 0:
                length = _whole_length(start)
            total += count
        seconds = time.perf_counter() - began
        return Answer(seconds, int(start.split(b" ", 2)[1]), length, start)


def _whole_length(start: bytes) -> int:
    head, found, _ = start.partition(b"\r\n\r\n")
    if not found:
        return -1
    lowered = head.lower()
    at = lowered.index(b"content-length:") + len(b"content-length:")
    return len(head) + 4 + int(lowered[at:].split(b"\r\n", 1)[0])


@contextmanager
def connection(url: str) -> Iterator[Connection]:
    """Open a connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=_DEADLINE_SECONDS) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Connection(connected)


def captured(name: str) -> Any:
    """Return a body that a real kube-scheduler sent."""
    return json.loads((_CAPTURED / f"{name}.body.json").read_text())


def uid_of(number: int) -> str:
    """Return a pod's UID."""
    return f"00000000-0000-4000-8000-{number:012d}"


def pod(number: int) -> dict[str, Any]:
    """Return a decode pod of the group ``g``, about 3 kB as real ones are."""
    made: dict[str, Any] = captured("filter_nodeCacheCapable_true")["Pod"]
    made["metadata"] |= {
        "name": f"decode-{number}",
        "uid": uid_of(number),
        "labels": {"nearkv.io/group": "g", "nearkv.io/role": "decode"},
    }
    made["spec"]["containers"][0]["env"] = [
        {"name": f"SETTING_{i}", "value": "some value of it"} for i in range(30)
    ]
    return made


def names_body(names: Sequence[str], number: int) -> bytes:
    """Return a body with names; the scheduler begins at another node for each pod."""
    start = number * 997 % len(names)
    turned = [*names[start:], *names[:start]]
    body = {"Pod": pod(number), "Nodes": None, "NodeNames": turned}
    return json.dumps(body, separators=(",", ":")).encode()


def nodes_body(names: Sequence[str], number: int) -> bytes:
    """Return a body with whole nodes of about 18.4 kB each: 50 images, labels of NFD."""
    template: dict[str, Any] = captured("filter_nodeCacheCapable_false")["Nodes"]["items"][0]
    template["status"]["images"] = [
        {
            "names": [
                f"registry.example.com/platform/team-{i % 7}/service-{i}@sha256:{i:064x}",
                f"registry.example.com/platform/team-{i % 7}/service-{i}:v1.{i}.3",
            ],
            "sizeBytes": 123_456_789 + i,
        }
        for i in range(50)
    ]
    template["metadata"]["labels"] |= {
        f"feature.node.kubernetes.io/cpu-cpuid.FEATURE_{i}": "true" for i in range(113)
    }
    spelled = json.dumps(template, separators=(",", ":"))
    own = template["metadata"]["name"]
    items = ",".join(spelled.replace(own, name) for name in names)
    asked = json.dumps(pod(number), separators=(",", ":"))
    return (
        f'{{"Pod":{asked},"Nodes":{{"metadata":{{}},"items":[{items}]}},"NodeNames":null}}'
    ).encode()
