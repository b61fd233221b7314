"""The latest records: a ring bounded by bytes, found by request id.

Records are kept packed. A record is some forty objects; thousands of them would be the garbage
collector's and the processor's caches' main work, paid for by every request.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from nearkv.ingress.recording.records import RequestRecord
from nearkv.ingress.tracing.context import TraceContext

_PLACE_BYTES = 400
"""What a record takes beside its bytes: its id, its place in the ring and by id."""


class _Kept(NamedTuple):
    """A record; trace ids are wider than what can be packed."""

    request_id: str
    packed: bytes
    trace: TraceContext | None


class RecordRing:
    """The latest records; the oldest go when they take too much. Keys are not kept."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: deque[_Kept] = deque()
        self._by_id: dict[str, _Kept] = {}
        self._size_bytes = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(RequestRecord).decode

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
        return self._unpack(self._kept[0]) if self._kept else None

    def add(self, record: RequestRecord) -> None:
        """Keep a record; one that alone is over the bound is not kept."""
        trace = record.trace
        if trace is not None or record.keys:
            record = msgspec.structs.replace(record, trace=None, keys=())
        kept = _Kept(record.request_id, self._encode(record), trace)
        size = len(kept.packed) + _PLACE_BYTES
        if size > self._limit_bytes:
            return
        self._kept.append(kept)
        self._by_id[kept.request_id] = kept
        self._size_bytes += size
        while self._size_bytes > self._limit_bytes:
            self._drop()

    def _drop(self) -> None:
        dropped = self._kept.popleft()
        self._size_bytes -= len(dropped.packed) + _PLACE_BYTES
        if self._by_id.get(dropped.request_id) is dropped:
            del self._by_id[dropped.request_id]

    def get(self, request_id: str) -> RequestRecord | None:
        """Return the latest record of a request id."""
        kept = self._by_id.get(request_id)
        return None if kept is None else self._unpack(kept)

    def latest(self) -> Iterator[RequestRecord]:
        """Yield the records there are now, latest first."""
        for kept in reversed(tuple(self._kept)):
            yield self._unpack(kept)

    def _unpack(self, kept: _Kept) -> RequestRecord:
        record = self._decode(kept.packed)
        record.trace = kept.trace
        return record
