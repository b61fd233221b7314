"""``/v1/responses`` and ``/v1/messages``, from client to engine double."""

import json
from contextlib import asynccontextmanager

import openai
import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.integration.envoy_site import endpoint
from tests.integration.pd_stack import Part, pd_double, pd_stack
from tests.integration.sidecar_site import running_sidecar
from tests.integration.stack import eventually, running_agent, running_ingress, small_fleet

STORY = "Once upon a time, in a small town by the river, there was a baker. " * 12
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EXACT = {"other_apis": True}
GUESSED = {"render_other_apis": False}
WITHOUT_SCALE_OUT = {"scale_out": False}


def double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=900, **config))


class Conversation:
    """A growing conversation by one of the APIs; compares what is predicted and reported."""

    def __init__(self, ingress, path, **fields):
        self._ingress = ingress
        self._path = path
        self._fields = {"model": "tiny", "temperature": 0, **fields}
        self.said = []
        self.pairs = []
        self.engines = set()

    async def say(self, text):
        self.said.append({"role": "user", "content": text})
        if self._path == RESPONSES:
            body = {"instructions": STORY, "input": self.said, "max_output_tokens": 8}
        else:
            body = {"system": STORY, "messages": self.said, "max_tokens": 8}
        response, answer = await self._ingress.post(self._path, self._fields | body)
        assert response.status == 200, answer
        if self._path == RESPONSES:
            reply = answer["output"][0]["content"][0]["text"]
            reported = answer["usage"]["input_tokens_details"]["cached_tokens"]
        else:
            reply = answer["content"][0]["text"]
            reported = answer["usage"]["cache_read_input_tokens"]
        self.said.append({"role": "assistant", "content": reply})
        self.pairs.append((int(response.headers["x-nearkv-predicted-cached-tokens"]), reported))
        self.engines.add(response.headers["x-nearkv-engine"])


async def metric(ingress, name):
    async with ingress.session.get(ingress.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    found = {}
    for line in lines:
        if line.startswith(name + "{"):
            labels, _, value = line[len(name) + 1 :].partition("} ")
            found[labels] = float(value)
    return found


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("config", [EXACT, GUESSED, WITHOUT_SCALE_OUT], ids=str)
async def test_predictions_come_true(path, config):
    async with double(**config) as a, double(**config) as b, small_fleet(a, b) as (ingress, agent):
        talk = Conversation(ingress, path)
        for i in range(6):
            await ingress.synced(agent)
            await talk.say(f"Question {i}: what did the baker do then?")
        assert all(predicted == reported for predicted, reported in talk.pairs), talk.pairs
        assert all(reported > 0 for _, reported in talk.pairs[1:])
        assert len(talk.engines) == 1
        checked = await metric(ingress, "nearkv_ingress_parity_checks_total")
        guesses = await metric(ingress, "nearkv_ingress_guess_checks_total")
        told = checked if config == EXACT else guesses
        assert told == {'outcome="equal"': 6.0}
        assert not (guesses if config == EXACT else checked)


@pytest.mark.parametrize("order", [(RESPONSES, MESSAGES), (MESSAGES, RESPONSES)])
async def test_another_api_s_blocks_are_the_same_blocks(order):
    async with double() as engine, small_fleet(engine) as (ingress, agent):
        for by in order:
            talk = Conversation(ingress, by)
            await talk.say("What did the baker do?")
            await ingress.synced(agent)
        predicted, reported = talk.pairs[-1]
        assert predicted == reported > 0


async def test_what_is_forwarded_are_the_client_s_bytes():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        body = b'{"model":"tiny", "input" : "x","max_output_tokens":2}'
        headers = {"Content-Type": "application/json"}
        async with ingress.session.post(
            ingress.url + RESPONSES, data=body, headers=headers
        ) as response:
            assert response.status == 200
        assert [r.body for r in engine.record if r.path == RESPONSES] == [body]


async def test_tokens_can_be_counted():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        body = {"model": "tiny", "messages": [{"role": "user", "content": STORY}]}
        response, answer = await ingress.post(f"{MESSAGES}/count_tokens", body)
        assert response.status == 200
        assert answer["input_tokens"] > 100


# -- Streams -------------------------------------------------------------------------------


@asynccontextmanager
async def openai_client(ingress):
    async with openai.AsyncOpenAI(
        base_url=ingress.url + "/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        yield client


async def test_a_streamed_response_is_passed_on_and_checked():
    async with (
        double() as engine,
        small_fleet(engine) as (ingress, agent),
        openai_client(ingress) as client,
    ):
        asked = {"model": "tiny", "input": STORY, "max_output_tokens": 6, "temperature": 0}
        whole = await client.responses.create(**asked)
        await ingress.synced(agent)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == whole.output_text
        usage = events[-1].response.usage
        assert usage.input_tokens_details.cached_tokens > 0
        checked = await metric(ingress, "nearkv_ingress_parity_checks_total")
        assert checked == {'outcome="equal"': 2.0}


async def test_streamed_messages_are_passed_on_and_checked():
    async with double() as engine, small_fleet(engine) as (ingress, agent):
        asked = {"model": "tiny", "max_tokens": 6, "stream": True}
        asked["messages"] = [{"role": "user", "content": STORY}]
        for _ in range(2):
            await ingress.synced(agent)
            async with ingress.session.post(ingress.url + MESSAGES, json=asked) as response:
                text = await response.text()
        names = [line for line in text.splitlines() if line.startswith("event: ")]
        assert (names[0], names[-1]) == ("event: message_start", "event: message_stop")
        checked = await metric(ingress, "nearkv_ingress_parity_checks_total")
        assert checked == {'outcome="equal"': 2.0}


async def test_a_streamed_response_that_breaks_raises_instead_of_ending():
    async with (
        double() as engine,
        small_fleet(engine) as (ingress, _),
        openai_client(ingress) as client,
    ):
        await engine.inject(Faults(die_after_chunks=5))
        stream = await client.responses.create(
            model="tiny", input="x", max_output_tokens=50, stream=True
        )
        with pytest.raises(openai.APIError, match="failed in the middle"):
            _ = [event async for event in stream]


async def test_streamed_messages_that_break_end_with_an_error_of_their_api():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        await engine.inject(Faults(die_after_chunks=4))
        asked = {"model": "tiny", "max_tokens": 50, "stream": True}
        asked["messages"] = [{"role": "user", "content": "x"}]
        async with ingress.session.post(ingress.url + MESSAGES, json=asked) as response:
            text = await response.text()
        name, data = text.strip().split("\n\n")[-1].split("\n")
        assert name == "event: error"
        error = json.loads(data.removeprefix("data: "))
        assert error["type"] == "error"
        assert error["error"]["type"] == "api_error"


# -- Errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        pytest.param({"model": "nope"}, 404, "not_found_error", id="unknown model"),
        pytest.param({"messages": {}}, 400, "invalid_request_error", id="no list"),
        pytest.param({"model": 7}, 400, "invalid_request_error", id="wrong type"),
        pytest.param({"max_tokens": 0}, 400, "BadRequestError", id="the engine's own"),
    ],
)
async def test_errors_of_messages_have_anthropic_s_shape(fields, status, kind):
    async with double() as engine, small_fleet(engine) as (ingress, _):
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
        response, answer = await ingress.post(MESSAGES, body | fields)
        assert response.status == status
        assert answer["type"] == "error"
        assert answer["error"]["type"] == kind
        assert set(answer["error"]) == {"type", "message"}


async def test_engines_that_fail_are_said_in_the_api_s_own_way():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        await engine.inject(Faults(close_before_first_byte=True))
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
        response, answer = await ingress.post(MESSAGES, body)
        assert (response.status, answer["error"]["type"]) == (502, "api_error")
        response, answer = await ingress.post(RESPONSES, {"model": "tiny", "input": "x"})
        assert (response.status, answer["error"]["code"]) == (502, 502)


async def test_errors_of_responses_have_openai_s_shape():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        response, answer = await ingress.post(RESPONSES, {"model": "tiny"})
        assert response.status == 400
        assert answer["error"]["param"] == "input"
        response, answer = await ingress.post(RESPONSES, {"model": "nope", "input": "x"})
        assert (response.status, answer["error"]["param"]) == (404, "model")


# -- Responses that engines keep -----------------------------------------------------------


async def go_on(ingress, previous=None):
    body = {"model": "tiny", "input": "And then?", "max_output_tokens": 4}
    if previous is not None:
        body["previous_response_id"] = previous
    response, answer = await ingress.post(RESPONSES, body)
    return response.headers["x-nearkv-engine"], response, answer


async def test_a_conversation_stays_with_the_engine_that_keeps_it():
    config = {"store_responses": True}
    async with (
        double(**config) as a,
        double(**config) as b,
        double(**config) as c,
        small_fleet(a, b, c, policy="round-robin") as (ingress, _),
    ):
        owner, _, answer = await go_on(ingress)
        for _ in range(5):
            engine, response, answer = await go_on(ingress, answer["id"])
            assert (response.status, engine) == (200, owner), answer
        for method, suffix, status in (("GET", "", 200), ("POST", "/cancel", 400)):
            url = f"{ingress.url}{RESPONSES}/{answer['id']}{suffix}"
            async with ingress.session.request(method, url) as response:
                assert response.status == status
                assert response.headers["x-nearkv-engine"] == owner
        counted = await metric(ingress, "nearkv_ingress_stateful_requests_total")
        assert counted == {'outcome="known"': 7.0}


async def test_a_replica_that_did_not_see_it_asks_the_engines():
    config = {"store_responses": True}
    async with double(**config) as a, double(**config) as b, running_agent(a, b) as agent:
        settings = {"policy": "round-robin"}
        async with (
            running_ingress(agent.url, **settings) as first,
            running_ingress(agent.url, **settings) as second,
        ):
            for _ in range(2):
                owner, _, answer = await go_on(first)
                for _ in range(3):
                    engine, response, answer = await go_on(second, answer["id"])
                    assert (response.status, engine) == (200, owner), answer
            counted = await metric(second, "nearkv_ingress_stateful_requests_total")
            assert counted == {'outcome="found"': 2.0, 'outcome="known"': 4.0}


async def test_a_response_that_nobody_has_is_the_engine_s_to_refuse():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, _):
        _, response, answer = await go_on(ingress, "resp_nope")
        assert response.status == 404
        assert answer["error"]["param"] == "response_id"
        counted = await metric(ingress, "nearkv_ingress_stateful_requests_total")
        assert counted == {'outcome="unknown"': 1.0}


async def test_a_response_whose_engine_restarted_is_gone():
    config = {"store_responses": True}
    async with (
        double(**config) as a,
        double(**config) as b,
        small_fleet(a, b) as (ingress, agent),
    ):
        owner, _, answer = await go_on(ingress)
        before = agent.state.trackers[owner].incarnation
        await {"a": a, "b": b}[owner].restart()
        await eventually(
            lambda: (
                agent.state.trackers[owner].incarnation != before
                and agent.state.trackers[owner].info.state == "ready"
            ),
            what="agent sees the restart",
        )
        await ingress.synced(agent)
        _, response, answer = await go_on(ingress, answer["id"])
        assert response.status == 404
        assert response.headers["x-nearkv-reason"] == "response_gone"
        assert answer["error"]["param"] == "previous_response_id"
        counted = await metric(ingress, "nearkv_ingress_stateful_requests_total")
        assert counted == {'outcome="gone"': 1.0}


# -- Two engines for one request -----------------------------------------------------------


PAIR = {"p": Part("prefill"), "d": Part("decode")}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_messages_may_be_prefilled_by_one_engine_and_answered_by_the_other(stream):
    body = {"model": "tiny", "max_tokens": 4, "stop_sequences": ["x"], "stream": stream}
    body["messages"] = [{"role": "user", "content": STORY * 3}]
    async with pd_stack(PAIR) as stack:
        url = stack.ingress.url + MESSAGES
        async with stack.ingress.session.post(url, json=body) as response:
            answer = await response.text()
        assert (response.status, response.headers["x-nearkv-reason"]) == (200, "pd"), answer
        (prefill,), (decode,) = stack.legs("p"), stack.legs("d")
        assert prefill["path"] == decode["path"] == MESSAGES
        assert prefill["body"]["messages"] == body["messages"]
        assert (prefill["body"]["max_tokens"], prefill["body"]["stream"]) == (1, False)
        params = decode["body"].pop("kv_transfer_params")
        assert decode["body"] == body
        assert params["do_remote_prefill"] is True
        assert '"cache_read_input_tokens":0' not in answer
        assert ("message_stop" in answer) is stream


async def test_the_sidecar_splits_messages_too():
    body = {"model": "tiny", "max_tokens": 4}
    body["messages"] = [{"role": "user", "content": STORY * 3}]
    async with (
        pd_double() as p,
        pd_double() as d,
        running_sidecar(d.url, prefillers=[endpoint(p.url)]) as sidecar,
    ):
        headers = {"x-prefiller-host-port": endpoint(p.url)}
        response, answer = await sidecar.post(MESSAGES, body, headers=headers)
        assert (response.status, response.headers["x-nearkv-prefill"]) == (200, "ok")
        assert json.loads(answer)["usage"]["cache_read_input_tokens"] > 0


async def test_responses_stay_whole():
    body = {"model": "tiny", "max_output_tokens": 4, "input": STORY * 3}
    async with pd_stack(PAIR) as stack:
        response, _ = await stack.ingress.post(RESPONSES, body)
        assert response.status == 200
        assert "x-nearkv-prefill-engine" not in response.headers
        counted = await metric(stack.ingress, "nearkv_ingress_pd_decisions_total")
        assert counted == {'outcome="local",why="other_api"': 1.0}
