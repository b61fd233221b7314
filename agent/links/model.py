"""What a node has of links: as sysfs tells it, ``None`` where it tells nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a device sits: its PCI address, the path to it from the host bridge down, its node.

    ``ancestry`` ends with the device itself, such as ``pci0000:16``, ``0000:16:01.0``,
    ``0000:17:00.0``. ``numa_node`` is ``None`` where the firmware does not say.
    """

    address: str
    ancestry: tuple[str, ...]
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device. ``state`` and ``phys_state`` are the kernel's words.

    ``counters`` are error counters by file name, as they stand. ``gids`` is how many addresses
    the port has, ``gid_types`` what they are good for, such as ``RoCE v2``.
    """

    number: int
    state: str | None = None
    phys_state: str | None = None
    link_layer: str | None = None
    speed_gbps: float | None = None
    gids: int | None = None
    gid_types: tuple[str, ...] = ()
    netdevs: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """``infiniband``, ``roce``, or what else the link layer is."""
        if self.link_layer is None:
            return "unknown"
        return "roce" if self.link_layer == "Ethernet" else self.link_layer.lower()

    @property
    def up(self) -> bool | None:
        """Whether the port can carry data; ``None`` where that is not known."""
        return None if self.state is None else self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """An RDMA device, such as ``mlx5_0``.

    Without a ``place`` it is software (soft-RoCE). ``physical_function`` is set for a virtual
    function. ``openable`` says whether this process may open its verbs device.
    """

    name: str
    place: Place | None = None
    identity: str = ""
    firmware: str | None = None
    physical_function: str | None = None
    openable: bool | None = None
    ports: tuple[RdmaPort, ...] = ()

    def link(self, port: RdmaPort) -> str:
        """Return the name of a port's link, such as ``mlx5_0/1``."""
        return f"{self.name}/{port.number}"

    @property
    def speed_gbps(self) -> float | None:
        """The speed of its fastest port."""
        return max((port.speed_gbps for port in self.ports if port.speed_gbps), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetDevice:
    """A network device with hardware behind it, or a bond of such."""

    name: str
    place: Place | None = None
    identity: str = ""
    kind: str = "ethernet"
    operstate: str | None = None
    carrier: bool | None = None
    speed_gbps: float | None = None
    mtu_bytes: int | None = None
    physical_function: str | None = None
    bond: str | None = None
    bond_mode: str | None = None
    members: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def up(self) -> bool | None:
        """Whether it can carry data; ``None`` where that is not known."""
        if self.operstate in (None, "unknown"):
            return self.carrier
        return self.operstate == "up"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinks:
    """One reading. ``rdma`` is ``None`` where it could not be read, and ``why`` says why.

    ``omitted`` counts devices beyond the limit.
    """

    rdma: tuple[RdmaDevice, ...] | None = None
    why: str = ""
    nets: tuple[NetDevice, ...] = ()
    gpus: tuple[Place, ...] = ()
    omitted: int = 0

    def rdma_links(self) -> list[tuple[str, RdmaDevice, RdmaPort]]:
        """Return every port of every RDMA device with the name of its link."""
        return [
            (device.link(port), device, port) for device in self.rdma or () for port in device.ports
        ]


def pci_address(text: str) -> str:
    """Return a PCI address as sysfs writes it; NVML writes ``00000000:17:00.0``, say.

    What is no such address is returned in lower case.
    """
    domain, colon, rest = text.strip().lower().partition(":")
    try:
        return f"{int(domain, 16):04x}{colon}{rest}"
    except ValueError:
        return text.strip().lower()
