"""Endpoints (``ip:port``) of engines, by the pool's membership where there is one (pure).

A pool names pods and ports; agents name engines by the URL they scrape. Both have the pod's IP
address in common. Where a pod serves on the port that the agent scrapes, that is the endpoint,
which keeps ranks apart that have a port each. Otherwise something stands before the engine (a
sidecar), and the endpoint is the pod's port of the pool.
"""

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Membership:
    """The pods of a pool: ports by IP address, and each pod's name."""

    ports: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def endpoints(self) -> list[str]:
        """Return all endpoints of the pool."""
        return [host_port(ip, port) for ip, ports in self.ports.items() for port in ports]


def host_port(host: str, port: int) -> str:
    """Return an endpoint; IPv6 addresses get brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(url: str) -> tuple[str, int] | None:
    """Return a URL's IP address and port, ``None`` where its host is a name.

    Envoy is told addresses: it resolves no names that come in a header.
    """
    try:
        parts = urlsplit(url)
        address = ipaddress.ip_address(parts.hostname or "")
        return str(address), parts.port or _DEFAULT_PORTS[parts.scheme]
    except (ValueError, KeyError):
        return None


def endpoint_of(url: str, membership: Membership | None) -> str:
    """Return where an engine is reached, empty where it cannot be or is not in the pool."""
    address = address_of(url)
    if address is None:
        return ""
    ip, port = address
    if membership is None:
        return host_port(ip, port)
    ports = membership.ports.get(ip, ())
    if port in ports:
        return host_port(ip, port)
    return host_port(ip, ports[0]) if len(ports) == 1 else ""


def is_within(endpoint: str, subset: Collection[str] | None) -> bool:
    """Tell whether a gateway's restriction lets an endpoint be picked; it may name IPs alone."""
    if subset is None:
        return True
    return endpoint in subset or endpoint.rpartition(":")[0].strip("[]") in subset


def unknown_members(membership: Membership, known: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name, endpoint) of members that no known endpoint stands for."""
    seen = set(known)
    addresses = {endpoint.rpartition(":")[0] for endpoint in seen}
    found = []
    for ip, ports in membership.ports.items():
        name = membership.names.get(ip, ip)
        for port in ports:
            endpoint = host_port(ip, port)
            if endpoint in seen or (len(ports) == 1 and endpoint.rpartition(":")[0] in addresses):
                continue
            found.append((name if len(ports) == 1 else f"{name}:{port}", endpoint))
    return found
