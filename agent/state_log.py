"""The log of changes that an agent serves (pure): snapshot, deltas, cursors.

Changes are collected, then sealed into one encoded delta. Encoded deltas stay in a ring
bounded in bytes; that ring is the only queue there is: a consumer is a cursor into it, and
one whose cursor has fallen out of it gets a new snapshot, never a gap.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from nearkv.agent.block_table import BlockChanges
from nearkv.agent.published_paths import PublishedPaths
from nearkv.block_keys import pack_keys
from nearkv.state.codec import KEYS_PER_FRAME, MAX_FRAME_BYTES, encode_frame
from nearkv.state.model import (
    BlockChange,
    Blocks,
    Cursor,
    Delta,
    EngineGauges,
    EngineInfo,
    Heartbeat,
    PathClasses,
    PathReading,
    SnapshotBegin,
    SnapshotEnd,
    TransferInfo,
)

TransferOf = Callable[[EngineInfo], TransferInfo | None]
"""Says how an engine's KV can move; asked for each info that is published."""


BlockObserver = Callable[[str, BlockChanges], None]
"""Takes an engine's id and what has changed of its blocks."""


def no_transfer(_info: EngineInfo) -> None:
    """Say that nothing moves, where transfer is off."""


@dataclass(slots=True)
class _Pending:
    info: EngineInfo | None = None
    gauges: EngineGauges | None = None
    blocks: BlockChanges | None = None


class StateLog:
    """Collects changes of all engines of a node and seals them into deltas."""

    def __init__(
        self,
        *,
        boot: str,
        node: str,
        version: str,
        ring_limit_bytes: int = 32 << 20,
        transfer_of: TransferOf = no_transfer,
    ) -> None:
        self._boot = boot
        self._node = node
        self._version = version
        self._epoch = 0
        self._seq = 0
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0
        self._ring_limit_bytes = ring_limit_bytes
        self._sealed_bytes = 0
        self._is_urgent = False
        self._infos: dict[str, EngineInfo] = {}
        self._gauges: dict[str, EngineGauges] = {}
        self._pending: dict[str, _Pending] = {}
        self._gone: list[str] = []
        self._published = PublishedPaths()
        self._transfer_of = transfer_of
        self._observers: list[BlockObserver] = []

    def observe_blocks(self, observer: BlockObserver) -> None:
        """Have an observer told of each engine's changes of blocks when they are sealed."""
        self._observers.append(observer)

    @property
    def cursor(self) -> Cursor:
        """The place behind the last sealed delta."""
        return Cursor(self._boot, self._epoch, self._seq)

    @property
    def infos(self) -> dict[str, EngineInfo]:
        """What is published of each engine."""
        return self._infos

    @property
    def gauges(self) -> dict[str, EngineGauges]:
        """The last reading published of each engine."""
        return self._gauges

    @property
    def ring_bytes(self) -> int:
        """Bytes of encoded deltas kept for consumers to catch up from."""
        return self._ring_bytes

    @property
    def sealed_bytes(self) -> int:
        """Bytes of all deltas so far."""
        return self._sealed_bytes

    @property
    def ring_limit_bytes(self) -> int:
        """How many bytes of deltas are kept at most."""
        return self._ring_limit_bytes

    @property
    def is_urgent(self) -> bool:
        """Tell whether what is collected must not wait: an engine's state or incarnation."""
        return self._is_urgent

    @property
    def has_pending(self) -> bool:
        """Tell whether :meth:`seal` would make a delta."""
        return bool(self._pending or self._gone or self._has_pending_paths)

    @property
    def _has_pending_paths(self) -> bool:
        return bool(self._published.pending or self._published.pending_classes)

    @property
    def paths(self) -> dict[tuple[str, str], PathReading]:
        """The path costs published, by (source node, target node)."""
        return self._published.readings

    @property
    def path_classes(self) -> PathClasses | None:
        """Where the node is and what classes of distance cost, as published."""
        return self._published.classes

    def measured_at(self, source: str, target: str) -> float | None:
        """Return when a pair was measured (monotonic), as far as is published."""
        return self._published.measured_at((source, target))

    def put_info(self, info: EngineInfo) -> None:
        """Publish what an engine is, and how its KV can move, if that is news."""
        info = msgspec.structs.replace(info, transfer=self._transfer_of(info))
        known = self._infos.get(info.id)
        if known != info:
            if known is not None and known.incarnation != info.incarnation:
                # Consumers drop the old incarnation's reading; the next one is news.
                self._gauges.pop(info.id, None)
                self._of(info.id).gauges = None
                self._is_urgent = True
            elif known is not None and known.state is not info.state:
                self._is_urgent = True
            self._infos[info.id] = info
            self._of(info.id).info = info

    def refresh_info(self, engine: str) -> None:
        """Publish an engine anew after its transfer changed; unknown ones are passed over."""
        info = self._infos.get(engine)
        if info is not None:
            self.put_info(info)

    def put_path(self, reading: PathReading, now: float) -> None:
        """Publish what moving KV between two nodes costs, if that is news."""
        self._published.put(reading, now)

    def put_path_classes(self, classes: PathClasses, now: float) -> None:
        """Publish where the node is, and what classes of distance cost, if that is news."""
        self._published.put_classes(classes, now)

    def drop_path(self, source: str, target: str) -> None:
        """Stop telling new consumers of a pair; those who know it keep what they know."""
        self._published.drop((source, target))

    def put_gauges(self, gauges: EngineGauges) -> None:
        """Publish a reading; one equal to the last but for its age makes no delta."""
        known = self._gauges.get(gauges.id)
        self._gauges[gauges.id] = gauges
        if known is None or not known.same_reading(gauges):
            self._of(gauges.id).gauges = gauges

    def blocks_of(self, engine: str) -> BlockChanges:
        """Return the collector for an engine's block changes."""
        pending = self._of(engine)
        if pending.blocks is None:
            pending.blocks = BlockChanges()
        return pending.blocks

    def drop_engine(self, engine: str) -> None:
        """Publish that an engine is gone for good."""
        self._pending.pop(engine, None)
        self._gauges.pop(engine, None)
        if self._infos.pop(engine, None) is not None:
            self._gone.append(engine)
            self._is_urgent = True
            self._tell(engine, BlockChanges(cleared=True))

    def seal(self) -> bytes | None:
        """Turn what was collected into one encoded delta; ``None`` when nothing was."""
        delta = self._delta()
        for engine, pending in self._pending.items():
            if pending.blocks:
                self._tell(engine, pending.blocks)
        self._pending = {}
        self._published.sealed()
        self._gone = []
        self._is_urgent = False
        if delta is None:
            return None
        self._seq += 1
        frame = encode_frame(delta)
        self._ring.append(frame)
        self._ring_bytes += len(frame)
        self._sealed_bytes += len(frame)
        # A frame that no reader accepts must go too, with all before it: a snapshot of the
        # same keys comes in parts.
        limit_bytes = 0 if len(frame) > MAX_FRAME_BYTES else self._ring_limit_bytes
        while self._ring_bytes > limit_bytes and self._ring:
            self._ring_bytes -= len(self._ring.popleft())
        return frame

    def after(self, cursor: Cursor | None, limit_bytes: int | None = None) -> list[bytes] | None:
        """Return the deltas behind ``cursor``; ``None`` when only a snapshot helps.

        With ``limit_bytes`` no more than fit, but one at least: whoever takes them asks again.
        """
        if cursor is None or cursor.boot != self._boot or cursor.epoch != self._epoch:
            return None
        missing = self._seq - cursor.seq
        if missing < 0 or missing > len(self._ring):
            return None
        frames: list[bytes] = []
        room_bytes = self._ring_bytes if limit_bytes is None else limit_bytes
        for i in range(len(self._ring) - missing, len(self._ring)):
            frame = self._ring[i]
            room_bytes -= len(frame)
            if frames and room_bytes < 0:
                break
            frames.append(frame)
        return frames

    def snapshot(
        self, blocks: Iterator[tuple[str, str, list[int]]], *, now: float
    ) -> Iterator[bytes]:
        """Yield the frames of a snapshot at :attr:`cursor`, as of ``now`` (monotonic).

        ``blocks`` gives (engine, tier, keys). The caller seals first and takes the keys in
        the same step, so that both speak of the same moment.
        """
        cursor = self.cursor
        yield encode_frame(
            SnapshotBegin(
                cursor=cursor,
                node=self._node,
                version=self._version,
                engines=tuple(self._infos.values()),
                gauges=tuple(self._gauges.values()),
                paths=self._published.aged(now),
                path_classes=self._published.aged_classes(now),
            )
        )
        for engine, tier, keys in blocks:
            for start in range(0, len(keys), KEYS_PER_FRAME):
                part = pack_keys(keys[start : start + KEYS_PER_FRAME])
                yield encode_frame(Blocks(engine=engine, tier=tier, keys=part))
        yield encode_frame(SnapshotEnd(cursor=cursor))

    def heartbeat(self, ages_seconds: dict[str, float], at: Cursor | None = None) -> bytes:
        """Return a frame that says nothing was missed up to ``at``; default: :attr:`cursor`."""
        return encode_frame(Heartbeat(cursor=at or self.cursor, ages_seconds=ages_seconds))

    def _tell(self, engine: str, changes: BlockChanges) -> None:
        for observe in self._observers:
            observe(engine, changes)

    def _of(self, engine: str) -> _Pending:
        return self._pending.setdefault(engine, _Pending())

    def _delta(self) -> Delta | None:
        infos = [p.info for p in self._pending.values() if p.info is not None]
        gauges = [p.gauges for p in self._pending.values() if p.gauges is not None]
        blocks = [
            change
            for engine, pending in self._pending.items()
            if pending.blocks
            for change in _block_changes(engine, pending.blocks)
        ]
        if not (infos or gauges or blocks or self._gone or self._has_pending_paths):
            return None
        return Delta(
            cursor=Cursor(self._boot, self._epoch, self._seq + 1),
            gone=tuple(self._gone),
            engines=tuple(infos),
            blocks=tuple(blocks),
            gauges=tuple(gauges),
            paths=tuple(self._published.pending.values()),
            path_classes=self._published.pending_classes,
        )


def _block_changes(engine: str, changes: BlockChanges) -> Iterator[BlockChange]:
    if changes.cleared:
        yield BlockChange(engine=engine, cleared=True)
    for tier, keys in changes.tiers.items():
        if keys:
            yield BlockChange(
                engine=engine,
                tier=tier,
                removed=pack_keys([key for key, present in keys.items() if not present]),
                added=pack_keys([key for key, present in keys.items() if present]),
            )
