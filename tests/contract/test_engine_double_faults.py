"""The double misbehaves on request, and only where asked."""

import asyncio
import time

import aiohttp
import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello world", "max_tokens": 4}


@pytest.fixture
async def engine():
    async with EngineDouble(EngineDoubleConfig(publish_events=False)) as engine:
        yield engine


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


async def status(session, engine, path=COMPLETIONS, **options):
    async with session.post(engine.url + path, json=BODY, **options) as response:
        await response.read()
        return response.status


async def collect(response, lines):
    async for line in response.content:
        lines.append(line)


async def eventually(condition, timeout_seconds=30.0):
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - the double offers no event for this
            await asyncio.sleep(0.005)


async def test_answer_status_hits_generation_only(session, engine):
    await engine.inject(Faults(answer_status=500))
    assert await status(session, engine) == 500
    assert await status(session, engine, "/tokenize") == 200


async def test_times_limits_a_fault(session, engine):
    await engine.inject(Faults(answer_status=503, times=2))
    assert [await status(session, engine) for _ in range(3)] == [503, 503, 200]


async def test_close_before_the_first_byte(session, engine):
    await engine.inject(Faults(close_before_first_byte=True))
    with pytest.raises(aiohttp.ClientConnectionError):
        await status(session, engine)


async def test_hang_before_the_headers(session, engine):
    await engine.inject(Faults(hang_seconds=30))
    with pytest.raises(TimeoutError):
        await status(session, engine, timeout=aiohttp.ClientTimeout(total=0.1))
    await eventually(lambda: engine.record.aborted == 1)


@pytest.mark.parametrize("chunks", [0, 2])
async def test_death_after_chunks(session, engine, chunks):
    await engine.inject(Faults(die_after_chunks=chunks))
    seen = []
    async with session.post(engine.url + COMPLETIONS, json=BODY | {"stream": True}) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await collect(response, seen)
    assert len([line for line in seen if line.startswith(b"data: ")]) == chunks


async def test_refused_connections_and_recovery(session, engine):
    assert await status(session, engine) == 200
    await engine.inject(Faults(refuse_connections_seconds=60))
    with pytest.raises(aiohttp.ClientConnectionError):
        await status(session, engine)
    await engine.inject(Faults())
    assert await status(session, engine) == 200


async def test_refusal_set_over_http_ends_by_itself(session, engine):
    faults = {"refuse_connections_seconds": 0.2}
    async with session.post(engine.url + "/double/faults", json=faults) as response:
        assert response.status == 204
    with pytest.raises(aiohttp.ClientConnectionError):
        await status(session, engine)
    await eventually(lambda: engine.is_listening)
    assert await status(session, engine) == 200


async def test_faults_over_http(session, engine):
    async with session.post(engine.url + "/double/faults", json={"answer_status": 429}) as response:
        assert response.status == 204
    assert await status(session, engine) == 429
    async with session.post(engine.url + "/double/faults", json={"nonsense": 1}) as response:
        assert response.status == 400


async def test_kill_breaks_connections_and_start_revives(session, engine):
    await engine.inject(Faults(hang_seconds=30))
    hanging = asyncio.create_task(status(session, engine))
    await eventually(lambda: engine.record.counts[COMPLETIONS] == 1)
    engine.kill()
    with pytest.raises(aiohttp.ClientConnectionError):
        await hanging
    with pytest.raises(aiohttp.ClientConnectionError):
        await status(session, engine)
    await engine.start()
    assert await status(session, engine) == 200


async def test_slow_factor(session):
    config = EngineDoubleConfig(overhead_seconds=0.02, publish_events=False)
    async with EngineDouble(config) as engine:
        await engine.inject(Faults(slow_factor=5))
        started = time.monotonic()
        await status(session, engine)
        assert time.monotonic() - started >= 0.1


async def test_taken_port_fails_the_start_and_leaves_nothing(engine):
    port = int(engine.url.rpartition(":")[2])
    second = EngineDouble(EngineDoubleConfig(port=port, bind_seconds=0.05))
    with pytest.raises(OSError, match="address"):
        await second.start()
    assert not second.is_listening
