"""The extender as a process: TLS that is renewed, signals, a configuration that is wrong."""

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.extender.tls_files import HAS_OPENSSL, make_pair, trusting
from tests.integration.extender_site import captured

DEADLINE_SECONDS = 40


@asynccontextmanager
async def extender_process(*arguments):
    """Run ``nearkv-extender`` without Kubernetes; yield the process and its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nearkv.extender", "--listen", "127.0.0.1:0"),
        *("--kubernetes.no-enabled", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            line = await next_event(process, "listening")
            yield process, line["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


async def next_event(process, event):
    while (line := json.loads(await process.stderr.readline()))["event"] != event:
        pass
    return line


async def common_name(url, context):
    host, port = url.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("peercert")
    writer.close()
    await writer.wait_closed()
    return shown["subject"][0][0][1]


@pytest.mark.skipif(not HAS_OPENSSL, reason="the openssl program is not installed")
async def test_tls_is_renewed_while_it_serves(tmp_path):
    old, new = make_pair(tmp_path, "old"), make_pair(tmp_path, "new")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    old.copy_to(cert, key)
    context = trusting(old, new)
    options = ("--tls.cert", str(cert), "--tls.key", str(key), "--tls.reload-seconds", "0.01")
    async with extender_process(*options) as (process, url), aiohttp.ClientSession() as session:
        assert url.startswith("https://")

        async def scores():
            body = captured("prioritize_nodeCacheCapable_true")
            async with session.post(f"{url}/v1/prioritize", data=body, ssl=context) as response:
                assert response.status == 200
                return await response.json()

        assert {entry["Score"] for entry in await scores()} == {5}
        assert await common_name(url, context) == "old"
        cert.write_text("half a certif")
        await next_event(process, "certificate_not_reloaded")
        assert await common_name(url, context) == "old"
        new.copy_to(cert, key)
        await next_event(process, "certificate_reloaded")
        assert await common_name(url, context) == "new"
        assert len(await scores()) == 3  # over the connection that was there before
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_without_kubernetes_it_serves_and_says_so():
    async with extender_process() as (process, url), aiohttp.ClientSession() as session:
        async with session.get(f"{url}/readyz?verbose") as response:
            assert response.status == 200
            assert "[+]caches_synced ok" in await response.text()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        pytest.param(
            ("--tls.cert", "/nowhere.crt", "--tls.key", "/nowhere.key"),
            1,
            "/nowhere.crt",
            id="no-certificate",
        ),
        pytest.param(("--distance.preset", "azure"), 2, "distance.preset", id="preset"),
        pytest.param(("--tls.cert", "/x"), 2, "tls.key", id="half-of-tls"),
    ],
)
async def test_a_wrong_configuration_ends_it_with_a_word(arguments, status, says):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nearkv.extender", "--listen", "127.0.0.1:0"),
        *("--kubernetes.no-enabled", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(process.communicate(), DEADLINE_SECONDS)
    assert process.returncode == status
    assert says in err.decode()
    assert "Traceback" not in err.decode()
