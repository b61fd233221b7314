"""Prefix ids: names that clients give to prompts and sessions (pure).

``X-Prompt-Hash`` and ``X-Session-ID`` are hints: they resolve to block keys learnt from
earlier requests under the same name, and to the engine that served the last one. They never
replace token keys; they speak where token keys say nothing, because the prompt could not be
tokenized or nobody holds any of it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

_HEADERS = ("X-Prompt-Hash", "X-Session-ID")
_MAX_ID_LENGTH = 256
_BYTES_PER_KEY = 8
_BYTES_PER_ENTRY = 400
_KEPT_KEYS = 4096


@dataclass(frozen=True, slots=True)
class PrefixHint:
    """What is known of a prefix id."""

    keys: Sequence[int]
    engine: str
    incarnation: str


def prefix_ids_of(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the prefix ids that a request names; ``headers`` ignore the case of names."""
    return tuple(
        f"{name}:{value[:_MAX_ID_LENGTH]}" for name in _HEADERS if (value := headers.get(name))
    )


class PrefixHints:
    """Least-recently-used map of prefix ids, bounded in bytes."""

    def __init__(self, *, limit_bytes: int = 64 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._of: OrderedDict[str, PrefixHint] = OrderedDict()

    def __len__(self) -> int:
        """Return how many prefix ids are known."""
        return len(self._of)

    def first_of(self, prefix_ids: Sequence[str]) -> PrefixHint | None:
        """Return what is known of the first of these ids that is known."""
        return next(filter(None, map(self.get, prefix_ids)), None)

    def get(self, prefix_id: str) -> PrefixHint | None:
        """Return what is known of a prefix id."""
        hint = self._of.get(prefix_id)
        if hint is not None:
            self._of.move_to_end(prefix_id)
        return hint

    def latest(self, limit: int) -> Iterator[tuple[str, PrefixHint]]:
        """Yield the prefix ids used last, latest first."""
        return islice(reversed(self._of.items()), limit)

    def learn(self, prefix_id: str, hint: PrefixHint) -> None:
        """Remember the keys and the engine of the latest request under a prefix id."""
        old = self._of.pop(prefix_id, None)
        if old is not None:
            self._bytes -= _size(prefix_id, old)
        kept = PrefixHint(hint.keys[:_KEPT_KEYS], hint.engine, hint.incarnation)
        self._of[prefix_id] = kept
        self._bytes += _size(prefix_id, kept)
        while self._bytes > self._limit_bytes and self._of:
            name, dropped = self._of.popitem(last=False)
            self._bytes -= _size(name, dropped)


def _size(prefix_id: str, hint: PrefixHint) -> int:
    return _BYTES_PER_ENTRY + len(prefix_id) + len(hint.keys) * _BYTES_PER_KEY
