"""Reaching an API server by kubeconfig or service account, with real TLS and real plugins."""

import asyncio
import json
import os
import ssl
import subprocess
import sys

import pytest

from nearkv.kube.access import AccessLimits, ApiAccess
from nearkv.kube.credentials import automatic, from_kubeconfig, from_service_account
from nearkv.kube.errors import AccessError, ApiError, Trouble
from nearkv.kube.objects import NODES_PATH
from tests.doubles.api_server import ApiServerConfig, ApiServerDouble, Faults
from tests.transfer.backends.tls import missing_openssl

EAGER = AccessLimits(renew_seconds=0, reload_seconds=0, credential_seconds=5)
needs_openssl = pytest.mark.skipif(bool(missing_openssl()), reason="no openssl")


def make_certificate(folder, name):
    """Make a certificate that is its own CA; return its path and its key's."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:api.example"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return certificate, key


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(folder, name) for name in ("server", "client", "other")}


@pytest.fixture
async def api():
    async with ApiServerDouble() as double:
        yield double


@pytest.fixture
async def tls_api(certificates):
    async with ApiServerDouble(ApiServerConfig(tls=server_context(certificates))) as double:
        yield double


def server_context(certificates, *, client=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates["server"])
    if client is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificates[client][0])
    return context


async def list_nodes(access):
    return await access.read("GET", NODES_PATH, limit_bytes=1 << 20, total_seconds=5)


async def trouble_of(access):
    with pytest.raises(ApiError) as caught:
        await list_nodes(access)
    return caught.value.trouble


def opened(path, limits=EAGER):
    return ApiAccess(from_kubeconfig(str(path)), limits=limits)


def write_kubeconfig(api, path, *, user=None, **cluster):
    api.write_kubeconfig(path, **cluster)
    if user is not None:
        # YAML holds JSON: the double's file is replaced by one with another user.
        value = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": api.url, **cluster}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
        path.write_text(json.dumps(value))
    return path


async def test_kubeconfig_with_a_token(api, tmp_path):
    api.accept_tokens("t0")
    path = write_kubeconfig(api, tmp_path / "config", user={"token": "t0"})
    async with opened(path) as access:
        assert b"NodeList" in await list_nodes(access)
    assert api.record.all()[0].authorization == "Bearer t0"


async def test_a_kubeconfig_is_never_written(api, tmp_path):
    """The package would store renewed tokens, and drop every comment of the file."""
    script = tmp_path / "login.py"
    credential = {"access_token": "fresh", "token_expiry": "2099-01-01T00:00:00Z"}
    script.write_text(f"print({json.dumps(json.dumps({'credential': credential}))})")
    provider = {"cmd-path": sys.executable, "cmd-args": str(script)}
    user = {"auth-provider": {"name": "gcp", "config": provider}}
    path = write_kubeconfig(api, tmp_path / "config", user=user)
    before = path.read_bytes()
    async with opened(path) as access:
        await list_nodes(access)
    assert api.record.all()[0].authorization == "Bearer fresh"
    assert path.read_bytes() == before


async def test_a_kubeconfig_is_found_by_its_variable(api, tmp_path, monkeypatch):
    path = api.write_kubeconfig(tmp_path / "config")
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    async with ApiAccess(automatic()) as access:
        assert b"NodeList" in await list_nodes(access)


async def test_a_path_in_the_url_is_kept(api, tmp_path):
    path = write_kubeconfig(api, tmp_path / "config")
    path.write_text(path.read_text().replace(api.url, api.url + "/k8s/clusters/c-1/"))
    async with opened(path) as access:
        assert await trouble_of(access) is Trouble.NOT_FOUND
    assert api.record.all()[0].path == "/k8s/clusters/c-1/api/v1/nodes"


@needs_openssl
@pytest.mark.parametrize(
    "cluster",
    [
        {"certificate-authority": "server"},
        {"insecure-skip-tls-verify": True},
        {"certificate-authority": "server", "tls-server-name": "api.example"},
    ],
    ids=["ca", "insecure", "server-name"],
)
async def test_tls(tls_api, tmp_path, certificates, cluster):
    cluster = {
        name: str(certificates[value][0]) if value in certificates else value
        for name, value in cluster.items()
    }
    path = write_kubeconfig(tls_api, tmp_path / "config", **cluster)
    async with opened(path) as access:
        assert b"NodeList" in await list_nodes(access)


@needs_openssl
@pytest.mark.parametrize(
    "cluster",
    [
        {},
        {"certificate-authority": "other"},
        {"certificate-authority": "server", "tls-server-name": "another.example"},
    ],
    ids=["no-ca", "other-ca", "other-name"],
)
async def test_a_server_that_is_not_the_one_is_not_talked_to(
    tls_api, tmp_path, certificates, cluster
):
    cluster = {
        name: str(certificates[value][0]) if value in certificates else value
        for name, value in cluster.items()
    }
    path = write_kubeconfig(tls_api, tmp_path / "config", **cluster)
    async with opened(path) as access:
        assert await trouble_of(access) is Trouble.UNREACHABLE
    assert len(tls_api.record) == 0


@needs_openssl
async def test_a_replaced_ca_is_taken_up(tls_api, tmp_path, certificates):
    path = tmp_path / "config"
    write_kubeconfig(tls_api, path, **{"certificate-authority": str(certificates["other"][0])})
    async with opened(path) as access:
        assert await trouble_of(access) is Trouble.UNREACHABLE
        write_kubeconfig(tls_api, path, **{"certificate-authority": str(certificates["server"][0])})
        assert b"NodeList" in await list_nodes(access)


@needs_openssl
async def test_a_client_certificate(tmp_path, certificates):
    context = server_context(certificates, client="client")
    async with ApiServerDouble(ApiServerConfig(tls=context)) as api:
        certificate, key = certificates["client"]
        path = write_kubeconfig(
            api,
            tmp_path / "config",
            user={"client-certificate": str(certificate), "client-key": str(key)},
            **{"certificate-authority": str(certificates["server"][0])},
        )
        async with opened(path) as access:
            assert b"NodeList" in await list_nodes(access)


def service_account(folder, api, certificate, token):
    (folder / "token").write_text(token)
    (folder / "ca.crt").write_bytes(certificate.read_bytes())
    host, _, port = api.url.removeprefix("https://").partition(":")
    return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}


@needs_openssl
async def test_the_service_account_of_a_pod_and_its_rotated_token(tls_api, tmp_path, certificates):
    tls_api.accept_tokens("first")
    environ = service_account(tmp_path, tls_api, certificates["server"][0], "first\n")
    loader = from_service_account(tmp_path, environ)
    async with ApiAccess(loader, limits=EAGER) as access:
        await list_nodes(access)
        tls_api.accept_tokens("second")
        (tmp_path / "token").write_text("second\n")
        assert await trouble_of(access) is Trouble.UNAUTHORIZED
        await list_nodes(access)
    headers = [seen.authorization for seen in tls_api.record]
    assert headers == ["Bearer first", "Bearer first", "Bearer second"]


PLUGIN = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
calls = folder / "calls"
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
if (folder / "hang").exists():
    time.sleep(60)
if (folder / "fail").exists():
    sys.exit("not logged in")
status = {"token": (folder / "token").read_text()}
if (folder / "expiry").exists():
    status["expirationTimestamp"] = (folder / "expiry").read_text()
print(json.dumps({
    "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status,
}))
"""


@pytest.fixture
def plugin(api, tmp_path):
    """Return a kubeconfig with a real exec plugin, steered by files beside it."""
    script = tmp_path / "plugin.py"
    script.write_text(PLUGIN)
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(script), str(tmp_path)],
            "interactiveMode": "Never",
        }
    }
    (tmp_path / "token").write_text("by-plugin")
    return write_kubeconfig(api, tmp_path / "config", user=user)


async def test_an_exec_plugin_is_asked_once_for_a_token_that_lasts(api, plugin, tmp_path):
    api.accept_tokens("by-plugin")
    async with opened(plugin) as access:
        for _ in range(3):
            await list_nodes(access)
    assert (tmp_path / "calls").read_text() == "x"


async def test_an_exec_plugin_is_asked_again_when_its_token_expires(api, plugin, tmp_path):
    (tmp_path / "expiry").write_text("2020-01-01T00:00:00Z")
    async with opened(plugin) as access:
        await list_nodes(access)
        (tmp_path / "token").write_text("newer")
        await list_nodes(access)
    assert api.record.all()[-1].authorization == "Bearer newer"


async def test_requests_at_once_share_one_renewal(api, plugin, tmp_path):
    async with opened(plugin) as access:
        await asyncio.gather(*(list_nodes(access) for _ in range(10)))
    assert (tmp_path / "calls").read_text() == "x"


async def test_an_exec_plugin_that_fails_is_noticed(api, plugin, tmp_path):
    api.accept_tokens("by-plugin")
    (tmp_path / "fail").touch()
    async with opened(plugin) as access:
        assert await trouble_of(access) in {Trouble.UNAUTHORIZED, Trouble.CREDENTIALS}
        (tmp_path / "fail").unlink()
        await list_nodes(access)


async def test_an_exec_plugin_that_hangs_keeps_nobody_waiting_for_ever(plugin, tmp_path):
    (tmp_path / "hang").touch()
    limits = AccessLimits(credential_seconds=3.0)
    async with opened(plugin, limits) as access:
        assert await trouble_of(access) is Trouble.CREDENTIALS
        assert await trouble_of(access) is Trouble.CREDENTIALS
    # Both waited for the same run.
    assert (tmp_path / "calls").read_text() == "x"


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "clusters: 7", "apiVersion: v1\nkind: Config\n"]
)
async def test_a_broken_kubeconfig_is_told(tmp_path, text):
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(AccessError, match=str(path)):
        from_kubeconfig(str(path))()
    async with opened(path) as access:
        assert await trouble_of(access) is Trouble.CREDENTIALS


def test_a_context_that_is_not_there_is_told(tmp_path):
    path = ApiServerDouble().write_kubeconfig(tmp_path / "config")
    with pytest.raises(AccessError, match="nowhere"):
        from_kubeconfig(str(path), "nowhere")()


def test_outside_of_a_pod_there_is_no_service_account(tmp_path):
    with pytest.raises(AccessError, match="service account"):
        from_service_account(tmp_path, {})()


@pytest.mark.parametrize(
    ("no_proxy", "proxy"), [("", "http://proxy:3128"), ("127.0.0.0/8", None), ("*", None)]
)
def test_proxies_are_those_of_the_environment(tmp_path, monkeypatch, no_proxy, proxy):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    double = ApiServerDouble(ApiServerConfig(port=1))
    path = double.write_kubeconfig(tmp_path / "config")
    assert from_kubeconfig(str(path))().proxy == proxy


async def test_redirects_are_not_followed_with_a_token(api):
    async with ApiServerDouble() as other:
        api.inject(Faults(status=302, location=other.url + NODES_PATH))
        async with ApiAccess.plain(api.url, "secret") as access:
            assert await trouble_of(access) is Trouble.REFUSED
        assert (len(api.record), len(other.record)) == (1, 0)


async def test_a_closed_access_says_so(api):
    with pytest.raises(RuntimeError, match="not open"):
        await list_nodes(ApiAccess.plain(api.url))
