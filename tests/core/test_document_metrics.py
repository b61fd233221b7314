"""The metrics page: true to the registries, and to what the components really serve."""

import asyncio
import re
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nearkv.cli.document_metrics import list_series, render_document
from tests.deploy.tools import find_promtool
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.extender_site import question, running_extender, small_cluster
from tests.integration.stack import small_fleet

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
PROMTOOL = find_promtool()
SERIES = [
    pytest.param(series, id=f"{component}-{series.name}")
    for component, listed in list_series().items()
    for series in listed
]


def exported(series):
    """The names that a family has in Prometheus, which queries may use."""
    suffixes = ("_bucket", "_count", "_sum") if series.kind == "histogram" else ("",)
    return {series.name + suffix for suffix in suffixes}


@asynccontextmanager
async def served_metrics():
    """Yield the text that agent, ingress and extender serve after requests."""
    async with (
        EngineDouble(EngineDoubleConfig()) as engine,
        small_fleet(engine) as (ingress, agent),
        running_extender(small_cluster()) as extender,
    ):
        for verb in ("filter", "prioritize"):
            await extender.post(verb, question(["gpu-00000", "gpu-00003"]))
            await extender.post(verb, b"{")
        for _ in range(2):
            response, _ = await ingress.complete("the same prompt twice " * 40)
            assert response.status == 200
        texts = {}
        served = (("agent", agent.url), ("ingress", ingress.url), ("extender", extender.url))
        for component, url in served:
            async with ingress.session.get(f"{url}/metrics") as response:
                texts[component] = await response.text()
        yield texts


async def run_promtool(text):
    program = await asyncio.create_subprocess_exec(
        *(PROMTOOL, "check", "metrics"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(program.communicate(text.encode()), 30)
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    return program.returncode, out.decode()


def test_the_metrics_page_is_up_to_date():
    assert METRICS_PAGE.read_text(encoding="utf-8") == render_document()


@pytest.mark.parametrize("series", SERIES)
def test_names_units_and_help(series):
    assert series.name.startswith("nearkv_")
    assert series.text.strip().endswith(".")
    assert (series.kind == "counter") == series.name.endswith("_total")
    assert not re.search(r"_(ms|millis|milliseconds|kb|mb|gb|percent|perc)(_|$)", series.name)
    assert "millisecond" not in series.text


def test_names_are_those_of_their_component():
    wrong = [
        series.name
        for component, listed in list_series().items()
        for series in listed
        if not series.name.startswith((f"nearkv_{component}_", "nearkv_build_info"))
    ]
    assert wrong == []


def test_queries_on_the_page_use_series_that_exist():
    prose, _, _ = render_document().partition("## nearkv-agent")
    known = {
        name for listed in list_series().values() for series in listed for name in exported(series)
    }
    used = set(re.findall(r"nearkv_\w+", prose))
    assert used
    assert used - known == set()


async def test_whatever_the_components_serve_is_on_the_page():
    documented = {
        component: {series.name: set(series.labels) for series in listed}
        for component, listed in list_series().items()
    }
    async with served_metrics() as texts:
        for component, text in texts.items():
            types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
            families = {name for name in types if not name.endswith("_created")}
            assert families == set(documented[component])
            for name, labels in re.findall(r"^(\w+)\{(.*)\} \S+$", text, re.MULTILINE):
                family = re.sub(r"_(bucket|count|sum|created)$", "", name)
                family = family if family in families else f"{family}_total"
                given = set(re.findall(r'(\w+)="', labels)) - {"le"}
                assert given == documented[component][family], name


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's package prometheus) is not here")
async def test_promtool_finds_nothing_to_complain_about():
    async with served_metrics() as texts:
        for text in texts.values():
            assert await run_promtool(text) == (0, "")
