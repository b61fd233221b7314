"""Whether the node can move KV by RDMA, and how each link does (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from nearkv.agent.links.counting import FAULTS
from nearkv.agent.links.model import NodeLinks, RdmaDevice, RdmaPort


class Obstacle(StrEnum):
    """Why a port is not usable, the first that applies."""

    NOT_CHOSEN = "not_chosen"
    SOFTWARE = "software"
    NO_PORT = "no_port"
    STATE_UNKNOWN = "state_unknown"
    NOT_ACTIVE = "not_active"
    NETDEV_DOWN = "netdev_down"
    NO_ADDRESS = "no_address"
    NOT_OPENABLE = "not_openable"


EXPLAINED: Mapping[Obstacle, str] = MappingProxyType(
    {
        Obstacle.NOT_CHOSEN: "not among links.rdma_devices",
        Obstacle.SOFTWARE: "software, not an adapter",
        Obstacle.NO_PORT: "has no port",
        Obstacle.STATE_UNKNOWN: "its state cannot be read",
        Obstacle.NOT_ACTIVE: "its port is not ACTIVE (cable, switch, subnet manager)",
        Obstacle.NETDEV_DOWN: "its network device is down",
        Obstacle.NO_ADDRESS: "has no GID (address) yet",
        Obstacle.NOT_OPENABLE: "its verbs device cannot be opened (links.device_dir)",
    }
)
"""Each obstacle in words for people."""


@dataclass(frozen=True, slots=True)
class RdmaVerdict:
    """Whether RDMA is usable; ``None`` where that is not known. ``reason`` is for people."""

    usable: bool | None
    reason: str


class LinkHealth(StrEnum):
    """How a link does. ``degraded``: it works, but faults grew lately."""

    OK = "ok"
    DEGRADED = "degraded"
    DOWN = "down"
    UNKNOWN = "unknown"


def judge_rdma(links: NodeLinks | None, chosen: Sequence[str]) -> RdmaVerdict:
    """Return whether any port is usable, of the ``chosen`` devices if any are."""
    if links is None:
        return RdmaVerdict(usable=None, reason="not read yet")
    if links.rdma is None:
        return RdmaVerdict(usable=None, reason=f"sysfs does not tell: {links.why}")
    if not links.rdma:
        return RdmaVerdict(usable=False, reason="no RDMA device")
    obstacles = {device.name: device_obstacle(device, links, chosen) for device in links.rdma}
    usable = [name for name, obstacle in obstacles.items() if obstacle is None]
    if usable:
        return RdmaVerdict(usable=True, reason=f"usable: {', '.join(usable)}")
    whys = [f"{name}: {EXPLAINED[why]}" for name, why in obstacles.items() if why is not None]
    unknown = Obstacle.STATE_UNKNOWN in obstacles.values()
    return RdmaVerdict(usable=None if unknown else False, reason="; ".join(whys))


def device_obstacle(device: RdmaDevice, links: NodeLinks, chosen: Sequence[str]) -> Obstacle | None:
    """Return why a device is not usable: ``None`` as soon as one of its ports is."""
    if chosen and device.name not in chosen:
        return Obstacle.NOT_CHOSEN
    if device.place is None:
        return Obstacle.SOFTWARE
    if not device.ports:
        return Obstacle.NO_PORT
    obstacles = [_port_obstacle(port, links) for port in device.ports]
    if None not in obstacles:
        return obstacles[0]
    # Only a clear no: the class of verbs devices may be out of sight.
    return Obstacle.NOT_OPENABLE if device.openable is False else None


def _port_obstacle(port: RdmaPort, links: NodeLinks) -> Obstacle | None:
    if port.up is None:
        return Obstacle.STATE_UNKNOWN
    if not port.up:
        return Obstacle.NOT_ACTIVE
    if port.gids == 0:
        return Obstacle.NO_ADDRESS
    behind = [net.up for net in links.nets if net.name in port.netdevs]
    # Over Ethernet, a port stays ACTIVE for a moment when its network device went down.
    if port.kind == "roce" and behind and all(up is False for up in behind):
        return Obstacle.NETDEV_DOWN
    return None


def judge_link(*, up: bool | None, recent: Mapping[str, int]) -> tuple[LinkHealth, list[str]]:
    """Return a link's health, and the faults behind it such as ``symbol_error +3``."""
    if up is None:
        return LinkHealth.UNKNOWN, []
    if not up:
        return LinkHealth.DOWN, []
    faults = [f"{kind} +{recent[kind]}" for kind in sorted(FAULTS & recent.keys())]
    return (LinkHealth.DEGRADED if faults else LinkHealth.OK), faults
