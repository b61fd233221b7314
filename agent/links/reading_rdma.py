"""RDMA devices from ``/sys/class/infiniband``."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nearkv.agent.links.counting import RDMA_COUNTERS
from nearkv.agent.links.model import RdmaDevice, RdmaPort
from nearkv.agent.links.placing import read_physical_function, read_place
from nearkv.agent.links.sysfs import list_names, read_count, read_name, read_text

_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec")
_MOST_GIDS = 256
_EMPTY_GIDS = 8
"""Tables are filled from their start, and reading 256 entries of each port would cost more than
all the rest: so many empty ones in a row are taken for the end."""


def read_rdma_device(root: Path, name: str, verbs: Mapping[str, Path]) -> RdmaDevice:
    """Read one device; ``verbs`` names its character device where that is of interest."""
    folder = root / "sys/class/infiniband" / name
    behind = folder / "device"
    return RdmaDevice(
        name=name,
        place=read_place(behind),
        identity=read_name(folder / "node_guid") or "",
        firmware=read_name(folder / "fw_ver"),
        physical_function=read_physical_function(behind),
        openable=_is_openable(verbs[name]) if name in verbs else None,
        ports=tuple(
            _read_port(folder, int(number))
            for number in sorted(list_names(folder / "ports") or (), key=_by_number)
            if number.isdecimal()
        ),
    )


def read_verbs(root: Path, devices: Path) -> dict[str, Path]:
    """Return the character device of each RDMA device, such as ``uverbs0`` in ``devices``."""
    folder = root / "sys/class/infiniband_verbs"
    named = {name: read_name(folder / name / "ibdev") for name in list_names(folder) or ()}
    return {device: devices / name for name, device in named.items() if device}


def _read_port(device: Path, number: int) -> RdmaPort:
    folder = device / "ports" / str(number)
    gids = _read_gids(folder)
    return RdmaPort(
        number=number,
        state=_named(read_name(folder / "state")),
        phys_state=_named(read_name(folder / "phys_state")),
        link_layer=read_name(folder / "link_layer"),
        speed_gbps=_speed_gbps(read_name(folder / "rate")),
        gids=None if gids is None else len(gids),
        gid_types=tuple(sorted(_attributes(folder, "types", gids or ()))),
        netdevs=tuple(sorted(_attributes(folder, "ndevs", gids or ()))) or _netdevs(device, number),
        counters=_read_counters(folder),
    )


def _read_gids(port: Path) -> list[int] | None:
    """Return the indexes of a port's addresses."""
    names = list_names(port / "gids")
    if names is None:
        return None
    found: list[int] = []
    empty = 0
    for index in range(min(len(names), _MOST_GIDS)):
        text = read_text(port / "gids" / str(index))
        if text and text.strip("0:"):
            found.append(index)
            empty = 0
        else:
            empty += 1
        if empty >= _EMPTY_GIDS:
            break
    return found


def _attributes(port: Path, attribute: str, gids: Iterable[int]) -> set[str]:
    texts = {read_name(port / "gid_attrs" / attribute / str(index)) for index in gids}
    return {text for text in texts if text}


def _netdevs(device: Path, port: int) -> tuple[str, ...]:
    """Return the network devices on a port's function, for ports whose addresses name none."""
    folder = device / "device/net"
    names = list_names(folder) or []
    of_port = [name for name in names if read_count(folder / name / "dev_port") == port - 1]
    return tuple(of_port or (names if port == 1 else ()))


def _read_counters(port: Path) -> dict[str, int]:
    counts = {name: read_count(port / name) for name in RDMA_COUNTERS}
    return {name: count for name, count in counts.items() if count is not None}


def _named(text: str | None) -> str | None:
    """Return the name in ``4: ACTIVE``."""
    number, colon, name = (text or "").partition(": ")
    return name if colon and number.isdecimal() and name else None


def _speed_gbps(text: str | None) -> float | None:
    """Return the figure in ``400 Gb/sec (4X NDR)``."""
    found = _RATE.match(text or "")
    return float(found[1]) if found else None


def _is_openable(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def _by_number(name: str) -> tuple[int, str]:
    return len(name), name
