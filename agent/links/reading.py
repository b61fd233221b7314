"""One reading of the node's links from sysfs; nothing that is missing there is an error."""

from pathlib import Path

from nearkv.agent.links.model import NetDevice, NodeLinks, RdmaDevice
from nearkv.agent.links.placing import read_gpus
from nearkv.agent.links.reading_nets import has_hardware, read_net_device
from nearkv.agent.links.reading_rdma import read_rdma_device, read_verbs
from nearkv.agent.links.sysfs import is_missing, is_there, list_names

_NOT_THERE = "no_sysfs"
_REFUSED = "unreadable"


def read_links(root: Path, devices: Path | None, *, max_devices: int) -> NodeLinks:
    """Read RDMA devices, network devices and the places of GPUs below ``root``/sys.

    ``devices`` is where verbs devices are, as this process sees them, if it needs to open them.
    Of each sort at most ``max_devices`` are read, virtual functions last: a node may have
    hundreds of them.
    """
    rdma, why, omitted = _read_rdma(root, devices, max_devices)
    nets, more = _read_nets(root, max_devices)
    return NodeLinks(
        rdma=rdma, why=why, nets=nets, gpus=read_gpus(root)[:max_devices], omitted=omitted + more
    )


def _read_rdma(
    root: Path, devices: Path | None, limit: int
) -> tuple[tuple[RdmaDevice, ...] | None, str, int]:
    folder = root / "sys/class/infiniband"
    names = list_names(folder)
    if names is None:
        if is_missing(root / "sys/class"):
            return None, _NOT_THERE, 0
        # Without the driver there is no such folder: a host without RDMA, which is normal.
        return ((), "", 0) if is_missing(folder) else (None, _REFUSED, 0)
    names.sort(key=lambda name: (is_there(folder / name / "device/physfn"), len(name), name))
    verbs = {} if devices is None else read_verbs(root, devices)
    read = tuple(read_rdma_device(root, name, verbs) for name in names[:limit])
    return tuple(sorted(read, key=lambda device: device.name)), "", len(names) - len(read)


def _read_nets(root: Path, limit: int) -> tuple[tuple[NetDevice, ...], int]:
    folder = root / "sys/class/net"
    names = [name for name in list_names(folder) or () if has_hardware(folder / name)]
    names.sort(key=lambda name: (is_there(folder / name / "device/physfn"), len(name), name))
    read = tuple(read_net_device(root, name) for name in names[:limit])
    return tuple(sorted(read, key=lambda net: net.name)), len(names) - len(read)
