"""One group's nodes: KV that engines hold there, room for more, pods that run (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nearkv.extender.model import Floats, GroupFacts
from nearkv.extender.view.columns import Column
from nearkv.node_summary import GroupSummary

_UNKNOWN = float("nan")
_NOTHING_SAID = GroupSummary(group="")


@dataclass(frozen=True, slots=True)
class GroupPods:
    """Pods of a group that run on a node; those that do both count in both."""

    prefill: int = 0
    decode: int = 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.prefill > 0 or self.decode > 0


class GroupTable:
    """The members of a group, which are the nodes that report it or run its pods."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._members: dict[str, int] = {}
        self._rows = Column(np.int32, -1)
        self._held = Column(np.float64, _UNKNOWN)
        self._free = Column(np.float64, _UNKNOWN)
        self._bytes_per_token = Column(np.float64, _UNKNOWN)
        self._tokens_per_second = Column(np.float64, _UNKNOWN)
        self._prefill = Column(np.int32, 0)
        self._decode = Column(np.int32, 0)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def pods(self) -> int:
        """Pods of the group that run; those that do both count twice."""
        size = len(self._names)
        return int(self._prefill.values[:size].sum() + self._decode.values[:size].sum())

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes in it."""
        return self._names

    def has_nothing(self, node: str) -> bool:
        """Tell whether nothing is known of the group on a node any more."""
        member = self._members[node]
        counts = (self._prefill, self._decode)
        floats = (self._held, self._free, self._bytes_per_token, self._tokens_per_second)
        return all(column.values[member] == 0 for column in counts) and all(
            np.isnan(column.values[member]) for column in floats
        )

    def put_report(self, node: str, row: int, summary: GroupSummary | None) -> None:
        """Note what a node's report says of the group, ``None`` where it says nothing."""
        member = self._member(node, row)
        said = summary or _NOTHING_SAID
        self._held.put(member, _or_unknown(said.held_bytes))
        self._free.put(member, _or_unknown(said.free_bytes))
        self._bytes_per_token.put(member, _or_unknown(said.kv_bytes_per_token))
        self._tokens_per_second.put(member, _or_unknown(said.prefill_tokens_per_second))

    def put_pods(self, node: str, row: int, pods: GroupPods) -> None:
        """Note the pods of the group on a node."""
        member = self._member(node, row)
        self._prefill.put(member, pods.prefill)
        self._decode.put(member, pods.decode)

    def put_row(self, node: str, row: int) -> None:
        """Note that a node has moved to another row."""
        self._rows.put(self._members[node], row)

    def drop(self, node: str) -> None:
        """Forget a node."""
        member = self._members.pop(node)
        last = self._names.pop()
        if last != node:
            self._names[member] = last
            self._members[last] = member
            for column in self._columns():
                column.move(len(self._names), member)

    def facts(self, reported_at: Floats, nothing_known: Floats) -> GroupFacts:
        """Return the group as the snapshot shows it.

        ``nothing_known`` is a row of NaN for each node, shared by groups without a report.
        """
        size = len(self._names)
        # By row, so that it does not matter who joined first.
        order = np.argsort(self._rows.values[:size])
        rows = self._rows.values[order]
        held, free = self._held.values[order], self._free.values[order]
        prefill, decode = self._prefill.values[order], self._decode.values[order]
        holds = held > 0
        holders = rows[holds]
        return GroupFacts(
            holders=_frozen(holders),
            held_bytes=_frozen(held[holds]),
            held_at=_frozen(reported_at[holders]),
            prefill=_frozen(rows[prefill > 0]),
            prefill_pods=_frozen(prefill[prefill > 0]),
            decode=_frozen(rows[decode > 0]),
            decode_pods=_frozen(decode[decode > 0]),
            kv_free_bytes=_spread(free, rows, nothing_known),
            kv_bytes_per_token=_median(self._bytes_per_token.values[:size]),
            prefill_tokens_per_second=_median(self._tokens_per_second.values[:size]),
        )

    def _member(self, node: str, row: int) -> int:
        member = self._members.get(node)
        if member is None:
            member = self._members[node] = len(self._names)
            self._names.append(node)
            for column in self._columns():
                column.clear(member)
            self._rows.put(member, row)
        return member

    def _columns(self) -> tuple[Column[np.int32] | Column[np.float64], ...]:
        floats = (self._held, self._free, self._bytes_per_token, self._tokens_per_second)
        return (self._rows, self._prefill, self._decode, *floats)


def _or_unknown(value: float | None) -> float:
    return _UNKNOWN if value is None else value


def _median(values: Floats) -> float | None:
    known = values[values > 0]
    return float(np.median(known)) if len(known) else None


def _spread(values: Floats, rows: np.ndarray, nothing_known: Floats) -> Floats:
    known = ~np.isnan(values)
    if not known.any():
        return nothing_known
    spread = nothing_known.copy()
    spread[rows[known]] = values[known]
    return _frozen(spread)


def _frozen(values: np.ndarray) -> np.ndarray:
    """Return an array that is shared with nobody and that nobody can change."""
    values.flags.writeable = False
    return values
