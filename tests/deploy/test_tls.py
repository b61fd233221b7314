"""One switch for TLS: what serves, what asks and what scrapes agree, and it works."""

from contextlib import AsyncExitStack

import pytest
import yaml

from nearkv.agent.app import TRANSPORT
from nearkv.agent.app import build_app as build_agent
from nearkv.agent.settings import AgentSettings
from nearkv.certificates import ClientCertificates
from nearkv.extender.settings import ExtenderSettings
from nearkv.ingress.settings import IngressSettings
from nearkv.serving import running
from tests.deploy.chart import ChartError, pods_of, profile, render, settings_of
from tests.doubles.authority import MISSING, Authority
from tests.integration.stack import ANY_PORT, running_ingress

NAME = "nearkv-agent.nearkv.svc"
OWNERS = {
    "agent": "DaemonSet/nearkv-agent",
    "extender": "Deployment/nearkv-extender",
    "ingress": "Deployment/nearkv-ingress",
    "scheduler": "Deployment/nearkv-scheduler",
    "test-agent": "Pod/nearkv-test-agent",
    "test-extender": "Pod/nearkv-test-extender",
}


def secrets_of(rendered, component):
    """Return the Secrets that a component's first container has, by the folder."""
    pod = pods_of(rendered)[OWNERS[component]]
    names = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
    return {
        mount["mountPath"]: names[mount["name"]]
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["name"] in names
    }


@pytest.mark.parametrize(
    ("component", "secrets"),
    [
        ("agent", {"/etc/nearkv-tls": "nearkv-agent-tls"}),
        (
            "extender",
            {
                "/etc/nearkv-tls": "nearkv-extender-tls",
                "/etc/nearkv-agents-tls": "nearkv-reader-tls",
            },
        ),
        ("ingress", {"/etc/nearkv-agents-tls": "nearkv-reader-tls"}),
        ("scheduler", {"/etc/nearkv-tls": "nearkv-extender-tls"}),
        ("test-agent", {"/etc/nearkv-tls": "nearkv-reader-tls"}),
        ("test-extender", {"/etc/nearkv-tls": "nearkv-extender-tls"}),
    ],
)
def test_each_has_the_secret_that_it_needs_and_no_other_key(rendered, component, secrets):
    found = secrets_of(rendered("tls"), component)
    assert {folder: each["secretName"] for folder, each in found.items()} == secrets
    if component in {"scheduler", "test-extender"}:
        (only,) = found.values()
        assert [item["key"] for item in only["items"]] == ["ca.crt"]


def test_the_chart_makes_no_certificate_then(rendered):
    assert rendered("tls").kinds("Secret", "Certificate") == []


def test_names_of_secrets_and_of_the_certificate_can_be_said():
    values = profile("tls")
    values["tls"] |= {"agentSecret": "a", "readerSecret": "r", "extenderSecret": "e"}
    made = render(values | {"tls": values["tls"] | {"agentName": "agents.example"}})
    assert secrets_of(made, "agent")["/etc/nearkv-tls"]["secretName"] == "a"
    assert secrets_of(made, "ingress")["/etc/nearkv-agents-tls"]["secretName"] == "r"
    assert secrets_of(made, "scheduler")["/etc/nearkv-tls"]["secretName"] == "e"
    assert settings_of(made, "ingress")["agent_tls"]["name"] == "agents.example"
    assert settings_of(made, "extender")["agents"]["tls"]["name"] == "agents.example"
    assert settings_of(made, "agent")["transfer"]["peer_tls"]["name"] == "agents.example"


def test_everybody_asks_by_https(rendered):
    made = rendered("tls")
    assert settings_of(made, "ingress")["agent_service"] == {
        "name": "nearkv-agent",
        "namespace": "nearkv",
        "scheme": "https",
    }
    assert settings_of(made, "extender")["agents"]["scheme"] == "https"
    variables = pods_of(made)[OWNERS["agent"]]["containers"][0]["env"]
    (peer_url,) = [each for each in variables if each["name"].endswith("PEER_URL")]
    assert peer_url["value"] == "https://$(POD_IP):9471"
    for component in ("agent", "extender"):
        container = pods_of(made)[OWNERS[component]]["containers"][0]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    assert pods_of(made)["Pod/nearkv-test-agent"]["containers"][0]["args"][0] == (
        f"https://{NAME}:9470"
    )


def test_prometheus_shows_the_readers_certificate(rendered):
    monitor = rendered("tls").one("PodMonitor", "nearkv-agent")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": NAME,
        "ca": {"secret": {"name": "nearkv-reader-tls", "key": "ca.crt"}},
        "cert": {"secret": {"name": "nearkv-reader-tls", "key": "tls.crt"}},
        "keySecret": {"name": "nearkv-reader-tls", "key": "tls.key"},
    }


def test_the_schedulers_entry_follows(rendered):
    text = rendered("tls").one("ConfigMap", "nearkv-scheduler")["data"]["scheduler.yaml"]
    (extender,) = yaml.safe_load(text)["extenders"]
    assert extender["urlPrefix"] == "https://nearkv-extender.nearkv.svc:9473/v1"
    assert extender["enableHTTPS"] is True
    assert extender["tlsConfig"] == {"caFile": "/etc/nearkv-tls/ca.crt"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"extender": {"tls": {"existingSecret": "x"}}}, r"extender\.tls: with tls\.enabled"),
        ({"ingress": {"agents": ["http://a:1"]}}, r"ingress\.agents: http://a:1: with tls\.enab"),
        (
            {"agent": {"enabled": False}, "ingress": {"agents": ["https://a:1"]}},
            r"tls\.agentName: say",
        ),
    ],
)
def test_what_contradicts_it_is_refused(values, message):
    with pytest.raises(ChartError, match=message):
        render(profile("tls") | values)


def test_a_release_with_an_ingress_alone_asks_for_the_name_of_the_service():
    values = profile("picker") | {"tls": {"enabled": True}}
    settings = settings_of(render(values), "ingress")
    assert settings["agent_tls"]["name"] == NAME
    assert settings["agent_service"]["scheme"] == "https"


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
async def test_it_works_with_the_certificates_that_it_asks_for(rendered, tmp_path):
    """The chart's own settings, with the Secrets' folders in another place."""
    made = rendered("tls")
    ours = Authority(tmp_path, "ours")
    folders = {
        "/etc/nearkv-tls": ours.issue("agent", names=f"DNS:{NAME}"),
        "/etc/nearkv-agents-tls": ours.issue("reader"),
    }
    for path, issued in folders.items():
        placed = tmp_path / path.rpartition("/")[2]
        placed.mkdir()
        issued.copy_to(placed)

    def moved(value):
        if isinstance(value, dict):
            return {key: moved(each) for key, each in value.items()}
        return value.replace("/etc/", f"{tmp_path}/") if isinstance(value, str) else value

    given = moved(settings_of(made, "agent"))
    agent = build_agent(
        AgentSettings.model_validate(
            {"node": "n1", "tls": given["tls"], "worker_status": {"enabled": "off"}}
        )
    )
    peers = AgentSettings.model_validate({"transfer": {"peer_tls": given["transfer"]["peer_tls"]}})
    assert peers.transfer.peer_tls.shown.name == NAME
    ingress = IngressSettings.model_validate(
        {"agent_tls": moved(settings_of(made, "ingress"))["agent_tls"]}
    )
    extender = ExtenderSettings.model_validate(
        {"agents": {"tls": moved(settings_of(made, "extender"))["agents"]["tls"]}}
    )
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(
            running(agent, ANY_PORT, transport=agent[TRANSPORT])
        )
        url = f"https://{address}"
        entry = await stack.enter_async_context(
            running_ingress(url, agent_tls=ingress.agent_tls.model_dump())
        )
        assert entry.knowledge.fleet.agents[url].connected
        options = ClientCertificates(extender.agents.tls.files).options
        async with entry.session.get(f"{url}/v1/summary", **options) as answer:
            assert answer.status == 200
