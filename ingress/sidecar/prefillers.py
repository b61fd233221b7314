"""Who may be asked to prefill (pure).

The header names hosts, and anybody who reaches the pod could send it: without a list of its
own the sidecar would send requests to wherever it is told.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from nearkv.ingress.extproc.endpoints import Membership
from nearkv.settings import parse_address

_MOST_TRIED = 2
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Allowed:
    """Hosts with ports, and networks, that may be asked."""

    hosts: frozenset[str]
    networks: tuple[_Network, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Allowed":
        """Read ``host:port`` and ``network/bits``; raises ``ValueError``."""
        return cls(
            frozenset(text for text in texts if "/" not in text),
            tuple(ipaddress.ip_network(text) for text in texts if "/" in text),
        )

    def allows(self, host_port: str, membership: Membership | None) -> bool:
        """Tell whether a prefiller may be asked; raises ``ValueError`` for what is none."""
        address = parse_address(host_port)
        if address.port == 0:
            raise ValueError(f"port 0 in {host_port!r}")
        if host_port in self.hosts:
            return True
        try:
            ip = ipaddress.ip_address(address.host)
        except ValueError:
            return False  # a name could mean another host at any time
        if membership is not None and address.port in membership.ports.get(str(ip), ()):
            return True
        return any(ip in network for network in self.networks if network.version == ip.version)


def named_prefillers(value: str) -> list[str]:
    """Return the prefillers in a header, in order: those that are worth trying."""
    return [name.strip() for name in value.split(",") if name.strip()][:_MOST_TRIED]
