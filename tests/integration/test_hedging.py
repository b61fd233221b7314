"""A second engine for late first bytes: whoever is first serves, and the other is let go."""

import asyncio
import contextlib

import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.metrics_reading import counts
from tests.integration.raw_http import raw_engine
from tests.integration.stack import eventually, running_ingress, small_fleet

STREAM = b'{"model": null, "stream": true}'
HEDGE = {"after_ms": 50.0, "budget_ratio": 1.0}


def answer_of(name):
    return b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n" + name


class Slow:
    """Answers when it is told to; notes whether somebody still listened."""

    def __init__(self, answer):
        self.answer = answer
        self.go_on = asyncio.Event()
        self.dropped = False

    async def __call__(self, writer):
        closed = asyncio.create_task(writer._reader.read(1))  # nothing more is sent but the end
        told = asyncio.create_task(self.go_on.wait())
        try:
            await asyncio.wait({closed, told}, return_when=asyncio.FIRST_COMPLETED)
            self.dropped = closed.done()
        finally:
            for task in (closed, told):
                task.cancel()
            await asyncio.gather(closed, told, return_exceptions=True)
        if self.dropped:
            raise ConnectionResetError
        writer.write(self.answer) if self.answer else writer.close()


def in_front_of(*engines, hedge=HEDGE, **settings):
    static = [{"id": f"s{i}", "url": engine.url} for i, engine in enumerate(engines)]
    return running_ingress(engines=static, policy="round-robin", hedge=hedge, **settings)


async def ask(ingress, body=STREAM):
    headers = {"Content-Type": "application/json"}
    url = ingress.url + "/v1/x"
    async with ingress.session.post(url, data=body, headers=headers) as response:
        return response.status, response.headers.get("x-nearkv-engine"), await response.read()


async def nothing_is_left(ingress):
    know = ingress.knowledge
    await eventually(
        lambda: know.in_flight.count == 0 and know.ledger.total_requests == 0,
        what="nothing is in flight",
    )


async def asked_both(*engines):
    await eventually(lambda: all(e.requests for e in engines), what="both engines were asked")


async def test_the_second_engine_serves_where_the_first_is_late_and_the_first_is_let_go():
    slow = Slow(answer_of(b"1"))
    async with (
        raw_engine(answer_of(b"0")) as fast,
        raw_engine(slow) as late,
        in_front_of(fast, late) as ingress,
    ):
        assert await ask(ingress) == (200, "s0", b"0")
        assert len(late.requests) == 1
        await eventually(lambda: slow.dropped, what="the late engine is let go")
        await nothing_is_left(ingress)
        assert await counts(ingress, "hedges") == {("won",): 1}
        assert await counts(ingress, "retries") == {}


async def test_the_first_engine_serves_where_it_is_first_after_all():
    first, second = Slow(answer_of(b"0")), Slow(answer_of(b"1"))
    async with raw_engine(first) as a, raw_engine(second) as b, in_front_of(b, a) as ingress:
        answer = asyncio.create_task(ask(ingress))
        await asked_both(a, b)
        first.go_on.set()
        assert await answer == (200, "s1", b"0")
        await eventually(lambda: second.dropped, what="the other is let go")
        await nothing_is_left(ingress)
        assert sum((await counts(ingress, "hedges")).values()) == 1


async def test_one_that_fails_waits_for_the_other():
    failing, slow = Slow(b""), Slow(answer_of(b"1"))
    async with raw_engine(failing) as a, raw_engine(slow) as b, in_front_of(a, b) as ingress:
        answer = asyncio.create_task(ask(ingress))
        await asked_both(a, b)
        failing.go_on.set()
        slow.go_on.set()
        assert await answer == (200, "s1", b"1")
        await nothing_is_left(ingress)
        assert [len(a.requests), len(b.requests)] == [1, 1]


async def test_where_both_fail_it_is_an_error_and_neither_engine_is_blamed():
    ends = Slow(b""), Slow(b"")
    async with (
        raw_engine(ends[0]) as a,
        raw_engine(ends[1]) as b,
        in_front_of(a, b, breaker={"failures": 1}, retries=0) as ingress,
    ):
        answer = asyncio.create_task(ask(ingress))
        await asked_both(a, b)
        for end in ends:
            end.go_on.set()
        assert (await answer)[0] == 502
        await nothing_is_left(ingress)
        async with ingress.session.get(ingress.url + "/v1/status") as status:
            assert {e["breaker"] for e in (await status.json())["engines"]} == {"closed"}


async def test_a_client_that_leaves_ends_both():
    ends = Slow(b""), Slow(b"")
    async with (
        raw_engine(ends[0]) as a,
        raw_engine(ends[1]) as b,
        in_front_of(a, b) as ingress,
    ):
        answer = asyncio.create_task(ask(ingress))
        await asked_both(a, b)
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answer
        await eventually(lambda: all(end.dropped for end in ends), what="both are let go")
        await nothing_is_left(ingress)


@pytest.mark.parametrize(
    ("engines", "budget_ratio", "outcome"), [(1, 1.0, "no_engine"), (2, 0.05, "no_budget")]
)
async def test_without_another_engine_or_budget_a_late_answer_is_waited_for(
    engines, budget_ratio, outcome
):
    slow = Slow(answer_of(b"0"))
    async with (
        raw_engine(answer_of(b"1")) as other,
        raw_engine(slow) as engine,
        in_front_of(*[other, engine][-engines:], hedge=HEDGE | {"budget_ratio": budget_ratio}) as (
            ingress
        ),
    ):
        answer = asyncio.create_task(ask(ingress))
        give_up_at = asyncio.get_running_loop().time() + 10
        while not (hedges := await counts(ingress, "hedges")):
            assert asyncio.get_running_loop().time() < give_up_at
        assert hedges == {(outcome,): 1}
        slow.go_on.set()
        assert (await answer)[2] == b"0"
        assert other.requests == []


async def test_with_tokens_and_costs_the_winner_s_own_prediction_is_told():
    async with (
        EngineDouble(EngineDoubleConfig(num_blocks=600, overhead_seconds=10.0)) as a,
        EngineDouble(EngineDoubleConfig(num_blocks=600)) as b,
        small_fleet(a, b, policy="cost", hedge=HEDGE | {"predicted_factor": 0.0}) as (ingress, _),
    ):
        for number in range(8):
            body = {
                "model": "tiny",
                "prompt": f"{number} A long winter closed the pass. " * 30,
                "max_tokens": 4,
                "stream": True,
            }
            async with ingress.session.post(ingress.url + "/v1/completions", json=body) as answer:
                assert (await answer.text()).endswith("data: [DONE]\n\n")
            assert answer.headers["x-nearkv-engine"] == "b"
            assert answer.headers["x-nearkv-predicted-cached-tokens"] == "0"
        await nothing_is_left(ingress)
        for view in ingress.knowledge.fleet.engines.values():
            assert ingress.knowledge.computing.at(view.info.id, view.info.incarnation) == 0
