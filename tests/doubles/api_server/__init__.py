"""A double of the Kubernetes API server: a real HTTP server over objects in memory.

It follows the API's conventions where a client can tell the difference: pages of one snapshot,
watches with bookmarks that begin after a version, versions that grow too old, merge patch and
server-side apply with subresources, ``Status`` answers, tokens, RBAC verbs. It has no admission,
no defaults, no garbage collection and no schemas.
"""

from tests.doubles.api_server.config import ApiServerConfig
from tests.doubles.api_server.faults import Faults
from tests.doubles.api_server.samples import node_object, pod_object, worker_status_object
from tests.doubles.api_server.server import ApiServerDouble

__all__ = [
    "ApiServerConfig",
    "ApiServerDouble",
    "Faults",
    "node_object",
    "pod_object",
    "worker_status_object",
]
