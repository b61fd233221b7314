import json

import msgspec
import pytest

from nearkv.kube.objects import (
    Node,
    Pod,
    WorkerStatus,
    count_devices,
    node_path,
    pods_path,
    requested_devices,
    worker_statuses_path,
)
from tests.doubles.api_server import node_object, pod_object, worker_status_object

GPU = "nvidia.com/gpu"


def decoded(value, kind):
    return msgspec.json.decode(json.dumps(value), type=kind)


def pod_with(**spec):
    value = pod_object("p", gpus=0)
    value["spec"] |= spec
    return decoded(value, Pod)


def container(gpus, *, only_limits=False, **more):
    needs = {"limits" if only_limits else "requests": {GPU: str(gpus), "cpu": "100m"}}
    return {"name": "c", "resources": needs, **more}


def test_node_is_read():
    value = node_object("n1", labels={"zone": "a"}, annotations={"k": "v"}, internal_ip="10.0.0.1")
    node = decoded(value, Node)
    assert (node.name, node.labels["zone"], node.annotations) == ("n1", "a", {"k": "v"})
    assert (node.is_ready, node.unschedulable, node.internal_ip) == (True, False, "10.0.0.1")
    assert count_devices(node.allocatable, [GPU]) == count_devices(node.capacity, [GPU]) == 8


def test_node_that_says_nothing_has_nothing():
    node = decoded({"metadata": {"name": "n"}}, Node)
    assert (node.labels, node.annotations, node.allocatable) == ({}, {}, {})
    assert not node.is_ready
    assert count_devices(node.allocatable, [GPU]) == 0


def test_null_reads_as_missing():
    value = {
        "metadata": {"name": "n", "labels": None, "annotations": None, "deletionTimestamp": None},
        "spec": {"unschedulable": None},
        "status": {"allocatable": None, "conditions": None, "addresses": None},
    }
    node = decoded(value, Node)
    assert (node.labels, node.allocatable, node.is_ready) == ({}, {}, False)
    assert not node.is_terminating
    pod = decoded({"metadata": {"name": "p"}, "spec": {"containers": None, "nodeName": None}}, Pod)
    assert (pod.node_name, pod.count(GPU), pod.is_ready) == ("", 0, False)


def test_cordoned_and_not_ready():
    value = node_object("n", ready=False) | {"spec": {"unschedulable": True}}
    node = decoded(value, Node)
    assert node.unschedulable
    assert not node.is_ready


def test_a_thousand_devices_are_written_with_a_unit():
    assert count_devices({GPU: "1k", "other": "3"}, [GPU, "other", "none"]) == 1003


def test_pod_is_read():
    value = pod_object(
        "p", node="n1", labels={"a": "b"}, gpus=4, pod_ip="1.1.1.1", host_ip="2.2.2.2"
    )
    value["metadata"] |= {"uid": "u", "deletionTimestamp": "2026-11-29T00:00:00Z"}
    pod = decoded(value, Pod)
    assert (pod.namespace, pod.name, pod.uid, pod.node_name) == ("default", "p", "u", "n1")
    assert (pod.phase, pod.is_ready, pod.has_ended, pod.is_terminating) == (
        *("Running", True, False, True),
    )
    assert (pod.status.pod_ip, pod.status.host_ip) == ("1.1.1.1", "2.2.2.2")
    assert requested_devices(pod, [GPU]) == 4


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_ended_pod_holds_nothing(phase):
    assert decoded(pod_object("p", node="n", phase=phase), Pod).has_ended


@pytest.mark.parametrize(
    ("containers", "init", "count"),
    [
        ([1, 2], [], 3),
        ([1], [4], 4),
        ([2], [1, 1], 2),
        ([], [], 0),
    ],
)
def test_devices_of_a_pod(containers, init, count):
    pod = pod_with(
        containers=[container(n) for n in containers],
        initContainers=[container(n) for n in init],
    )
    assert requested_devices(pod, [GPU]) == count


def test_sidecars_run_beside_everything_after_them():
    sidecar = container(1, restartPolicy="Always")
    pod = pod_with(containers=[container(2)], initContainers=[container(3), sidecar, container(4)])
    assert requested_devices(pod, [GPU]) == 5  # 4 beside the sidecar, more than 2 + 1
    pod = pod_with(containers=[container(2)], initContainers=[sidecar])
    assert requested_devices(pod, [GPU]) == 3


def test_limits_stand_in_for_requests():
    assert requested_devices(pod_with(containers=[container(2, only_limits=True)]), [GPU]) == 2


def test_devices_that_are_no_quantity_are_refused():
    pod = pod_with(containers=[container("many")])
    with pytest.raises(ValueError, match="many"):
        requested_devices(pod, [GPU])


def test_worker_status_keeps_its_status_as_json():
    status = decoded(worker_status_object("w", {"seq": 3}), WorkerStatus)
    assert (status.name, json.loads(bytes(status.status))) == ("w", {"seq": 3})
    assert bytes(decoded({"metadata": {"name": "w"}}, WorkerStatus).status) == b"{}"


def test_paths():
    assert node_path("n1") == "/api/v1/nodes/n1"
    assert pods_path() == "/api/v1/pods"
    assert pods_path("llm") == "/api/v1/namespaces/llm/pods"
    assert worker_statuses_path() == "/apis/nearkv.io/v1alpha1/workerstatuses"
    assert worker_statuses_path("a") == "/apis/nearkv.io/v1alpha1/namespaces/a/workerstatuses"
