"""Classes of distance: how near two nodes are by their labels (pure)."""

from collections.abc import Mapping, Sequence

_NIL_UUID = "00000000-0000-0000-0000-000000000000"
"""What hosts whose NVLink ends at the host may have for a clique, all of them the same."""

SAME_NODE = "same_node"
"""The class of a node and itself."""

BEYOND = "beyond"
"""The class of pairs with no level in common."""

UNKNOWN = "unknown"
"""The class of pairs of which a label is missing."""


def class_between(one: Mapping[str, str], other: Mapping[str, str], levels: Sequence[str]) -> str:
    """Return the class of two nodes: the first level, a label's name, that both have alike.

    An empty label is a missing one.
    """
    for level in levels:
        if one.get(level) and one.get(level) == other.get(level):
            return level
    missing = any(not labels.get(level) for labels in (one, other) for level in levels)
    return UNKNOWN if missing or not levels else BEYOND


def place_of(labels: Mapping[str, str], levels: Sequence[str]) -> dict[str, str]:
    """Return what a node with these labels is at each level, without those that it lacks.

    A level may be several labels with ``|`` between them, which releases and clouds have used for
    one thing; the first that is there counts.
    """
    found = {level: _value_of(labels, level) for level in levels}
    return {level: value for level, value in found.items() if value}


def _value_of(labels: Mapping[str, str], level: str) -> str:
    for label in (level, *level.split("|")):
        value = labels.get(label)
        if value and not value.startswith(_NIL_UUID):
            return value
    return ""
