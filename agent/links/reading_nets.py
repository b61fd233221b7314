"""Network devices from ``/sys/class/net``: those with hardware behind them, and bonds."""

import os
from pathlib import Path

from nearkv.agent.links.counting import NET_COUNTERS
from nearkv.agent.links.model import NetDevice
from nearkv.agent.links.placing import read_physical_function, read_place
from nearkv.agent.links.sysfs import is_there, read_count, read_name, read_text

# Hardware types of Linux (ARPHRD_*).
_KINDS = {"1": "ethernet", "32": "infiniband"}
_MOST_MBPS = 10_000_000
_MOST_DIGITS = 12


def has_hardware(folder: Path) -> bool:
    """Tell a device of interest from bridges, tunnels, pods' ends and files."""
    return is_there(folder / "device") or is_there(folder / "bonding/mode")


def read_net_device(root: Path, name: str) -> NetDevice:
    """Read one network device."""
    folder = root / "sys/class/net" / name
    behind = folder / "device"
    on_hardware = is_there(behind)
    counts = {file: read_count(folder / file) for file in NET_COUNTERS}
    mode = read_name(folder / "bonding/mode")
    return NetDevice(
        name=name,
        place=read_place(behind) if on_hardware else None,
        identity=read_name(folder / "address") or "",
        kind=_KINDS.get(read_name(folder / "type") or "", "other"),
        operstate=read_name(folder / "operstate"),
        carrier={"1": True, "0": False}.get(read_text(folder / "carrier") or ""),
        speed_gbps=_speed_gbps(read_text(folder / "speed")),
        mtu_bytes=read_count(folder / "mtu"),
        physical_function=read_physical_function(behind) if on_hardware else None,
        bond=_master(folder),
        # The file says name and number, such as "802.3ad 4".
        bond_mode=mode.split()[0] if mode else None,
        members=tuple(sorted((read_text(folder / "bonding/slaves") or "").split())),
        counters={file: count for file, count in counts.items() if count is not None},
    )


def _speed_gbps(text: str | None) -> float | None:
    """Return Gbit/s of a speed in Mbit/s; -1 says that there is none."""
    if text is None or not text.isdecimal() or not 0 < int(text[:_MOST_DIGITS]) <= _MOST_MBPS:
        return None
    return int(text[:_MOST_DIGITS]) / 1000


def _master(folder: Path) -> str | None:
    """Return the bond that a device is a member of; a bridge is not of interest."""
    master = folder / "master"
    return Path(os.path.realpath(master)).name if is_there(master / "bonding/mode") else None
