"""How often the agents of a cluster write to its API server: their real plan, simulated time."""

import heapq
import random
from collections import Counter

from nearkv.agent.worker_status.phasing import phase_of
from nearkv.agent.worker_status.planning import Act, WriteLimits, WritePlan

_ENGINE = "engine"
_HOUR_SECONDS = 3600.0
_LEAST_STEP_SECONDS = 0.05
_PERIOD_SECONDS = 200.0


def writes_per_second(nodes: int, *, news_seconds: float) -> tuple[float, int]:
    """Return the mean and the busiest second of an hour, an hour after the start.

    There is one engine on each node, which has something new to tell every ``news_seconds``, at
    random.
    """
    source = random.Random(nodes)
    writers = [_Writer(f"node-{number}", source, news_seconds) for number in range(nodes)]
    due = [(writer.next_at(), number) for number, writer in enumerate(writers)]
    heapq.heapify(due)
    written: Counter[int] = Counter()
    while due[0][0] < 2 * _HOUR_SECONDS:
        now, number = due[0]
        if writers[number].act(now) and now >= _HOUR_SECONDS:
            written[int(now)] += 1
        heapq.heapreplace(due, (writers[number].next_at(), number))
    return written.total() / _HOUR_SECONDS, max(written.values())


class _Writer:
    """One node: its plan, and the news of its engine."""

    def __init__(self, node: str, source: random.Random, news_seconds: float) -> None:
        self._source = source
        self._news_seconds = news_seconds
        phase = phase_of(node, period_seconds=_PERIOD_SECONDS, now=0.0, time_of_day=0.0)
        self._plan = WritePlan(WriteLimits(), phase=phase, now=0.0, draw=source.random)
        self._plan.start([_ENGINE], 0.0)
        self._news = 0
        self._now = 0.0
        self._news_at = source.expovariate(1 / news_seconds)

    def next_at(self) -> float:
        """Return when there is something to do; time goes on by a step at least."""
        soonest = min(self._plan.next_at(self._now), self._news_at)
        return max(soonest, self._now + _LEAST_STEP_SECONDS)

    def act(self, now: float) -> bool:
        """Do what is due; tells whether that was a write."""
        self._now = now
        if now >= self._news_at:
            self._news += 1
            self._news_at = now + self._source.expovariate(1 / self._news_seconds)
        news = b"%d" % self._news
        self._plan.offer(_ENGINE, news, b"", now)
        errand = self._plan.next_errand(now)
        if errand is None:
            return False
        if errand.act is Act.INTRODUCE:
            self._plan.introduced(_ENGINE, now, told=None)
        else:
            self._plan.reported(_ENGINE, news, b"", now)
        return True
