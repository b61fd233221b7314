"""Beginning the records of requests."""

import time
from collections.abc import Callable

from nearkv.ingress.recording.records import RequestRecord
from nearkv.ingress.recording.watching import RequestWatch, WatchRules
from nearkv.ingress.tracing.context import TraceContext


class Recorder:
    """Begins a watch for each request.

    ``start_trace`` makes a request's place in its trace from its ``traceparent``; ``None``
    where there is no tracing.
    """

    def __init__(
        self,
        rules: WatchRules,
        *,
        start_trace: Callable[[str], TraceContext] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._rules = rules
        self._start_trace = start_trace
        self._wall = wall

    def begin(
        self, request_id: str, path: str, *, arrived_at: float, traceparent: str
    ) -> RequestWatch:
        """Return the watch of a request that has just arrived, by the rules' clock."""
        start = self._start_trace
        record = RequestRecord(
            request_id=request_id,
            path=path,
            at=self._wall(),
            arrived_at=arrived_at,
            trace=None if start is None else start(traceparent),
        )
        return RequestWatch(record, self._rules)
