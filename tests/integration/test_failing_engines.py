"""Engines that fail in every way, and what clients see of it: budgets, breakers, black holes."""

import asyncio
import contextlib
import gc
import socket
import time

import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.integration.metrics_reading import counts
from tests.integration.raw_http import deaf_port, raw_engine
from tests.integration.stack import eventually, running_ingress, small_fleet

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
DOCUMENT = "A long winter closed the pass above the village for weeks. " * 30
PATHS = ("/v1/completions", "/metrics", "/health", "/version", "/v1/models", "/is_sleeping")


def double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=600, max_model_len=8192, **config))


def in_front_of(*engines, **settings):
    static = [{"id": f"s{i}", "url": engine.url} for i, engine in enumerate(engines)]
    return running_ingress(engines=static, policy="round-robin", **settings)


async def ask(ingress, body=b'{"model": null}'):
    url = ingress.url + "/v1/x"
    async with ingress.session.post(url, data=body) as response:
        return response.status, response.headers.get("x-nearkv-engine"), await response.read()


async def breakers(ingress):
    async with ingress.session.get(ingress.url + "/v1/status") as answer:
        return {e["id"]: e["breaker"] for e in (await answer.json())["engines"]}


async def nothing_is_left(ingress):
    know = ingress.knowledge
    await eventually(
        lambda: know.in_flight.count == 0 and know.ledger.total_requests == 0,
        what="nothing is in flight",
    )


async def hang_up(writer):
    writer.close()


# -- Retries -----------------------------------------------------------------------------


async def test_an_outage_is_not_multiplied_by_retries():
    failing = b"HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\nno"
    budget = {"budget_ratio": 0.2, "floor_per_second": 0.0}
    async with (
        raw_engine(failing) as a,
        raw_engine(failing) as b,
        in_front_of(a, b, retry=budget) as ingress,
    ):
        statuses = [(await ask(ingress))[0] for _ in range(100)]
        assert set(statuses) == {500}, "the engines' own error is passed on"
        sent = len(a.requests) + len(b.requests)
        assert 110 <= sent <= 120
        refused = await counts(ingress, "retries_refused")
        assert await counts(ingress, "retries") == {("status",): sent - 100}
        assert refused[("budget",)] + refused[("limit",)] == 100


async def test_engines_that_cannot_be_connected_to_cost_no_budget():
    budget = {"budget_ratio": 0.0, "floor_per_second": 0.0}
    async with (
        double() as a,
        double() as b,
        double() as c,
        double() as live,
        in_front_of(a, b, c, live, retry=budget) as ingress,
    ):
        for dead in (a, b, c):
            dead.kill()
        for _ in range(8):
            response, _ = await ingress.complete("hello")
            assert response.status == 200
            assert response.headers["x-nearkv-engine"] == "s3"
        reasons = await counts(ingress, "retries")
        assert set(reasons) == {("unreachable",)}
        assert 1 <= reasons[("unreachable",)] <= 3, "one request for each says it all"


async def test_the_only_engine_is_asked_again_after_a_pause_where_it_had_not_begun():
    answers = [b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n", OK]

    async def busy_once(writer):
        writer.write(answers.pop(0))

    async with raw_engine(busy_once) as engine, in_front_of(engine) as ingress:
        assert await ask(ingress) == (200, "s0", b"ok")
        assert len(engine.requests) == 2
        await nothing_is_left(ingress)


async def test_the_only_engine_is_not_asked_again_for_what_it_had_begun():
    async with raw_engine(hang_up) as engine, in_front_of(engine) as ingress:
        assert (await ask(ingress))[0] == 502
        assert len(engine.requests) == 1


# -- Breakers ----------------------------------------------------------------------------


async def test_an_engine_that_fails_is_left_alone_and_found_well_again_by_one_trial():
    answers = {"fails": True}

    async def moody(writer):
        writer.write(OK) if not answers["fails"] else writer.close()

    breaker = {"failures": 3, "open_seconds": 1.0}
    async with (
        raw_engine(moody) as a,
        raw_engine(OK) as b,
        in_front_of(a, b, breaker=breaker) as ingress,
    ):
        for _ in range(12):
            assert (await ask(ingress))[0] == 200
        asked = len(a.requests)
        assert 3 <= asked < 8, "three, and a trial for each second that this took"
        assert (await breakers(ingress))["s0"] != "closed"
        answers["fails"] = False

        async def well_again():
            while (await breakers(ingress))["s0"] != "closed":
                assert (await ask(ingress))[0] == 200

        async with asyncio.timeout(30):
            await well_again()
        assert len(a.requests) == asked + 1, "one trial"
        changes = await counts(ingress, "breaker_changes")
        assert changes == {("opened",): asked - 2, ("closed",): 1}
        assert await counts(ingress, "breakers") == {
            ("closed",): 2,
            ("open",): 0,
            ("half-open",): 0,
        }


async def test_one_poisonous_request_opens_no_breaker():
    engines = {}

    def crashing(name):
        async def answer(writer):
            _, body = engines[name].requests[-1]
            writer.close() if b"poison" in body else writer.write(OK)

        return answer

    async with (
        raw_engine(crashing("a")) as a,
        raw_engine(crashing("b")) as b,
        raw_engine(crashing("c")) as c,
        in_front_of(a, b, c, breaker={"failures": 1}) as ingress,
    ):
        engines |= {"a": a, "b": b, "c": c}
        for number in range(5):
            sent = sum(len(engine.requests) for engine in engines.values())
            assert (await ask(ingress, b'{"poison": %d}' % number))[0] == 502
            assert sum(len(engine.requests) for engine in engines.values()) == sent + 2
        assert set((await breakers(ingress)).values()) == {"closed"}
        assert (await ask(ingress))[0] == 200


async def test_clients_own_faults_open_nothing():
    refusing = b"HTTP/1.1 400 X\r\nContent-Length: 2\r\n\r\nno"
    async with raw_engine(refusing) as engine, in_front_of(engine) as ingress:
        for _ in range(20):
            assert (await ask(ingress))[0] == 400
        assert await breakers(ingress) == {"s0": "closed"}


async def test_clients_that_leave_open_nothing():
    async def never(writer):
        await asyncio.sleep(60)

    async with raw_engine(never) as engine, in_front_of(engine) as ingress:
        for number in range(5):
            task = asyncio.create_task(ask(ingress))
            await eventually(lambda n=number: len(engine.requests) == n + 1, what="it arrived")
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await nothing_is_left(ingress)
        assert await breakers(ingress) == {"s0": "closed"}


async def test_with_all_breakers_open_the_best_engine_is_tried_at_once():
    long_pause = {"open_seconds": 30.0}
    async with double() as a, double() as b, in_front_of(a, b, breaker=long_pause) as ingress:
        a.kill()
        b.kill()
        assert (await ingress.complete("hello"))[0].status == 502
        assert set((await breakers(ingress)).values()) == {"open"}
        await a.start()
        await b.start()
        for _ in range(4):
            assert (await ingress.complete("hello"))[0].status == 200
        assert "closed" in (await breakers(ingress)).values()


async def test_streams_that_break_count_against_the_engine():
    async with double() as engine, in_front_of(engine) as ingress:
        await engine.inject(Faults(die_after_chunks=1))
        for _ in range(6):  # each began well, so it is their share that counts
            async with ingress.session.post(
                ingress.url + "/v1/completions",
                json={"model": "tiny", "prompt": "hello", "stream": True},
            ) as response:
                assert b"BadGatewayError" in await response.read()
        assert await breakers(ingress) == {"s0": "open"}


# -- Draining ----------------------------------------------------------------------------


async def test_a_draining_engine_gets_nothing_new_but_where_nobody_else_is_left():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, agent):
        response, _ = await ingress.complete(DOCUMENT)
        holder = response.headers["x-nearkv-engine"]
        (other,) = {"a", "b"} - {holder}
        await ingress.synced(agent)
        agent.state.trackers[holder].drain()
        agent.state.changed()
        await ingress.synced(agent)
        for number in range(6):
            response, _ = await ingress.complete(f"{DOCUMENT} {number}")
            assert response.headers["x-nearkv-engine"] == other
        {"a": a, "b": b}[other].kill()
        response, _ = await ingress.complete(DOCUMENT)
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, holder)


async def test_an_open_breaker_is_tried_before_a_draining_engine_that_has_the_prompt():
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, agent):
        response, _ = await ingress.complete(DOCUMENT)
        holder = response.headers["x-nearkv-engine"]
        (other,) = {"a", "b"} - {holder}
        agent.state.trackers[holder].drain()
        agent.state.changed()
        await ingress.synced(agent)
        know = ingress.knowledge
        incarnation = know.fleet.engines[other].info.incarnation
        know.suspects.failed(other, incarnation, time.monotonic())
        response, _ = await ingress.complete(DOCUMENT)
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, other)


# -- Black holes -------------------------------------------------------------------------


async def test_an_engine_whose_connections_hang_is_left_for_another_at_the_connect_deadline():
    with deaf_port() as url:
        async with raw_engine(OK) as live:
            static = [{"id": "hole", "url": url}, {"id": "live", "url": live.url}]
            deadlines = {"connect_seconds": 1.0, "sync_seconds": 0.1}
            async with running_ingress(
                engines=static, policy="round-robin", deadlines=deadlines
            ) as ingress:
                served = [await ask(ingress) for _ in range(4)]
                assert served == [(200, "live", b"ok")] * 4
                assert await counts(ingress, "retries") == {("unreachable",): 1}
                assert await breakers(ingress) == {"hole": "open", "live": "closed"}


async def test_an_engine_that_takes_requests_and_never_answers_loses_them_by_its_agents_word():
    deadlines = {"unreachable_seconds": 0.3}
    agent = {"scrape": {"interval_seconds": 0.1, "timeout_seconds": 1.0}}
    async with (
        double() as a,
        double() as b,
        small_fleet(a, b, policy="prefix-first", agent=agent, deadlines=deadlines) as (ingress, _),
    ):
        response, _ = await ingress.complete(DOCUMENT)
        holder = response.headers["x-nearkv-engine"]
        hung = {"a": a, "b": b}[holder]
        await hung.inject(Faults(hang_seconds=60.0, paths=PATHS))
        answers = await asyncio.gather(*(ingress.complete("hello there") for _ in range(6)))
        assert {response.status for response, _ in answers} == {200}
        assert {r.headers["x-nearkv-engine"] for r, _ in answers} == {"a", "b"} - {holder}
        assert (await counts(ingress, "retries"))[("lost",)] >= 1
        await nothing_is_left(ingress)
        await eventually(lambda: hung.record.aborted >= 1, what="the hung engine's are dropped")


async def test_an_engine_that_is_silent_to_the_last_deadline_is_left_alone():
    async with double() as a, double() as b:
        settings = {"deadlines": {"first_byte_seconds": 1.5}, "breaker": {"failures": 1}}
        async with in_front_of(a, b, **settings) as ingress:
            await a.inject(Faults(hang_seconds=60.0))
            statuses = [(await ingress.complete("hello"))[0].status for _ in range(4)]
            assert sorted(statuses) == [200, 200, 200, 504]
            assert (await breakers(ingress))["s0"] == "open"


async def test_a_streamed_answer_much_later_than_predicted_is_asked_of_another_engine():
    deadlines = {"late_seconds": 0.2, "late_factor": 2.0}
    async with (
        double() as a,
        double() as b,
        small_fleet(a, b, policy="cost", deadlines=deadlines) as (ingress, agent),
    ):
        response, _ = await ingress.complete(DOCUMENT)
        holder = response.headers["x-nearkv-engine"]
        await ingress.synced(agent)
        await {"a": a, "b": b}[holder].inject(Faults(hang_seconds=60.0))
        body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 4, "stream": True}
        async with ingress.session.post(ingress.url + "/v1/completions", json=body) as response:
            text = await response.text()
        assert response.status == 200
        assert text.endswith("data: [DONE]\n\n")
        assert response.headers["x-nearkv-engine"] != holder
        assert await counts(ingress, "retries") == {("silent",): 1}
        await nothing_is_left(ingress)


async def test_without_another_engine_a_late_one_is_waited_for():
    deadlines = {"late_seconds": 0.1, "late_factor": 0.0}
    async with (
        double() as engine,
        small_fleet(engine, policy="cost", deadlines=deadlines) as (ingress, _),
    ):
        await engine.inject(Faults(hang_seconds=1.0))
        body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 4, "stream": True}
        async with ingress.session.post(ingress.url + "/v1/completions", json=body) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        assert await counts(ingress, "retries") == {}


# -- Agents that are black holes -----------------------------------------------------------


async def test_an_agent_that_accepts_and_never_answers_keeps_nobody_waiting():
    async def never(writer):
        await asyncio.sleep(60)

    async with (
        raw_engine(never) as hole,
        double() as engine,
        running_ingress(
            hole.url,
            engines=[{"id": "s", "url": engine.url}],
            deadlines={"sync_seconds": 0.2, "agent_silence_seconds": 0.3},
        ) as ingress,
    ):
        response, _ = await ingress.complete("hello")
        assert (response.status, response.headers["x-nearkv-engine"]) == (200, "s")
        await eventually(lambda: len(hole.requests) >= 2, what="it is asked anew")
        errors = await counts(ingress, "agent_stream_errors")
        assert errors[("silent",)] >= 1


@pytest.mark.parametrize("late", ["ready", "not yet ready"])
async def test_a_replica_that_joins_while_requests_stream_knows_what_the_others_know(late):
    async with (
        double(decode_seconds_per_token=0.02) as a,
        double(decode_seconds_per_token=0.02) as b,
        small_fleet(a, b) as (first, agent),
    ):
        response, _ = await first.complete(DOCUMENT)
        holder = response.headers["x-nearkv-engine"]
        await first.synced(agent)
        body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 50, "stream": True}
        streams = [
            await first.session.post(first.url + "/v1/completions", json=body) for _ in range(4)
        ]
        async with running_ingress(agent.url) as second:
            if late == "ready":
                await second.synced(agent)
            response, _ = await second.complete(DOCUMENT)
            assert (response.status, response.headers["x-nearkv-engine"]) == (200, holder)
            for stream in streams:
                assert (await stream.text()).endswith("data: [DONE]\n\n")
            await nothing_is_left(first)
            await nothing_is_left(second)


async def test_connections_to_engines_notice_a_host_that_is_gone():
    """No host can vanish on loopback; what the system was asked to watch can be seen."""
    async with raw_engine(OK) as engine, in_front_of(engine) as ingress:
        await ask(ingress)
        (idle,) = [
            held
            for held in gc.get_objects()
            if isinstance(held, asyncio.Transport)
            and (peer := held.get_extra_info("peername"))
            and peer[:2] == ("127.0.0.1", int(engine.url.rpartition(":")[2]))
        ]
        sock = idle.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
