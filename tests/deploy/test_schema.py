"""Wrong values are refused, and the message says which and why."""

import json

import pytest

from tests.deploy.chart import CHART, ChartError, profile, render
from tests.deploy.schema import SCHEMA, schema_text

BASE = profile("base")


def merged(values, path, value):
    """Return the values with one of them changed."""
    head, _, rest = path.partition(".")
    inner = merged(values.get(head, {}), rest, value) if rest else value
    return {**values, head: inner}


def test_the_schema_is_up_to_date():
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), "run `make render`"


@pytest.mark.parametrize(
    ("path", "value", "where", "why"),
    [
        ("agentt", {}, "''", "'agentt' not allowed"),
        ("agent.maxUnavailable", 0, "/agent/maxUnavailable", "minimum"),
        ("agent.maxUnavailable", "lots", "/agent/maxUnavailable", "pattern"),
        ("agent.resources.limit", {}, "/agent/resources", "'limit' not allowed"),
        ("agent.transfer.socketDir", "run", "/agent/transfer/socketDir", "pattern"),
        ("agent.image.digest", "sha256:12", "/agent/image/digest", "pattern"),
        ("extender.replicas", "2", "/extender/replicas", "want integer"),
        ("extender.tls.mode", "self", "/extender/tls/mode", "'chart', 'secret', 'cert-manager'"),
        ("extender.distancePreset", "azure", "/extender/distancePreset", "'topograph'"),
        ("scheduler.weight", 0, "/scheduler/weight", "minimum"),
        ("scheduler.httpTimeout", "0.2s", "/scheduler/httpTimeout", "pattern"),
        ("scheduler.percentageOfNodesToScore", 101, "/scheduler/percentageOfNodesToScore", "max"),
        ("scheduler.managedResources", [], "/scheduler/managedResources", "minItems"),
        ("ingress.service.port", 0, "/ingress/service/port", "minimum"),
        ("ingress.decisionsFile.sizeLimit", "0", "/ingress/decisionsFile/sizeLimit", "pattern"),
        ("ingress.decisionsFile.claim", "c", "/ingress/decisionsFile", "'claim' not allowed"),
        ("ingress.agents", ["node-1:9470"], "/ingress/agents/0", "pattern"),
        ("networkPolicy.enginePorts", [70000], "/networkPolicy/enginePorts/0", "maximum"),
        # Settings of components, and secrets that would stand in a ConfigMap.
        ("agent.config.gpuu", {}, "/agent/config", "'gpuu' not allowed"),
        ("agent.config.gpu.interval_seconds", "often", "/agent/config/gpu/interval", "number"),
        ("agent.config.token", "s3cret", "/agent/config", "'token' not allowed"),
        ("agent.config.transfer.peer_token", "x", "/agent/config/transfer", "'peer_token' not"),
        ("agent.config.transfer.store", {"url": "redis://u:p@h"}, "/transfer/store", "'url' not"),
        ("extender.config.admin_token", "x", "/extender/config", "'admin_token' not allowed"),
        ("ingress.config.policy", "cheapest", "/ingress/config/policy", "'least-loaded'"),
    ],
)
def test_the_message_names_the_value_and_the_fault(path, value, where, why):
    with pytest.raises(ChartError) as caught:
        render(merged(BASE, path, value))
    assert where in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent.runAsRoot": False}, "agent.gpu.podResources: the kubelet's socket is root's"),
        (
            {"agent.runAsRoot": False, "agent.gpu.podResources": False, "agent.rdma.enabled": True},
            "agent.rdma.enabled: pinning memory takes IPC_LOCK",
        ),
        ({"agent.rdma.required": True}, "agent.rdma.required: set agent.rdma.enabled, too"),
        ({"extender.enabled": False}, "scheduler.enabled: needs extender.enabled"),
        ({"scheduler.name": "default-scheduler"}, "scheduler.name: default-scheduler is the"),
        ({"extender.tls": {"mode": "secret", "existingSecret": ""}}, "extender.tls.existingSecret"),
        ({"extender.tls": {"mode": "cert-manager"}}, "extender.tls.issuerRef.name: name the"),
        ({"agent.config.node": "n1"}, "agent.config.node: other objects depend on it"),
        (
            {"ingress.config.decisions": {"file": "/data/x"}},
            "ingress.config.decisions.file: it needs a volume; set ingress.decisionsFile.enabled",
        ),
        ({"ingress.config.listen": "0.0.0.0:1"}, "ingress.config.listen: other objects depend"),
    ],
)
def test_values_that_contradict_each_other_are_refused(changes, message):
    values = BASE
    for path, value in changes.items():
        values = merged(values, path, value)
    with pytest.raises(ChartError) as caught:
        render(values)
    assert message in str(caught.value)


def test_a_chart_above_may_pass_global_values():
    assert render(BASE | {"global": {"anything": 1}}).objects


def test_every_part_of_the_schema_is_closed():
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    for name in ("agent", "extender", "ingress", *schema["$defs"]):
        part = schema["$defs"].get(name)
        if part is not None and part.get("type") == "object":
            assert part["additionalProperties"] is False, name
