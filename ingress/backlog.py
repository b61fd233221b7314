"""The backlog: prompt tokens sent to engines and not known to be computed yet.

Counted before dispatch and taken off at the first byte, so that a burst spreads before any
scrape can show it. An engine computes prompts one after another, near enough, so the time
since its oldest one began counts as progress on that one.

An answer that is not streamed has its first byte only when all of it is there. Such an entry
leaves by itself once the engine should have computed it; else a long answer would look like
a long queue.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count


@dataclass(slots=True)
class _Entry:
    tokens: int
    tells: bool


@dataclass(slots=True)
class _Lane:
    """One engine's entries, oldest first, and when the oldest one's turn came.

    ``telling`` counts those whose end says that their prompt is computed.
    """

    since: float
    tokens: int = 0
    telling: int = 0
    entries: dict[int, _Entry] = field(default_factory=dict)


class Backlog:
    """What is still to be computed, by engine and incarnation; ``now`` gives seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._of: dict[tuple[str, str], _Lane] = {}
        self._numbers = count()

    def at(self, engine: str, incarnation: str) -> int:
        """Return the tokens sent to an engine's present incarnation and not answered yet."""
        lane = self._of.get((engine, incarnation))
        return 0 if lane is None else lane.tokens

    def requests_at(self, engine: str, incarnation: str) -> int:
        """Return how many requests these tokens belong to."""
        lane = self._of.get((engine, incarnation))
        return 0 if lane is None else len(lane.entries)

    def load(self, engine: str, incarnation: str, seconds_per_token: float) -> tuple[int, float]:
        """Return how many requests an engine has, and how long they will take it still."""
        lane = self._of.get((engine, incarnation))
        if lane is None:
            return 0, 0.0
        left = lane.tokens * seconds_per_token
        elapsed = self._now() - lane.since
        if elapsed >= left and not lane.telling:
            return len(lane.entries), 0.0
        for entry in lane.entries.values():
            seconds = entry.tokens * seconds_per_token
            if elapsed < seconds:
                left -= max(0.0, elapsed)
                break
            left -= seconds
            elapsed -= seconds
            if entry.tells:
                break
        return len(lane.entries), max(0.0, left)

    def counting(
        self, engine: str, incarnation: str, tokens: int, *, tells: bool = True
    ) -> "Counting":
        """Count tokens for as long as a ``with`` block lasts.

        ``tells`` says that the block ends when the prompt is computed, not later.
        """
        return Counting(self, (engine, incarnation), _Entry(tokens, tells))

    def _open(self, key: tuple[str, str], entry: _Entry) -> int:
        lane = self._of.get(key)
        if lane is None:
            lane = self._of[key] = _Lane(self._now())
        number = next(self._numbers)
        lane.entries[number] = entry
        lane.tokens += entry.tokens
        lane.telling += entry.tells
        return number

    def _close(self, key: tuple[str, str], number: int) -> None:
        lane = self._of[key]
        entries = lane.entries
        if len(entries) == 1:
            del self._of[key]
            return
        if next(iter(entries)) == number:
            lane.since = self._now()
        entry = entries.pop(number)
        lane.tokens -= entry.tokens
        lane.telling -= entry.tells


class Counting:
    """Counts one request's tokens between entering and leaving.

    A class, since a generator would cost a microsecond on every request.
    """

    __slots__ = ("_backlog", "_entry", "_key", "_number")

    def __init__(self, backlog: Backlog, key: tuple[str, str], entry: _Entry) -> None:
        self._backlog = backlog
        self._key = key
        self._entry = entry
        self._number = -1

    def __enter__(self) -> None:
        self._number = self._backlog._open(self._key, self._entry)  # noqa: SLF001 (its other half)

    def __exit__(self, *_: object) -> None:
        self._backlog._close(self._key, self._number)  # noqa: SLF001 (as above)
