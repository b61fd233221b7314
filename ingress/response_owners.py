"""Which engine made which response (pure).

A request that goes on from an earlier response, or asks for one, can be served only by the
engine that made it: engines keep responses in their own memory. Ids are remembered for a
while, the latest of them.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

_MOST_CHARACTERS = 256
_LOOKED_AT_BYTES = 4096
_ID = re.compile(rb'"id":\s*"([^"\\]{1,256})"')


@dataclass(frozen=True, slots=True)
class Owner:
    """The engine that made a response."""

    engine: str
    incarnation: str
    until: float


class ResponseOwners:
    """Ids of responses and the engines that made them, bounded in number and age."""

    def __init__(self, *, most: int = 100_000, seconds: float = 86_400.0) -> None:
        self._most = most
        self._seconds = seconds
        self._of: OrderedDict[str, Owner] = OrderedDict()

    def __len__(self) -> int:
        """Return how many ids are known."""
        return len(self._of)

    def learn(self, response_id: str, engine: str, incarnation: str, now: float) -> None:
        """Remember who made a response."""
        if not response_id or len(response_id) > _MOST_CHARACTERS:
            return
        self._of.pop(response_id, None)
        self._of[response_id] = Owner(engine, incarnation, now + self._seconds)
        while len(self._of) > self._most:
            self._of.popitem(last=False)

    def find(self, response_id: str, now: float) -> Owner | None:
        """Return who made a response, if that is known still."""
        owner = self._of.get(response_id)
        if owner is not None and owner.until <= now:
            del self._of[response_id]
            return None
        return owner

    def sweep(self, now: float) -> None:
        """Drop what is too old; ids are in the order of their ages."""
        while self._of:
            response_id, owner = next(iter(self._of.items()))
            if owner.until > now:
                return
            del self._of[response_id]


class _Whole(msgspec.Struct):
    id: str = ""


_whole = msgspec.json.Decoder(_Whole)


def response_id_of(first: bytes, *, whole: bool) -> str:
    """Return a response's id from its first bytes; empty where they show none.

    A stream begins with an event that holds the response, whose first field is its id.
    """
    if whole and first.startswith(b"{"):
        try:
            return _whole.decode(first).id
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return ""
    found = _ID.search(first, 0, _LOOKED_AT_BYTES)
    return found[1].decode(errors="replace") if found else ""
