"""TLS that comes to nothing: each side names why, as far as it can know."""

import asyncio
import ssl
from collections import Counter

import aiohttp
import pytest
from aiohttp import web

from nearkv.certificates import (
    CertificateFiles,
    Certificates,
    ClientCertificates,
    ClientFiles,
    tls_options,
)
from nearkv.handshakes import name_handshake_failure
from nearkv.http_failures import explain_failure, name_failure
from nearkv.serving import Transport, running
from nearkv.settings import Address
from tests.core.waiting import eventually
from tests.doubles.authority import MISSING, Authority

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("authorities")
    ours, others = Authority(folder, "ours"), Authority(folder, "others")
    return {
        "good": ours.issue("good"),
        "expired": ours.issue("expired", days=-1),
        "elsewhere": ours.issue("elsewhere", names="DNS:agents.example"),
        "foreign": others.issue("foreign"),
    }


class Site:
    """A server over TLS that counts, and clients of it."""

    def __init__(self, served, ca):
        self.failed = Counter()
        self.certificates = Certificates(
            CertificateFiles(served.cert, served.key, ca),
            count=lambda _: None,
            count_handshake=lambda reason: self.failed.update([reason]),
        )

    def running(self):
        app = web.Application()
        app.router.add_get("/", hello)
        transport = Transport(tls=self.certificates.context)
        return running(app, Address("127.0.0.1", 0), transport=transport)


async def ask(url, client):
    """Return an answer's text, or the name of the failure and its explanation."""
    options = tls_options(None if client is None else ClientCertificates(client))
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(url, **options) as response:
                return await response.text(), ""
        except aiohttp.ClientError as error:
            return name_failure(error), explain_failure(error)


async def hello(_request):
    return web.Response(text="hello")


@pytest.mark.parametrize(
    ("served", "name", "reason", "says"),
    [
        ("good", "", "hello", ""),
        ("elsewhere", "agents.example", "hello", ""),
        ("good", "agents.example", "tls_other_name", "not valid for"),
        ("elsewhere", "", "tls_other_name", "not valid for"),
        ("expired", "", "tls_expired", "has expired"),
        ("foreign", "", "tls_untrusted", "local issuer"),
    ],
)
async def test_a_client_names_what_is_wrong_with_the_servers(files, served, name, reason, says):
    site = Site(files[served], None)
    async with site.running() as address:
        got = await ask(f"https://{address}/", ClientFiles(files["good"].ca, name=name))
        assert (got[0], says in got[1]) == (reason, True)
        if reason != "hello":
            assert got[1].startswith("its certificate is not trusted: ")


@pytest.mark.parametrize(
    ("shown", "counted"),
    [(None, "missing"), ("expired", "expired"), ("foreign", "untrusted"), ("good", None)],
)
async def test_a_server_names_what_is_wrong_with_a_clients(files, shown, counted):
    site = Site(files["good"], files["good"].ca)
    client = ClientFiles(files["good"].ca)
    if shown is not None:
        client = ClientFiles(files["good"].ca, files[shown].cert, files[shown].key)
    async with site.running() as address:
        got, _ = await ask(f"https://{address}/", client)
        if counted is None:
            assert (got, site.failed) == ("hello", {})
            return
        assert got == "disconnected"
        await eventually(lambda: site.failed, what="it is counted")
        assert set(site.failed) == {counted}


async def test_reloaded_files_count_handshakes_too(files, tmp_path):
    placed = files["good"].copy_to(tmp_path)
    site = Site(placed, None)
    files["foreign"].copy_to(tmp_path)
    site.certificates.reload()
    async with site.running() as address:
        with pytest.raises(ssl.SSLCertVerificationError):
            # Unlike asyncio, blocking sockets tell the other side.
            await asyncio.to_thread(
                ssl.get_server_certificate, (address.host, address.port), ca_certs=files["good"].ca
            )
        await eventually(lambda: site.failed == {"rejected": 1}, what="it is counted")


async def test_plain_http_to_a_tls_server_and_the_other_way_round(files):
    site = Site(files["good"], None)
    async with site.running() as address:
        assert (await ask(f"http://{address}/", None))[0] == "disconnected"
        await eventually(lambda: set(site.failed) == {"no_tls"}, what="it is counted")
    app = web.Application()
    app.router.add_get("/", hello)
    async with running(app, Address("127.0.0.1", 0)) as address:
        got = await ask(f"https://{address}/", ClientFiles(files["good"].ca))
        assert got == ("tls_no_tls", "no TLS with it: WRONG_VERSION_NUMBER")


async def test_nonsense_in_a_handshake_is_counted_as_such(files):
    site = Site(files["good"], None)
    async with site.running() as address:
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"\x16\x03\x01\x00\x05" + b"x" * 5)
        await eventually(lambda: site.failed == {"protocol": 1}, what="it is counted")
        writer.close()


def test_a_broken_connection_is_no_defect_of_tls():
    assert name_handshake_failure(ConnectionResetError()) == "broken_off"
    assert name_handshake_failure(ssl.SSLEOFError()) == "broken_off"
