"""Which records are kept where there are very many (pure)."""

from nearkv.ingress.recording.records import RequestRecord
from nearkv.ingress.recording.watching import Sink


class Thinning:
    """Lets at most so many ordinary records through in a second, and all that tell of trouble.

    Nobody reads thousands a second, while each costs its request what a decision does.
    ``per_second`` 0 lets all through.
    """

    def __init__(self, sink: Sink, *, per_second: int) -> None:
        self._sink = sink
        self._per_second = per_second
        self._second = -1
        self._taken = 0
        self.skipped = 0

    def add(self, record: RequestRecord) -> None:
        """Let an ended record through, or count it as skipped."""
        if self._per_second and record.outcome == "ok" and not record.failures:
            second = int(record.ended_at or 0.0)
            if second != self._second:
                self._second, self._taken = second, 0
            self._taken += 1
            if self._taken > self._per_second:
                self.skipped += 1
                return
        self._sink(record)
