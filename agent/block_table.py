"""The block table: which blocks one engine holds, by our own keys (pure).

Fed with KV events, it resolves the engine's opaque handles to block keys and reports what
was added and removed per tier. Three rules come from how engines behave
(reference/vllm.md 1.3, 1.6):

- A store is a set insertion, not a count: engines repeat stores. A removal for
  (handle, medium, group) wins.
- A store whose parent is unknown is an *orphan*: it is kept until the parent shows up,
  since there is no snapshot to ask for.
- A store without tokens says that known blocks were copied to another tier.

Memory is bounded: whoever owns the table has the least used blocks evicted in time; beyond the
limit new ones are refused. Both are counted, and the table becomes a lower bound (fewer hits),
never a wrong answer.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nearkv.agent.block_runs import BlockRuns
from nearkv.agent.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Handle
from nearkv.block_keys import KeyNamespace, chain_keys, fold_extra, pack_tokens, root_key

BYTES_PER_BLOCK = 360
"""Measured cost of one entry: two integers of 64 bits and a slot in each of two dicts.

It is what a table comes to after long churn, when the dicts have their most room to spare; a
fresh one takes about half."""
_BYTES_PER_ORPHAN_TOKEN = 36
_BYTES_PER_WAITING = 400
"""Of a block in another tier whose tokens are not known yet."""
_EVICTED_AT_ONCE = 256
_MOST_PLACES = 64
"""Engines have a few tiers and groups. Each look-up of a parent goes through all of them, and
each tier is a label of metrics."""

_Place = tuple[str, int]  # medium, KV group


@dataclass(slots=True)
class BlockChanges:
    """What a run of events changed, the last word on each key winning.

    ``tiers`` maps a tier to ``{key: present}``. ``cleared`` comes before all of it.
    """

    cleared: bool = False
    tiers: dict[str, dict[int, bool]] = field(default_factory=dict)

    def add(self, tier: str, keys: Iterable[int]) -> None:
        """Note keys as present."""
        self.tiers.setdefault(tier, {}).update(dict.fromkeys(keys, True))

    def remove(self, tier: str, keys: Iterable[int]) -> None:
        """Note keys as absent."""
        self.tiers.setdefault(tier, {}).update(dict.fromkeys(keys, False))

    def clear(self) -> None:
        """Forget everything noted: all tiers are empty now."""
        self.cleared = True
        self.tiers.clear()

    def __bool__(self) -> bool:
        """Tell whether anything changed."""
        return self.cleared or any(self.tiers.values())


@dataclass(slots=True)
class TableCounts:
    """What the table could not use, since its start."""

    refused: int = 0
    evicted: int = 0
    bad_tokens: int = 0
    orphans_dropped: int = 0
    unknown_removed: int = 0
    unresolved_tier: int = 0


class BlockTable:
    """Blocks of one engine (one data-parallel rank of it)."""

    __slots__ = (
        "_key_model",
        "_limit_blocks",
        "_now",
        "_orphan_limit_tokens",
        "_orphan_places",
        "_orphan_tokens",
        "_orphans",
        "_places",
        "_runs",
        "_secret",
        "_waiting_tiers",
        "block_size",
        "counts",
        "uses",
    )

    def __init__(
        self, *, key_model: str, secret: bytes = b"", limit_bytes: int = 256 << 20
    ) -> None:
        self._key_model = key_model
        self._secret = secret
        self._limit_blocks = max(1, limit_bytes // BYTES_PER_BLOCK)
        self._orphan_limit_tokens = max(1, limit_bytes // 4 // _BYTES_PER_ORPHAN_TOKEN)
        self._places: dict[_Place, dict[Handle, int]] = {}
        self._runs = BlockRuns()
        self._now = 0.0
        self._orphans: dict[Handle, list[BlockStored]] = {}
        self._orphan_places: dict[tuple[str, int, Handle], bool] = {}
        self._orphan_tokens = 0
        self._waiting_tiers: dict[Handle, set[_Place]] = {}
        self.block_size: int | None = None
        self.counts = TableCounts()
        self.uses: dict[int, int] = {}
        """How often something was stored right below a key; put in a key to have it counted."""

    def apply(self, events: Iterable[Event], changes: BlockChanges, now: float = 0.0) -> None:
        """Apply events in order, noting in ``changes`` what they did.

        ``now`` is when blocks were used that the events speak of, in monotonic seconds.
        """
        self._now = now
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, changes)
            elif isinstance(event, BlockRemoved):
                self._remove(event, changes)
            elif isinstance(event, AllBlocksCleared):
                self.clear()
                changes.clear()

    def clear(self) -> None:
        """Forget every block and orphan."""
        self._places.clear()
        self._runs.clear()
        self._orphans.clear()
        self._orphan_places.clear()
        self._orphan_tokens = 0
        self._waiting_tiers.clear()

    @property
    def limit_bytes(self) -> int:
        """Memory that blocks may take."""
        return self._limit_blocks * BYTES_PER_BLOCK

    @property
    def block_count(self) -> int:
        """Entries over all tiers and groups."""
        return sum(map(len, self._places.values()))

    @property
    def orphan_count(self) -> int:
        """Blocks waiting for their parent."""
        return len(self._orphan_places)

    @property
    def has_guests(self) -> bool:
        """Tell whether something is kept that is of no use until more is known."""
        return bool(self._orphans or self._waiting_tiers)

    @property
    def estimated_bytes(self) -> int:
        """Memory held, by measured cost per entry."""
        return (
            self.block_count * BYTES_PER_BLOCK
            + self._orphan_tokens * _BYTES_PER_ORPHAN_TOKEN
            + len(self._waiting_tiers) * _BYTES_PER_WAITING
        )

    @property
    def oldest_use_at(self) -> float | None:
        """When the blocks were used that would be evicted first; ``None`` where there are none."""
        return self._runs.oldest_use_at

    def evict(self, free_bytes: int, changes: BlockChanges) -> int:
        """Give up orphans, then some blocks of the chain used least; returns the bytes freed.

        Blocks go from all tiers together. Call it again until enough is freed, or nothing is.
        """
        if self.has_guests:
            return self._drop_guests()
        handles = self._runs.evict(min(_EVICTED_AT_ONCE, -(-free_bytes // BYTES_PER_BLOCK)))
        freed = 0
        for (medium, _group), blocks in self._places.items():
            keys = [blocks.pop(handle) for handle in handles if handle in blocks]
            changes.remove(medium, keys)
            freed += len(keys)
        self.counts.evicted += freed
        return freed * BYTES_PER_BLOCK

    def _drop_guests(self) -> int:
        """Give up orphans, and tiers of blocks that are not known; returns the bytes freed."""
        freed = self._orphan_tokens * _BYTES_PER_ORPHAN_TOKEN
        freed += len(self._waiting_tiers) * _BYTES_PER_WAITING
        self.counts.orphans_dropped += len(self._orphan_places)
        self.counts.refused += len(self._waiting_tiers)
        self._waiting_tiers.clear()
        self._orphans.clear()
        self._orphan_places.clear()
        self._orphan_tokens = 0
        return freed

    def keys_by_tier(self) -> dict[str, list[int]]:
        """Return the keys held, by tier; a key may stand twice where groups share it."""
        tiers: dict[str, list[int]] = {}
        for (medium, _group), blocks in self._places.items():
            tiers.setdefault(medium, []).extend(blocks.values())
        return tiers

    def blocks_by_tier(self) -> dict[str, int]:
        """Return how many entries each tier holds."""
        tiers: dict[str, int] = {}
        for (medium, _group), blocks in self._places.items():
            tiers[medium] = tiers.get(medium, 0) + len(blocks)
        return tiers

    def _store(self, event: BlockStored, changes: BlockChanges) -> None:
        if not event.token_ids:
            self._gain_tier(event, changes)
            return
        try:
            packed = pack_tokens(event.token_ids)
        except ValueError:
            self.counts.bad_tokens += len(event.handles)
            return
        if self.block_size is None:
            self.block_size = event.block_size
        parent: int | None = None
        if event.parent is not None:
            parent = self._find_key(event.parent, (event.medium, event.group))
            if parent is None:
                self._keep_orphan(event)
                return
            if parent in self.uses:
                self.uses[parent] += 1
        keys = self._chain(event, packed, parent)
        held = dict(zip(event.handles, keys, strict=True))
        if self._orphan_places:
            for handle in held:
                self._orphan_places.pop((event.medium, event.group, handle), None)
        if self._insert(event, held, changes):
            self._fill_waiting_tiers(event.handles, keys, changes)
            self._adopt_orphans(event.handles, keys, changes)

    def _insert(self, event: BlockStored, held: dict[Handle, int], changes: BlockChanges) -> bool:
        """Insert those of an event's blocks that are ``held``; False where there is no room.

        A handle that is known keeps its key: engines name one content by one handle.
        """
        blocks = self._place((event.medium, event.group))
        if blocks is None:
            self.counts.refused += len(held)
            return False
        if self.block_count + len(held) > self._limit_blocks:
            new = sum(handle not in blocks for handle in held)
            if self.block_count + new > self._limit_blocks:
                self.counts.refused += new
                return False
        if not blocks.keys().isdisjoint(held):
            held = {handle: blocks.get(handle, key) for handle, key in held.items()}
        blocks.update(held)
        if held:
            self._runs.add(list(held), event.parent, self._now)
        changes.add(event.medium, held.values())
        return True

    def _place(self, place: _Place) -> dict[Handle, int] | None:
        """Return the blocks of a place; ``None`` where there are too many places to have more."""
        blocks = self._places.get(place)
        if blocks is not None:
            return blocks
        if len(self._places) >= _MOST_PLACES:
            self._places = {name: held for name, held in self._places.items() if held}
            if len(self._places) >= _MOST_PLACES:
                return None
        return self._places.setdefault(place, {})

    def _chain(self, event: BlockStored, packed: bytes, parent: int | None) -> list[int]:
        """Return the keys of an event's blocks below ``parent``, their parent block's key."""
        if event.extra_keys is not None:
            return self._chain_with_extra(event, packed, parent)
        if parent is None:
            parent = root_key(KeyNamespace(self._key_model, event.lora), self._secret)
        return chain_keys(parent, packed, event.block_size)

    def _chain_with_extra(self, event: BlockStored, packed: bytes, parent: int | None) -> list[int]:
        """Chain keys block by block where blocks carry more than tokens."""
        step = len(packed) // len(event.handles)
        extras = event.extra_keys or []
        keys = []
        for i in range(len(event.handles)):
            salt, rest = _split_extra(
                extras[i] if i < len(extras) else None, event, first=parent is None
            )
            if parent is None:
                parent = root_key(KeyNamespace(self._key_model, event.lora, salt), self._secret)
            (parent,) = chain_keys(parent, packed[i * step : (i + 1) * step], event.block_size)
            if rest:
                parent = fold_extra(parent, msgspec.msgpack.encode(rest))
            keys.append(parent)
        return keys

    def _find_key(self, handle: Handle, place: _Place) -> int | None:
        """Look a handle up, in its own place first."""
        key = self._places.get(place, {}).get(handle)
        if key is not None:
            return key
        return next((held[handle] for held in self._places.values() if handle in held), None)

    def _remove(self, event: BlockRemoved, changes: BlockChanges) -> None:
        place = (event.medium, event.group)
        blocks = self._places.get(place, {})
        other_groups = [
            others
            for (medium, group), others in self._places.items()
            if medium == event.medium and group != event.group
        ]
        removed = []
        for handle in event.handles:
            key = blocks.pop(handle, None)
            if key is not None and self._is_gone(handle):
                self._runs.remove(handle, self._now)
            waited = self._remove_waiting(place, handle)
            if key is None:
                self.counts.unknown_removed += not waited
            elif not any(handle in others for others in other_groups):
                removed.append(key)
        changes.remove(event.medium, removed)

    def _is_gone(self, handle: Handle) -> bool:
        """Tell whether a block is held in no place."""
        return not any(handle in held for held in self._places.values())

    def _remove_waiting(self, place: _Place, handle: Handle) -> bool:
        """Remove a block that is still an orphan, or waits for its tokens; tell if it did."""
        found = False
        if (*place, handle) in self._orphan_places:
            self._orphan_places[*place, handle] = False
            found = True
        waiting = self._waiting_tiers.get(handle)
        if waiting and place in waiting:
            waiting.remove(place)
            if not waiting:
                del self._waiting_tiers[handle]
            found = True
        return found

    def _gain_tier(self, event: BlockStored, changes: BlockChanges) -> None:
        place = (event.medium, event.group)
        for handle in event.handles:
            key = self._find_key(handle, place)
            if key is not None:
                self._copy(handle, key, place, changes)
            elif self._wait_for_tokens(handle, place):
                self.counts.unresolved_tier += 1
            else:
                self.counts.refused += 1

    def _wait_for_tokens(self, handle: Handle, place: _Place) -> bool:
        """Keep a tier of a block that is not known; False where there is no room."""
        places = self._waiting_tiers.get(handle, set())
        if len(places) >= _MOST_PLACES or len(self._waiting_tiers) >= self._limit_blocks:
            return False
        self._waiting_tiers.setdefault(handle, places).add(place)
        return True

    def _fill_waiting_tiers(
        self, handles: Iterable[Handle], keys: Iterable[int], changes: BlockChanges
    ) -> None:
        if self._waiting_tiers:
            for handle, key in zip(handles, keys, strict=True):
                for place in self._waiting_tiers.pop(handle, ()):
                    self._copy(handle, key, place, changes)

    def _copy(self, handle: Handle, key: int, place: _Place, changes: BlockChanges) -> None:
        """Note a known block in another place, if there is room."""
        blocks = self._place(place)
        if blocks is None or (handle not in blocks and self.block_count >= self._limit_blocks):
            self.counts.refused += 1
            return
        blocks[handle] = key
        changes.add(place[0], (key,))

    def _keep_orphan(self, event: BlockStored) -> None:
        assert event.parent is not None  # noqa: S101 (only then can a parent be unknown)
        places = [(event.medium, event.group, handle) for handle in event.handles]
        if not all(place in self._orphan_places for place in places):
            if self._orphan_tokens + len(event.token_ids) > self._orphan_limit_tokens:
                self.counts.orphans_dropped += len(event.handles)
                return
            self._orphan_tokens += len(event.token_ids)
            self._orphans.setdefault(event.parent, []).append(event)
        self._orphan_places.update(dict.fromkeys(places, True))

    def _adopt_orphans(self, handles: list[Handle], keys: list[int], changes: BlockChanges) -> None:
        """Insert the orphans below newly known blocks, and those below them in turn.

        A parent serves even if it was itself removed while it was an orphan: its key is
        what its children need, not its presence.
        """
        if not self._orphans:
            return
        parents = deque(zip(handles, keys, strict=True))
        while parents and self._orphans:
            handle, key = parents.popleft()
            for orphan in self._orphans.pop(handle, ()):
                self._orphan_tokens -= len(orphan.token_ids)
                orphan_keys = self._chain(orphan, pack_tokens(orphan.token_ids), key)
                # What was removed meanwhile stays out, and what another event brought in
                # already may have been removed since: each orphan block is placed once.
                held = {
                    handle: orphan_key
                    for handle, orphan_key in zip(orphan.handles, orphan_keys, strict=True)
                    if self._orphan_places.pop((orphan.medium, orphan.group, handle), False)
                }
                if self._insert(orphan, held, changes):
                    self._fill_waiting_tiers(orphan.handles, orphan_keys, changes)
                    parents.extend(zip(orphan.handles, orphan_keys, strict=True))


def _split_extra(extra: Any, event: BlockStored, *, first: bool) -> tuple[str, list[Any]]:  # noqa: ANN401 (foreign data)
    """Split a block's extra keys into cache salt and all that is neither salt nor LoRA.

    Engines send bare values: the LoRA name on every block, the salt on the first one.
    """
    rest = list(extra) if isinstance(extra, list) else []
    if event.lora in rest:
        rest.remove(event.lora)  # only once: a salt may be the same text
    if first and len(rest) == 1 and isinstance(rest[0], str):
        return rest[0], []
    return "", rest
