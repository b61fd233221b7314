"""TLS between movers, with certificates made for the test."""

import subprocess

import pytest

from nearkv.agent.movers.jobs import PullJob
from nearkv.agent.movers.securing import tcp_backend
from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.errors import PullError, Reason
from tests.agent.movers.engines import assert_copied, grant_for, refused, request_of

REFUSALS = {Reason.AUTH, Reason.PEER_LOST, Reason.PEER_REFUSED}


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)  # noqa: S607 - whichever there is


def make_ca(folder, name):
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-keyout", key, "-out", cert, "-days", "2", "-subj", f"/CN={name}"),
        *("-addext", "keyUsage=critical,keyCertSign"),
    )
    return cert, key


def make_cert(folder, name, ca, address):
    """Return the options of one agent's TLS, with a certificate for an address."""
    key, request, cert = (folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
    openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-keyout", key, "-out", request, "-subj", f"/CN={name}"),
        *("-addext", f"subjectAltName=IP:{address}"),
    )
    openssl(
        *("x509", "-req", "-in", request, "-CA", ca[0], "-CAkey", ca[1], "-CAcreateserial"),
        *("-days", "2", "-copy_extensions", "copy", "-out", cert),
    )
    return {"cert": str(cert), "key": str(key), "ca": str(ca[0])}


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    ca, foreign = make_ca(folder, "ours"), make_ca(folder, "foreign")
    return {
        "right": make_cert(folder, "right", ca, "127.0.0.1"),
        "elsewhere": make_cert(folder, "elsewhere", ca, "192.0.2.1"),
        "foreign": make_cert(folder, "foreigner", foreign, "127.0.0.1"),
    }


@pytest.fixture
def pull_between(pool_of, engine):
    """Return a function that pulls between two agents with these TLS options."""

    async def pull(theirs, ours):
        p, d = engine("p"), engine("d")
        server = pool_of(options={"tcp": {"tls": theirs} if theirs else {}})
        reader = pool_of(options={"tcp": {"tls": ours} if ours else {}})
        grant = grant_for(p)
        offer = await server.offer(p.memory, "tcp", grant)
        job = PullJob(
            target=d.memory,
            request=request_of(p, ticket=grant.ticket),
            deadline_ms=monotonic_ms() + 20_000,
            backend="tcp",
            offer=offer,
        )
        report = await reader.pull(job)
        assert_copied(p, d)
        return report

    return pull


async def test_agents_of_one_ca_read_from_each_other(pull_between, tls):
    report = await pull_between(tls["right"], tls["right"])
    assert report.path.name == "tcp"


async def test_the_address_need_not_be_in_the_certificate_when_told_so(pull_between, tls):
    lax = tls["elsewhere"] | {"check_host": False}
    await pull_between(lax, lax)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("elsewhere", "right"),
        ("foreign", "right"),
        ("right", "foreign"),
        (None, "right"),
        ("right", None),
    ],
)
async def test_whoever_does_not_belong_gets_nothing(pull_between, tls, theirs, ours):
    error = await refused(pull_between(tls.get(theirs), tls.get(ours)))
    assert error.reason in REFUSALS


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"cert": "/nowhere.pem"}, "nowhere.pem"),
        ({"cret": "x"}, "cret"),
        ({"ca": "", "check_host": False}, "check_host"),
    ],
)
def test_tls_that_cannot_be_set_up_is_refused_and_named(tls, change, named):
    with pytest.raises(PullError, match=named) as caught:
        tcp_backend(tls=tls["right"] | change)
    assert caught.value.reason == Reason.AUTH


async def test_a_server_whose_certificate_is_missing_serves_nobody(pull_between, tls):
    error = await refused(pull_between(tls["right"] | {"cert": "/nowhere.pem"}, tls["right"]))
    assert error.reason == Reason.AUTH
