"""Envoy with our endpoint picker: aliases, adapters and the other APIs."""

import json

import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.picker_site import gateway, running_picker
from tests.integration.stack import running_agent

DOCUMENT = "The ferry to the outer islands leaves when the tide allows. " * 12
ALIASES = {"aliases": {"gpt-x": "tiny", "a-name-longer-than-the-other": "tiny", "nice": "tiny"}}


def small_double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=2048, **config))


@pytest.mark.parametrize("alias", ALIASES["aliases"])
@pytest.mark.parametrize("prompt", ["short", DOCUMENT * 200], ids=["small", "large"])
async def test_an_alias_is_put_right_on_the_way(tmp_path, alias, prompt):
    async with (
        small_double(max_model_len=60_000) as a,
        running_agent(a) as agent,
        running_picker(agent.url, models=ALIASES) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        response, body = await entry.complete(prompt, model=alias)
        assert response.status == 200, body
        assert json.loads(body)["model"] == "tiny"
        (received,) = [r for r in a.record if r.path == "/v1/completions"]
        assert json.loads(received.body)["prompt"] == prompt


async def test_an_adapter_s_requests_go_only_to_engines_that_have_it(tmp_path):
    async with (
        small_double() as a,
        small_double(loras=("sql",)) as b,
        running_agent(a, b) as agent,
        running_picker(agent.url, policy="round-robin") as picker,
        gateway(picker, tmp_path) as entry,
    ):
        for i in range(4):
            response, _ = await entry.complete(f"{i} {DOCUMENT}", model="sql")
            assert (response.status, response.headers["x-nearkv-engine"]) == (200, "b")


async def test_messages_are_predicted_checked_and_refused_in_their_own_shape(tmp_path):
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": DOCUMENT}]}
    async with (
        small_double() as a,
        running_agent(a) as agent,
        running_picker(agent.url) as picker,
        gateway(picker, tmp_path) as entry,
    ):
        for _ in range(2):
            await picker.synced(agent)
            response, answer = await entry.post("/v1/messages", body)
            assert response.status == 200
        reported = json.loads(answer)["usage"]["cache_read_input_tokens"]
        assert int(response.headers["x-nearkv-predicted-cached-tokens"]) == reported > 0
        await picker.is_idle()
        assert (await picker.counts("parity_checks")) == {("equal",): 2}
        response, answer = await entry.post("/v1/messages?beta=true", body | {"model": "nope"})
        assert response.status == 404
        assert json.loads(answer)["error"]["type"] == "not_found_error"


async def test_a_kept_response_is_found_again(tmp_path):
    config = {"store_responses": True}
    async with (
        small_double(**config) as a,
        small_double(**config) as b,
        running_agent(a, b) as agent,
        running_picker(agent.url, policy="round-robin") as picker,
        gateway(picker, tmp_path) as entry,
    ):
        body = {"model": "tiny", "input": "Who works at the pass?", "max_output_tokens": 4}
        response, answer = await entry.post("/v1/responses", body)
        owner = response.headers["x-nearkv-engine"]
        for _ in range(4):
            previous = json.loads(answer)["id"]
            response, answer = await entry.post(
                "/v1/responses", body | {"previous_response_id": previous}
            )
            assert (response.status, response.headers["x-nearkv-engine"]) == (200, owner)
