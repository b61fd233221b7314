"""Agents that serve over mutual TLS, and those who read them: ingress, extender, command line."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from nearkv.agent.app import TRANSPORT
from nearkv.agent.app import build_app as build_agent
from nearkv.agent.settings import AgentSettings
from nearkv.certificates import ClientCertificates
from nearkv.extender.app import build_app as build_extender
from nearkv.extender.settings import ExtenderSettings
from nearkv.serving import running
from nearkv.settings import ClientTlsSettings
from tests.core.running_cli import run_cli
from tests.doubles.api_server import ApiServerDouble, node_object
from tests.doubles.authority import MISSING, Authority
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import (
    ANY_PORT,
    DEADLINE_SECONDS,
    FAST_AGENT,
    eventually,
    running_ingress,
)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
NAME = "nearkv-agent.nearkv.svc"
"""Asked by their pods' addresses, agents have the name of their Service in the certificate."""


class Certificates:
    """What agents and readers have: good ones, and such as should not do."""

    def __init__(self, folder):
        self.ours, self.others = Authority(folder, "ours"), Authority(folder, "others")
        names = f"DNS:{NAME}"
        self.served = {
            "good": self.ours.issue("agent", names=names),
            "expired": self.ours.issue("agent-expired", names=names, days=-1),
            "foreign": self.others.issue("agent", names=names),
        }
        self.readers = {
            "good": self.ours.issue("reader").shown(),
            "expired": self.ours.issue("reader-expired", days=-1).shown(),
            "foreign": self.others.issue("reader").shown() | {"ca": str(self.ours.cert)},
            "none": {"ca": str(self.ours.cert)},
        }

    def reader(self, name):
        return self.readers[name] | {"name": NAME}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("authorities"))


@asynccontextmanager
async def tls_agent(engine, issued, readers):
    settings = {
        **FAST_AGENT,
        "node": "n1",
        "engines": [{"id": "e", "url": engine.url}],
        "tls": issued.served(readers=readers),
        "summary": {"interval_seconds": 0.1},
    }
    app = build_agent(AgentSettings.model_validate(settings))
    async with running(app, ANY_PORT, transport=app[TRANSPORT]) as address:
        yield app[TRANSPORT].url_of(address), app


@pytest.fixture
async def engine():
    async with EngineDouble(EngineDoubleConfig()) as engine:
        yield engine


def series(text, start):
    lines = (line for line in text.splitlines() if line.startswith(start))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def counted(session, url, start, **options):
    """Wait until a series of a component is above zero."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            async with session.get(f"{url}/metrics", **options) as answer:
                if series(await answer.text(), start) > 0:
                    return
            await asyncio.sleep(0.01)


TROUBLES = pytest.mark.parametrize(
    ("served", "reader", "reason"),
    [
        ("foreign", "good", "tls_untrusted"),
        ("expired", "good", "tls_expired"),
        ("good", "none", "unauthorized"),
        ("good", "expired", "disconnected"),
        ("good", "foreign", "disconnected"),
    ],
    ids=lambda value: value,
)


# -- The ingress -----------------------------------------------------------------------------------


async def test_an_ingress_is_let_in_by_its_certificate(certificates, engine):
    async with (
        tls_agent(engine, certificates.served["good"], certificates.ours) as (url, _),
        running_ingress(url, agent_tls=certificates.reader("good")) as ingress,
    ):
        assert ingress.knowledge.fleet.agents[url].connected
        await eventually(lambda: "e" in ingress.knowledge.fleet.engines, what="its engine is known")


@TROUBLES
async def test_an_ingress_without_its_agents_serves_all_the_same(
    certificates, engine, served, reader, reason
):
    async with (
        tls_agent(engine, certificates.served[served], certificates.ours) as (url, _),
        running_ingress(
            url,
            agent_tls=certificates.reader(reader),
            engines=[{"id": "static", "url": engine.url}],
            deadlines={"sync_seconds": 0.1},
        ) as ingress,
    ):
        errors = f'nearkv_ingress_agent_stream_errors_total{{cause="{reason}"}}'
        await counted(ingress.session, ingress.url, errors)
        response, _ = await ingress.complete("hello")
        assert response.status == 200
        assert not ingress.knowledge.fleet.agents[url].synced


async def test_a_renewed_reader_certificate_is_shown_without_a_restart(
    certificates, engine, tmp_path
):
    placed = certificates.others.issue("old").copy_to(tmp_path)
    async with (
        tls_agent(engine, certificates.served["good"], certificates.ours) as (url, _),
        running_ingress(
            url,
            agent_tls=placed.shown() | {"name": NAME},
            deadlines={"sync_seconds": 0.1},
        ) as ingress,
    ):
        errors = 'nearkv_ingress_agent_stream_errors_total{cause="tls_untrusted"}'
        await counted(ingress.session, ingress.url, errors)
        certificates.ours.issue("new").copy_to(tmp_path)
        agent = ingress.knowledge.fleet.agents[url]
        await eventually(lambda: agent.connected, what="it is let in")
        loads = 'nearkv_ingress_certificate_loads_total{outcome="reloaded"}'
        await counted(ingress.session, ingress.url, loads)


@pytest.mark.parametrize(
    ("reader", "reason"), [("expired", "expired"), ("foreign", "untrusted")], ids=lambda it: it
)
async def test_an_agent_counts_whom_it_did_not_let_in(certificates, engine, reader, reason):
    async with (
        tls_agent(engine, certificates.served["good"], certificates.ours) as (url, _),
        running_ingress(
            url, agent_tls=certificates.reader(reader), deadlines={"sync_seconds": 0.1}
        ),
        running_ingress(url, agent_tls=certificates.reader("good")) as scraper,
    ):
        options = scraper_options(certificates)
        failed = f'nearkv_agent_failed_tls_handshakes_total{{reason="{reason}"}}'
        await counted(scraper.session, url, failed, **options)


def scraper_options(certificates):
    files = ClientTlsSettings.model_validate(certificates.reader("good")).files
    return ClientCertificates(files).options


# -- The extender ----------------------------------------------------------------------------------


@asynccontextmanager
async def extender_over(url, shown, folder):
    async with ApiServerDouble() as api:
        api.put(node_object("n1"))
        settings = {
            "kubernetes": {"kubeconfig": str(api.write_kubeconfig(folder / "kubeconfig"))},
            "agents": {"urls": [url], "tls": shown, "wait_seconds": 0.2},
        }
        app = build_extender(ExtenderSettings.model_validate(settings))
        async with running(app, ANY_PORT) as address:
            yield address.url


async def test_an_extender_is_let_in_by_its_certificate(certificates, engine, tmp_path):
    async with (
        tls_agent(engine, certificates.served["good"], certificates.ours) as (url, _),
        extender_over(url, certificates.reader("good"), tmp_path) as extender,
        running_ingress() as client,
    ):
        await counted(client.session, extender, "nearkv_extender_reports ")


@TROUBLES
async def test_an_extender_without_its_agents_answers_all_the_same(
    certificates, engine, tmp_path, served, reader, reason
):
    async with (
        tls_agent(engine, certificates.served[served], certificates.ours) as (url, _),
        extender_over(url, certificates.reader(reader), tmp_path) as extender,
        running_ingress() as client,
    ):
        await counted(
            client.session, extender, f'nearkv_extender_agent_failures_total{{reason="{reason}"}}'
        )
        pod = {
            "metadata": {"name": "p", "namespace": "d", "uid": "u", "labels": {}},
            "spec": {"containers": []},
        }
        body = {"Pod": pod, "Nodes": None, "NodeNames": ["n1"]}
        async with client.session.post(f"{extender}/v1/filter", json=body) as answer:
            assert (answer.status, (await answer.json())["NodeNames"]) == (200, ["n1"])


# -- The command line ------------------------------------------------------------------------------


def flags(shown):
    names = {"ca": "--ca", "cert": "--cert", "key": "--key"}
    return [item for key, flag in names.items() if key in shown for item in (flag, shown[key])]


async def test_the_command_line_is_let_in_by_its_certificate(certificates, engine):
    async with tls_agent(engine, certificates.served["good"], certificates.ours) as (url, _):
        shown = certificates.readers["good"]
        code, out, err = await run_cli(
            "status", "--agent", url, *flags(shown), "--tls-name", NAME, "-o", "json"
        )
        assert (code, err) == (0, "")
        assert '"n1"' in out
        by_variables = {
            "NEARKV_CA": shown["ca"],
            "NEARKV_CERT": shown["cert"],
            "NEARKV_KEY": shown["key"],
            "NEARKV_TLS_NAME": NAME,
        }
        assert (await run_cli("status", "--agent", url, **by_variables))[0] == 0


@pytest.mark.parametrize(
    ("served", "reader", "says"),
    [
        ("foreign", "good", "its certificate is not trusted"),
        ("expired", "good", "certificate has expired"),
        ("good", "none", "answers 401"),
        ("good", "foreign", "does it take our certificate"),
    ],
    ids=lambda value: value,
)
async def test_the_command_line_says_what_is_wrong(certificates, engine, served, reader, says):
    async with tls_agent(engine, certificates.served[served], certificates.ours) as (url, _):
        code, _, err = await run_cli(
            *("status", "--agent", url, *flags(certificates.readers[reader])),
            *("--tls-name", NAME),
        )
        assert code == 1
        assert says in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cert", "/nowhere"), "--cert and --key go together"),
        (("--ca", "/nowhere"), "--ca, --cert, --key: tls: /nowhere: No such file"),
    ],
)
@pytest.mark.parametrize("verb", [("status",), ("doctor", "transfer")], ids=lambda it: it[0])
async def test_files_that_cannot_be_used_are_named(verb, arguments, says):
    code, _, err = await run_cli(*verb, "--agent", "https://127.0.0.1:9", *arguments)
    assert code == 2
    assert says in err
