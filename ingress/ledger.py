"""The in-flight ledger: what this replica has sent and not yet seen end (pure).

Counted before dispatch, so that a burst spreads before any scrape can show it, and keyed by
the engine's incarnation: when an engine is replaced, what was in flight there is gone.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class EngineLoad(msgspec.Struct, frozen=True):
    """What is in flight at one engine; ``tokens`` are those that it makes room for."""

    requests: int = 0
    tokens: int = 0


class LedgerEntry(msgspec.Struct, frozen=True):
    """One dispatched request, and the tokens whose KV is new to the engine.

    What it has cached takes no more room than before, and requests share it: counted whole, ten
    conversations with one system prompt look like ten times their memory.
    """

    engine: str
    incarnation: str
    tokens: int


_NOTHING = EngineLoad()


class Ledger:
    """Counts requests and their new tokens in flight by engine and incarnation."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], EngineLoad] = {}

    def open(self, engine: str, incarnation: str, tokens: int) -> LedgerEntry:
        """Count a request before it is dispatched."""
        held = self._of.get((engine, incarnation), _NOTHING)
        self._of[engine, incarnation] = EngineLoad(held.requests + 1, held.tokens + tokens)
        return LedgerEntry(engine, incarnation, tokens)

    def close(self, entry: LedgerEntry) -> None:
        """Take a request off again; once per entry."""
        key = (entry.engine, entry.incarnation)
        held = self._of[key]
        if held.requests == 1:
            del self._of[key]
        else:
            self._of[key] = EngineLoad(held.requests - 1, held.tokens - entry.tokens)

    def at(self, engine: str, incarnation: str) -> EngineLoad:
        """Return what is in flight at an engine's present incarnation."""
        return self._of.get((engine, incarnation), _NOTHING)

    @property
    def total_requests(self) -> int:
        """Requests in flight everywhere."""
        return sum(held.requests for held in self._of.values())


class TokenTally:
    """Counts tokens by engine and incarnation, for work of one kind that comes and goes."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], int] = {}

    def at(self, engine: str, incarnation: str) -> int:
        """Return the tokens counted at an engine's present incarnation."""
        return self._of.get((engine, incarnation), 0)

    @contextmanager
    def counting(self, engine: str, incarnation: str, tokens: int) -> Iterator[None]:
        """Count tokens for as long as the block lasts."""
        key = (engine, incarnation)
        self._of[key] = self._of.get(key, 0) + tokens
        try:
            yield
        finally:
            left = self._of[key] - tokens
            if left:
                self._of[key] = left
            else:
                del self._of[key]
