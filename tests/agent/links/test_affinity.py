"""Which adapter a GPU gets: by PCI, then by NUMA node, then evenly, or as configured."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.agent.links.affinity import (
    Adapter,
    Affinity,
    Nearness,
    list_adapters,
    pair_gpus,
    unknown_overrides,
)
from nearkv.agent.links.model import Place
from nearkv.agent.links.reading import read_links
from tests.agent.links.sysfs_tree import GPU_0, GPU_1, NIC_0, SWITCH_0, two_sockets


def place(path, numa_node=None):
    ancestry = tuple(path.split("/"))
    return Place(address=ancestry[-1], ancestry=ancestry, numa_node=numa_node)


def adapter(name, path, numa_node=None, **fields):
    return Adapter(name=name, place=place(path, numa_node), **fields)


def chosen(gpus, adapters, override=None):
    return {pair.gpu: pair.adapter for pair in pair_gpus(gpus, adapters, override or {})}


def pairs_of(tree, only=()):
    links = read_links(tree.root, tree.devices, max_devices=64)
    return pair_gpus(links.gpus, list_adapters(links, only), {})


def test_each_gpu_gets_the_adapter_behind_its_switch_whatever_the_names(sockets):
    assert pairs_of(sockets) == [
        Affinity(gpu=GPU_0, adapter="mlx5_1", nearness=Nearness.SWITCH, steps=2),
        Affinity(gpu=GPU_1, adapter="mlx5_0", nearness=Nearness.SWITCH, steps=2),
    ]


G = "0000:17:00.0"
FAR_GPU = place(f"pci0000:16/0000:16:01.0/{G}", 1)


@pytest.mark.parametrize(
    ("adapters", "expected", "nearness"),
    [
        pytest.param(
            [adapter("a", "pci0000:16/0000:16:02.0/x", 0), adapter("b", "pci0000:20/y", 1)],
            "a",
            Nearness.HOST_BRIDGE,
            id="a-common-bridge-before-a-common-node",
        ),
        pytest.param(
            [adapter("a", "pci0000:20/x", 0), adapter("b", "pci0000:21/y", 1)],
            "b",
            Nearness.NUMA,
            id="the-node-where-no-way-is-shared",
        ),
        pytest.param(
            [adapter("a", "pci0000:16/x", 0), adapter("b", "pci0000:16/y", 1)],
            "b",
            Nearness.HOST_BRIDGE,
            id="the-node-where-the-way-is-equally-shared",
        ),
        pytest.param(
            [adapter("b", "pci0000:20/x", 0), adapter("a", "pci0000:21/y")],
            "a",
            Nearness.NOTHING,
            id="the-name-where-nothing-tells",
        ),
        pytest.param(
            [adapter("mlx5_10", "pci0000:20/x"), adapter("mlx5_9", "pci0000:21/y")],
            "mlx5_9",
            Nearness.NOTHING,
            id="names-by-number",
        ),
        pytest.param(
            [
                adapter("a", "pci0000:16/x", speed_gbps=100),
                adapter("b", "pci0000:16/y", speed_gbps=400),
            ],
            "b",
            Nearness.HOST_BRIDGE,
            id="the-faster-of-equally-near",
        ),
        pytest.param(
            [
                adapter("a", "pci0000:16/x", virtual_function=True, speed_gbps=400),
                adapter("b", "pci0000:16/y", speed_gbps=400),
            ],
            "b",
            Nearness.HOST_BRIDGE,
            id="the-physical-function",
        ),
        pytest.param(
            [adapter("a", "pci0000:16/x", works=False), adapter("b", "pci0000:16/y")],
            "b",
            Nearness.HOST_BRIDGE,
            id="the-one-that-works",
        ),
    ],
)
def test_nearness_decides_then_what_the_adapters_are(adapters, expected, nearness):
    for order in (adapters, adapters[::-1]):
        (pair,) = pair_gpus([FAR_GPU], order, {})
        assert (pair.adapter, pair.nearness, pair.displaced) == (expected, nearness, None)


def test_unknown_nodes_are_not_the_same_one():
    gpu = place(f"pci0000:16/{G}")
    (pair,) = pair_gpus([gpu], [adapter("a", "pci0000:20/x")], {})
    assert pair.nearness is Nearness.NOTHING


def test_gpus_behind_one_switch_share_its_adapters_out():
    gpus = [place(f"pci0000:16/s/0000:1{n}:00.0") for n in range(4)]
    adapters = [adapter(name, f"pci0000:16/s/{name}") for name in ("b", "a")]
    assert list(chosen(gpus, adapters).values()) == ["a", "b", "a", "b"]


def test_a_virtual_machine_without_topology_shares_out_too():
    gpus = [place(f"pci0000:00/0000:00:0{n}.0") for n in range(2)]
    adapters = [adapter(f"mlx5_{n}", f"pci0000:00/0000:00:1{n}.0") for n in range(2)]
    assert set(chosen(gpus, adapters).values()) == {"mlx5_0", "mlx5_1"}


def test_a_gpu_whose_adapter_is_down_gets_the_next_and_is_said_to(tmp_path):
    tree = two_sockets(tmp_path)
    state = tree.root / "sys/class/infiniband/mlx5_1/ports/1/state"
    state.write_text("1: DOWN\n")
    first, second = pairs_of(tree)
    assert (first.adapter, first.nearness, first.displaced) == ("mlx5_0", "nothing", "mlx5_1")
    assert (second.adapter, second.displaced) == ("mlx5_0", None)


def test_a_gpu_keeps_its_adapter_where_none_works(tmp_path):
    tree = two_sockets(tmp_path, state="1: DOWN")
    assert [pair.adapter for pair in pairs_of(tree)] == ["mlx5_1", "mlx5_0"]


def test_devices_that_kv_may_not_use_are_chosen_last(sockets):
    assert [pair.adapter for pair in pairs_of(sockets, only=("mlx5_0",))] == ["mlx5_0", "mlx5_0"]


def test_network_devices_stand_in_where_there_is_no_rdma(tree):
    tree.gpu(f"{SWITCH_0}/{GPU_0}", 0)
    tree.rdma("rxe0", None)
    tree.net("eth1", NIC_0, numa_node=0)
    tree.net("eth0", "pci0000:96/0000:98:00.0", numa_node=1)
    tree.bond("bond0", ("eth1",))
    assert [pair.adapter for pair in pairs_of(tree)] == ["eth1"]


def test_no_adapter_no_pairs(tree):
    tree.gpu(f"{SWITCH_0}/{GPU_0}", 0)
    assert pairs_of(tree) == []


def test_an_override_wins_and_counts_as_taken():
    gpus = [place(f"pci0000:16/s/0000:1{n}:00.0") for n in range(2)]
    adapters = [adapter(name, f"pci0000:16/s/{name}") for name in ("a", "b")]
    pairs = pair_gpus(gpus, adapters, {"0000:10:00.0": "b"})
    assert [(pair.adapter, pair.nearness) for pair in pairs] == [
        ("b", Nearness.OVERRIDE),
        ("a", Nearness.SWITCH),
    ]


def test_an_override_of_what_is_not_there_is_left_to_nearness_and_named():
    override = {G: "gone", "0000:ff:00.0": "a"}
    adapters = [adapter("a", "pci0000:16/x")]
    assert chosen([FAR_GPU], adapters, override) == {G: "a"}
    assert unknown_overrides([FAR_GPU], adapters, override) == [f"{G}=gone", "0000:ff:00.0=a"]


steps = st.lists(st.sampled_from("abc"), max_size=3)
nodes = st.none() | st.integers(0, 1)
places = st.builds(lambda path, node: (path, node), steps, nodes)


@given(
    gpus=st.lists(places, max_size=5),
    adapters=st.lists(st.tuples(places, st.booleans(), st.booleans()), min_size=1, max_size=5),
    seed=st.integers(),
)
def test_the_order_of_what_was_found_never_matters_and_nobody_is_left_out(gpus, adapters, seed):
    made_gpus = [
        place("/".join(["pci0", *path, f"g{i}"]), node) for i, (path, node) in enumerate(gpus)
    ]
    made = [
        adapter(f"n{i}", "/".join(["pci0", *path, f"n{i}"]), node, works=works, virtual_function=vf)
        for i, ((path, node), works, vf) in enumerate(adapters)
    ]
    pairs = pair_gpus(made_gpus, made, {})
    shuffler = random.Random(seed)
    assert (
        pair_gpus(shuffler.sample(made_gpus, len(gpus)), shuffler.sample(made, len(made)), {})
        == pairs
    )
    assert sorted(pair.gpu for pair in pairs) == sorted(gpu.address for gpu in made_gpus)
    by_name = {it.name: it for it in made}
    if any(it.works for it in made):
        assert all(by_name[pair.adapter].works for pair in pairs)
