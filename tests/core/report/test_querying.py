"""Asking a Prometheus server: its answers, its failures, the queries themselves."""

import json
import time

import pytest
from aiohttp import web

from nearkv.report.errors import ReportError
from nearkv.report.querying import Window, query_all, selector
from nearkv.report.scraping import Asking
from nearkv.report.series import PREFILL_SECONDS, USED_RATIO
from nearkv.serving import running
from nearkv.settings import Address

ASKING = Asking(5.0, time.time)


def vector(*values):
    result = [{"metric": labels, "value": [1.0, str(value)]} for labels, value in values]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


async def ask(answer_of, window=None):
    asked = []

    async def query(request):
        asked.append((await request.post())["query"])
        answer = answer_of(asked[-1])
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    app = web.Application()
    app.router.add_post("/api/v1/query", query)
    async with running(app, Address("127.0.0.1", 0)) as address:
        found = await query_all(f"http://{address}", window or Window(3600.0), ASKING)
    return found, asked


async def test_each_kind_of_series_is_asked_for_in_its_way():
    def answer(query):
        if "avg_over_time(nearkv_agent_kv_cache_used_ratio" in query:
            return vector(({"engine": "a"}, 0.25), ({"engine": "b"}, 0.75))
        if "request_prefill_time_seconds_bucket" in query:
            return vector(({"le": "1.0"}, 3), ({"le": "+Inf"}, 4))
        if "increase(vllm:request_prefill_time_seconds_sum" in query:
            return vector(({}, 5.5))
        if "last_over_time(vllm:request_prefill_time_seconds_sum" in query:
            return vector(({}, 2))
        return vector()

    found, asked = await ask(answer)
    assert found.gauge_values(USED_RATIO) == [0.25, 0.75]
    prefill = found.histogram(PREFILL_SECONDS)
    assert (prefill.total, prefill.count) == (5.5, 4)
    assert (found.engines, found.engine_seconds) == (2, 7200.0)
    assert all("[3600s]" in query for query in asked)


async def test_no_series_and_no_numbers_are_not_zero():
    found, _ = await ask(lambda query: vector(({}, "NaN")) if "sum(" in query else vector())
    assert not found.counters
    assert not found.histograms
    assert found.engine_seconds is None


def test_matchers_go_into_every_selector():
    window = Window(60.0, 'namespace="llm"')
    assert selector(USED_RATIO[0], "", window) == (
        'nearkv_agent_kv_cache_used_ratio{namespace="llm"}[60s]'
    )
    assert 'stage="prefill_forward",namespace="llm"' in selector(PREFILL_SECONDS[1], "_sum", window)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (web.Response(text="<html>"), "does not answer as a Prometheus"),
        (
            web.Response(text=json.dumps({"status": "error", "error": "bad matcher"}), status=400),
            "bad matcher",
        ),
    ],
    ids=["html", "error"],
)
async def test_a_server_that_refuses_is_quoted(answer, said):
    def once(_query):
        return web.Response(text=answer.text, status=answer.status)

    with pytest.raises(ReportError, match=said):
        await ask(once)


async def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ReportError, match=r"127\.0\.0\.1:9.*cannot connect"):
        await query_all("http://127.0.0.1:9", Window(60.0), ASKING)
