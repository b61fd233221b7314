"""Certificates: taken over when renewed, kept when the new ones are broken."""

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
)
from nearkv.errors import CertificateError
from nearkv.serving import Transport, running
from nearkv.settings import Address
from tests.core.waiting import eventually
from tests.extender.tls_files import HAS_OPENSSL, make_pair, trusting

pytestmark = pytest.mark.skipif(not HAS_OPENSSL, reason="the openssl program is not installed")
ANY_PORT = Address("127.0.0.1", 0)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return {name: make_pair(folder, name) for name in ("old", "new", "client", "stranger")}


async def say_hello(_request):
    return web.Response(text="hello")


class Served:
    """A server whose TLS files can be exchanged."""

    def __init__(self, folder, pair, *, client_ca=None):
        self.counts = Counter()
        self.cert, self.key = folder / "tls.crt", folder / "tls.key"
        pair.copy_to(self.cert, self.key)
        files = CertificateFiles(self.cert, self.key, client_ca)
        self.certificates = Certificates(files, count=lambda outcome: self.counts.update([outcome]))
        self.app = web.Application()
        self.app.router.add_get("/", say_hello)

    def running(self):
        return running(self.app, ANY_PORT, transport=Transport(tls=self.certificates.context))

    async def common_name(self, address, context):
        """Connect anew; return the common name of the certificate that the server shows."""
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
        shown = writer.get_extra_info("peercert")
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() in (None, "http/1.1")
        writer.close()
        await writer.wait_closed()
        del reader
        return shown["subject"][0][0][1]


async def test_a_renewed_pair_serves_new_connections_and_leaves_open_ones(tmp_path, pairs):
    served = Served(tmp_path, pairs["old"])
    context = trusting(pairs["old"], pairs["new"])
    async with served.running() as address, aiohttp.ClientSession() as client:
        url = f"https://{address}/"
        async with client.get(url, ssl=context) as response:
            assert await response.text() == "hello"
        served.certificates.reload()
        assert served.counts == {}
        pairs["new"].copy_to(served.cert, served.key)
        served.certificates.reload()
        assert served.counts == {"reloaded": 1}
        assert await served.common_name(address, context) == "new"
        async with client.get(url, ssl=context) as response:  # the connection from before
            assert await response.text() == "hello"


@pytest.mark.parametrize("damage", ["half", "other-key", "gone", "not-pem", "no-key"])
async def test_a_broken_pair_changes_nothing_but_a_count(tmp_path, pairs, damage):
    served = Served(tmp_path, pairs["old"])
    context = trusting(pairs["old"], pairs["new"])
    async with served.running() as address:
        if damage == "half":
            served.cert.write_bytes(pairs["new"].cert.read_bytes()[:200])
        elif damage == "other-key":
            served.cert.write_bytes(pairs["new"].cert.read_bytes())
        elif damage == "gone":
            served.cert.unlink()
        elif damage == "no-key":
            served.key.write_text("")
        else:
            served.cert.write_text("hello")
        for _ in range(3):
            served.certificates.reload()
        assert served.counts == {"failed": 1}
        assert await served.common_name(address, context) == "old"
        pairs["new"].copy_to(served.cert, served.key)
        served.certificates.reload()
        assert served.counts == {"failed": 1, "reloaded": 1}
        assert await served.common_name(address, context) == "new"


async def test_clients_must_show_a_certificate_of_the_ca(tmp_path, pairs):
    ca = tmp_path / "ca.crt"
    ca.write_bytes(pairs["client"].cert.read_bytes())
    served = Served(tmp_path, pairs["old"], client_ca=ca)
    async with served.running() as address:
        url = f"https://{address}/"

        async def ask(showing):
            context = trusting(pairs["old"], showing=showing)
            async with (
                aiohttp.ClientSession() as client,
                client.get(url, ssl=context) as response,
            ):
                return response.status

        assert await ask(pairs["client"]) == 200
        for showing in (None, pairs["stranger"]):
            with pytest.raises(aiohttp.ClientError):
                await ask(showing)
        # A renewed CA counts too, for new connections.
        ca.write_bytes(pairs["stranger"].cert.read_bytes())
        served.certificates.reload()
        assert await ask(pairs["stranger"]) == 200
        with pytest.raises(aiohttp.ClientError):
            await ask(pairs["client"])


async def test_old_protocols_are_refused(tmp_path, pairs):
    served = Served(tmp_path, pairs["old"])
    context = trusting(pairs["old"])
    with pytest.warns(DeprecationWarning, match=r"TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with served.running() as address:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await served.common_name(address, context)


@pytest.mark.parametrize("missing", ["cert", "key"])
def test_at_start_a_pair_that_cannot_be_used_is_named(tmp_path, pairs, missing):
    paths = {"cert": pairs["old"].cert, "key": pairs["old"].key, missing: tmp_path / "nowhere"}
    with pytest.raises(CertificateError, match="nowhere"):
        Certificates(CertificateFiles(**paths), count=lambda _outcome: None)


def test_at_start_a_key_of_another_certificate_is_named(pairs):
    files = CertificateFiles(pairs["old"].cert, pairs["new"].key)
    with pytest.raises(CertificateError, match="MISMATCH"):
        Certificates(files, count=lambda _outcome: None)


async def test_files_are_looked_at_again_and_again(tmp_path, pairs):
    served = Served(tmp_path, pairs["old"])
    watch = asyncio.create_task(served.certificates.watch(0.001))
    pairs["new"].copy_to(served.cert, served.key)
    await eventually(lambda: served.counts["reloaded"], what="the new pair is taken over")
    watch.cancel()


# -- Clients -----------------------------------------------------------------------------------


def subject_trusted(context):
    return {dict(pair[0] for pair in ca["subject"])["commonName"] for ca in context.get_ca_certs()}


def test_a_client_takes_renewed_files_over_with_its_next_connection(tmp_path, pairs):
    ca, key = tmp_path / "ca.crt", tmp_path / "ca.key"
    pairs["old"].copy_to(ca, key)
    certificates = ClientCertificates(ClientFiles(ca=ca, cert=ca, key=key))
    first = certificates.context
    assert subject_trusted(first) == {"old"}
    assert certificates.context is first
    pairs["new"].copy_to(ca, key)
    assert subject_trusted(certificates.context) == {"new"}


def test_a_client_keeps_its_files_while_new_ones_are_broken(tmp_path, pairs):
    ca, key = tmp_path / "ca.crt", tmp_path / "ca.key"
    pairs["old"].copy_to(ca, key)
    certificates = ClientCertificates(ClientFiles(ca=ca))
    first = certificates.context
    ca.write_text("nonsense")
    assert certificates.context is first
    ca.unlink()
    assert certificates.context is first
    pairs["new"].copy_to(ca, key)
    assert subject_trusted(certificates.context) == {"new"}


def test_at_start_a_clients_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(CertificateError, match="nowhere: No such file"):
        ClientCertificates(ClientFiles(ca=tmp_path / "nowhere"))
