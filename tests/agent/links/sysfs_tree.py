"""Builds fake sysfs trees: real folders, files and relative links, as the kernel lays them out."""

import os
from pathlib import Path

GID = "fe80:0000:0000:0000:0e42:a1ff:fe00:{:04x}"
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


class SysfsTree:
    """A root folder with ``sys`` and ``dev/infiniband`` below it, filled device by device."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/class").mkdir(parents=True)

    @property
    def devices(self) -> Path:
        return self.root / "dev/infiniband"

    def write(self, path: str, text: str) -> Path:
        """Write a file below ``sys``."""
        file = self.root / "sys" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")
        return file

    def link(self, path: str, target: str) -> None:
        """Make a relative link below ``sys`` to another path below ``sys``."""
        link = self.root / "sys" / path
        link.parent.mkdir(parents=True, exist_ok=True)
        real = self.root / "sys" / target
        link.symlink_to(os.path.relpath(real, os.path.realpath(link.parent)))

    def pci(self, place: str, numa_node: int = -1, **files: str) -> str:
        """Add a PCI function at ``place``, such as ``pci0000:16/0000:16:01.0/0000:17:00.0``."""
        for name, text in (files | {"numa_node": str(numa_node)}).items():
            self.write(f"devices/{place}/{name}", text)
        self.link(f"bus/pci/devices/{place.rsplit('/', 1)[-1]}", f"devices/{place}")
        return place

    def gpu(self, place: str, numa_node: int = -1, kind: str = "0x030200") -> str:
        """Add a GPU; returns its PCI address."""
        self.pci(place, numa_node, vendor="0x10de", **{"class": kind})
        return place.rsplit("/", 1)[-1]

    def rdma(self, name: str, place: str | None, *, numa_node: int = -1, ports: int = 1, **port):
        """Add an RDMA device with equal ports; without a place it is soft-RoCE."""
        if place is None:
            folder = f"devices/virtual/infiniband/{name}"
        else:
            if not (self.root / "sys/devices" / place).exists():
                self.pci(place, numa_node, vendor="0x15b3", **{"class": "0x020700"})
            folder = f"devices/{place}/infiniband/{name}"
        self.write(f"{folder}/node_guid", f"0c42:a103:00{len(name):02x}:{sum(name.encode()):04x}")
        self.write(f"{folder}/fw_ver", "28.39.1002")
        if place is not None:
            self.link(f"{folder}/device", f"devices/{place}")
        for number in range(1, ports + 1):
            self.port(f"{folder}/ports/{number}", **port)
        self.link(f"class/infiniband/{name}", folder)
        self.verbs(name)
        return folder

    def port(
        self,
        folder: str,
        *,
        state: str = "4: ACTIVE",
        phys_state: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        link_layer: str = "InfiniBand",
        gids: int = 1,
        netdev: str | None = None,
        counters: dict[str, int] | None = None,
    ) -> None:
        """Add a port of an RDMA device."""
        files = {"state": state, "phys_state": phys_state, "rate": rate, "link_layer": link_layer}
        for name, text in files.items():
            self.write(f"{folder}/{name}", text)
        for index in range(16):
            used = index < gids
            self.write(f"{folder}/gids/{index}", GID.format(index) if used else NO_GID)
            if used and link_layer == "Ethernet":
                kind = "RoCE v2" if index % 2 else "IB/RoCE v1"
                self.write(f"{folder}/gid_attrs/types/{index}", kind)
            if used and netdev:
                self.write(f"{folder}/gid_attrs/ndevs/{index}", netdev)
        for name, count in ({"counters/symbol_error": 0} if counters is None else counters).items():
            self.write(f"{folder}/{name}", str(count))

    def verbs(self, name: str) -> None:
        """Add the verbs device of an RDMA device, and its node."""
        number = len(list((self.root / "sys/class").glob("infiniband_verbs/*")))
        self.write(f"class/infiniband_verbs/uverbs{number}/ibdev", name)
        self.devices.mkdir(parents=True, exist_ok=True)
        (self.devices / f"uverbs{number}").touch()

    def net(self, name: str, place: str | None, *, numa_node: int = -1, **files: object) -> str:
        """Add a network device; without a place it is virtual."""
        if place is None:
            folder = f"devices/virtual/net/{name}"
        else:
            if not (self.root / "sys/devices" / place).exists():
                self.pci(place, numa_node, vendor="0x15b3", **{"class": "0x020000"})
            folder = f"devices/{place}/net/{name}"
        plain = {"type": 1, "operstate": "up", "carrier": 1, "speed": 100_000, "mtu": 9000}
        plain |= {"address": f"02:00:00:00:00:{sum(name.encode()) % 256:02x}", "dev_port": 0}
        for file, text in (plain | files).items():
            if text is not None:
                self.write(f"{folder}/{file.replace('__', '/')}", str(text))
        if place is not None:
            self.link(f"{folder}/device", f"devices/{place}")
        self.link(f"class/net/{name}", folder)
        return folder

    def bond(self, name: str, members: tuple[str, ...], **files: object) -> None:
        """Add a bond of network devices that are there already."""
        folder = self.net(name, None, **files)
        self.write(f"{folder}/bonding/mode", "802.3ad 4")
        self.write(f"{folder}/bonding/slaves", " ".join(members))
        self.write("class/net/bonding_masters", name)
        for member in members:
            self.link(f"class/net/{member}/master", folder)

    def virtual_function(self, place: str, of: str) -> str:
        """Make the PCI function at ``place`` a virtual function of the one at ``of``."""
        self.link(f"devices/{place}/physfn", f"devices/{of}")
        return place


GPU_0, GPU_1 = "0000:17:00.0", "0000:97:00.0"
SWITCH_0, SWITCH_1 = "pci0000:16/0000:16:01.0", "pci0000:96/0000:96:01.0"
NIC_0, NIC_1 = f"{SWITCH_0}/0000:18:00.0", f"{SWITCH_1}/0000:98:00.0"


def two_sockets(root: Path, **port) -> SysfsTree:
    """Two NUMA nodes with a GPU and an RDMA device each; their names run against the wiring."""
    tree = SysfsTree(root)
    tree.gpu(f"{SWITCH_0}/{GPU_0}", 0)
    tree.gpu(f"{SWITCH_1}/{GPU_1}", 1)
    tree.rdma("mlx5_1", NIC_0, numa_node=0, **port)
    tree.rdma("mlx5_0", NIC_1, numa_node=1, **port)
    return tree
