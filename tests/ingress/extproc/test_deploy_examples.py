"""The examples in deploy/envoy: settings that exist, names that belong together."""

from pathlib import Path

import msgspec
import pytest
import yaml

from nearkv.ingress.extproc.pool import InferencePool, why_unusable
from nearkv.ingress.settings import IngressSettings, Mode
from nearkv.settings import resolve_settings

EXAMPLES = Path(__file__).parents[3] / "deploy" / "envoy"


def documents(name):
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


def of_kind(kind, name):
    (found,) = (d for d in documents(name) if d["kind"] == kind)
    return found


def picker_settings():
    text = of_kind("ConfigMap", "picker.yaml")["data"]["ingress.yaml"]
    return IngressSettings.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_is_yaml(path):
    assert documents(path.name)


def test_the_pickers_settings_are_settings_and_its_ports_fit():
    settings = picker_settings()
    assert settings.mode is Mode.EXT_PROC
    (container,) = of_kind("Deployment", "picker.yaml")["spec"]["template"]["spec"]["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    own = settings.ext_proc
    assert ports == {settings.listen.port, own.listen.port, own.health_listen.port}
    assert container["readinessProbe"]["grpc"]["port"] == own.health_listen.port


def test_the_pool_is_usable_and_is_the_one_that_the_picker_reads():
    pool = of_kind("InferencePool", "picker.yaml")
    read = msgspec.convert(pool, InferencePool)
    assert why_unusable(read) == ""
    wanted = picker_settings().ext_proc.pool
    assert (read.metadata.name, read.metadata.namespace) == (wanted.name, wanted.namespace)
    service = of_kind("Service", "picker.yaml")
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["name"] == service["metadata"]["name"]
    assert picker["port"]["number"] == service["spec"]["ports"][0]["port"]


def test_the_role_allows_what_the_watches_do_and_no_more():
    rules = of_kind("Role", "picker.yaml")["rules"]
    assert {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    } == {
        (group, resource, verb)
        for group, resource in (("inference.networking.k8s.io", "inferencepools"), ("", "pods"))
        for verb in ("list", "watch")
    }


def test_the_sidecars_flags_are_settings_and_its_ports_fit():
    pod = of_kind("Deployment", "decode-sidecar.yaml")["spec"]["template"]["spec"]
    engine, sidecar = pod["containers"]
    resolved = resolve_settings(
        IngressSettings, sidecar["args"], environment={}, component="ingress"
    )
    settings = resolved.settings
    assert settings.mode is Mode.SIDECAR
    ports = [port["containerPort"] for port in sidecar["ports"]]
    assert ports == [settings.sidecar.listen.port, settings.listen.port]
    assert settings.sidecar.engine.endswith(f":{engine['ports'][0]['containerPort']}")
    pool = of_kind("InferencePool", "picker.yaml")
    assert pool["spec"]["targetPorts"][0]["number"] == settings.sidecar.listen.port


@pytest.mark.parametrize("name", ["kgateway.yaml", "envoy-gateway.yaml"])
def test_routes_lead_to_the_pool_or_to_the_picker(name):
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    (route,) = (d for d in documents(name) if d["kind"] == "HTTPRoute")
    backends = {b["name"] for rule in route["spec"]["rules"] for b in rule["backendRefs"]}
    assert backends == {"llama-3-8b"}
    assert "kind: InferencePool" in text or "name: nearkv-picker" in text
