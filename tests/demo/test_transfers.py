import pytest
from aiohttp import ClientSession, web

from nearkv.demo.errors import ScenarioError
from nearkv.demo.transfers import Transfers, parse_transfers, read_transfers, wait_for_engines
from nearkv.serving import running
from nearkv.settings import Address

METRICS = """\
# TYPE nearkv_agent_transfer_bytes counter
nearkv_agent_transfer_bytes_total{path="tcp"} 4096.0
nearkv_agent_transfer_bytes_total{path="shm"} 0.0
# TYPE nearkv_agent_transfer_seconds histogram
nearkv_agent_transfer_seconds_bucket{path="tcp",le="+Inf"} 2.0
nearkv_agent_transfer_seconds_count{path="tcp"} 2.0
nearkv_agent_transfer_seconds_sum{path="tcp"} 0.25
"""


def test_totals_are_read_by_path():
    found = parse_transfers(METRICS)
    assert (found.path, found.size_bytes, found.seconds) == ("tcp", 4096, 0.25)


def test_the_difference_of_two_readings_is_what_happened_between():
    before = Transfers({"tcp": 96}, {"tcp": 0.05})
    moved = parse_transfers(METRICS) - before
    assert (moved.size_bytes, moved.seconds) == (4000, pytest.approx(0.2))


def test_nothing_moved_has_no_path():
    assert Transfers().path is None
    assert (parse_transfers(METRICS) - parse_transfers(METRICS)).path is None


def agent(status):
    async def answer(_request):
        return web.json_response(status)

    async def metrics(_request):
        return web.Response(text=METRICS)

    app = web.Application()
    app.router.add_get("/v1/status", answer)
    app.router.add_get("/metrics", metrics)
    return running(app, Address("127.0.0.1", 0))


async def test_an_agent_is_asked_over_http():
    async with agent({}) as address, ClientSession() as session:
        assert (await read_transfers(session, address.url)).size_bytes == 4096


async def test_registered_engines_end_the_wait():
    status = {"node": "n", "transfer": {"engines": [{"id": "e", "complete": True}]}}
    async with agent(status) as address, ClientSession() as session:
        await wait_for_engines(session, [address.url])


async def test_an_agent_whose_engine_never_registers_is_named(monkeypatch):
    monkeypatch.setattr("nearkv.demo.transfers.PAIR_DEADLINE_SECONDS", 0.0)
    async with agent({"node": "node-a", "transfer": None}) as address, ClientSession() as session:
        with pytest.raises(ScenarioError, match="node-a"):
            await wait_for_engines(session, [address.url])


async def test_an_agent_that_does_not_answer_is_an_error():
    async with agent({}) as address:
        url = address.url
    async with ClientSession() as session:
        with pytest.raises(ScenarioError, match="cannot read"):
            await read_transfers(session, url)
