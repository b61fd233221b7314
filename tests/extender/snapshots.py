"""Snapshots by hand, for tests and benchmarks of the extender.

``make_snapshot`` takes nodes one by one and says everything by name; ``make_cluster`` makes a
large regular one at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from nearkv.extender.model import GroupFacts, Ints, MeasuredLink, PodAsk, Role, Snapshot

NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node; ``labels`` holds a value for each level, nearest first, and "" where it lacks one.

    ``free`` are the free memory ratios of its devices by NVML (NaN is unknown), ``ok`` their
    health (1 healthy, 0 failed, -1 unknown). By default every device is healthy and unused;
    ``reported_at=NEVER`` makes a node that no agent speaks for.
    """

    name: str
    labels: tuple[str, ...] = ()
    rdma: int = -1
    devices: int = 8
    requested: int = 0
    free: tuple[float, ...] | None = None
    ok: tuple[int, ...] | None = None
    reported_at: float = 0.0
    report_seconds: float = 15.0
    from_status: bool = False
    left_at: float = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group's facts by node name: KV bytes held, prefill and decode pods, KV bytes free."""

    held: Mapping[str, float] = field(default_factory=dict)
    held_at: float = 0.0
    prefill: Mapping[str, int] = field(default_factory=dict)
    decode: Mapping[str, int] = field(default_factory=dict)
    kv_free: Mapping[str, float] = field(default_factory=dict)
    kv_bytes_per_token: float | None = None
    prefill_tokens_per_second: float | None = None


def measured(
    milliseconds_setup: float, gigabytes_per_second: float, *, count: int = 100, at: float = 0.0
) -> MeasuredLink:
    """Return a measured link: set-up in ms, bandwidth in GB/s."""
    return MeasuredLink(
        setup_seconds=milliseconds_setup / 1e3,
        bytes_per_second=gigabytes_per_second * 1e9,
        count=count,
        received_at=at,
    )


def ask(
    *,
    group: str = "g",
    role: Role = Role.DECODE,
    devices: int = 1,
    name: str = "pod",
    uid: str | None = None,
    memory_ratio: float = 0.9,
    prefix_tokens: int | None = None,
) -> PodAsk:
    """Return what a pod asks for; its UID is made from its name."""
    return PodAsk(
        namespace="default",
        name=name,
        uid=f"uid-{name}" if uid is None else uid,
        group=group,
        role=role,
        devices=devices,
        memory_ratio=memory_ratio,
        prefix_tokens=prefix_tokens,
    )


def make_snapshot(
    nodes: Sequence[Node],
    *,
    groups: Mapping[str, Group] | None = None,
    links: Mapping[int, MeasuredLink] | None = None,
    pairs: Mapping[tuple[str, str], MeasuredLink] | None = None,
    levels: int | None = None,
    version: int = 1,
) -> Snapshot:
    """Return the snapshot of these nodes; ``pairs`` are by (name of source, name of node)."""
    rows = {node.name: row for row, node in enumerate(nodes)}
    level_count = max((len(node.labels) for node in nodes), default=0) if levels is None else levels
    free_ratio, device_ok = _devices(nodes)
    return Snapshot(
        version=version,
        names=tuple(rows),
        rows=MappingProxyType(rows),
        labels=_label_numbers(nodes, level_count),
        rdma=np.array([node.rdma for node in nodes], np.int8),
        devices=np.array([node.devices for node in nodes], np.int32),
        requested=np.array([node.requested for node in nodes], np.int32),
        free_ratio=free_ratio,
        device_ok=device_ok,
        reported_at=np.array([node.reported_at for node in nodes], np.float64),
        report_seconds=np.array([node.report_seconds for node in nodes], np.float64),
        from_status=np.array([node.from_status for node in nodes], np.int8),
        left_at=np.array([node.left_at for node in nodes], np.float64),
        groups={name: group_facts(group, rows) for name, group in (groups or {}).items()},
        links=dict(links or {}),
        pairs={(rows[a], rows[b]): link for (a, b), link in (pairs or {}).items()},
    )


def group_facts(group: Group, rows: Mapping[str, int]) -> GroupFacts:
    """Return a group's facts by row."""
    kv_free = np.full(len(rows), np.nan)
    for name, free in group.kv_free.items():
        kv_free[rows[name]] = free
    return GroupFacts(
        holders=_rows(group.held, rows),
        held_bytes=np.array(list(group.held.values()), np.float64),
        held_at=np.full(len(group.held), group.held_at),
        prefill=_rows(group.prefill, rows),
        prefill_pods=np.array(list(group.prefill.values()), np.int32),
        decode=_rows(group.decode, rows),
        decode_pods=np.array(list(group.decode.values()), np.int32),
        kv_free_bytes=kv_free,
        kv_bytes_per_token=group.kv_bytes_per_token,
        prefill_tokens_per_second=group.prefill_tokens_per_second,
    )


def make_cluster(
    count: int,
    *,
    level_sizes: Sequence[int] = (8, 64, 512, 4096),
    sources: int = 8,
    seed: int = 0,
    version: int = 1,
) -> Snapshot:
    """Return a regular cluster of ``count`` nodes with one group, ``"g"``.

    Level ``i`` has ``level_sizes[i]`` nodes to a domain. ``sources`` nodes, far apart, hold KV
    and run prefill; all devices are healthy, and some are taken.
    """
    random = np.random.default_rng(seed)
    names = tuple(f"ip-10-{i // 256}-{i % 256}.eu-central-1.compute.internal" for i in range(count))
    requested = random.integers(0, 8, count).astype(np.int32)
    device = np.arange(8)[None, :]
    source_rows = np.linspace(0, count - 1, sources).astype(np.int32)
    return Snapshot(
        version=version,
        names=names,
        rows={name: row for row, name in enumerate(names)},
        labels=np.stack([np.arange(count) // size + 1 for size in level_sizes], 1).astype(np.int32),
        rdma=np.ones(count, np.int8),
        devices=np.full(count, 8, np.int32),
        requested=requested,
        free_ratio=np.where(device < requested[:, None], 0.08, 0.99).astype(np.float32),
        device_ok=np.ones((count, 8), np.int8),
        reported_at=np.zeros(count),
        report_seconds=np.full(count, 15.0),
        from_status=np.zeros(count, np.int8),
        left_at=np.full(count, NEVER),
        groups={
            "g": GroupFacts(
                holders=source_rows,
                held_bytes=np.linspace(1e9, 8e9, sources),
                held_at=np.zeros(sources),
                prefill=source_rows,
                prefill_pods=np.ones(sources, np.int32),
                decode=np.zeros(0, np.int32),
                decode_pods=np.zeros(0, np.int32),
                kv_free_bytes=np.full(count, np.nan),
                kv_bytes_per_token=131072.0,
                prefill_tokens_per_second=8000.0,
            )
        },
        links={},
        pairs={},
    )


def _rows(by_name: Mapping[str, float], rows: Mapping[str, int]) -> Ints:
    return np.array([rows[name] for name in by_name], np.int32)


def _label_numbers(nodes: Sequence[Node], levels: int) -> Ints:
    numbers: list[dict[str, int]] = [{"": 0} for _ in range(levels)]
    labels = np.zeros((len(nodes), levels), np.int32)
    for row, node in enumerate(nodes):
        for level, value in enumerate(node.labels):
            labels[row, level] = numbers[level].setdefault(value, len(numbers[level]))
    return labels


def _devices(nodes: Sequence[Node]) -> tuple[np.ndarray, np.ndarray]:
    columns = max((_column_count(node) for node in nodes), default=0)
    free_ratio = np.full((len(nodes), columns), np.nan, np.float32)
    device_ok = np.full((len(nodes), columns), -1, np.int8)
    for row, node in enumerate(nodes):
        if node.reported_at == NEVER and node.free is None and node.ok is None:
            continue
        free = (1.0,) * node.devices if node.free is None else node.free
        ok = (1,) * len(free) if node.ok is None else node.ok
        free_ratio[row, : len(free)] = free
        device_ok[row, : len(ok)] = ok
    return free_ratio, device_ok


def _column_count(node: Node) -> int:
    return max(node.devices, len(node.free or ()), len(node.ok or ()))
