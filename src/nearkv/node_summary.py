"""The summary of a node: what the agent tells the extender (DESIGN section 3), as JSON.

It holds no block keys and changes rarely. Each field is nullable: ``null`` is "not known", and
``reasons`` says why, by the field's name.
"""

from typing import Literal

import msgspec

SCHEMA_VERSION = 1
SUMMARY_PATH = "/v1/summary"

Health = Literal["ok", "failed", "unknown"]


class DeviceSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU by NVML: its memory as used by anybody, and whether the hardware is sound."""

    id: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    health: Health = "unknown"
    why: str = ""
    pod_uid: str | None = None


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engines of one group on this node, added up.

    ``held_bytes`` is KV in their caches that a prefix could be fetched from, ``free_bytes`` room
    for the KV of more traffic.
    """

    group: str
    engines: int = 0
    roles: tuple[str, ...] = ()
    held_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    kv_bytes_per_token: float | None = None
    prefill_tokens_per_second: float | None = None
    requests_waiting: int | None = None


class PathSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What fetching KV from ``source`` (a node's name) to this node was measured to take."""

    source: str
    transport: str
    setup_seconds: float
    bytes_per_second: float
    count: int = 0
    age_seconds: float = 0.0


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node's summary. ``boot`` and ``seq`` order the summaries of one agent.

    ``interval_seconds`` is how often its readings are taken. ``pods`` are the UIDs of pods whose
    devices the report already covers, where that is known.
    """

    schema_version: int = SCHEMA_VERSION
    node: str
    boot: str
    seq: int
    interval_seconds: float
    devices: tuple[DeviceSummary, ...] | None = None
    rdma: bool | None = None
    groups: tuple[GroupSummary, ...] = ()
    paths: tuple[PathSummary, ...] = ()
    pods: tuple[str, ...] | None = None
    reasons: dict[str, str] = msgspec.field(default_factory=dict)
