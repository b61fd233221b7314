"""Split requests when something fails on the way: no error to the client, no lease left."""

import asyncio
import json
import random

import aiohttp
import pytest

from nearkv.state.model import TransferInfo
from tests.doubles.engine import Faults
from tests.integration.pd_stack import Part, pd_double, pd_stack, until_released
from tests.integration.raw_http import raw_engine
from tests.integration.stack import eventually

DOCUMENT = "A lamp in the window meant that the bridge could be crossed. " * 30
PD = {"p": Part("prefill"), "d": Part("decode")}
TWO_P = PD | {"q": Part("prefill")}
THREE_P = TWO_P | {"r": Part("prefill")}
TWO_D = {"p": Part("prefill"), "d": Part("decode"), "e": Part("decode", node="far")}
LEASE = {"epoch": "epoch-1", "lease": "lease-1"}
SLOW = {"overhead_seconds": 30.0}
COMPLETION = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 4, "temperature": 0}


async def abandoned(stack, body, *, when):
    """Post a request and go away as soon as a condition holds."""

    async def post():
        async with stack.ingress.session.post(
            stack.ingress.url + "/v1/completions", json=body
        ) as response:
            async for _ in response.content.iter_any():
                pass

    task = asyncio.create_task(post())
    await eventually(when, what="the moment to go away")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Faults(close_before_first_byte=True), id="connection broken"),
        pytest.param(Faults(answer_status=500), id="status 500"),
        pytest.param(Faults(answer_status=503), id="status 503"),
    ],
)
async def test_where_two_prefill_engines_fail_one_engine_serves_alone(fault):
    async with pd_stack(THREE_P) as stack:
        for name in "pqr":
            await stack.engines[name].inject(fault)
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, "d")
        assert "x-nearkv-prefill-engine" not in response.headers
        assert sorted(len(stack.legs(name)) for name in "pqr") == [0, 1, 1]
        assert await stack.counts("pd_legs") == {("prefill", "failed"): 2}
        assert await stack.counts("pd_decisions") == {
            ("pd", "always"): 2,
            ("local", "pairs_failed"): 1,
        }


async def test_where_a_prefill_engine_fails_another_pair_is_made_and_it_is_left_alone():
    async with pd_stack(TWO_P) as stack:
        await stack.engines["p"].inject(Faults(close_before_first_byte=True))
        for number in range(10):
            response, _ = await stack.ingress.complete(f"{number} {DOCUMENT}")
            assert response.headers["x-nearkv-prefill-engine"] == "q"
            assert response.headers["x-nearkv-reason"] == "pd"
        assert len(stack.legs("p")) == 3  # that many requests have to agree


async def test_without_any_prefill_engine_requests_are_served_by_one_alone():
    async with pd_stack(PD) as stack:
        stack.engines["p"].kill()
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.status == 200
        assert response.headers["x-nearkv-engine"] == "d"
        assert response.headers["x-nearkv-reason"] == "prefix_miss"
        assert "kv_transfer_params" not in stack.legs("d")[0]["body"]


async def test_a_prefill_engine_that_hangs_is_given_up_at_the_deadline():
    async with pd_stack(PD, doubles={"p": pd_double(**SLOW)}, prefill_seconds=0.2) as stack:
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.status == 200
        assert response.headers["x-nearkv-engine"] == "d"
        assert await stack.counts("pd_legs") == {("prefill", "timeout"): 1}
        await eventually(lambda: stack.engines["p"].record.aborted == 1, what="P's leg is cut")


async def test_a_prefill_engine_that_kept_nothing_leaves_the_other_to_compute():
    async with pd_stack(PD) as stack:
        await stack.engines["p"].inject(Faults(withhold_transfer_params=True))
        response, body = await stack.ingress.complete(DOCUMENT)
        assert response.headers["x-nearkv-engine"] == "d"
        assert response.headers["x-nearkv-reason"] == "no_kv"
        assert "x-nearkv-prefill-engine" not in response.headers
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert response.headers["x-nearkv-predicted-cached-tokens"] == "0"
        assert await stack.counts("pd_legs") == {("prefill", "no_kv"): 1, ("decode", "ok"): 1}
        assert "kv_transfer_params" not in stack.legs("d")[0]["body"]


ANSWERS = {
    "not json": b"<html>",
    "no object": b'{"kv_transfer_params": [1]}',
    "endless": b'{"kv_transfer_params": {"a": "' + b"x" * (1 << 20) + b'"}}',
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_a_prefill_answer_that_makes_no_sense_is_passed_over(answer):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)
    async with (
        raw_engine(head + answer) as raw,
        pd_stack(PD | {"p": Part("prefill", url=raw.url)}) as stack,
    ):
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.status == 200
        assert response.headers["x-nearkv-reason"] == "no_kv"
        assert await stack.counts("pd_legs") == {("prefill", "unreadable"): 1, ("decode", "ok"): 1}


async def test_a_decode_engine_that_rejects_the_parameters_gets_the_request_without():
    async with pd_stack(PD) as stack:
        await stack.engines["d"].inject(Faults(reject_transfer_params=True))
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.status == 200
        assert response.headers["x-nearkv-reason"] == "no_kv"
        with_params, without = stack.legs("d")
        assert "kv_transfer_params" in with_params["body"]
        assert without["body"] == COMPLETION
        await until_released(stack)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(Faults(close_before_first_byte=True), "broken"), (Faults(answer_status=500), "status")],
    ids=["broken", "status"],
)
async def test_a_decode_engine_that_fails_is_replaced_and_the_lease_given_back(fault, reason):
    async with pd_stack(TWO_D) as stack:
        await stack.engines["d"].inject(fault)
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, "e")
        assert "x-nearkv-prefill-engine" not in response.headers
        assert "kv_transfer_params" not in stack.legs("e")[0]["body"]
        await until_released(stack)
        (leg,) = stack.legs("d")
        engine = leg["body"]["kv_transfer_params"]["remote_engine_id"]
        assert stack.relay.released == [LEASE | {"engine": engine}]
        assert len(stack.legs("p")) == 1
        assert await stack.counts("retries") == {(reason,): 1}


async def test_an_engine_for_prefill_answers_where_no_other_can():
    async with pd_stack(PD) as stack:
        await stack.engines["d"].inject(Faults(answer_status=500))
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, "p")
        await until_released(stack)


async def test_a_prefill_engine_that_its_agent_cannot_reach_is_given_up():
    deadlines = {"unreachable_seconds": 0.2}
    agent = {"scrape": {"interval_seconds": 0.1, "timeout_seconds": 1.0}}
    async with pd_stack(PD, ingress={"deadlines": deadlines}, agent=agent) as stack:
        paths = ("/v1/completions", "/metrics")
        await stack.engines["p"].inject(Faults(hang_seconds=60.0, paths=paths))
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, "d")
        assert await stack.counts("pd_legs") == {("prefill", "timeout"): 1}
        await eventually(lambda: stack.engines["p"].record.aborted, what="P's leg is cut")


async def test_a_client_that_leaves_during_prefill_ends_it_and_nothing_else_begins():
    async with pd_stack(PD, doubles={"p": pd_double(**SLOW)}) as stack:
        await abandoned(stack, COMPLETION, when=lambda: stack.legs("p"))
        await eventually(lambda: stack.engines["p"].record.aborted == 1, what="P's leg is cut")
        await eventually(
            lambda: stack.ingress.knowledge.ledger.total_requests == 0, what="nothing in flight"
        )
        assert stack.legs("d") == []
        assert stack.relay.released == []  # P never answered: there is no lease yet
        assert await stack.counts("pd_legs") == {("prefill", "client_gone"): 1}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_before_the_answer_gives_the_lease_back_once(stream):
    async with pd_stack(PD, doubles={"d": pd_double(**SLOW)}) as stack:
        body = COMPLETION | {"stream": stream}
        await abandoned(stack, body, when=lambda: stack.legs("d"))
        await eventually(lambda: stack.engines["d"].record.aborted == 1, what="D's leg is cut")
        await until_released(stack)
        assert stack.relay.released[0].items() >= LEASE.items()
        assert await stack.counts("pd_releases") == {("released",): 1}
        assert await stack.counts("pd_legs") == {
            ("prefill", "ok"): 1,
            ("decode", "client_gone"): 1,
        }


async def test_a_client_that_leaves_in_the_middle_of_the_answer_leaves_the_lease_to_the_engine():
    double = pd_double(decode_seconds_per_token=0.02)
    async with pd_stack(PD, doubles={"d": double}) as stack:
        body = COMPLETION | {"stream": True, "max_tokens": 1000}
        async with aiohttp.ClientSession() as session:
            response = await session.post(stack.ingress.url + "/v1/completions", json=body)
            await response.content.readany()
            response.close()
        await eventually(lambda: double.record.aborted == 1, what="D's leg is cut")
        assert stack.relay.released == []
        assert await stack.counts("pd_legs") == {("prefill", "ok"): 1, ("decode", "ok"): 1}


async def test_a_decode_engine_that_keeps_silent_gives_the_lease_back():
    deadlines = {"first_byte_seconds": 0.3}
    doubles = {"d": pd_double(**SLOW)}
    async with pd_stack(PD, doubles=doubles, ingress={"deadlines": deadlines}) as stack:
        response, body = await stack.ingress.complete(DOCUMENT)
        assert (response.status, body["error"]["code"]) == (504, 504)
        await until_released(stack)


async def test_the_agents_token_is_shown_when_a_lease_is_given_back():
    async with pd_stack(PD, ingress={"agent_token": "t"}) as stack:
        await stack.engines["d"].inject(Faults(reject_transfer_params=True))
        await stack.ingress.complete(DOCUMENT)
        await until_released(stack)
        assert stack.relay.tokens == ["Bearer t"]


async def test_stock_connectors_know_no_release():
    nixl = TransferInfo(mode="nixl", compat="c")
    parts = {"p": Part("prefill", nixl), "d": Part("decode", nixl)}
    doubles = {name: pd_double(transfer_keys="{}") for name in parts}
    async with pd_stack(parts, doubles=doubles) as stack:
        await stack.engines["d"].inject(Faults(reject_transfer_params=True))
        response, _ = await stack.ingress.complete(DOCUMENT)
        assert response.status == 200
        assert await stack.counts("pd_releases") == {}


async def test_a_stream_that_breaks_after_prefill_ends_with_an_error():
    async with pd_stack(PD) as stack:
        await stack.engines["d"].inject(Faults(die_after_chunks=2))
        async with stack.ingress.session.post(
            stack.ingress.url + "/v1/completions", json=COMPLETION | {"stream": True}
        ) as response:
            text = (await response.read()).decode()
        last = text.strip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["code"] == 502
        assert stack.relay.released == []


async def test_whenever_clients_leave_nothing_stays_in_flight_and_every_lease_has_one_end():
    chance = random.Random(5)
    doubles = {name: pd_double(overhead_seconds=0.01) for name in PD}
    async with pd_stack(PD, doubles=doubles) as stack:

        async def ask(number):
            try:
                async with asyncio.timeout(chance.uniform(0.0, 0.3)):
                    response, _ = await stack.ingress.complete(f"{number} {DOCUMENT}")
            except TimeoutError:
                return None
            return response.status

        answers = [
            await asyncio.gather(*(ask(5 * turn + n) for n in range(5))) for turn in range(12)
        ]
        know = stack.ingress.knowledge
        await eventually(lambda: know.in_flight.count == 0, what="no handler runs")
        assert {status for turn in answers for status in turn} <= {200, None}
        assert know.ledger.total_requests == 0
        for view in know.fleet.engines.values():
            key = (view.info.id, view.info.incarnation)
            assert (know.computing.at(*key), know.staged.at(*key)) == (0, 0)
        legs = await stack.counts("pd_legs")
        gone = legs.get(("decode", "client_gone"), 0)
        assert legs.get(("prefill", "ok"), 0) == legs.get(("decode", "ok"), 0) + gone
        await until_released(stack, gone)
