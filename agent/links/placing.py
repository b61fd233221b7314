"""Where devices sit on PCI, from sysfs."""

import os
from pathlib import Path

from nearkv.agent.links.model import Place
from nearkv.agent.links.sysfs import is_there, list_names, read_count, read_text

_GPU_VENDORS = ("0x10de", "0x1002")
# PCI classes: VGA-compatible controllers, 3D controllers, processing accelerators.
_GPU_CLASSES = ("0x0300", "0x0302", "0x1200")


def read_place(device: Path) -> Place | None:
    """Return the place of a ``device`` link's target; ``None`` where it is not on PCI."""
    parts = Path(os.path.realpath(device)).parts
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), None)
    if start is None:
        return None
    ancestry = parts[start:]
    # Behind a PCI function there may be more, such as virtio2: the address is the last one.
    addresses = [i for i, part in enumerate(ancestry) if part.count(":") == 2]  # noqa: PLR2004 (domain:bus:slot)
    if not addresses:
        return None
    ancestry = ancestry[: addresses[-1] + 1]
    function = Path(*parts[: start + len(ancestry)])
    return Place(
        address=ancestry[-1], ancestry=ancestry, numa_node=read_count(function / "numa_node")
    )


def read_gpus(root: Path) -> tuple[Place, ...]:
    """Return the GPUs of NVIDIA and AMD by PCI address."""
    folder = root / "sys/bus/pci/devices"
    places = [
        read_place(folder / name) for name in list_names(folder) or () if _is_gpu(folder / name)
    ]
    return tuple(place for place in places if place is not None)


def read_physical_function(device: Path) -> str | None:
    """Return the PCI address of the function that a virtual function belongs to."""
    link = device / "physfn"
    return Path(os.path.realpath(link)).name if is_there(link) else None


def _is_gpu(device: Path) -> bool:
    return read_text(device / "vendor") in _GPU_VENDORS and (
        read_text(device / "class") or ""
    ).startswith(_GPU_CLASSES)
