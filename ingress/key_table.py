"""A compact map from 64-bit keys to 32-bit values (pure): open addressing over flat arrays.

A Python dict costs about 100 bytes per block once its key objects are counted; here a slot
costs 12, so 24 to 48 bytes per block. Single keys are handled by plain loops, whole prompts
by numpy over the same memory. Keys are hashes already, so a key's low bits are its home slot;
collisions go to the next free slot, and removal shifts followers back, so there are no
tombstones to wade through. Value 0 means absent.

A value set to 0 in bulk (:meth:`rewrite_values`) leaves its key behind as dead weight until
the next rebuild; such keys count as used but are found by nobody. While the table is
``pinned``, keys removed one by one are left behind too, so that none moves to where whoever
goes through the table in parts has been already.

The search for a key's slot stands in each of the three loops over single keys: a call per key
would cost as much as the search.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SLOT_BYTES = 12
_LEAST_SLOTS = 1 << 10
_FULL_RATIO = 0.5

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32]


def as_keys(keys: Sequence[int] | Keys) -> Keys:
    """Return keys as an array, without copying what is one already (``array('Q')`` included)."""
    return np.asarray(keys, dtype=np.uint64)


def without_zero(keys: Sequence[int]) -> Sequence[int]:
    """Return keys with 0, which marks an empty slot, replaced by 1 (a hash is 0 by chance only)."""
    return [key or 1 for key in keys] if 0 in keys else keys


def capacity_within(limit_bytes: int) -> int:
    """Return how many keys the largest table of at most ``limit_bytes`` takes."""
    slots = _LEAST_SLOTS
    while 2 * slots * SLOT_BYTES <= limit_bytes:
        slots *= 2
    return int(slots * _FULL_RATIO)


class KeyTable:
    """Maps keys to values; grows by doubling, rebuilt in one vectorised pass."""

    def __init__(self) -> None:
        self._allocate(_LEAST_SLOTS)
        self.live = 0
        self._dead = 0
        self.generation = 0
        self.pinned = False

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays."""
        return self.slot_count * SLOT_BYTES

    @property
    def slot_count(self) -> int:
        """Slots allocated."""
        return self._mask + 1

    def get(self, key: int) -> int:
        """Return a key's value, 0 when absent."""
        return self.find_few((key,))[0]

    def find_few(self, wanted: Sequence[int]) -> list[int]:
        """Return the values of keys, up to and including the first absent one (0)."""
        keys, values, mask = self._keys, self._values, self._mask
        numbers = []
        for key in without_zero(wanted):
            slot = key & mask
            found = keys[slot]
            while found and found != key:
                slot = (slot + 1) & mask
                found = keys[slot]
            value = values[slot]
            numbers.append(value)
            if not value:
                break
        return numbers

    def find(self, wanted: Sequence[int] | Keys) -> Values:
        """Return the value of each key, 0 where absent."""
        sought = as_keys(wanted)
        if not sought.all():
            sought = np.where(sought == 0, np.uint64(1), sought)
        keys = self._keys_view
        mask = np.int64(self._mask)
        slots = (sought & np.uint64(self._mask)).astype(np.int64)
        missed = np.flatnonzero(keys[slots] != sought)
        while missed.size:
            missed = missed[keys[slots[missed]] != 0]
            slots[missed] = (slots[missed] + 1) & mask
            missed = missed[keys[slots[missed]] != sought[missed]]
        # A search that ended on an empty slot reads that slot's value, which is 0.
        return self._values_view[slots]

    def merge(self, new: Sequence[int], value: int, merged: Callable[[int], int]) -> None:
        """Set absent keys to ``value`` and others to ``merged(old value)``.

        Room must have been made by :meth:`reserve`.
        """
        keys, values, mask = self._keys, self._values, self._mask
        inserted = revived = 0
        for key in without_zero(new):
            slot = key & mask
            found = keys[slot]
            while found and found != key:
                slot = (slot + 1) & mask
                found = keys[slot]
            if not found:
                keys[slot] = key
                values[slot] = value
                inserted += 1
                continue
            old = values[slot]
            if old != value:
                revived += not old
                values[slot] = merged(old) if old else value
        self.live += inserted + revived
        self._dead -= revived

    def change(self, wanted: Sequence[int], changed: Callable[[int], int]) -> None:
        """Replace the values of present keys; a key whose value becomes 0 is removed."""
        keys, values, mask = self._keys, self._values, self._mask
        for key in without_zero(wanted):
            slot = key & mask
            found = keys[slot]
            while found and found != key:
                slot = (slot + 1) & mask
                found = keys[slot]
            old = values[slot]
            if not found or not old:
                continue
            value = changed(old)
            if value:
                values[slot] = value
            elif self.pinned:
                values[slot] = 0
                self.live -= 1
                self._dead += 1
            else:
                self._remove_at(slot)

    def reserve(self, more: int) -> None:
        """Make room for ``more`` new keys."""
        if self.has_room(more):
            return
        slots = _LEAST_SLOTS
        while self.live + more > slots * _FULL_RATIO:
            slots *= 2
        self._rebuild(slots)

    def has_room(self, more: int) -> bool:
        """Tell whether ``more`` new keys fit without a rebuild."""
        return self.live + self._dead + more <= self.slot_count * _FULL_RATIO

    def rewrite_values(self, start: int, stop: int, new_value_of: Values) -> None:
        """Map the values in a range of slots through a table; 0 makes a key absent."""
        part = self._values_view[start:stop]
        before = np.count_nonzero(part)
        part[:] = new_value_of[part]
        lost = int(before - np.count_nonzero(part))
        self.live -= lost
        self._dead += lost

    def used_values(self) -> Values:
        """Return the distinct values in use, 0 included."""
        seen = np.zeros(int(self._values_view.max()) + 1, dtype=bool)
        seen[self._values_view] = True  # no sort: this runs between requests
        return np.flatnonzero(seen).astype(np.uint32)

    def _remove_at(self, hole: int) -> None:
        """Empty a slot, shifting back those that were pushed past it."""
        keys, values, mask = self._keys, self._values, self._mask
        slot = hole
        while True:
            slot = (slot + 1) & mask
            key = keys[slot]
            if not key:
                break
            if (slot - key) & mask >= (slot - hole) & mask:
                keys[hole] = key
                values[hole] = values[slot]
                hole = slot
        keys[hole] = 0
        values[hole] = 0
        self.live -= 1

    def _allocate(self, slots: int) -> None:
        self._keys = array("Q", [0]) * slots
        self._values = array("I", [0]) * slots
        self._mask = slots - 1
        self._keys_view: Keys = _view(self._keys, np.uint64)
        self._values_view: Values = _view(self._values, np.uint32)

    def _rebuild(self, slots: int) -> None:
        """Move all live keys into arrays of another size.

        Sorted by home slot, the place of each key is the first free one at or after its
        home: a running maximum. Only what runs off the end is placed one by one.
        """
        alive = self._values_view != 0
        keys = self._keys_view[alive]
        values = self._values_view[alive]
        self._allocate(slots)
        self._dead = 0
        self.generation += 1
        homes = (keys & np.uint64(self._mask)).astype(np.int64)
        order = np.argsort(homes, kind="stable")
        rank = np.arange(keys.size)
        places = np.maximum.accumulate(homes[order] - rank) + rank
        inside = places < slots
        self._keys_view[places[inside]] = keys[order[inside]]
        self._values_view[places[inside]] = values[order[inside]]
        self.live = int(np.count_nonzero(inside))
        for i in order[~inside]:
            self.merge((int(keys[i]),), int(values[i]), int)


def _view(memory: "array[int]", kind: Any) -> npt.NDArray[Any]:  # noqa: ANN401 (a numpy type)
    return np.frombuffer(memory, dtype=kind)
