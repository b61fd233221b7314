"""Where the agents are, by the EndpointSlices of their Service (pure)."""

from collections.abc import Iterable

from nearkv.kube.endpoint_slices import EndpointSlice, endpoints_at
from nearkv.settings.address import Address


def agent_urls(slices: Iterable[EndpointSlice], *, port_name: str, scheme: str) -> frozenset[str]:
    """Return the agents' base URLs, one for each pod.

    Whether an endpoint is ready does not matter: an agent that starts or drains says so itself.
    """
    found: dict[str, str] = {}
    for endpoint, address, port in endpoints_at(slices, port_name=port_name):
        pod = endpoint.target_ref.uid if endpoint.target_ref else ""
        found.setdefault(pod or address, f"{scheme}://{Address(address, port)}")
    return frozenset(found.values())
