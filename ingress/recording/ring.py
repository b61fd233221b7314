"""The latest records: a ring bounded by bytes, found by request id."""

from collections import deque
from collections.abc import Iterator

from nearkv.ingress.recording.records import RequestRecord


class RecordRing:
    """The latest records; the oldest go when they take too much."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: deque[tuple[RequestRecord, int]] = deque()
        self._by_id: dict[str, RequestRecord] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        """Return how many records are kept."""
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """About what they take."""
        return self._size_bytes

    @property
    def limit_bytes(self) -> int:
        """The bound."""
        return self._limit_bytes

    @property
    def oldest(self) -> RequestRecord | None:
        """The record that goes next."""
        return self._kept[0][0] if self._kept else None

    def add(self, record: RequestRecord) -> None:
        """Keep a record; one that alone is over the bound is not kept."""
        size = record.size_bytes
        if size > self._limit_bytes:
            return
        self._kept.append((record, size))
        self._by_id[record.request_id] = record
        self._size_bytes += size
        while self._size_bytes > self._limit_bytes:
            dropped, dropped_bytes = self._kept.popleft()
            self._size_bytes -= dropped_bytes
            if self._by_id.get(dropped.request_id) is dropped:
                del self._by_id[dropped.request_id]

    def get(self, request_id: str) -> RequestRecord | None:
        """Return the latest record of a request id."""
        return self._by_id.get(request_id)

    def latest(self) -> Iterator[RequestRecord]:
        """Yield the records, latest first."""
        for record, _ in reversed(self._kept):
            yield record
