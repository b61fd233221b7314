"""EndpointSlices as Kubernetes makes them, and the agents in them."""

import msgspec
import pytest

from nearkv.ingress.agent_slices import agent_urls
from nearkv.kube.endpoint_slices import EndpointSlice, slices_path

STATE = ({"name": "state", "port": 9470, "protocol": "TCP"},)


def endpoint(address, uid="", **conditions):
    made = {"addresses": [address], "conditions": conditions or {"ready": True}}
    if uid:
        made["targetRef"] = {"kind": "Pod", "name": f"agent-{uid}", "uid": uid}
    return made


def slice_of(*endpoints, family="IPv4", ports=STATE, name="s"):
    value = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "nearkv-agent"}},
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": list(ports),
    }
    return msgspec.json.decode(msgspec.json.encode(value), type=EndpointSlice)


def urls_of(*slices, port_name="state", scheme="http"):
    return agent_urls(slices, port_name=port_name, scheme=scheme)


def test_each_pod_has_one_url():
    found = urls_of(slice_of(endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b")))
    assert found == {"http://10.0.0.1:9470", "http://10.0.0.2:9470"}


def test_those_that_start_or_drain_are_followed_too():
    found = urls_of(slice_of(endpoint("10.0.0.1", "a", ready=False, terminating=True)))
    assert found == {"http://10.0.0.1:9470"}


def test_a_pod_in_two_slices_is_one_agent():
    both = slice_of(endpoint("10.0.0.1", "a")), slice_of(endpoint("10.0.0.1", "a"), name="t")
    assert urls_of(*both) == {"http://10.0.0.1:9470"}
    without_ref = slice_of(endpoint("10.0.0.1")), slice_of(endpoint("10.0.0.1"), name="t")
    assert urls_of(*without_ref) == {"http://10.0.0.1:9470"}


def test_of_two_families_a_pod_is_asked_by_one():
    six = slice_of(endpoint("fd00::1", "a"), endpoint("fd00::2", "b"), family="IPv6")
    four = slice_of(endpoint("10.0.0.1", "a"))
    assert urls_of(six, four) == {"http://10.0.0.1:9470", "http://[fd00::2]:9470"}


def test_names_are_no_addresses_of_pods():
    assert urls_of(slice_of(endpoint("agents.example"), family="FQDN")) == frozenset()


def test_the_scheme_is_the_settings():
    found = urls_of(slice_of(endpoint("10.0.0.1", "a")), scheme="https")
    assert found == {"https://10.0.0.1:9470"}


@pytest.mark.parametrize(
    ("ports", "found"),
    [
        ([{"name": "peers", "port": 1}, {"name": "state", "port": 2}], {"http://10.0.0.1:2"}),
        ([{"name": "other", "port": 3}], set()),
        ([{"name": None, "port": 3}], set()),
        ([], set()),
        ([{"name": "state", "port": None}], set()),
    ],
    ids=["named", "another", "without-name", "no-port", "any-port"],
)
def test_the_port_is_found_by_its_name(ports, found):
    assert urls_of(slice_of(endpoint("10.0.0.1", "a"), ports=ports)) == found


def test_an_empty_slice_has_no_agents():
    assert urls_of(slice_of()) == frozenset()
    assert urls_of() == frozenset()


def test_the_path_takes_any_namespace():
    assert slices_path("a/b").endswith("/namespaces/a%2Fb/endpointslices")
