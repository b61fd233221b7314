"""What the status says of links (pure)."""

from typing import Any

from nearkv.agent.links.affinity import Affinity
from nearkv.agent.links.following import LinkWatch
from nearkv.agent.links.judging import LinkHealth, RdmaVerdict, judge_link
from nearkv.agent.links.model import NetDevice, Place, RdmaDevice, RdmaPort


def describe_links(watch: LinkWatch, rdma: RdmaVerdict) -> dict[str, Any]:
    """Return the section of the status as plain JSON types; unknown values are null."""
    links = watch.latest
    age = watch.age_seconds
    return {
        "age_seconds": None if age is None else round(age, 3),
        "rdma": {"usable": rdma.usable, "reason": rdma.reason},
        "rdma_ports": [
            _describe_port(watch, name, device, port)
            for name, device, port in (links.rdma_links() if links else ())
        ],
        "network": [_describe_net(watch, net) for net in (links.nets if links else ())],
        "affinity": [_describe_affinity(pair) for pair in watch.affinities],
        "omitted": links.omitted if links else None,
    }


def list_link_problems(watch: LinkWatch) -> list[str]:
    """Return what is wrong with links, in words for people; no RDMA is no problem."""
    problems = [] if watch.problem is None else [f"links: {watch.problem}"]
    problems += [f"links.affinity names what is not there: {it}" for it in watch.unknown_overrides]
    problems += [
        f"GPU {pair.gpu}: {pair.displaced} beside it cannot be used, so {pair.adapter} is taken"
        for pair in watch.affinities
        if pair.displaced is not None
    ]
    for name, up in _links_up(watch):
        health, faults = judge_link(up=up, recent=watch.errors.recent(name))
        if health is LinkHealth.DEGRADED:
            problems.append(f"{name}: {', '.join(faults)} lately")
    return problems


def _links_up(watch: LinkWatch) -> list[tuple[str, bool | None]]:
    links = watch.latest
    if links is None:
        return []
    ports = [(name, port.up) for name, _, port in links.rdma_links()]
    return ports + [(net.name, net.up) for net in links.nets]


def _describe_port(
    watch: LinkWatch, name: str, device: RdmaDevice, port: RdmaPort
) -> dict[str, Any]:
    return {
        "link": name,
        "kind": port.kind,
        "state": port.state,
        "phys_state": port.phys_state,
        "speed_gbps": port.speed_gbps,
        "gids": port.gids,
        "gid_types": list(port.gid_types),
        "netdevs": list(port.netdevs),
        "firmware": device.firmware,
        "virtual_function_of": device.physical_function,
        "openable": device.openable,
        **_describe_place(device.place),
        **_describe_errors(watch, name, up=port.up),
    }


def _describe_net(watch: LinkWatch, net: NetDevice) -> dict[str, Any]:
    return {
        "link": net.name,
        "kind": net.kind,
        "up": net.up,
        "speed_gbps": net.speed_gbps,
        "mtu_bytes": net.mtu_bytes,
        "bond": net.bond,
        "bond_mode": net.bond_mode,
        "members": list(net.members),
        "virtual_function_of": net.physical_function,
        **_describe_place(net.place),
        **_describe_errors(watch, net.name, up=net.up),
    }


def _describe_place(place: Place | None) -> dict[str, Any]:
    return {
        "pci": place and place.address,
        "pci_path": place and "/".join(place.ancestry),
        "numa_node": place and place.numa_node,
    }


def _describe_errors(watch: LinkWatch, name: str, *, up: bool | None) -> dict[str, Any]:
    recent = watch.errors.recent(name)
    health, faults = judge_link(up=up, recent=recent)
    return {
        "health": health.value,
        "faults": faults,
        "errors": dict(watch.errors.totals(name)),
        "recent_errors": dict(recent),
    }


def _describe_affinity(pair: Affinity) -> dict[str, Any]:
    return {
        "gpu": pair.gpu,
        "adapter": pair.adapter,
        "nearness": pair.nearness.value,
        "common_pci_steps": pair.steps,
        "instead_of": pair.displaced,
    }
