"""Reading fake sysfs trees: what is there, what is not, and what makes no sense."""

from pathlib import Path

import pytest

from nearkv.agent.links.model import pci_address
from nearkv.agent.links.reading import read_links
from tests.agent.links.sysfs_tree import GPU_0, GPU_1, NIC_0, NIC_1, SWITCH_0


def read(tree, *, limit=64, devices=True):
    return read_links(tree.root, tree.devices if devices else None, max_devices=limit)


def device(tree, name="mlx5_0", **options):
    (found,) = [it for it in read(tree, **options).rdma if it.name == name]
    return found


def net(tree, name):
    (found,) = [it for it in read(tree).nets if it.name == name]
    return found


def test_infiniband_devices_are_read_with_their_places(sockets):
    links = read(sockets)
    assert [gpu.address for gpu in links.gpus] == [GPU_0, GPU_1]
    first, second = links.rdma
    assert (first.name, first.place.address, first.place.numa_node) == ("mlx5_0", "0000:98:00.0", 1)
    assert second.place.ancestry == ("pci0000:16", "0000:16:01.0", "0000:18:00.0")
    assert (first.firmware, first.openable, first.physical_function) == ("28.39.1002", True, None)
    (port,) = first.ports
    assert (port.state, port.phys_state, port.kind, port.up) == (
        "ACTIVE",
        "LinkUp",
        "infiniband",
        True,
    )
    assert (port.speed_gbps, port.gids, port.counters) == (400, 1, {"counters/symbol_error": 0})


def test_roce_ports_name_the_network_devices_of_their_addresses(tree):
    tree.rdma("mlx5_0", NIC_0, link_layer="Ethernet", gids=4, netdev="eth0")
    (port,) = device(tree).ports
    assert (port.kind, port.gids, port.netdevs) == ("roce", 4, ("eth0",))
    assert port.gid_types == ("IB/RoCE v1", "RoCE v2")


def test_addresses_behind_a_long_gap_are_not_looked_for(tree):
    folder = tree.rdma("mlx5_0", NIC_0, gids=2)
    tree.write(f"{folder}/ports/1/gids/4", "fe80:0000:0000:0000:0000:0000:0000:0001")
    assert device(tree).ports[0].gids == 3
    tree.write(f"{folder}/ports/1/gids/15", "fe80:0000:0000:0000:0000:0000:0000:0002")
    assert device(tree).ports[0].gids == 3


def test_a_port_whose_addresses_name_none_has_the_devices_on_its_function(tree):
    tree.rdma("mlx5_0", NIC_0, ports=2)
    tree.net("ib0", NIC_0, type=32, dev_port=0)
    tree.net("ib1", NIC_0, type=32, dev_port=1)
    assert [port.netdevs for port in device(tree).ports] == [("ib0",), ("ib1",)]


def test_a_port_that_is_down_says_so(tree):
    tree.rdma(
        "mlx5_0", NIC_0, state="1: DOWN", phys_state="3: Disabled", rate="2.5 Gb/sec (1X SDR)"
    )
    (port,) = device(tree).ports
    assert (port.state, port.phys_state, port.up, port.speed_gbps) == (
        "DOWN",
        "Disabled",
        False,
        2.5,
    )


def test_ports_come_in_the_order_of_their_numbers(tree):
    tree.rdma("mlx5_0", NIC_0, ports=11)
    assert [port.number for port in device(tree).ports] == list(range(1, 12))


def test_soft_roce_has_no_place(tree):
    tree.rdma("rxe0", None, link_layer="Ethernet")
    assert device(tree, "rxe0").place is None


def test_a_virtual_function_names_its_physical_one(tree):
    place = f"{SWITCH_0}/0000:18:00.2"
    tree.rdma("mlx5_0", NIC_0)
    tree.rdma("mlx5_2", place)
    tree.virtual_function(place, NIC_0)
    assert device(tree, "mlx5_2").physical_function == "0000:18:00.0"


def test_physical_devices_are_read_first_and_the_rest_is_counted(tree):
    for index in range(8):
        place = f"{SWITCH_0}/0000:18:01.{index}"
        tree.rdma(f"mlx5_{index}", place)
        tree.net(f"eth{index}", place)
        tree.virtual_function(place, NIC_0)
    tree.rdma("mlx5_10", NIC_0)
    tree.net("zeth", NIC_0)
    links = read(tree, limit=2)
    assert [it.name for it in links.rdma] == ["mlx5_0", "mlx5_10"]
    assert [it.name for it in links.nets] == ["eth0", "zeth"]
    assert links.omitted == 14


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:17:00.0", "0000:17:00.0"),
        ("0000:17:00.0", "0000:17:00.0"),
        ("00010000:AB:00.0", "10000:ab:00.0"),
        ("nonsense", "nonsense"),
    ],
)
def test_addresses_of_nvml_are_those_of_sysfs(text, address):
    assert pci_address(text) == address


# -- Network devices -------------------------------------------------------------------------


def test_network_devices_with_hardware_are_read(tree):
    tree.net("eth0", NIC_0, numa_node=0, carrier_down_count=2)
    tree.net("ib0", NIC_1, type=32)
    for name in ("lo", "veth1", "docker0"):
        tree.net(name, None)
    assert [it.name for it in read(tree).nets] == ["eth0", "ib0"]
    eth0 = net(tree, "eth0")
    assert (eth0.speed_gbps, eth0.mtu_bytes, eth0.up, eth0.kind) == (100, 9000, True, "ethernet")
    assert (eth0.place.address, eth0.place.numa_node) == ("0000:18:00.0", 0)
    assert eth0.counters == {"carrier_down_count": 2}
    assert net(tree, "ib0").kind == "infiniband"


def test_a_bond_is_read_with_its_members(tree):
    tree.net("eth0", NIC_0)
    tree.net("eth1", f"{SWITCH_0}/0000:18:00.1")
    tree.bond("bond0", ("eth1", "eth0"), speed=200_000)
    bond = net(tree, "bond0")
    assert (bond.bond_mode, bond.members, bond.speed_gbps) == ("802.3ad", ("eth0", "eth1"), 200)
    assert (bond.place, net(tree, "eth0").bond, net(tree, "eth1").bond) == (None, "bond0", "bond0")


def test_a_member_of_a_bridge_is_in_no_bond(tree):
    bridge = tree.net("br0", None)
    tree.net("eth0", NIC_0)
    tree.link("class/net/eth0/master", bridge)
    assert net(tree, "eth0").bond is None


def test_a_virtio_device_sits_at_its_pci_function(tree):
    tree.pci("pci0000:00/0000:00:03.0", 0)
    tree.write("devices/pci0000:00/0000:00:03.0/virtio2/feature", "0")
    tree.net("eth0", "pci0000:00/0000:00:03.0/virtio2", speed=-1)
    place = net(tree, "eth0").place
    assert (place.address, place.ancestry) == ("0000:00:03.0", ("pci0000:00", "0000:00:03.0"))
    assert (net(tree, "eth0").speed_gbps, place.numa_node) == (None, 0)


@pytest.mark.parametrize(
    ("operstate", "carrier", "up"),
    [
        ("up", 1, True),
        ("down", 0, False),
        ("lowerlayerdown", 1, False),
        ("unknown", 1, True),
        ("unknown", None, None),
        (None, None, None),
        ("\x07garbage", 0, False),
    ],
)
def test_whether_a_network_device_is_up(tree, operstate, carrier, up):
    tree.net("eth0", NIC_0, operstate=operstate, carrier=carrier)
    assert net(tree, "eth0").up is up


# -- Missing, refused, garbage ---------------------------------------------------------------


def test_a_host_without_devices_is_a_normal_case(tree):
    links = read(tree)
    assert (links.rdma, links.why, links.nets, links.gpus, links.omitted) == ((), "", (), (), 0)


def test_a_host_without_sysfs_is_unknown(tmp_path):
    links = read_links(tmp_path, None, max_devices=64)
    assert (links.rdma, links.why) == (None, "no_sysfs")


def test_a_file_in_place_of_the_folder_is_unknown(tree):
    tree.write("class/infiniband", "not a folder")
    assert (read(tree).rdma, read(tree).why) == (None, "unreadable")


def test_a_device_without_any_file_is_all_unknown(tree):
    (tree.root / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    found = device(tree)
    (port,) = found.ports
    assert (found.place, found.firmware, found.openable, found.identity) == (None, None, None, "")
    assert (port.state, port.up, port.kind, port.speed_gbps, port.gids) == (
        None,
        None,
        "unknown",
        None,
        None,
    )
    assert (port.netdevs, port.counters) == ((), {})


def test_every_missing_file_leaves_the_others_as_they_are(tree):
    folder = (
        tree.root
        / "sys"
        / tree.rdma(
            "mlx5_0",
            NIC_0,
            counters={"counters/link_downed": 3, "hw_counters/out_of_sequence": 4},
        )
    )
    whole = device(tree)
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        text = file.read_text()
        file.unlink()
        assert device(tree).name == "mlx5_0"
        file.write_text(text)
    assert device(tree) == whole


GARBAGE = [
    b"",
    b"\n",
    b"\xff\xfe\x00",
    b"9" * 5000,
    b"4:",
    b": :",
    b"-1",
    b"nan",
    "٤: ACTIVE".encode(),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_in_every_file_is_unknown_and_harms_nothing(tree, garbage):
    tree.rdma("mlx5_0", NIC_0, link_layer="Ethernet", netdev="eth0", numa_node=0)
    tree.net("eth0", NIC_0)
    tree.gpu(f"{SWITCH_0}/{GPU_0}")
    for file in (tree.root / "sys").rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.write_bytes(garbage)
    links = read(tree)
    (port,) = links.rdma[0].ports
    assert (port.state, port.speed_gbps, port.counters) == (None, None, {})
    assert (links.nets[0].speed_gbps, links.nets[0].kind) == (None, "other")
    assert links.rdma[0].place.numa_node is None


@pytest.mark.parametrize("target", ["nowhere", "mlx5_0"], ids=["dangling", "itself"])
def test_a_link_that_leads_nowhere_is_a_device_without_facts(tree, target):
    folder = tree.root / "sys/class/infiniband"
    folder.mkdir()
    (folder / "mlx5_0").symlink_to(target)
    assert device(tree).ports == ()


def test_a_refused_file_is_unknown(tree):
    folder = tree.rdma("mlx5_0", NIC_0)
    state = tree.root / "sys" / folder / "ports/1/state"
    state.unlink()
    state.mkdir()  # reading it is an error even for root, as a refusal is for others
    (port,) = device(tree).ports
    assert (port.up, port.phys_state) == (None, "LinkUp")


def test_a_verbs_device_that_is_not_there_cannot_be_opened(sockets):
    (sockets.devices / "uverbs0").unlink()
    assert {it.name: it.openable for it in read(sockets).rdma} == {"mlx5_1": False, "mlx5_0": True}
    assert {it.openable for it in read(sockets, devices=False).rdma} == {None}


def test_this_machines_own_links_can_be_read():
    links = read_links(Path("/"), Path("/dev/infiniband"), max_devices=64)
    assert links.why in {"", "no_sysfs", "unreadable"}
    assert len(links.nets) <= 64
