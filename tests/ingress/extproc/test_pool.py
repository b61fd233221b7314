"""InferencePools: which pods are members, and pools that cannot mean what they say."""

import msgspec
import pytest

from nearkv.ingress.extproc.pool import InferencePool, members, why_unusable
from nearkv.kube.objects import Pod
from tests.doubles.api_server import pod_object


def pool_of(labels, *ports):
    spec = {
        "selector": {"matchLabels": labels},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": "x", "failureMode": "FailOpen"},
    }
    return msgspec.convert({"metadata": {"name": "pool"}, "spec": spec}, InferencePool)


def pod_of(name="a", ip="10.0.0.1", *, ready=True, **given):
    value = pod_object(name, node="n1", pod_ip=ip, labels={"app": "vllm", "x": "y"}, **given)
    if not ready:
        value["status"]["conditions"][0]["status"] = "False"
    return value


POOL = pool_of({"app": "vllm"}, 8000, 8001)


def members_of(*pods, pool=POOL):
    return members(pool, [msgspec.convert(pod, Pod) for pod in pods])


def test_ready_pods_with_matching_labels_are_members_on_every_port():
    found = members_of(pod_of("a", "10.0.0.1"), pod_of("b", "fd00::1"))
    assert found.ports == {"10.0.0.1": (8000, 8001), "fd00::1": (8000, 8001)}
    assert found.names == {"10.0.0.1": "a", "fd00::1": "b"}


def leaving(pod):
    pod["metadata"]["deletionTimestamp"] = "2026-11-29T00:00:00Z"
    return pod


@pytest.mark.parametrize(
    "pod",
    [
        pod_of(ready=False),
        pod_of(ip=""),
        pod_of(ip="not-an-address"),
        leaving(pod_of()),
        pod_object("a", node="n1", pod_ip="10.0.0.1", labels={"app": "other"}),
        pod_object("a", node="n1", pod_ip="10.0.0.1"),
    ],
    ids=["unready", "no_ip", "bad_ip", "leaving", "other_labels", "no_labels"],
)
def test_other_pods_are_not(pod):
    assert members_of(pod).ports == {}


def test_membership_does_not_depend_on_the_order_of_pods():
    one, other = pod_of("a", "10.0.0.1"), pod_of("b", "10.0.0.2")
    assert members_of(one, other) == members_of(other, one)


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        (POOL, ""),
        (pool_of({}, 8000), "matchLabels"),
        (pool_of({"app": "vllm"}), "targetPorts"),
        (pool_of({"app": "vllm"}, 0), "targetPorts has 0"),
        (pool_of({"app": "vllm"}, 8000, 70000), "targetPorts has 70000"),
        (InferencePool(), "matchLabels"),
    ],
)
def test_a_pool_that_selects_everything_or_nothing_says_why(pool, why):
    assert why in why_unusable(pool)
    assert bool(why_unusable(pool)) is bool(why)


def test_the_selector_is_written_in_one_order():
    assert pool_of({"b": "2", "a": "1"}, 1).label_selector == "a=1,b=2"
