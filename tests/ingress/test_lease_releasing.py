"""Giving leases back: one call each, bounded, and every end counted."""

import asyncio
from collections import Counter

import aiohttp
import msgspec
import pytest
from aiohttp import web

from nearkv.certificates import CertificateFiles, ClientCertificates, ClientFiles, load_context
from nearkv.ingress.lease_releasing import LeaseReleaser
from nearkv.serving import Transport, running
from nearkv.settings import Address
from tests.doubles.authority import MISSING, Authority

PARAMS = msgspec.Raw(
    b'{"remote_engine_id":"p","remote_epoch":"e","remote_lease_id":"l","remote_block_ids":[[1]]}'
)


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def counts():
    return Counter()


@pytest.fixture
def make_releaser(session, counts):
    def count(outcome):
        counts[outcome] += 1

    def make(deadline_seconds=10.0):
        return LeaseReleaser(session, token=None, deadline_seconds=deadline_seconds, count=count)

    return make


@pytest.fixture
def releaser(make_releaser):
    return make_releaser()


@pytest.fixture
async def agent():
    """An agent that answers by ``answers``, kept in its application."""
    app = web.Application()
    asked, status = [], []

    async def release(request):
        asked.append(await request.json())
        if not status:
            await asyncio.Event().wait()
        return web.Response(status=status[0])

    app.router.add_post("/v1/transfer/release", release)
    async with running(app, Address("127.0.0.1", 0)) as address:
        yield address.url, asked, status


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "released"), (204, "released"), (404, "refused"), (500, "refused"), (302, "refused")],
)
async def test_the_agent_is_told_once(releaser, agent, counts, status, outcome):
    url, asked, answers = agent
    answers.append(status)
    releaser.release(url, PARAMS)
    await releaser.close()
    assert asked == [{"engine": "p", "epoch": "e", "lease": "l"}]
    assert counts == {outcome: 1}


async def test_an_agent_that_keeps_silent_is_given_up(make_releaser, agent, counts):
    releaser = make_releaser(deadline_seconds=0.1)
    releaser.release(agent[0], PARAMS)
    await releaser.close()
    assert counts == {"timeout": 1}


async def test_an_agent_that_is_not_there_is_no_trouble(releaser, counts):
    releaser.release("http://127.0.0.1:9", PARAMS)
    await releaser.close()
    assert counts == {"failed": 1}


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize(
    ("trusted", "shown", "outcome"),
    [
        ("ours", "ours", "released"),
        ("others", "ours", "tls_untrusted"),
        ("ours", "others", "failed"),
        ("ours", None, "failed"),
    ],
)
async def test_agents_over_tls_are_told_by_certificate(
    tmp_path, session, counts, trusted, shown, outcome
):
    authorities = {name: Authority(tmp_path, name) for name in ("ours", "others")}
    served = authorities["ours"].issue("agent")
    files = ClientFiles(authorities[trusted].cert)
    if shown is not None:
        reader = authorities[shown].issue("reader")
        files = ClientFiles(files.ca, reader.cert, reader.key)
    releaser = LeaseReleaser(
        session,
        token=None,
        certificates=ClientCertificates(files),
        deadline_seconds=10.0,
        count=lambda outcome: counts.update([outcome]),
    )
    app = web.Application()
    app.router.add_post("/v1/transfer/release", done)
    tls = load_context(CertificateFiles(served.cert, served.key, authorities["ours"].cert))
    async with running(app, Address("127.0.0.1", 0), transport=Transport(tls=tls)) as address:
        releaser.release(f"https://{address}", PARAMS)
        await releaser.close()
    assert counts == {outcome: 1}


async def done(_request):
    return web.Response()


async def test_too_many_at_once_are_dropped_and_counted(releaser, agent, counts):
    url, _, answers = agent
    answers.append(200)
    for _ in range(257):
        releaser.release(url, PARAMS)
    await releaser.close()
    assert counts == {"released": 256, "dropped": 1}


@pytest.mark.parametrize(
    ("url", "params"), [("", PARAMS), ("http://127.0.0.1:9", msgspec.Raw(b'{"remote_port":5}'))]
)
async def test_without_agent_or_lease_there_is_nothing_to_do(releaser, counts, url, params):
    releaser.release(url, params)
    await releaser.close()
    assert counts == {}
