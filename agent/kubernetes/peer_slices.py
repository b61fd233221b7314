"""Where the other agents are, by the EndpointSlices of their Service (pure)."""

from collections.abc import Iterable

from nearkv.agent.probes.neighbours import ZONE_LABEL
from nearkv.agent.probes.peers import Peer
from nearkv.kube.endpoint_slices import EndpointSlice, endpoints_at
from nearkv.settings import Address


def peers_of(slices: Iterable[EndpointSlice], *, port_name: str, scheme: str) -> list[Peer]:
    """Return the agents, one for each node, ready or not: one that is not is tried again later.

    A slice says in which zone an endpoint is, where its node has the label.
    """
    found: dict[str, Peer] = {}
    for endpoint, address, port in endpoints_at(slices, port_name=port_name):
        if endpoint.node_name:
            labels = {ZONE_LABEL: endpoint.zone} if endpoint.zone else {}
            url = f"{scheme}://{Address(address, port)}"
            found.setdefault(endpoint.node_name, Peer(endpoint.node_name, url, labels))
    return list(found.values())
