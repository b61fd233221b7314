"""Names of series: those that our programs and vLLM export, and those that a query asks for."""

import re
from functools import cache

from nearkv.cli.document_metrics import list_series
from tests.deploy.chart import ROOT

_ENGINES = ROOT / "tests" / "data" / "vllm" / "metrics.txt"
_FAMILY = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
_NAME = re.compile(r"\b(?:nearkv_[a-z0-9_]+|vllm:[a-z0-9_]+)(?![a-z0-9_*])")


def names_in(text: str) -> set[str]:
    """Return the names of series that a text has."""
    return set(_NAME.findall(text))


@cache
def exported_names() -> frozenset[str]:
    """Return all names that exist; those of vLLM are of a captured page of a real engine."""
    families = [
        (series.name, series.kind) for listed in list_series().values() for series in listed
    ]
    families += _FAMILY.findall(_ENGINES.read_text(encoding="utf-8"))
    names = set()
    for name, kind in families:
        suffixes = ("_bucket", "_count", "_sum", "") if kind == "histogram" else ("",)
        names |= {name + suffix for suffix in suffixes}
    return frozenset(names)
