"""The last requests an engine double received, so that tests can count and read them."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request as it came in."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def as_json(self) -> dict[str, Any]:
        """Return the request with lower-case header names and its body decoded when it is JSON."""
        try:
            body = msgspec.json.decode(self.body) if self.body else None
        except msgspec.DecodeError:
            body = self.body.decode(errors="replace")
        headers = {name.lower(): value for name, value in self.headers.items()}
        return {"method": self.method, "path": self.path, "headers": headers, "body": body}


class RequestRecord:
    """Counts per path since the start, and the last requests in full."""

    def __init__(self, kept: int) -> None:
        self.counts: Counter[str] = Counter()
        self.aborted = 0
        self._recent: deque[ReceivedRequest] = deque(maxlen=kept)

    def __iter__(self) -> Iterator[ReceivedRequest]:
        return iter(self._recent)

    def add(self, request: ReceivedRequest) -> None:
        """Note one request."""
        self.counts[request.path] += 1
        self._recent.append(request)

    def clear(self) -> None:
        """Forget the requests and start counting again."""
        self.counts.clear()
        self._recent.clear()
        self.aborted = 0

    def as_json(self) -> dict[str, Any]:
        """Return what ``GET /double/requests`` answers."""
        return {
            "counts": dict(self.counts),
            "aborted": self.aborted,
            "requests": [request.as_json() for request in self._recent],
        }
