"""Pods of engines for tests, as objects and as the agent reads them."""

import msgspec

from nearkv.kube.objects import Pod
from tests.doubles.api_server import pod_object

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
