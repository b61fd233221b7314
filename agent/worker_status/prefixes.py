"""Which named prefixes to list for an engine (pure)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

LONGEST_ID = 64


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """A prefix that somebody gave a name, still held whole by an engine; ``uses`` ranks it."""

    id: str
    uses: int


PrefixReader = Callable[[str], Sequence[NamedPrefix] | None]
"""Returns the named prefixes that an engine (pod UID) holds, ``None`` where names are not known.

Names are written to the API server for all to see who may read the object, so they must be ones
that an operator chose, not what clients send as session ids.
"""


def no_prefixes(_engine: str) -> Sequence[NamedPrefix] | None:
    """Return ``None``: nobody names prefixes."""
    return None


def choose_prefixes(
    held: Iterable[NamedPrefix], shown: Iterable[str], *, limit: int
) -> tuple[str, ...]:
    """Return at most ``limit`` ids, the most used, in alphabetical order.

    One that is shown stays while it is among the first twice as many: two that are used alike
    must not take turns. Ids that are too long to be shown are passed over.
    """
    ranked = sorted(
        (prefix for prefix in held if 0 < len(prefix.id) <= LONGEST_ID),
        key=lambda prefix: (-prefix.uses, prefix.id),
    )
    ids = list(dict.fromkeys(prefix.id for prefix in ranked))
    known = set(shown)
    kept = [each for each in ids[: 2 * limit] if each in known]
    others = [each for each in ids if each not in known]
    return tuple(sorted((kept + others)[:limit]))
