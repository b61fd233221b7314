"""Which network adapter lies next to which GPU (pure over a root that holds ``sys``)."""

import os
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

_NVIDIA_VENDOR = "0x10de"
# PCI classes of display controllers: VGA-compatible and 3D.
_GPU_CLASSES = ("0x0300", "0x0302")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A device: ``ancestry`` is its place below ``sys/devices``, from the root port down.

    ``numa_node`` is -1 where the firmware does not say.
    """

    name: str
    ancestry: tuple[str, ...]
    numa_node: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The adapter nearest to a GPU, and why it is the nearest."""

    gpu: str
    nic: str
    shared_bridges: int
    same_numa_node: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device, with its state as the kernel says it, such as ``ACTIVE``."""

    device: str
    port: str
    state: str

    @property
    def active(self) -> bool:
        """Whether it can carry data."""
        return self.state == "ACTIVE"


def list_rdma_ports(root: Path) -> list[RdmaPort]:
    """Return the ports of all RDMA devices; a device without any has one of state ``no port``."""
    ports: list[RdmaPort] = []
    for device in _children(root / "sys/class/infiniband"):
        names = [path.name for path in _children(device / "ports")]
        ports += [
            RdmaPort(
                device=device.name,
                port=name,
                # The file says number and name, such as "4: ACTIVE".
                state=read_text(device / "ports" / name / "state").partition(": ")[2] or "unknown",
            )
            for name in names
        ] or [RdmaPort(device=device.name, port="-", state="no port")]
    return ports


def list_nics(root: Path) -> list[PciDevice]:
    """Return RDMA devices with their places; those that are not on PCI are passed over."""
    nics = (
        _device(path / "device", path.name) for path in _children(root / "sys/class/infiniband")
    )
    return [nic for nic in nics if nic is not None]


def list_gpus(root: Path) -> list[PciDevice]:
    """Return NVIDIA GPUs by PCI address."""
    found = (
        _device(path, path.name)
        for path in _children(root / "sys/bus/pci/devices")
        if read_text(path / "vendor") == _NVIDIA_VENDOR
        and read_text(path / "class").startswith(_GPU_CLASSES)
    )
    return [gpu for gpu in found if gpu is not None]


def pair_devices(gpus: list[PciDevice], nics: list[PciDevice]) -> list[Nearest]:
    """Return the nearest adapter of each GPU.

    The longest common PCIe path counts first, the NUMA node second, the name last.
    """
    return [_nearest(gpu, nics) for gpu in gpus] if nics else []


def read_text(path: Path) -> str:
    """Return a file's text without white space around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _nearest(gpu: PciDevice, nics: list[PciDevice]) -> Nearest:
    def rank(nic: PciDevice) -> tuple[int, bool]:
        return _shared(gpu, nic), 0 <= gpu.numa_node == nic.numa_node

    best = max(sorted(nics, key=lambda nic: nic.name), key=rank)
    shared, same = rank(best)
    return Nearest(gpu=gpu.name, nic=best.name, shared_bridges=shared, same_numa_node=same)


def _shared(one: PciDevice, other: PciDevice) -> int:
    steps = zip(one.ancestry, other.ancestry, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], steps))


def _device(link: Path, name: str) -> PciDevice | None:
    place = Path(os.path.realpath(link)).parts
    start = next((i for i, part in enumerate(place) if part.startswith("pci")), None)
    if start is None:
        return None
    numa_node = read_text(link / "numa_node")
    return PciDevice(
        name=name,
        ancestry=place[start:],
        numa_node=int(numa_node) if numa_node.isdecimal() else -1,
    )


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
