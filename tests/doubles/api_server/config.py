"""What the double can be set to."""

import ssl
from dataclasses import dataclass

from tests.doubles.api_server.resources import NODES, PODS, WORKER_STATUSES, Resource


@dataclass(frozen=True, kw_only=True)
class ApiServerConfig:
    """Settings of the double.

    ``tokens`` are the bearer tokens that it takes, none for all callers. ``bookmark_seconds`` is
    the time between bookmarks of a watch that wants them (Kubernetes: a minute). They are sent
    always, as in a cluster in which something is written all the time; an API server that sees no
    write sends none.
    ``history_kept`` events can be watched from; older versions are gone (410).
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    tokens: frozenset[str] = frozenset()
    resources: tuple[Resource, ...] = (NODES, PODS, WORKER_STATUSES)
    bookmark_seconds: float = 60.0
    history_kept: int = 100_000
    snapshots_kept: int = 64
    requests_kept: int = 100_000
    bind_seconds: float = 5.0
