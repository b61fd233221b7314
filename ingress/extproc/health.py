"""The gRPC health protocol's messages (pure), and which names are served.

``liveness`` is about the process; ``readiness``, the picker's own name and the empty name are
about whether it should get traffic.
"""

from enum import IntEnum

from nearkv.ingress.extproc.messages import SERVICE
from nearkv.protobuf import message_at, text, varint_field

HEALTH_SERVICE = "grpc.health.v1.Health"
CHECK = f"/{HEALTH_SERVICE}/Check"
WATCH = f"/{HEALTH_SERVICE}/Watch"
_READY_NAMES = frozenset({"", "readiness", SERVICE})


class Serving(IntEnum):
    """The protocol's statuses."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


def asked_service(data: bytes) -> str:
    """Return the name asked for; raises ``WireError``."""
    content = message_at(memoryview(data), 1)
    return "" if content is None else text(content)


def status_of(service: str, *, is_ready: bool) -> Serving:
    """Return a name's status."""
    if service == "liveness":
        return Serving.SERVING
    if service in _READY_NAMES:
        return Serving.SERVING if is_ready else Serving.NOT_SERVING
    return Serving.SERVICE_UNKNOWN


def encode_status(status: Serving) -> bytes:
    """Return a ``HealthCheckResponse``."""
    return varint_field(1, status)
