"""The global prefix index: which engines hold which block, over all engines (pure).

A table from block key to a set of *slots*. A slot is one generation of one engine's one
tier: a restart or a new snapshot opens new slots, so what was before can neither mix with
it nor linger. Closing a slot takes it out of the live mask, which is instant whatever its
size; its bits are swept out of the table later, in slices that stall nobody.

Sets of slots are few, so each gets a number, and a block costs its key and that number
(see ``key_table``). Along a prompt the number rarely changes, which makes matching a matter
of a few runs. Memory is bounded: beyond the limit new keys are refused and counted. Refusing
the newest keeps the roots of chains, without which nothing below them can match.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nearkv.ingress.key_table import KeyTable, as_keys, capacity_within

_FOLD_LIMIT = 1 << 16
_FEW_BLOCKS = 32
_NO_KEYS = as_keys(())
_FIRST_CHUNK = 256
_CHUNK_BLOCKS = 4096
_SWEEP_SLOTS = 1 << 16
_SPARE_SETS = 1024


@dataclass(frozen=True, slots=True)
class IndexSize:
    """How large the index is and may become."""

    blocks: int
    estimated_bytes: int
    limit_bytes: int
    refused: int
    slots: int


class PrefixIndex:
    """Block key to slots, with longest-prefix match."""

    def __init__(self, *, limit_bytes: int = 1 << 30) -> None:
        self._table = KeyTable()
        self._masks: list[int] = [0]
        self._number_of: dict[int, int] = {0: 0}
        self._spare_numbers: list[int] = []
        self._sets_kept = 0
        self._limit_bytes = limit_bytes
        self._limit_blocks = capacity_within(limit_bytes)
        self._refused = 0
        self._live = 0
        self._dead = 0
        self._opened = 0
        self._free: list[int] = []
        self._extra_of: dict[int, int] = {}
        self._folded: dict[int, int] = {}
        self._unions: dict[int, tuple[int, Callable[[int], int]]] = {}

    @property
    def size(self) -> IndexSize:
        """Return the present size."""
        return IndexSize(
            blocks=self._table.live,
            estimated_bytes=self._table.size_bytes,
            limit_bytes=self._limit_bytes,
            refused=self._refused,
            slots=self._opened - len(self._free),
        )

    # -- Slots -------------------------------------------------------------------------

    def open_slot(self) -> int:
        """Return a new slot; it counts in matches only once it is activated."""
        if self._free:
            return self._free.pop()
        self._opened += 1
        return self._opened - 1

    def activate(self, slot: int) -> None:
        """Let a slot count in matches."""
        self._live |= 1 << slot

    def close_slot(self, slot: int) -> None:
        """Take a slot out of all matches at once; its memory goes with the next sweep."""
        bit = 1 << slot
        self._live &= ~bit
        self._dead |= bit
        self._unions.pop(slot, None)
        self._unlink(slot)

    def link_tier(self, slot: int, extra: int) -> None:
        """Let blocks in ``extra`` continue the prefix of ``slot``: same engine, other tier."""
        self._extra_of[slot] = self._extra_of.get(slot, 0) | 1 << extra
        self._folded.clear()

    def _unlink(self, slot: int) -> None:
        if not self._extra_of:
            return
        self._extra_of.pop(slot, None)
        keep = ~(1 << slot)
        self._extra_of = {
            primary: extras & keep for primary, extras in self._extra_of.items() if extras & keep
        }
        self._folded.clear()

    # -- Blocks ------------------------------------------------------------------------

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """Note that a slot holds these keys."""
        if not self._table.has_room(len(keys)):
            keys = self._make_room(keys)
        alone, union = self._unions.get(slot) or self._open_union(slot)
        self._table.merge(keys, alone, union)

    def _open_union(self, slot: int) -> tuple[int, Callable[[int], int]]:
        """Return the number of the set {slot}, and what joins the slot to other sets."""
        bit = 1 << slot
        joined: dict[int, int] = {}

        def union(number: int) -> int:
            merged = joined.get(number)
            if merged is None:
                merged = joined[number] = self._number(self._masks[number] | bit)
            return merged

        self._unions[slot] = (self._number(bit), union)
        return self._unions[slot]

    def remove(self, slot: int, keys: Sequence[int]) -> None:
        """Note that a slot no longer holds these keys."""
        keep = ~(1 << slot)
        self._table.change(keys, lambda number: self._number(self._masks[number] & keep))

    def _make_room(self, keys: Sequence[int]) -> Sequence[int]:
        """Grow the table for those keys that are new; at the limit, leave some of them out."""
        known = self._table.find(keys) != 0
        room = self._limit_blocks - self._table.live
        new = len(keys) - int(np.count_nonzero(known))
        if new > room:
            self._refused += new - room
            fits = known | (np.cumsum(~known) <= room)
            keys = [key for key, kept in zip(keys, fits, strict=True) if kept]
        self._table.reserve(min(new, room))
        return keys

    def sweep(self) -> Iterator[None]:
        """Take closed slots' bits out of the index, yielding between slices.

        Run it to the end now and then, one at a time; several closed slots cost one pass.
        """
        dead = self._dead
        if not dead:
            self._recycle_numbers()
            return
        table = self._table
        table.pinned = True
        try:
            swept = -1
            while swept != table.generation:  # a table rebuilt meanwhile is gone through again
                swept = table.generation
                for start in range(0, table.slot_count, _SWEEP_SLOTS):
                    if swept != table.generation:
                        break
                    table.rewrite_values(start, start + _SWEEP_SLOTS, self._numbers_without(dead))
                    yield
        finally:
            table.pinned = False
        self._dead &= ~dead
        self._free.extend(slot for slot in range(self._opened) if dead >> slot & 1)
        self._recycle_numbers()

    def _numbers_without(self, slots: int) -> "np.typing.NDArray[np.uint32]":
        """Return a table from each set's number to that of the set without ``slots``."""
        count = len(self._masks)
        return np.array(
            [self._number(self._masks[i] & ~slots) for i in range(count)], dtype=np.uint32
        )

    def _recycle_numbers(self) -> None:
        """Free the numbers of sets that no block has any more, once they may be many again."""
        if len(self._number_of) < max(_SPARE_SETS, 2 * self._sets_kept):
            return
        self._unions.clear()  # they remember numbers
        used = set(self._table.used_values().tolist()) | {0}
        for mask, number in list(self._number_of.items()):
            if number not in used:
                del self._number_of[mask]
                self._masks[number] = 0
                self._spare_numbers.append(number)
        self._sets_kept = len(self._number_of)

    def _number(self, mask: int) -> int:
        """Return the number of a set of slots."""
        number = self._number_of.get(mask)
        if number is None:
            if self._spare_numbers:
                number = self._spare_numbers.pop()
                self._masks[number] = mask
            else:
                number = len(self._masks)
                self._masks.append(mask)
            self._number_of[mask] = number
        return number

    @property
    def needs_sweep(self) -> bool:
        """Tell whether closed slots wait for a sweep."""
        return bool(self._dead)

    # -- Matching ----------------------------------------------------------------------

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        """Return how many leading blocks of ``keys`` each slot holds; slots with none are left out.

        With tiers linked, an engine's depth stands under its primary slot. Cost is linear
        in the deepest match, not in the prompt: a miss costs one look-up.
        """
        depths: dict[int, int] = {}
        alive = self._live
        if not alive:
            return depths
        for start, number in self._runs_along(keys):
            held = alive & self._fold(self._masks[number])
            if held != alive:
                _record(depths, alive ^ held, start)
                if not held:
                    return depths
                alive = held
        _record(depths, alive, len(keys))
        return depths

    def _runs_along(self, keys: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (start, set number) of each run of blocks: a few singly, the rest by numpy."""
        previous = -1
        few = self._table.find_few(keys[:_FEW_BLOCKS])
        for start, number in enumerate(few):
            if number != previous:
                yield start, number
                previous = number
        sought = as_keys(keys) if len(keys) > _FEW_BLOCKS else _NO_KEYS
        start, chunk = _FEW_BLOCKS, _FIRST_CHUNK
        while start < sought.size:
            numbers = self._table.find(sought[start : start + chunk])
            changes = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
            yield start, int(numbers[0])
            for change in changes.tolist():
                yield start + change, int(numbers[change])
            start += numbers.size
            chunk = _CHUNK_BLOCKS

    def _fold(self, mask: int) -> int:
        """Give each engine's primary bit to masks that hold any of its tiers."""
        if not self._extra_of:
            return mask
        folded = self._folded.get(mask)
        if folded is None:
            folded = mask
            for primary, extras in self._extra_of.items():
                if mask & extras:
                    folded |= 1 << primary
            if len(self._folded) >= _FOLD_LIMIT:
                self._folded.clear()
            self._folded[mask] = folded
        return folded


def _record(depths: dict[int, int], slots: int, depth: int) -> None:
    """Note ``depth`` for each bit in ``slots``; nothing is noted for depth 0."""
    if not depth:
        return
    while slots:
        low = slots & -slots
        depths[low.bit_length() - 1] = depth
        slots ^= low
