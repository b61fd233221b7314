"""Which adapter each GPU's KV should leave by (pure, the same on every call and every node).

Nearness is the longest common way on PCI, then the NUMA node. Among adapters equally near,
one that works comes first, then physical functions, then speed, then the one that fewest GPUs
have so far: two GPUs behind one switch with two adapters get one each. A GPU whose near
adapters are all down gets the nearest that works, and is said to be off its place.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from nearkv.agent.links.judging import device_obstacle
from nearkv.agent.links.model import NodeLinks, Place, RdmaDevice


class Nearness(StrEnum):
    """What a GPU and its adapter have in common."""

    SWITCH = "switch"
    HOST_BRIDGE = "host_bridge"
    NUMA = "numa"
    NOTHING = "nothing"
    OVERRIDE = "override"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter to choose from."""

    name: str
    place: Place | None = None
    works: bool = True
    virtual_function: bool = False
    speed_gbps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """The adapter of one GPU, by its PCI address.

    ``steps`` is the length of their common way on PCI. ``displaced`` names the nearer adapter
    that would have been chosen if it worked.
    """

    gpu: str
    adapter: str
    nearness: Nearness
    steps: int = 0
    displaced: str | None = None


def list_adapters(links: NodeLinks, chosen: Sequence[str]) -> list[Adapter]:
    """Return the RDMA devices, or the network devices on PCI where there are none."""
    rdma = [_rdma_adapter(device, links, chosen) for device in links.rdma or () if device.place]
    return rdma or [
        Adapter(
            name=net.name,
            place=net.place,
            works=net.up is True,
            virtual_function=net.physical_function is not None,
            speed_gbps=net.speed_gbps,
        )
        for net in links.nets
        if net.place is not None
    ]


def pair_gpus(
    gpus: Iterable[Place], adapters: Sequence[Adapter], override: Mapping[str, str]
) -> list[Affinity]:
    """Return an adapter for each GPU, by address; none where there are no adapters.

    ``override`` gives adapters by GPU; what it names but is not there is left to nearness
    (see :func:`unknown_overrides`).
    """
    named = {adapter.name for adapter in adapters}
    taken: Counter[str] = Counter()
    pairs = []
    for gpu in sorted(gpus, key=lambda gpu: gpu.address):
        told = override.get(gpu.address)
        if told in named:
            pair = Affinity(gpu=gpu.address, adapter=told, nearness=Nearness.OVERRIDE)
        elif adapters:
            pair = _nearest(gpu, adapters, taken)
        else:
            continue
        taken[pair.adapter] += 1
        pairs.append(pair)
    return pairs


def unknown_overrides(
    gpus: Iterable[Place], adapters: Iterable[Adapter], override: Mapping[str, str]
) -> list[str]:
    """Return what an override names that is not there, as ``GPU=adapter``."""
    addresses = {gpu.address for gpu in gpus}
    names = {adapter.name for adapter in adapters}
    return [
        f"{gpu}={name}"
        for gpu, name in override.items()
        if gpu not in addresses or name not in names
    ]


def _nearest(gpu: Place, adapters: Sequence[Adapter], taken: Mapping[str, int]) -> Affinity:
    def nearness(adapter: Adapter) -> tuple[int, bool]:
        return _common_steps(gpu, adapter.place), _same_node(gpu, adapter.place)

    def rank(adapter: Adapter) -> tuple[object, ...]:
        steps, same_node = nearness(adapter)
        return (
            -steps,
            not same_node,
            adapter.virtual_function,
            -(adapter.speed_gbps or 0.0),
            taken.get(adapter.name, 0),
            len(adapter.name),
            adapter.name,
        )

    ranked = sorted(adapters, key=rank)
    best = next((adapter for adapter in ranked if adapter.works), ranked[0])
    steps, same_node = nearness(best)
    return Affinity(
        gpu=gpu.address,
        adapter=best.name,
        nearness=_name_nearness(steps, same_node=same_node),
        steps=steps,
        displaced=ranked[0].name if nearness(ranked[0]) != (steps, same_node) else None,
    )


def _name_nearness(steps: int, *, same_node: bool) -> Nearness:
    if steps > 1:
        return Nearness.SWITCH
    if steps == 1:
        return Nearness.HOST_BRIDGE
    return Nearness.NUMA if same_node else Nearness.NOTHING


def _common_steps(gpu: Place, other: Place | None) -> int:
    steps = zip(gpu.ancestry, () if other is None else other.ancestry, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], steps))


def _same_node(gpu: Place, other: Place | None) -> bool:
    return gpu.numa_node is not None and other is not None and gpu.numa_node == other.numa_node


def _rdma_adapter(device: RdmaDevice, links: NodeLinks, chosen: Sequence[str]) -> Adapter:
    return Adapter(
        name=device.name,
        place=device.place,
        works=device_obstacle(device, links, chosen) is None,
        virtual_function=device.physical_function is not None,
        speed_gbps=device.speed_gbps,
    )
