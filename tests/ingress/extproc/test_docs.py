"""docs/envoy.md: the series and settings it names exist, and it leaves no series out."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from nearkv.ingress.extproc.metrics import ExtProcMetrics
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.sidecar.metrics import SidecarMetrics

PAGE = (Path(__file__).parents[3] / "docs" / "envoy.md").read_text(encoding="utf-8")


def registered():
    registry = CollectorRegistry()
    ExtProcMetrics(registry)
    SidecarMetrics(registry)
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
    }


def test_the_page_names_the_series_that_there_are():
    named = set(re.findall(r"`(nearkv_ingress_(?:ext_proc|sidecar)_\w+)`", PAGE))
    assert named == registered()


def test_settings_that_the_page_names_exist():
    named = set(
        re.findall(r"`((?:ext_proc|sidecar|limits|deadlines|admission|tenants)\.[a-z_.]+)", PAGE)
    )
    assert named
    for path in named:
        model = IngressSettings
        for part in path.split("."):
            field = model.model_fields[part]
            model = field.annotation
