"""Objects for tests, in the form a real API server gives them."""

from typing import Any


def node_object(
    name: str,
    *,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    gpus: int = 8,
    resource: str = "nvidia.com/gpu",
    ready: bool = True,
    internal_ip: str = "",
) -> dict[str, Any]:
    """Return a Node with ``gpus`` devices."""
    amounts = {"cpu": "192", "memory": "2113000000Ki", "pods": "110"}
    if gpus:
        amounts[resource] = str(gpus)
    metadata: dict[str, Any] = {
        "name": name,
        "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})},
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    condition = {
        "type": "Ready",
        "status": "True" if ready else "False",
        "reason": "KubeletReady" if ready else "KubeletNotReady",
        "message": "",
        "lastHeartbeatTime": "2026-11-29T00:00:00Z",
        "lastTransitionTime": "2026-11-29T00:00:00Z",
    }
    status: dict[str, Any] = {
        "capacity": dict(amounts),
        "allocatable": dict(amounts),
        "conditions": [condition],
    }
    if internal_ip:
        status["addresses"] = [{"type": "InternalIP", "address": internal_ip}]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": metadata,
        "spec": {},
        "status": status,
    }


def pod_object(
    name: str,
    *,
    namespace: str = "default",
    node: str = "",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    gpus: int = 1,
    resource: str = "nvidia.com/gpu",
    phase: str = "",
    scheduler: str = "default-scheduler",
    pod_ip: str = "",
    host_ip: str = "",
) -> dict[str, Any]:
    """Return a Pod that asks for ``gpus`` devices; it runs if it has a node."""
    amounts = {resource: str(gpus)} if gpus else {}
    metadata: dict[str, Any] = {"name": name, "namespace": namespace}
    if labels:
        metadata["labels"] = dict(labels)
    if annotations:
        metadata["annotations"] = dict(annotations)
    container = {
        "name": "main",
        "image": "vllm",
        "resources": {"limits": dict(amounts), "requests": {"cpu": "1", **amounts}},
    }
    spec: dict[str, Any] = {"containers": [container], "schedulerName": scheduler}
    if node:
        spec["nodeName"] = node
    status: dict[str, Any] = {"phase": phase or ("Running" if node else "Pending")}
    if node:
        status["conditions"] = [{"type": "Ready", "status": "True"}]
    if pod_ip:
        status["podIP"] = pod_ip
    if host_ip:
        status["hostIP"] = host_ip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def worker_status_object(
    name: str, status: dict[str, Any], *, namespace: str = "default"
) -> dict[str, Any]:
    """Return a WorkerStatus."""
    return {
        "apiVersion": "nearkv.io/v1alpha1",
        "kind": "WorkerStatus",
        "metadata": {"name": name, "namespace": namespace},
        "status": status,
    }
