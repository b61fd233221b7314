"""``nearkv status``: what is asked, what is shown, and the exit status."""

import json
import re

import msgspec
import pytest
from aiohttp import web

from nearkv.cli.fetching import Endpoint, fetch_all
from nearkv.cli.status import list_endpoints
from nearkv.cli.status_model import AgentEngine, AgentStatus, IngressEngine, IngressStatus
from nearkv.cli.status_table import (
    COLUMNS,
    cells_of,
    format_age,
    format_bytes,
    format_ratio,
    list_problems,
    merge_views,
)
from nearkv.serving import running
from nearkv.settings import Address
from tests.core.running_cli import run_cli

ENGINE = {
    "id": "engine-a",
    "url": "http://127.0.0.1:8000",
    "model": "[bold]tiny[/bold]",
    "role": "both",
    "group": "tiny-32",
    "incarnation": "i-1",
    "state": "ready",
    "events": "live",
    "block_size": 32,
    "blocks": {"GPU": 120},
    "orphans": 0,
    "kv_used_ratio": 0.125,
    "kv_used_bytes": 1 << 20,
    "requests_running": 0,
    "requests_waiting": None,
    "prefix_hits_tokens": 93,
    "prefix_queries_tokens": 100,
    "metrics_age_seconds": 0.4,
    "freshness": "fresh",
    "a_later_field": [1],
}
AGENT = {"component": "agent", "node": "demo", "engines": [ENGINE], "problems": []}
INGRESS = {
    "component": "ingress",
    "policy": "prefix-first",
    "ready": True,
    "agents": [{"url": "http://a:1", "connected": True, "age_seconds": 0.1}],
    "engines": [
        {"id": "engine-a", "freshness": "fresh", "inflight": 2, "mode": "exact"},
        {
            "id": "engine-b",
            "freshness": "aged",
            "prefix_hits_tokens": 1,
            "prefix_queries_tokens": 4,
        },
    ],
    "requests_total": 7,
    "hit_ratio": None,
}
SICK_AGENT = AGENT | {"engines": [ENGINE | {"state": "unreachable"}]}


@pytest.fixture
async def served():
    """Serve canned statuses below a path each; yield the base URL."""
    documents = {"agent": AGENT, "ingress": INGRESS, "sick": SICK_AGENT, "other": {"component": 3}}

    async def status(request):
        name = request.match_info["name"]
        if name == "closed" and request.headers.get("Authorization") != "Bearer s3cret":
            return web.Response(status=401)
        return web.json_response(documents.get(name, AGENT))

    app = web.Application()
    app.router.add_get("/{name}/v1/status", status)
    async with running(app, Address("127.0.0.1", 0)) as address:
        yield address.url


@pytest.fixture
async def unused_url():
    async with running(web.Application(), Address("127.0.0.1", 0)) as address:
        pass
    return address.url


async def fetch_one(component, url, token=None):
    (answer,) = await fetch_all([Endpoint(component, url)], token=token, timeout_seconds=5)
    return answer


async def test_the_table_joins_agents_and_ingresses(served):
    code, out, err = await run_cli(
        "status", "--agent", f"{served}/agent", "--ingress", f"{served}/ingress"
    )
    lines = [re.split(r"  +", line.strip()) for line in out.strip().splitlines()]
    header, alone, joined, ingress = lines
    assert (code, err) == (0, "")
    assert tuple(header) == COLUMNS
    assert alone == ["engine-b", *["-"] * 9, "25.0%", "-", "aged"]
    assert joined == [
        *("engine-a", "demo", "[bold]tiny[/bold]", "both", "ready", "live", "12.5% (1.0 MiB)"),
        *("120", "0", "-", "93.0%", "0.4s", "fresh"),
    ]
    assert ingress[0].endswith("agents 1/1, requests 7, hit ratio -")


async def test_no_colour_codes_are_piped(served):
    _, out, _ = await run_cli("status", "--agent", f"{served}/agent", "-o", "wide")
    assert "\x1b" not in out
    assert "INCARNATION" in out


@pytest.mark.parametrize(
    ("form", "decode"),
    [
        pytest.param("json", json.loads, id="json"),
        pytest.param("yaml", msgspec.yaml.decode, id="yaml"),
    ],
)
async def test_documents_are_passed_on_whole(served, unused_url, form, decode):
    environment = {"NEARKV_AGENTS": f"{served}/agent, {unused_url}", "NEARKV_INGRESS": ""}
    code, out, _ = await run_cli("status", "-o", form, **environment)
    document = decode(out)
    assert code == 1
    assert document["agents"] == [AGENT]
    assert document["ingresses"] == []
    assert [error["url"] for error in document["errors"]] == [unused_url]


async def test_what_does_not_answer_is_said_with_a_hint(served, unused_url):
    code, out, err = await run_cli("status", "--agent", unused_url, "--agent", f"{served}/agent")
    assert code == 1
    assert "engine-a" in out
    assert f"nearkv: agent {unused_url}: " in err
    assert "is it running" in err


async def test_an_unhealthy_engine_is_an_exit_status(served):
    code, _, err = await run_cli("status", "--agent", f"{served}/sick")
    assert code == 1
    assert err == f"nearkv: agent {served}/sick: engine-a: does not answer\n"


async def test_no_endpoint_is_a_usage_error():
    code, _, err = await run_cli("status", NEARKV_AGENTS="", NEARKV_INGRESS="")
    assert code == 2
    assert "--agent URL" in err


async def test_the_token_is_sent(served):
    refused = await fetch_one("agent", f"{served}/closed")
    allowed = await fetch_one("agent", f"{served}/closed", token="s3cret")  # noqa: S106 - of this test
    assert refused.error.startswith("answers 401; the token is missing or wrong")
    assert allowed.status.node == "demo"


@pytest.mark.parametrize(
    ("component", "path", "error"),
    [
        pytest.param("agent", "/other", "the answer is not a nearkv status", id="garbage"),
        pytest.param("agent", "/ingress", "this is an ingress; use --ingress", id="mixed-up"),
        pytest.param("agent", "/nowhere/at/all", "answers 404", id="no-such-path"),
    ],
)
async def test_an_answer_that_is_no_status_is_named(served, component, path, error):
    assert (await fetch_one(component, served + path)).error.startswith(error)


@pytest.mark.parametrize("url", ["http://a:b:c", "ftp://a:1", "http://"])
async def test_what_is_no_url_is_named(url):
    assert "is not an HTTP URL" in (await fetch_one("agent", url)).error


def test_flags_replace_the_environment():
    environment = {"NEARKV_AGENTS": "http://a:1,b:2", "NEARKV_INGRESS": "http://i:1"}
    assert [e.url for e in list_endpoints([], [], environment)] == [
        "http://a:1",
        "http://b:2",
        "http://i:1",
    ]
    assert list_endpoints(["c:3"], [], environment) == [Endpoint("agent", "http://c:3")]


def test_unknown_is_a_dash_and_never_zero():
    (view,) = merge_views([AgentStatus(engines=(AgentEngine(id="a"),))])
    cells = cells_of(view, wide=True)
    assert cells.pop("ENGINE") == "a"
    assert set(cells.values()) == {"-"}


def test_an_engine_that_only_an_ingress_knows_has_a_row():
    engine = IngressEngine(id="b", prefix_hits_tokens=1, prefix_queries_tokens=4, freshness="aged")
    (view,) = merge_views([IngressStatus(engines=(engine,))])
    cells = cells_of(view, wide=False)
    assert (cells["BLOCKS"], cells["HIT RATIO"], cells["FRESHNESS"]) == ("-", "25.0%", "aged")


def test_the_agent_has_the_first_word_and_the_ingress_fills_the_gaps():
    agent = AgentEngine(id="a", state="starting", requests_running=0)
    ingress = IngressEngine(id="a", state="ready", node="n1", requests_running=3, age_seconds=1)
    (view,) = merge_views([IngressStatus(engines=(ingress,)), AgentStatus(engines=(agent,))])
    cells = cells_of(view, wide=False)
    assert [cells[c] for c in ("NODE", "STATE", "RUN", "AGE")] == ["n1", "starting", "0", "1.0s"]


def test_how_the_kv_of_an_engine_moves_is_shown_where_there_is_room():
    (view,) = merge_views([IngressStatus(engines=(IngressEngine(id="b", transfer="nixl"),))])
    assert cells_of(view, wide=True)["TRANSFER"] == "nixl"
    assert "TRANSFER" not in cells_of(view, wide=False)


def test_tiers_are_shown_apart():
    engine = AgentEngine(id="a", blocks={"GPU": 2, "CPU": 5}, prefix_queries_tokens=0)
    (view,) = merge_views([AgentStatus(engines=(engine,))])
    assert cells_of(view, wide=False)["BLOCKS"] == "CPU:5 GPU:2"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param(AgentStatus(problems=("x: y",)), ["x: y"], id="reported"),
        pytest.param(
            AgentStatus(problems=("a: gone",), engines=(AgentEngine(id="a", state="unreachable"),)),
            ["a: gone"],
            id="said-once",
        ),
        pytest.param(
            AgentStatus(
                problems=("a1: gone",), engines=(AgentEngine(id="a", state="unreachable"),)
            ),
            ["a1: gone", "a: does not answer"],
            id="another-engines-name-begins-alike",
        ),
        pytest.param(
            AgentStatus(engines=(AgentEngine(id="a", state="ready", freshness="unknown"),)),
            ["a: its metrics are missing or too old"],
            id="unknown",
        ),
        pytest.param(
            AgentStatus(engines=(AgentEngine(id="a", state="starting", freshness="unknown"),)),
            [],
            id="starting-is-no-problem",
        ),
        pytest.param(IngressStatus(ready=False), ["the ingress is not ready"], id="not-ready"),
        pytest.param(
            IngressStatus(engines=(IngressEngine(id="a", breaker="open"),)),
            ["a: gets no requests, because recent ones failed"],
            id="breaker",
        ),
    ],
)
def test_problems(status, expected):
    assert list(list_problems(status)) == expected


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        pytest.param(format_bytes(0), "0 B", id="zero-bytes"),
        pytest.param(format_bytes(1536), "1.5 KiB", id="kib"),
        pytest.param(format_bytes(3 << 40), "3.0 TiB", id="tib"),
        pytest.param(format_bytes(None), "-", id="no-bytes"),
        pytest.param(format_age(0.44), "0.4s", id="seconds"),
        pytest.param(format_age(180), "3m", id="minutes"),
        pytest.param(format_age(7200), "2h", id="hours"),
        pytest.param(format_ratio(0.0), "0.0%", id="zero-ratio"),
    ],
)
def test_figures(shown, expected):
    assert shown == expected
