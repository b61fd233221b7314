"""Durations as Go writes them: ``200ms``, ``1m30s`` (pure)."""

import re

_UNIT_SECONDS = (
    ("ns", 1e-9),
    ("us", 1e-6),
    ("\N{MICRO SIGN}s", 1e-6),
    ("\N{GREEK SMALL LETTER MU}s", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("m", 60.0),
    ("h", 3600.0),
)
_PART = re.compile(
    r"(\d+\.?\d*|\.\d+)(" + "|".join(unit for unit, _ in _UNIT_SECONDS) + r")(?=[\d.]|$)"
)


def parse_go_duration(text: str) -> float:
    """Return seconds; raises ``ValueError`` for what Go's time.ParseDuration refuses."""
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    if rest == "0":
        return 0.0
    seconds, position = 0.0, 0
    units = dict(_UNIT_SECONDS)
    while part := _PART.match(rest, position):
        seconds += float(part[1]) * units[part[2]]
        position = part.end()
    if position == 0 or position != len(rest):
        raise ValueError(f"not a duration such as 200ms: {text!r}")
    return sign * seconds
