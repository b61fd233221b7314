"""The block pool of one rank: prefix hits, LRU eviction and the events they cause; pure.

Follows vLLM's pool: block 0 is never used; a running sequence pins its blocks; a finished one
gives them back last block first, those without a hash to the front of the free queue (used next)
and those with one to its tail; a block loses its hash only when it is taken for something else.
Equal blocks of concurrent sequences are not merged: each is announced, each is removed.
A capture of vLLM 0.32 pins the order (``tests/contract/test_engine_double_events.py``).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from tests.doubles.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

ROOT_HASH = 0x6E6561726B762D30


@dataclass(frozen=True, slots=True)
class CacheScope:
    """What besides tokens decides whether a block may be shared."""

    cache_salt: str | None = None
    lora_name: str | None = None
    lora_id: int | None = None

    def extra_keys(self, index: int) -> list[str] | None:
        """Return the extra keys of the block at ``index``; the salt counts on the first only."""
        keys = [self.lora_name] if self.lora_name else []
        if self.cache_salt and index == 0:
            keys.append(self.cache_salt)
        return keys or None


SHARED = CacheScope()


def chain_hashes(
    tokens: Sequence[int],
    *,
    block_size: int,
    known: Sequence[int] = (),
    scope: CacheScope = SHARED,
) -> list[int]:
    """Return the hash of every full block of ``tokens``, continuing after the ``known`` ones."""
    hashes = list(known)
    start = len(hashes) * block_size
    packed = array("I", tokens[start:]).tobytes()
    stride = 4 * block_size
    for offset in range(0, len(packed) - stride + 1, stride):
        extra = scope.extra_keys(len(hashes))
        parent = hashes[-1] if hashes else ROOT_HASH
        data = parent.to_bytes(8, "big") + packed[offset : offset + stride]
        hashes.append(xxhash.xxh3_64_intdigest(data + repr(extra).encode() if extra else data))
    return hashes


@dataclass(slots=True)
class BlockTable:
    """The tokens of one request and the blocks that hold them.

    ``tokens`` are all tokens known when the sequence is admitted; ``extend`` appends more.
    ``hashes`` may arrive filled in for the full blocks of ``tokens`` (they are not checked).
    """

    tokens: list[int]
    scope: CacheScope = SHARED
    hashes: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens found in either tier when the sequence was admitted."""
        return self.device_hit_tokens + self.host_hit_tokens


class HostTier:
    """An LRU of block hashes kept in host memory after they left the device."""

    def __init__(self, limit_blocks: int) -> None:
        self._limit = limit_blocks
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, value: int) -> bool:
        return value in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def touch(self, hashes: Iterable[int]) -> None:
        """Make ``hashes`` the most recently used."""
        for value in hashes:
            self._hashes.move_to_end(value)

    def offload(self, value: int) -> Iterator[Event]:
        """Keep ``value`` and yield the events of it, a placeholder store like vLLM's."""
        if self._limit == 0:
            return
        if value in self._hashes:
            self._hashes.move_to_end(value)
            return
        if len(self._hashes) >= self._limit:
            oldest, _ = self._hashes.popitem(last=False)
            yield BlockRemoved(hashes=(oldest,), medium="CPU", group_idx=None)
        self._hashes[value] = None
        yield BlockStored(
            hashes=(value,),
            parent=None,
            token_ids=[],
            block_size=0,
            medium="CPU",
            group_idx=None,
            kind=None,
        )

    def clear(self) -> None:
        """Forget everything."""
        self._hashes.clear()


class BlockCache:
    """Blocks of one rank's KV memory and the prefix index over them."""

    def __init__(self, *, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self._block_size = block_size
        self._usable = num_blocks - 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: list[int | None] = [None] * num_blocks
        self._holders: dict[int, list[int]] = {}
        self._host = HostTier(host_blocks)
        self._events: list[Event] = []

    @property
    def used_ratio(self) -> float:
        """Share of the usable blocks pinned by running sequences, 0 to 1."""
        return 1.0 - len(self._free) / self._usable

    @property
    def device_hashes(self) -> frozenset[int]:
        """Hashes a lookup would find on the device."""
        return frozenset(self._holders)

    def admit(self, table: BlockTable, *, report_full: bool = False, spare_blocks: int = 0) -> bool:
        """Pin the blocks of ``table.tokens``, reusing the cached prefix; False when out of room.

        The last token is never taken from the cache, since its logits are needed.
        ``report_full`` announces the reused blocks again (``kv_cache_report_mode: full``);
        ``spare_blocks`` must be left over to be admitted.
        """
        size = self._block_size
        table.hashes = chain_hashes(
            table.tokens, block_size=size, known=table.hashes, scope=table.scope
        )
        hits, host_hits = self._match(table.hashes[: (len(table.tokens) - 1) // size])
        needed = -(-len(table.tokens) // size) - len(hits)
        wanted = needed + spare_blocks
        if wanted + len(hits) > len(self._free) and wanted > self._free_besides(hits):
            return False
        self._pin(hits)
        self._host.touch(table.hashes[len(hits) : len(hits) + host_hits])
        table.block_ids = hits + self._take(needed)
        table.device_hit_tokens = len(hits) * size
        table.host_hit_tokens = host_hits * size
        self._store(table, 0 if report_full else len(hits), known=len(hits))
        return True

    def extend(self, table: BlockTable, tokens: Sequence[int]) -> bool:
        """Append computed ``tokens``; False, with nothing changed, when out of room."""
        size = self._block_size
        total = len(table.tokens) + len(tokens)
        missing = -(-total // size) - len(table.block_ids)
        if missing > len(self._free):
            return False
        if missing > 0:
            table.block_ids += self._take(missing)
        table.tokens.extend(tokens)
        known = len(table.hashes)
        if total // size > known:
            table.hashes = chain_hashes(
                table.tokens, block_size=size, known=table.hashes, scope=table.scope
            )
            self._store(table, known, known=known)
        return True

    def release(self, table: BlockTable) -> None:
        """Unpin the blocks of a finished sequence; harmless when it holds none."""
        for block in reversed(table.block_ids):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)
        table.block_ids = []

    def clear(self) -> bool:
        """Forget all cached blocks; False while a sequence is running, as in vLLM."""
        if len(self._free) != self._usable:
            return False
        self._holders.clear()
        self._host.clear()
        self._hash_of = [None] * len(self._hash_of)
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _match(self, hashes: Sequence[int]) -> tuple[list[int], int]:
        hits: list[int] = []
        for value in hashes:
            holders = self._holders.get(value)
            if holders is None:
                break
            hits.append(holders[0])
        host_hits = 0
        for value in hashes[len(hits) :]:
            if value not in self._host:
                break
            host_hits += 1
        return hits, host_hits

    def _free_besides(self, hits: Sequence[int]) -> int:
        return len(self._free) - sum(self._references[block] == 0 for block in hits)

    def _pin(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def _take(self, count: int) -> list[int]:
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            if self._hash_of[block] is not None:
                self._evict(block)
        return taken

    def _evict(self, block: int) -> None:
        value = self._hash_of[block]
        assert value is not None
        holders = self._holders[value]
        holders.remove(block)
        if not holders:
            del self._holders[value]
        self._hash_of[block] = None
        self._events += self._host.offload(value)
        self._events.append(BlockRemoved(hashes=(value,)))

    def _store(self, table: BlockTable, start: int, *, known: int) -> None:
        """Index the full blocks from ``known`` and announce those from ``start``."""
        end = len(table.hashes)
        for index in range(known, end):
            block, value = table.block_ids[index], table.hashes[index]
            self._hash_of[block] = value
            self._holders.setdefault(value, []).append(block)
        if start == end:
            return
        size = self._block_size
        self._events.append(
            BlockStored(
                hashes=tuple(table.hashes[start:end]),
                parent=table.hashes[start - 1] if start else None,
                token_ids=table.tokens[start * size : end * size],
                block_size=size,
                lora_id=table.scope.lora_id,
                lora_name=table.scope.lora_name,
                extra_keys=[table.scope.extra_keys(index) for index in range(start, end)],
            )
        )
