"""The second kube-scheduler: what it would make of its configuration, and what it depends on."""

import base64
import ssl

import pytest
import yaml

from nearkv.scheduler_config.linting import lint
from tests.core.running_cli import run_cli
from tests.deploy.chart import pods_of, profile, profile_names, render

WITH_SCHEDULER = sorted(set(profile_names()) - {"agents", "canary", "minimal", "picker"})


def config_text(rendered):
    """Return the configuration's text."""
    return rendered.one("ConfigMap", "nearkv-scheduler")["data"]["scheduler.yaml"]


@pytest.mark.parametrize("name", WITH_SCHEDULER)
def test_the_lint_has_nothing_to_say(rendered, name):
    report = lint(config_text(rendered(name)))
    assert list(report.findings) == []
    assert report.behaviour


async def test_the_command_line_takes_the_config_map_as_it_is(rendered, tmp_path):
    file = tmp_path / "configmap.yaml"
    file.write_text(yaml.safe_dump(rendered("default").one("ConfigMap", "nearkv-scheduler")))
    status, out, err = await run_cli("lint-scheduler", str(file))
    assert (status, err) == (0, "")
    assert "kube-scheduler would take it" in out
    assert "https://nearkv-extender.nearkv.svc:9473/v1/filter" in out


def test_the_extender_is_where_the_scheduler_looks_for_it(rendered):
    made = rendered("default")
    (extender,) = yaml.safe_load(config_text(made))["extenders"]
    service = made.one("Service", "nearkv-extender")
    (port,) = service["spec"]["ports"]
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert extender["urlPrefix"] == f"https://{host}:{port['port']}/v1"
    pod = pods_of(made)["Deployment/nearkv-scheduler"]
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "extender-ca"]
    assert extender["tlsConfig"]["caFile"] == f"{mount['mountPath']}/ca.crt"
    (volume,) = [v for v in pod["volumes"] if v["name"] == "extender-ca"]
    assert [item["key"] for item in volume["secret"]["items"]] == ["ca.crt"]


def test_its_lease_is_the_one_that_it_may_use(rendered):
    made = rendered("default")
    election = yaml.safe_load(config_text(made))["leaderElection"]
    role = made.one("Role", "nearkv-scheduler-lease")
    assert role["rules"][1]["resourceNames"] == [election["resourceName"]]
    assert role["metadata"]["namespace"] == election["resourceNamespace"]
    assert election["resourceName"] != "kube-scheduler"


@pytest.mark.parametrize("component", ["extender", "scheduler"])
def test_what_it_needs_to_start_is_placed_by_the_default_scheduler(rendered, component):
    pod = pods_of(rendered("default"))[f"Deployment/nearkv-{component}"]
    assert pod["schedulerName"] == "default-scheduler"


def test_without_tls_it_asks_in_the_clear():
    made = render(profile("base") | {"extender": {"tls": {"mode": "off"}}})
    (extender,) = yaml.safe_load(config_text(made))["extenders"]
    assert extender["urlPrefix"].startswith("http://")
    assert "tlsConfig" not in extender
    assert "enableHTTPS" not in extender
    probe = pods_of(made)["Deployment/nearkv-extender"]["containers"][0]["readinessProbe"]
    assert probe["httpGet"]["scheme"] == "HTTP"


def test_the_image_is_of_the_clusters_version_unless_said_otherwise(rendered):
    pod = pods_of(rendered("default"))["Deployment/nearkv-scheduler"]
    assert pod["containers"][0]["image"].startswith("registry.k8s.io/kube-scheduler:v1.")
    pinned = pods_of(rendered("large"))["Deployment/nearkv-scheduler"]["containers"][0]["image"]
    assert pinned.startswith("registry.k8s.io/kube-scheduler@sha256:")


def test_the_certificate_that_the_chart_makes_is_for_the_service(rendered, tmp_path):
    secret = rendered("default").one("Secret", "nearkv-extender-tls")["data"]
    files = {key: tmp_path / key for key in ("ca.crt", "tls.crt", "tls.key")}
    for key, file in files.items():
        file.write_bytes(base64.b64decode(secret[key]))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files["tls.crt"], files["tls.key"])
    client = ssl.create_default_context(cafile=files["ca.crt"])
    shake_hands(server, client, "nearkv-extender.nearkv.svc")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, "elsewhere.nearkv.svc")


def shake_hands(server, client, name):
    """Let two contexts greet each other in memory; raises what the client thinks of the name."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname=name)
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (asking, serving):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    asking.do_handshake()
