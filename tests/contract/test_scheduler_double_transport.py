"""How the double reaches an extender: URLs, TLS as configured, odd but legal HTTP."""

import asyncio
import shutil
import ssl

import pytest

from tests.contract.scheduler_stage import make_node, make_pod
from tests.doubles.scheduler import ExtenderConfig, Outcome, SchedulerConfig, SchedulerDouble
from tests.doubles.scheduler.clocks import HandClock
from tests.doubles.scheduler.cluster import Cluster
from tests.doubles.scheduler.go_http import GoHttpClient, TransportError
from tests.doubles.scheduler.scripted_extender import ScriptedExtender
from tests.extender.tls_files import make_pair

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
VERBS = {"filterVerb": "filter", "prioritizeVerb": "prioritize", "weight": 1}


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def place(entry):
    """Place a pod with an extender that is configured as in the file."""
    cluster = Cluster()
    for name in ("n0", "n1"):
        cluster.set_node(make_node(name))
    config = SchedulerConfig(extenders=[ExtenderConfig.from_entry({**VERBS, **entry})])
    scheduler = SchedulerDouble(cluster, config, now=HandClock())
    try:
        cluster.set_pod(make_pod("p"))
        return await scheduler.step()
    finally:
        scheduler.close()


async def test_the_prefix_loses_its_slashes_at_the_end():
    async with ScriptedExtender().serving() as extender:
        assert (await place({"urlPrefix": f"{extender.url}/v1//"})).outcome is Outcome.PLACED
        assert extender.verbs == ["filter", "prioritize"]


async def test_a_prefix_without_a_scheme_fails_every_call():
    placement = await place({"urlPrefix": "127.0.0.1:1/v1"})
    assert placement.outcome is Outcome.ERROR
    assert "unsupported protocol scheme" in placement.describe()


@needs_openssl
@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({}, Outcome.ERROR),
        ({"enableHTTPS": True}, Outcome.PLACED),
        ({"tlsConfig": {"insecure": True}}, Outcome.PLACED),
        ({"tlsConfig": {"caFile": "own"}}, Outcome.PLACED),
        ({"tlsConfig": {"caFile": "other"}, "enableHTTPS": True}, Outcome.ERROR),
    ],
    ids=["unknown CA", "enableHTTPS verifies nothing", "insecure", "right CA", "wrong CA"],
)
async def test_certificates_are_verified_as_configured(tmp_path, options, outcome):
    pairs = {name: make_pair(tmp_path, name) for name in ("own", "other")}
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pairs["own"].cert, pairs["own"].key)
    config = dict(options.get("tlsConfig", {}))
    if "caFile" in config:
        config["caFile"] = str(pairs[config["caFile"]].cert)
    async with ScriptedExtender().serving(tls=tls) as extender:
        placement = await place({**options, "urlPrefix": extender.url, "tlsConfig": config})
        assert placement.outcome is outcome


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (CHUNKED + b"2;x=y\r\n[1\r\n1\r\n]\r\n0\r\n\r\n", b"[1]"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", b"[]"),
        (b"HTTP/1.0 200 OK\r\n\r\n[2]", b"[2]"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[]", None),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n[]", None),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", None),
        (b"", None),
    ],
    ids=["chunked", "100 first", "HTTP/1.0", "cut", "no gzip", "no HTTP", "nothing"],
)
async def test_answers_as_they_may_come(answer, body):
    async def reply(reader, writer):
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = GoHttpClient(5.0, HandClock())
        url = f"http://127.0.0.1:{port}/filter"
        if body is None:
            with pytest.raises(TransportError) as failed:
                await client.post(url, b"{}")
            assert failed.value.reason in {"closed", "malformed"}
        else:
            assert (await client.post(url, b"{}")).body == body
        client.close()
