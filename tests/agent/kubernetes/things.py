"""Pods of engines for tests, as objects and as the agent reads them; where agents are."""

import msgspec

from nearkv.kube.endpoint_slices import SERVICE_LABEL
from nearkv.kube.objects import Pod
from tests.doubles.api_server import pod_object
from tests.doubles.api_server.resources import Resource

SLICES = Resource("EndpointSlice", "endpointslices", "discovery.k8s.io")
LABELS = {"nearkv.io/group": "g", "nearkv.io/role": "decode"}


def engine_pod(name="e", *, node="n1", labels=LABELS, ip="10.0.0.7", uid=None, **fields):
    """Return the JSON of a pod that runs an engine."""
    value = pod_object(name, node=node, labels=labels, pod_ip=ip, **fields)
    if uid is not None:
        value["metadata"]["uid"] = uid
    return value


def read_as_pod(value):
    """Return a pod as the agent's watch decodes it."""
    return msgspec.json.decode(msgspec.json.encode(value), type=Pod)


def pod(name="e", *, leaving=False, ready=True, **fields):
    """Return a pod that runs an engine; its UID is its name with an ``u-``."""
    value = engine_pod(name, uid=f"u-{name}", **fields)
    if leaving:
        value["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    if not ready:
        value["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    return read_as_pod(value)


def slice_of(node, port, *, service="nearkv-agent", namespace="nearkv", zone="", address=""):
    """Return an EndpointSlice with one agent, which serves peers at a port of its own."""
    endpoint = {"addresses": [address or "127.0.0.1"], "nodeName": node}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{service}-{node}",
            "namespace": namespace,
            "labels": {SERVICE_LABEL: service},
        },
        "addressType": "IPv4",
        "endpoints": [{**endpoint, "zone": zone} if zone else endpoint],
        "ports": [{"name": "state", "port": 9470}, {"name": "peers", "port": port}],
    }
