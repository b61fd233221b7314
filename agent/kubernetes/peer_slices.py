"""Where the other agents are, by the EndpointSlices of their Service (pure)."""

from collections.abc import Iterable
from urllib.parse import quote

import msgspec

from nearkv.agent.probes.neighbours import ZONE_LABEL
from nearkv.agent.probes.peers import Peer
from nearkv.settings import Address

SERVICE_LABEL = "kubernetes.io/service-name"
_FAMILIES = ("IPv4", "IPv6")
"""In the order of preference; the third one, names, is not made for pods."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Parts that are read; what is null reads as missing."""


class _Endpoint(_Part, frozen=True, kw_only=True):
    addresses: list[str] | None = None
    node_name: str | None = None
    zone: str | None = None


class _Port(_Part, frozen=True, kw_only=True):
    name: str | None = None
    port: int | None = None


class PeerSlice(_Part, frozen=True, kw_only=True):
    """A part of a Service's endpoints."""

    address_type: str = ""
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None

    def port_named(self, name: str) -> int | None:
        """Return a port's number."""
        return next((each.port for each in self.ports or () if each.name == name), None)


def slices_path(namespace: str) -> str:
    """Return the path of a namespace's slices."""
    return f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace, safe='')}/endpointslices"


def peers_of(slices: Iterable[PeerSlice], *, port_name: str, scheme: str) -> list[Peer]:
    """Return the agents, one for each node, ready or not: one that is not is tried again later.

    A slice says in which zone an endpoint is, where its node has the label.
    """
    listed = list(slices)
    found: dict[str, Peer] = {}
    for family in _FAMILIES:
        for each in listed:
            port = each.port_named(port_name)
            if each.address_type != family or not port:
                continue
            for endpoint in each.endpoints or ():
                if endpoint.addresses and endpoint.node_name:
                    url = f"{scheme}://{Address(endpoint.addresses[0], port)}"
                    labels = {ZONE_LABEL: endpoint.zone} if endpoint.zone else {}
                    found.setdefault(endpoint.node_name, Peer(endpoint.node_name, url, labels))
    return list(found.values())
