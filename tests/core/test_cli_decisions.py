"""``nearkv decisions`` and ``nearkv explain request``: tables, documents, and what is said else."""

import json
import ssl
from contextlib import asynccontextmanager

import msgspec
import pytest

from nearkv.ingress.app import build_app as build_ingress
from nearkv.ingress.settings import IngressSettings
from nearkv.serving import Transport, running
from tests.core.running_cli import run_cli
from tests.doubles.authority import MISSING, Authority
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import ANY_PORT, running_ingress, small_fleet

TOKEN = "not-a-real-one"  # noqa: S105 (it guards nothing)
PROMPT = "A heron stands in the shallows below the weir. " * 20


def double():
    return EngineDouble(EngineDoubleConfig(num_blocks=600, prefill_tokens_per_second=4000))


@pytest.fixture
async def ingress():
    async with double() as a, double() as b, small_fleet(a, b, policy="cost") as (entry, agent):
        await entry.complete(PROMPT, headers={"X-Request-Id": "one"})
        await entry.synced(agent)
        await entry.complete(PROMPT + "Why?", headers={"X-Request-Id": "two"})
        await entry.complete(PROMPT + "How?", headers={"X-Request-Id": "three"})
        await entry.complete("x", model="nobody", headers={"X-Request-Id": "lost"})
        yield entry


async def test_the_table_of_requests(ingress):
    code, out, err = await run_cli("decisions", "--ingress", ingress.url)
    assert (code, err) == (0, "")
    heading, *rows = out.splitlines()
    assert heading.split()[:5] == ["AT", "REQUEST", "MODEL", "TOKENS", "CACHED"]
    assert [row.split()[1] for row in rows][0::3] == ["lost", "one"]
    assert "unknown_model" in rows[0]
    assert "refused 404" in rows[0]
    assert "prefix_hit" in rows[1]
    assert "prefix_miss" in rows[3]


async def test_requests_are_narrowed_and_counted(ingress):
    ask = ("decisions", "--ingress", ingress.url, "-o", "json")
    _, out, _ = await run_cli(*ask, "--reason", "prefix_hit", "--limit", "1")
    assert [line["id"] for line in json.loads(out)["decisions"]] == ["three"]
    _, out, _ = await run_cli(*ask, "--model", "nothing")
    assert json.loads(out)["decisions"] == []


async def test_no_requests_are_said_so(ingress):
    code, out, _ = await run_cli("decisions", "--ingress", ingress.url, "--engine", "nobody")
    assert (code, out) == (0, "No requests.\n")


async def test_replicas_are_all_asked_and_one_that_is_away_is_named(ingress):
    async with running_ingress() as other:
        await other.complete("x", headers={"X-Request-Id": "elsewhere"})
        both = f"{ingress.url},{other.url}"
        code, out, err = await run_cli("decisions", "-o", "yaml", NEARKV_INGRESS=both)
        assert (code, err) == (0, "")
        found = msgspec.yaml.decode(out)["decisions"]
        assert [line["id"] for line in found][:2] == ["elsewhere", "lost"]
        ask = ("--ingress", other.url, "--ingress", ingress.url)
        code, out, err = await run_cli("explain", "request", "one", *ask)
        assert (code, err) == (0, "")
        assert out.startswith("one ")
    away = ("--ingress", "http://127.0.0.1:9", "--ingress", ingress.url)
    code, out, err = await run_cli("decisions", *away)
    assert code == 1
    assert "lost" in out
    assert "ingress http://127.0.0.1:9: " in err


async def test_a_request_is_explained(ingress):
    code, out, err = await run_cli("explain", "request", "three", "--ingress", ingress.url)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("three  20")
    assert ": it holds the prompt's beginning" in lines[1]
    heading = next(i for i, line in enumerate(lines) if line.startswith("ENGINE"))
    assert "chosen: it holds the prompt's beginning" in lines[heading + 1]
    assert " ms dearer (" in lines[heading + 2]
    assert any("came from the cache, as predicted" in line for line in lines)


async def test_json_and_yaml_are_the_ingress_s_own(ingress):
    ask = ("explain", "request", "one", "--ingress", ingress.url, "--limit", "1")
    _, as_json, _ = await run_cli(*ask, "-o", "json")
    _, as_yaml, _ = await run_cli(*ask, "-o", "yaml")
    found = json.loads(as_json)
    assert found == msgspec.yaml.decode(as_yaml)
    assert (found["engines_total"], len(found["engines"])) == (2, 1)


async def test_a_request_that_nobody_knows(ingress):
    code, out, err = await run_cli("explain", "request", "nobody", "--ingress", ingress.url)
    assert (code, out) == (1, "")
    assert "no record of request 'nobody'" in err


async def test_the_token():
    async with running_ingress(admin_token=TOKEN) as entry:
        ask = ("decisions", "--ingress", entry.url)
        code, _, err = await run_cli(*ask)
        assert code == 1
        assert "set --token or NEARKV_TOKEN" in err
        code, _, err = await run_cli(*ask, NEARKV_TOKEN=TOKEN)
        assert (code, err) == (0, "")


async def test_nobody_to_ask():
    code, _, err = await run_cli("decisions")
    assert code == 2
    assert "give --ingress URL or set NEARKV_INGRESS" in err


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@asynccontextmanager
async def behind_mutual_tls(issued):
    """Run an ingress that talks only to those who show a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=issued.ca)
    context.load_cert_chain(issued.cert, issued.key)
    context.verify_mode = ssl.CERT_REQUIRED
    transport = Transport(tls=context)
    app = await build_ingress(IngressSettings.model_validate({"listen": "127.0.0.1:0"}))
    async with running(app, ANY_PORT, transport=transport) as address:
        yield transport.url_of(address)


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize(
    ("verb", "ends"),
    [(("decisions",), (0, "")), (("explain", "request", "one"), (1, "no record of request 'one'"))],
    ids=["decisions", "explain"],
)
async def test_a_certificate_is_shown(authority, verb, ends):
    issued = authority.issue(f"ingress-{verb[0]}")
    shown = [f"--{name}={path}" for name, path in issued.shown().items()]
    async with behind_mutual_tls(issued) as url:
        code, _, err = await run_cli(*verb, "--ingress", url, *shown)
        assert code == ends[0]
        assert ends[1] in err
        code, _, err = await run_cli(*verb, "--ingress", url, f"--ca={issued.ca}")
        assert code == 1
        assert "does it take our certificate (--cert, --key)?" in err
        code, _, err = await run_cli(*verb, "--ingress", url)
        assert code == 1
        assert "its certificate is not trusted" in err
        assert "set --ca" in err
        code, _, err = await run_cli(*verb, "--ingress", url, f"--cert={issued.cert}")
        assert code == 2
        assert "--cert and --key go together" in err
