"""EndpointSlices: where the pods of a Service are; the parts that nearkv reads.

Fields that may be missing or ``null`` read as empty.
"""

from collections.abc import Iterable, Iterator
from urllib.parse import quote

import msgspec

SERVICE_LABEL = "kubernetes.io/service-name"
"""Its value is the name of the Service that a slice belongs to."""

_FAMILIES = ("IPv4", "IPv6")
"""In the order of preference; a third one, names, is not made for pods."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What all parts have in common: the API's camelCase, and no setting of fields."""


class SliceMeta(_Part, frozen=True, kw_only=True):
    """``metadata`` of a slice."""

    name: str = ""


class TargetRef(_Part, frozen=True, kw_only=True):
    """The pod behind an endpoint."""

    uid: str = ""


class SliceEndpoint(_Part, frozen=True, kw_only=True):
    """One pod: its addresses are interchangeable, as Kubernetes has it."""

    addresses: list[str] | None = None
    node_name: str | None = None
    zone: str | None = None
    target_ref: TargetRef | None = None


class SlicePort(_Part, frozen=True, kw_only=True):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(_Part, frozen=True, kw_only=True):
    """A part of a Service's endpoints; there may be several, and one pod in two of them."""

    metadata: SliceMeta = SliceMeta()
    address_type: str = ""
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None

    @property
    def name(self) -> str:
        """``metadata.name``."""
        return self.metadata.name

    def port_named(self, name: str) -> int | None:
        """Return a port's number, ``None`` where there is none of that name."""
        return next((each.port for each in self.ports or () if each.name == name), None)


def slices_path(namespace: str) -> str:
    """Return the path of a namespace's slices."""
    return f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace, safe='')}/endpointslices"


def endpoints_at(
    slices: Iterable[EndpointSlice], *, port_name: str
) -> Iterator[tuple[SliceEndpoint, str, int]]:
    """Yield endpoints with an address and the port of that name, IPv4 before IPv6.

    A pod may be there more than once: in two slices, and with either family.
    """
    listed = list(slices)
    for family in _FAMILIES:
        for each in listed:
            port = each.port_named(port_name)
            if each.address_type == family and port:
                for endpoint in each.endpoints or ():
                    if endpoint.addresses:
                        yield endpoint, endpoint.addresses[0], port
