"""Kubernetes quantities (``8``, ``1k``, ``64Gi``, ``1e3``), read as numbers.

The API server rewrites quantities into their shortest form, so that 1000 devices are ``1k``.
Grammar: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

import re
from decimal import ROUND_DOWN, Decimal
from types import MappingProxyType

LARGEST = 2**63 - 1
"""No quantity is above this by its definition."""

_FORM = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))([eE][+-]?\d{1,3}|[a-zA-Z]{0,2})", re.ASCII)
_LONGEST_TEXT = 64
_UNITS = MappingProxyType(
    {
        "": Decimal(1),
        **{unit: Decimal(10) ** power for unit, power in zip("num", (-9, -6, -3), strict=True)},
        **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
        **{unit + "i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
    }
)


def parse_quantity(text: str) -> Decimal:
    """Return the number that a quantity stands for; raises ``ValueError`` for anything else."""
    match = _FORM.fullmatch(text) if len(text) <= _LONGEST_TEXT else None
    if match is None:
        raise ValueError(f"{text[:_LONGEST_TEXT]!r} is no quantity")
    number, suffix = match.groups()
    if suffix[1:] and suffix[0] in "eE" and suffix[1:] != "i":
        value = Decimal(number + suffix)
    elif suffix in _UNITS:
        value = Decimal(number) * _UNITS[suffix]
    else:
        raise ValueError(f"{text!r} has an unknown unit {suffix!r}")
    if abs(value) > LARGEST:
        raise ValueError(f"{text!r} is above the largest quantity, {LARGEST}")
    return value


def whole_count(text: str | int) -> int:
    """Return a quantity of things that come whole, devices for one; never below 0.

    Raises ``ValueError`` for what is no quantity.
    """
    if isinstance(text, int):
        return max(text, 0)
    if text.isascii() and text.isdigit() and len(text) < len(str(LARGEST)):
        return int(text)
    return max(int(parse_quantity(text).to_integral_value(ROUND_DOWN)), 0)
