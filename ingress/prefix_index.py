"""The global prefix index: which engines hold which block, over all engines (pure).

A dict from block key to a bitmask of *slots*. A slot is one generation of one engine's one
tier: a restart or a new snapshot opens new slots, so what was before can neither mix with
it nor linger. Closing a slot takes it out of the live mask, which is instant whatever its
size; its bits are swept out of the dict later, in slices that stall nobody.

Equal masks are one object, so a block costs its key and a dict entry, and a run of blocks
held by the same engines is compared by identity. Memory is bounded: beyond the limit new
keys are refused and counted. Refusing the newest keeps the roots of chains, without which
nothing below them can match.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

BYTES_PER_BLOCK = 96
"""Cost of one key: a 64-bit integer (48), a dict entry and its share of the hash table."""
_INTERN_LIMIT = 1 << 16
_CHUNK_BLOCKS = 64
_SWEEP_BLOCKS = 2048


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
        self._masks: dict[int, int] = {}
        self._interned: dict[int, int] = {}
        self._limit_bytes = limit_bytes
        self._limit_blocks = max(1, limit_bytes // BYTES_PER_BLOCK)
        self._refused = 0
        self._live = 0
        self._dead = 0
        self._opened = 0
        self._free: list[int] = []
        self._extra_of: dict[int, int] = {}
        self._folded: dict[int, int] = {}

    @property
    def size(self) -> IndexSize:
        """Return the present size."""
        return IndexSize(
            blocks=len(self._masks),
            estimated_bytes=len(self._masks) * BYTES_PER_BLOCK,
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
        masks = self._masks
        room = self._limit_blocks - len(masks)
        bit = self._intern(1 << slot)
        get = masks.get
        full = room < len(keys)
        for key in keys:
            held = get(key)
            if held is None:
                if full and len(masks) >= self._limit_blocks:
                    self._refused += 1
                else:
                    masks[key] = bit
            elif not held & bit:
                masks[key] = self._intern(held | bit)

    def remove(self, slot: int, keys: Sequence[int]) -> None:
        """Note that a slot no longer holds these keys."""
        masks = self._masks
        bit = 1 << slot
        for key in keys:
            held = masks.get(key)
            if held is None or not held & bit:
                continue
            if held == bit:
                del masks[key]
            else:
                masks[key] = self._intern(held ^ bit)

    def sweep(self) -> Iterator[None]:
        """Take closed slots' bits out of the index, yielding between slices.

        Run it to the end now and then; several closed slots cost one pass.
        """
        dead = self._dead
        if not dead:
            return
        masks = self._masks
        keys = iter(list(masks))
        while part := list(islice(keys, _SWEEP_BLOCKS)):
            for key in part:
                held = masks.get(key)
                if held is None or not held & dead:
                    continue
                if left := held & ~dead:
                    masks[key] = self._intern(left)
                else:
                    del masks[key]
            yield
        self._dead &= ~dead
        self._free.extend(slot for slot in range(self._opened) if dead >> slot & 1)

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
        alive = self._live
        depths: dict[int, int] = {}
        if not alive:
            return depths
        get = self._masks.get
        previous: int | None = -1  # equal to no mask, and no missing key
        depth = 0
        end = len(keys)
        chunk = 1
        while depth < end:
            masks: list[int | None] = list(map(get, keys[depth : depth + chunk]))
            if masks.count(previous) == len(masks):
                depth += len(masks)
                continue
            for mask in masks:
                if mask is not previous:
                    previous = mask
                    held = alive & self._fold(mask) if mask is not None else 0
                    if held != alive:
                        _record(depths, alive ^ held, depth)
                        if not held:
                            return depths
                        alive = held
                depth += 1
            chunk = _CHUNK_BLOCKS
        _record(depths, alive, depth)
        return depths

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
            if len(self._folded) >= _INTERN_LIMIT:
                self._folded.clear()
            self._folded[mask] = folded
        return folded

    def _intern(self, mask: int) -> int:
        if len(self._interned) >= _INTERN_LIMIT:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)


def _record(depths: dict[int, int], slots: int, depth: int) -> None:
    """Note ``depth`` for each bit in ``slots``; nothing is noted for depth 0."""
    if not depth:
        return
    while slots:
        low = slots & -slots
        depths[low.bit_length() - 1] = depth
        slots ^= low
