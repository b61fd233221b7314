"""The same ingress in front of engines with vLLM's own NixlConnector (``transfer: nixl``)."""

import random

import pytest

from tests.e2e.pd_stage import agents_and_ingress, stock_nixl, two_engines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTHS = (33, 100, 640, 3000)


async def test_pd_with_the_stock_connector_gives_the_tokens_of_one_engine(monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    async with (
        two_engines(stock_nixl) as engines,
        agents_and_ingress(engines, "shm", mode="nixl") as stack,
    ):
        for length in LENGTHS:
            numbers = random.Random(length)
            prompt = [numbers.randrange(10, 400) for _ in range(length)]
            headers, answer = await stack.post(
                "/v1/completions", {"prompt": prompt, "max_tokens": 8}
            )
            alone = await engines.complete("p", prompt)
            assert answer["choices"][0]["text"] == alone["choices"][0]["text"], length
            assert headers["x-nearkv-reason"] == "pd"
            assert headers["x-nearkv-prefill-engine"] == "p"
        moved = (
            'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv'
        )
        assert await engines.counter("d", moved) > 0
