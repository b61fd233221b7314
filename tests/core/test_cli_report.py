"""``nearkv report`` as its users run it, against captured metrics and live components."""

import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from nearkv.cli.report import parse_window
from nearkv.report.errors import ReportError
from nearkv.serving import running
from nearkv.settings import Address
from tests.core.running_cli import run_cli

VLLM = Path(__file__).parents[1] / "data" / "vllm" / "metrics.txt"


@asynccontextmanager
async def endpoint(text, *, token=None):
    async def metrics(request):
        if token is not None and request.headers.get("Authorization") != f"Bearer {token}":
            raise web.HTTPUnauthorized
        return web.Response(text=text)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with running(app, Address("127.0.0.1", 0)) as address:
        yield f"http://{address}"


async def test_the_table_answers_or_says_what_is_missing_where():
    async with endpoint(VLLM.read_text()) as url:
        status, out, err = await run_cli("report", "--engine", url)
    assert (status, err) == (0, "")
    assert "11.4% of 1,123 prompt tokens" in out
    assert f"unknown: metric nearkv_ingress_prompt_tokens_total not found at {url}/metrics" in out
    assert "Everything since the start of 1 endpoints." in out


async def test_json_and_markdown_have_the_same_answers():
    async with endpoint(VLLM.read_text()) as url:
        _, as_json, _ = await run_cli("report", "--engine", url, "-o", "json")
        _, markdown, _ = await run_cli("report", "--engine", url, "-o", "markdown")
    answers = json.loads(as_json)["answers"]
    assert len(answers) == 10
    assert all(a["text"] in markdown for a in answers)
    assert all((a["value"] is None) == bool(a["unknown"]) for a in answers)


async def test_two_scrapes_look_at_what_happened_between_them():
    async with endpoint(VLLM.read_text()) as url:
        status, out, _ = await run_cli("report", "--engine", url, "--interval", "0.05")
    assert status == 0
    assert "unknown: no request ended in the window" in out
    assert "0.05 s of 1 endpoints." in out


async def test_what_does_not_answer_is_said_and_the_rest_is_shown():
    async with endpoint(VLLM.read_text()) as url, endpoint("<html>") as other:
        engines = ("--engine", url, "--engine", "http://127.0.0.1:9", "--engine", other)
        status, out, err = await run_cli("report", *engines)
    assert status == 1
    assert "11.4% of 1,123" in out
    assert "http://127.0.0.1:9/metrics: cannot connect" in err
    assert f"{other}/metrics: the answer is not Prometheus text" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no endpoint to ask"),
        (("--engine", "http://127.0.0.1:9", "--link", "what"), "--link"),
        (("--prometheus", "http://127.0.0.1:9", "--window", "soon"), "--window"),
        (("--prometheus", "http://127.0.0.1:9"), "cannot connect"),
    ],
)
async def test_what_cannot_be_asked_names_the_option(arguments, said):
    status, out, err = await run_cli("report", *arguments)
    assert (status, out) == (2, "")
    assert said in err


def test_windows_have_a_unit():
    assert [parse_window(text) for text in ("90s", "30m", "1h", "2d")] == [90, 1800, 3600, 172800]
    with pytest.raises(ReportError, match="--window"):
        parse_window("0h")
