"""Label and field selectors."""

import re
from collections.abc import Callable
from typing import Any

Matches = Callable[[dict[str, Any]], bool]
_SET = re.compile(r"^\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_FIELDS = {
    "metadata.name",
    "metadata.namespace",
    "spec.nodeName",
    "spec.schedulerName",
    "status.phase",
    "spec.unschedulable",
}


def selector(labels: str, fields: str) -> Matches:
    """Return what tells whether an object is selected; raises ``ValueError`` for bad selectors."""
    tests = [_label_test(part) for part in _split(labels)]
    tests += [_field_test(part) for part in _split(fields)]
    return lambda item: all(test(item) for test in tests)


def _split(text: str) -> list[str]:
    """Cut at the commas that are not within parentheses."""
    return [part for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _label_test(part: str) -> Matches:
    matched = _SET.match(part)
    if matched:
        key, operator, values = matched.groups()
        wanted = {value.strip() for value in values.split(",")}
        # An object without the label is "not in" any set, as in Kubernetes.
        return lambda item: (_labels(item).get(key) in wanted) == (operator == "in")
    if "=" in part:
        key, negated, value = _compare(part)
        return lambda item: (_labels(item).get(key) == value) != negated
    name = part.strip()
    if name.startswith("!"):
        return lambda item: name[1:] not in _labels(item)
    return lambda item: name in _labels(item)


def _field_test(part: str) -> Matches:
    path, negated, value = _compare(part)
    if path not in _FIELDS:
        raise ValueError(f'"{path}" is not a known field selector')
    return lambda item: (_field(item, path) == value) != negated


def _compare(part: str) -> tuple[str, bool, str]:
    matched = re.fullmatch(r"\s*([^=!\s]+)\s*(!=|==|=)\s*(\S*)\s*", part)
    if matched is None:
        raise ValueError(f"invalid selector: {part!r}")
    key, operator, value = matched.groups()
    return key, operator == "!=", value


def _labels(item: dict[str, Any]) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def _field(item: dict[str, Any], path: str) -> str:
    value: Any = item
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else str(value)
