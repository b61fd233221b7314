"""Which blocks of named prefixes engines hold, kept from what is published anyway (pure)."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from nearkv.agent.block_table import BlockChanges


class Residency:
    """Follows some keys over all engines; anything else costs a look-up at most."""

    def __init__(self) -> None:
        self._watched: Counter[int] = Counter()
        self._tiers_of: dict[str, dict[int, set[str]]] = {}
        self._version_of: Counter[str] = Counter()

    def watch(self, keys: Iterable[int]) -> None:
        """Begin to follow keys; each is followed as often as it was asked for."""
        self._watched.update(keys)

    def unwatch(self, keys: Iterable[int]) -> None:
        """Follow keys once less."""
        self._watched.subtract(keys)
        for key in keys:
            if self._watched[key] <= 0:
                del self._watched[key]
                for held in self._tiers_of.values():
                    held.pop(key, None)

    def scan(self, engine: str, keys_by_tier: Mapping[str, Iterable[int]]) -> None:
        """Take all that an engine holds: what it held before a key was followed."""
        self._tiers_of.pop(engine, None)
        self._version_of[engine] += 1
        for tier, keys in keys_by_tier.items():
            # Not the other way round: a table may hold a million keys.
            self._add(engine, tier, set(self._watched).intersection(keys))

    def observe(self, engine: str, changes: BlockChanges) -> None:
        """Take what has changed of an engine's blocks."""
        if not self._watched:
            return
        if changes.cleared:
            self._tiers_of.pop(engine, None)
            self._version_of[engine] += 1
        for tier, marks in changes.tiers.items():
            found = self._watched.keys() & marks.keys()
            if not found:
                continue
            self._version_of[engine] += 1
            self._add(engine, tier, {key for key in found if marks[key]})
            held = self._tiers_of.get(engine, {})
            for key in found:
                if not marks[key] and key in held:
                    held[key].discard(tier)
                    if not held[key]:
                        del held[key]

    def forget(self, known: Collection[str]) -> None:
        """Drop what there is of engines that are not known any more."""
        for engine in self._version_of.keys() - set(known):
            del self._version_of[engine]
            self._tiers_of.pop(engine, None)

    def version(self, engine: str) -> int:
        """Return a number that changes whenever :meth:`leading` may answer otherwise."""
        return self._version_of[engine]

    def leading(self, engine: str, keys: Sequence[int]) -> int:
        """Return how many leading keys an engine holds, in whatever tier."""
        held = self._tiers_of.get(engine, {})
        return next((i for i, key in enumerate(keys) if key not in held), len(keys))

    def _add(self, engine: str, tier: str, keys: Iterable[int]) -> None:
        held = self._tiers_of.setdefault(engine, {})
        for key in keys:
            held.setdefault(key, set()).add(tier)
