"""What the HTTP server library logs: nothing that a client sent."""

import json
import logging

import pytest
from aiohttp import web

from nearkv.serving import running
from nearkv.settings import Address
from tests.integration.raw_http import exchange

LOOPBACK = Address("127.0.0.1", 0)
POST = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


async def fail(_request):
    raise RuntimeError("a defect")


def said(caplog):
    return json.dumps(
        [(r.levelno, r.getMessage(), repr(r.exc_info), r.exc_text) for r in caplog.records]
    )


@pytest.mark.parametrize(
    "bad",
    [
        POST + b"Authorization: Bearer sk-secret\x01\r\n\r\n",
        POST + b"Authorization : Bearer sk-secret\r\n\r\n",
        POST + b"Authorization: Bearer sk-secret" + b"j" * 9000 + b"\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nsk-secret: a prompt\r\n",
        b"GET /sk-secret\xff HTTP/1.1\r\n\r\n",
    ],
    ids=["character", "space", "long", "chunk", "path"],
)
async def test_a_request_that_cannot_be_read_leaves_no_secret_and_is_no_error(bad, caplog):
    caplog.set_level(logging.DEBUG)
    async with running(web.Application(), LOOPBACK) as address:
        assert b" 400 Bad Request" in await exchange(address.url, bad, until=b"\r\n\r\n")
    assert "Error handling request from 127.0.0.1: " in said(caplog)
    assert "secret" not in said(caplog)
    assert max(record.levelno for record in caplog.records) == logging.INFO


async def test_a_defect_is_logged_with_its_cause(caplog):
    app = web.Application()
    app.router.add_post("/", fail)
    async with running(app, LOOPBACK) as address:
        await exchange(address.url, POST + b"\r\n", until=b"\r\n\r\n")
    (record,) = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert record.levelno == logging.ERROR
    assert isinstance(record.exc_info[1], RuntimeError)
