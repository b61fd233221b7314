"""Where the agents are."""

import pytest

from nearkv.extender.view.directory import AgentDirectory, AgentDiscovery, read_agent
from nearkv.extender.view.nodes import NodeFacts
from tests.doubles.api_server import pod_object
from tests.extender.view.things import as_pod

NODES = [
    NodeFacts("n1", (), 8, -1, "10.0.0.1"),
    NodeFacts("n2", (), 8, -1),
    NodeFacts("n3", (), 8, -1, "fd00::3"),
]


def seen(uid, **fields):
    value = pod_object(uid, **{"node": "n1", "pod_ip": "10.1.0.1", **fields})
    value["metadata"]["uid"] = uid
    return read_agent(as_pod(value))


def urls(directory):
    return [(target.url, target.node) for target in directory.targets(NODES)]


def test_configured_agents_come_first():
    discovery = AgentDiscovery(
        urls=("http://a:1",), selector="app=x", template="http://{host_ip}:1"
    )
    assert urls(AgentDirectory(discovery)) == [("http://a:1", "")]
    assert (discovery.by_pods, discovery.by_nodes) == (False, False)


def test_agents_are_found_by_their_pods_and_speak_for_their_nodes():
    directory = AgentDirectory(AgentDiscovery(selector="app=x", port=9470))
    directory.replace([seen("a"), seen("b", node="n2", pod_ip="fd00::b")])
    assert urls(directory) == [("http://10.1.0.1:9470", "n1"), ("http://[fd00::b]:9470", "n2")]
    directory.drop("a")
    assert urls(directory) == [("http://[fd00::b]:9470", "n2")]


@pytest.mark.parametrize("fields", [{"phase": "Pending"}, {"pod_ip": ""}, {"node": ""}])
def test_pods_that_cannot_be_asked_are_left_out(fields):
    directory = AgentDirectory(AgentDiscovery(selector="app=x"))
    directory.put(seen("a", **fields))
    assert urls(directory) == []


def test_agents_are_found_by_their_hosts():
    directory = AgentDirectory(AgentDiscovery(template="http://{host_ip}:9470"))
    assert urls(directory) == [("http://10.0.0.1:9470", "n1"), ("http://[fd00::3]:9470", "n3")]


def test_only_changes_are_told():
    directory = AgentDirectory(AgentDiscovery(selector="app=x"))
    urls(directory)
    directory.put(seen("a"))
    assert directory.changed
    urls(directory)
    directory.put(seen("a"))
    directory.drop("b")
    assert not directory.changed


def test_without_any_way_nobody_is_asked():
    assert urls(AgentDirectory(AgentDiscovery())) == []
