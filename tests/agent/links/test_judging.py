"""The verdict on RDMA, and the health of a link."""

import pytest

from nearkv.agent.links.judging import EXPLAINED, LinkHealth, Obstacle, judge_link, judge_rdma
from nearkv.agent.links.model import NodeLinks
from nearkv.agent.links.reading import read_links
from tests.agent.links.sysfs_tree import NIC_0, NIC_1, SWITCH_0


def judge(tree, chosen=(), *, devices=True):
    devices_folder = tree.devices if devices else None
    return judge_rdma(read_links(tree.root, devices_folder, max_devices=64), chosen)


def test_a_host_without_rdma_has_none(tree):
    assert (judge(tree).usable, judge(tree).reason) == (False, "no RDMA device")


@pytest.mark.parametrize("links", [None, NodeLinks(why="unreadable")], ids=["not-read", "refused"])
def test_what_cannot_be_read_is_unknown(links):
    assert judge_rdma(links, ()).usable is None


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
def test_an_active_port_with_an_address_is_usable(tree, layer):
    tree.rdma("mlx5_0", NIC_0, link_layer=layer)
    assert (judge(tree).usable, judge(tree).reason) == (True, "usable: mlx5_0")


@pytest.mark.parametrize(
    ("port", "obstacle"),
    [
        ({"state": "1: DOWN"}, Obstacle.NOT_ACTIVE),
        ({"state": "2: INIT"}, Obstacle.NOT_ACTIVE),
        ({"state": "3: ARMED"}, Obstacle.NOT_ACTIVE),
        ({"gids": 0}, Obstacle.NO_ADDRESS),
        ({"ports": 0}, Obstacle.NO_PORT),
    ],
    ids=str,
)
def test_what_a_port_lacks_is_the_reason(tree, port, obstacle):
    tree.rdma("mlx5_0", NIC_0, **port)
    assert (judge(tree).usable, judge(tree).reason) == (False, f"mlx5_0: {EXPLAINED[obstacle]}")


def test_one_usable_port_is_enough(tree):
    folder = tree.rdma("mlx5_0", NIC_0, ports=2)
    tree.write(f"{folder}/ports/1/state", "1: DOWN")
    tree.rdma("mlx5_1", NIC_1, state="1: DOWN")
    assert (judge(tree).usable, judge(tree).reason) == (True, "usable: mlx5_0")


def test_a_state_that_cannot_be_read_leaves_the_verdict_open(tree):
    tree.rdma("mlx5_0", NIC_0, state="garbage")
    tree.rdma("mlx5_1", NIC_1, state="1: DOWN")
    assert judge(tree).usable is None
    assert EXPLAINED[Obstacle.STATE_UNKNOWN] in judge(tree).reason


@pytest.mark.parametrize(
    ("layer", "usable"), [("Ethernet", False), ("InfiniBand", True)], ids=["roce", "infiniband"]
)
def test_the_network_device_behind_counts_for_roce_only(tree, layer, usable):
    tree.rdma("mlx5_0", NIC_0, link_layer=layer, netdev="eth0")
    tree.net("eth0", NIC_0, operstate="down", carrier=0)
    assert judge(tree).usable is usable


def test_a_bonded_device_is_usable_while_its_bond_is_up(tree):
    tree.net("eth0", NIC_0, operstate="down", carrier=0)
    tree.net("eth1", f"{SWITCH_0}/0000:18:00.1")
    tree.bond("bond0", ("eth0", "eth1"))
    tree.rdma("mlx5_bond_0", NIC_0, link_layer="Ethernet", netdev="bond0")
    assert judge(tree).usable is True


def test_software_is_not_rdma(tree):
    tree.rdma("rxe0", None, link_layer="Ethernet")
    assert (judge(tree).usable, judge(tree).reason) == (
        False,
        f"rxe0: {EXPLAINED[Obstacle.SOFTWARE]}",
    )


def test_a_device_that_cannot_be_opened_is_not_usable_unless_nobody_wants_to(sockets):
    for node in sockets.devices.iterdir():
        node.unlink()
    assert judge(sockets).usable is False
    assert EXPLAINED[Obstacle.NOT_OPENABLE] in judge(sockets).reason
    assert judge(sockets, devices=False).usable is True


def test_only_chosen_devices_count(sockets):
    assert judge(sockets, ("mlx5_1",)).reason == "usable: mlx5_1"
    assert judge(sockets, ("mlx5_7",)).usable is False


def test_every_obstacle_is_explained():
    assert EXPLAINED.keys() == set(Obstacle)


@pytest.mark.parametrize(
    ("up", "recent", "health", "faults"),
    [
        (True, {}, LinkHealth.OK, []),
        (True, {"retry": 5, "out_of_sequence": 9}, LinkHealth.OK, []),
        (
            True,
            {"symbol_error": 3, "link_downed": 1, "retry": 5},
            LinkHealth.DEGRADED,
            ["link_downed +1", "symbol_error +3"],
        ),
        (False, {"link_downed": 1}, LinkHealth.DOWN, []),
        (None, {"link_downed": 1}, LinkHealth.UNKNOWN, []),
    ],
)
def test_a_link_is_degraded_by_faults_not_by_congestion(up, recent, health, faults):
    assert judge_link(up=up, recent=recent) == (health, faults)
