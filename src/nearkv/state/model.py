"""Wire types of the node state (msgpack, DESIGN section 3).

A stream is a snapshot (``SnapshotBegin``, ``Blocks``..., ``SnapshotEnd``) followed by
``Delta`` and ``Heartbeat`` frames. Block keys travel packed, see ``nearkv.block_keys``.
Applying a change twice changes nothing: blocks are sets, gauges are last-writer-wins.
"""

from enum import StrEnum

import msgspec

TIER_DEVICE = "GPU"
"""The tier name of the engine's own device memory, as vLLM's events call it (also on CPU)."""


class EngineState(StrEnum):
    """Whether an engine can take requests, as its node's agent sees it."""

    STARTING = "starting"
    READY = "ready"
    ASLEEP = "asleep"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"


class EventsState(StrEnum):
    """How complete the block table of an engine is.

    ``live``: nothing is missing. ``partial``: a safe lower bound (joined late, or a replay
    was truncated). ``replaying``: catching up. ``lost``: the subscription is broken.
    ``off``: the engine publishes no events.
    """

    LIVE = "live"
    PARTIAL = "partial"
    REPLAYING = "replaying"
    LOST = "lost"
    OFF = "off"


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """A place in one agent's stream of changes.

    ``boot`` changes with every agent start, ``epoch`` when the agent starts its log anew,
    ``seq`` with every delta.
    """

    boot: str
    epoch: int
    seq: int

    def __str__(self) -> str:
        """Return the form used in URLs, ``boot:epoch:seq``."""
        return f"{self.boot}:{self.epoch}:{self.seq}"

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Parse ``boot:epoch:seq``; raises ``ValueError`` naming what is wrong."""
        parts = text.split(":")
        expected_parts = 3
        if len(parts) != expected_parts or not parts[0]:
            raise ValueError(f"a cursor is boot:epoch:seq, got {text[:80]!r}")
        try:
            return cls(parts[0], int(parts[1]), int(parts[2]))
        except ValueError as error:
            raise ValueError(
                f"epoch and seq of a cursor are integers, got {text[:80]!r}"
            ) from error


class TransferInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an engine's KV can move; present only while it can.

    ``mode`` is ``agent`` (our connector and movers) or ``nixl`` (vLLM's own connector).
    Only engines with equal ``mode`` and ``compat`` can use each other's KV: ``compat`` digests
    model, element type, parallelism and layout.
    """

    mode: str
    compat: str
    kv_bytes_per_token: int | None = None
    agent: str = ""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine is: changes rarely.

    ``key_model`` names the namespace of its block keys and ``key_check`` is that
    namespace's root key, so that a consumer with another cluster secret notices.
    ``models`` are the names it serves the base model under, ``adapters`` its LoRA names.
    ``dp_rank`` is set only where one server holds several data-parallel ranks.
    """

    id: str
    incarnation: str
    url: str
    node: str = ""
    model: str = ""
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    role: str = "both"
    group: str = ""
    state: EngineState = EngineState.STARTING
    events: EventsState = EventsState.OFF
    block_size: int | None = None
    key_model: str = ""
    key_check: int = 0
    max_model_len: int | None = None
    engine_version: str | None = None
    dp_rank: int | None = None
    transfer: TransferInfo | None = None


class EngineGauges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine is doing; ``None`` is unknown, never zero.

    ``*_tokens`` counters are the engine's own, since its start.
    """

    id: str
    age_seconds: float = 0.0
    kv_used_ratio: float | None = None
    kv_total_tokens: int | None = None
    kv_total_bytes: int | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    prefix_hits_tokens: int | None = None
    prefix_queries_tokens: int | None = None
    prompt_tokens: int | None = None
    computed_tokens: int | None = None
    prefill_seconds_per_token: float | None = None

    @property
    def kv_used_bytes(self) -> int | None:
        """Bytes of KV cache held by requests now running."""
        if self.kv_used_ratio is None or self.kv_total_bytes is None:
            return None
        return round(self.kv_used_ratio * self.kv_total_bytes)

    @property
    def kv_free_bytes(self) -> int | None:
        """Bytes that a new request could take; cached but unused blocks count as free."""
        used = self.kv_used_bytes
        return None if used is None or self.kv_total_bytes is None else self.kv_total_bytes - used

    def same_reading(self, other: "EngineGauges") -> bool:
        """Tell whether two readings differ in nothing but their age."""
        return msgspec.structs.replace(self, age_seconds=other.age_seconds) == other


class BlockChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of one engine's blocks in one tier: first ``cleared``, then removed, then added.

    ``cleared`` empties every tier of the engine.
    """

    engine: str
    tier: str = TIER_DEVICE
    cleared: bool = False
    removed: bytes = b""
    added: bytes = b""


class PathReading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What moving KV from ``source`` to ``target`` (nodes) costs over the path last used.

    ``points`` transfers were measured, the last one ``age_seconds`` before this was sent; 0 says
    that the figures are the configured prior.
    """

    source: str
    target: str
    path: str
    setup_seconds: float
    bytes_per_second: float
    points: int = 0
    age_seconds: float = 0.0


class PathClass(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What pulls to this node cost from the nodes of one class of distance, over one transport.

    Medians over ``pairs`` source nodes that were measured ``count`` times in all, the last one
    ``age_seconds`` before this was sent. ``name`` is as in :mod:`nearkv.path_class`.
    """

    name: str
    path: str
    setup_seconds: float
    bytes_per_second: float
    pairs: int = 0
    count: int = 0
    age_seconds: float = 0.0


class PathClasses(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node's place, and what each class of distance costs it.

    ``levels`` are the labels that tell the classes, nearest first, ``labels`` this node's own.
    """

    levels: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    costs: tuple[PathClass, ...] = ()


class SnapshotBegin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Opens a snapshot: the engines and gauges; their blocks follow."""

    cursor: Cursor
    node: str
    version: str
    engines: tuple[EngineInfo, ...]
    gauges: tuple[EngineGauges, ...]
    paths: tuple[PathReading, ...] = ()
    path_classes: PathClasses | None = None


class Blocks(msgspec.Struct, frozen=True, kw_only=True, tag="blocks"):
    """A part of a snapshot: keys that one engine holds in one tier."""

    engine: str
    tier: str
    keys: bytes


class SnapshotEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Closes a snapshot; only now does the consumer switch over to it."""

    cursor: Cursor


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delta"):
    """One step of change, applied in the order gone, engines, blocks, gauges.

    An engine whose incarnation differs from the one known has lost all its blocks and its
    last reading.
    """

    cursor: Cursor
    gone: tuple[str, ...] = ()
    engines: tuple[EngineInfo, ...] = ()
    blocks: tuple[BlockChange, ...] = ()
    gauges: tuple[EngineGauges, ...] = ()
    paths: tuple[PathReading, ...] = ()
    path_classes: PathClasses | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """Says that nothing was missed, and how old the last reading of each engine is."""

    cursor: Cursor
    ages_seconds: dict[str, float]


Frame = SnapshotBegin | Blocks | SnapshotEnd | Delta | Heartbeat
