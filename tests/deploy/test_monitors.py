"""Prometheus is led to every component, with the token and the authority that it needs."""

import pytest

from tests.deploy.chart import pods_of, settings_of


def ports_of(rendered, component):
    """Return the names of a component's ports."""
    name = {"agent": "DaemonSet/nearkv-agent"}.get(component, f"Deployment/nearkv-{component}")
    return {each["name"] for each in pods_of(rendered)[name]["containers"][0]["ports"]}


def test_agents_are_scraped_with_their_token_and_named_by_node(rendered):
    made = rendered("rdma")
    (endpoint,) = made.one("PodMonitor", "nearkv-agent")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in ports_of(made, "agent")
    assert endpoint["authorization"]["credentials"] == {"name": "nearkv-auth", "key": "agent-token"}
    # Alerts and dashboards speak of nodes.
    assert {each["targetLabel"] for each in endpoint["relabelings"]} == {"node"}


@pytest.mark.parametrize("component", ["extender", "ingress"])
def test_services_are_scraped_by_a_port_that_they_have(rendered, component):
    made = rendered("rdma")
    spec = made.one("ServiceMonitor", f"nearkv-{component}")["spec"]
    (endpoint,) = spec["endpoints"]
    service = made.one("Service", f"nearkv-{component}")
    assert endpoint["port"] in {each["name"] for each in service["spec"]["ports"]}
    assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert (endpoint.get("scheme") == "https") == ("tls" in settings_of(made, component))


def test_the_extenders_name_is_checked(rendered):
    (endpoint,) = rendered("rdma").one("ServiceMonitor", "nearkv-extender")["spec"]["endpoints"]
    assert endpoint["tlsConfig"]["serverName"] == "nearkv-extender.nearkv.svc"
    assert "insecureSkipVerify" not in endpoint["tlsConfig"]
    assert endpoint["tlsConfig"]["ca"]["secret"]["key"] == "ca.crt"


def test_labels_for_the_operator_are_put_on(rendered):
    for each in rendered("rdma").kinds("ServiceMonitor", "PodMonitor", "PrometheusRule"):
        assert each["metadata"]["labels"]["release"] == "prometheus"
