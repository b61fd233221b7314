"""Checks of a host over fake trees: RDMA ports, GPUs and their nearest adapters."""

import resource

import pytest

from nearkv.cli.doctor_affinity import list_gpus, list_nics, pair_devices
from nearkv.cli.doctor_checks import (
    Verdict,
    check_affinity,
    check_memlock,
    check_memory,
    check_namespaces,
    check_rdma,
)

GPU_1, GPU_2 = "0000:17:00.0", "0000:97:00.0"


def add_device(root, place, numa_node, **files):
    folder = root / "sys/devices" / place
    folder.mkdir(parents=True)
    for name, text in (files | {"numa_node": numa_node}).items():
        (folder / name).write_text(f"{text}\n", encoding="utf-8")
    return folder


def add_gpu(root, place, numa_node, *, kind="0x030200"):
    folder = add_device(root, place, numa_node, **{"vendor": "0x10de", "class": kind})
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / folder.name).symlink_to(f"../../../devices/{place}")


def add_nic(root, name, place, numa_node, state="4: ACTIVE"):
    folder = add_device(root, place, numa_node, vendor="0x15b3")
    port = folder / "infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n", encoding="utf-8")
    (folder / "infiniband" / name / "device").symlink_to("../..")
    links = root / "sys/class/infiniband"
    links.mkdir(parents=True, exist_ok=True)
    (links / name).symlink_to(f"../../devices/{place}/infiniband/{name}")


@pytest.fixture
def two_sockets(tmp_path):
    """Two NUMA nodes with a GPU and an adapter each; names run against the wiring."""
    add_gpu(tmp_path, f"pci0000:16/0000:16:01.0/{GPU_1}", 0)
    add_gpu(tmp_path, f"pci0000:96/0000:96:01.0/{GPU_2}", 1)
    add_nic(tmp_path, "mlx5_1", "pci0000:16/0000:16:01.0/0000:18:00.0", 0)
    add_nic(tmp_path, "mlx5_0", "pci0000:96/0000:96:01.0/0000:98:00.0", 1)
    return tmp_path


def test_each_gpu_gets_the_adapter_behind_its_switch(two_sockets):
    pairs = pair_devices(list_gpus(two_sockets), list_nics(two_sockets))
    assert [(p.gpu, p.nic, p.shared_bridges) for p in pairs] == [
        (GPU_1, "mlx5_1", 2),
        (GPU_2, "mlx5_0", 2),
    ]
    rows = check_affinity(two_sockets)
    assert [row.verdict for row in rows] == [Verdict.OK, Verdict.OK]
    assert rows[0].finding == f"{GPU_1} -> mlx5_1 (2 PCIe steps in common)"


def test_the_numa_node_decides_where_no_path_is_shared(tmp_path):
    add_gpu(tmp_path, f"pci0000:16/{GPU_1}", 1)
    add_nic(tmp_path, "mlx5_0", "pci0000:20/0000:21:00.0", 0)
    add_nic(tmp_path, "mlx5_1", "pci0000:90/0000:91:00.0", 1)
    (row,) = check_affinity(tmp_path)
    assert row.finding == f"{GPU_1} -> mlx5_1 (same NUMA node)"


def test_unknown_numa_nodes_are_not_the_same_one(tmp_path):
    add_gpu(tmp_path, f"pci0000:16/{GPU_1}", -1)
    add_nic(tmp_path, "mlx5_0", "pci0000:20/0000:21:00.0", -1)
    (row,) = check_affinity(tmp_path)
    assert (row.verdict, "nothing in common" in row.finding) == (Verdict.WARN, True)


def test_other_functions_of_a_card_are_no_gpus(tmp_path):
    add_gpu(tmp_path, "pci0000:16/0000:17:00.1", 0, kind="0x040300")
    assert list_gpus(tmp_path) == []
    (row,) = check_affinity(tmp_path)
    assert row.verdict is Verdict.INFO


@pytest.mark.parametrize(
    ("states", "require", "verdict"),
    [
        pytest.param((), False, Verdict.WARN, id="none"),
        pytest.param((), True, Verdict.FAIL, id="none-but-required"),
        pytest.param(("4: ACTIVE",), True, Verdict.OK, id="active"),
        pytest.param(("4: ACTIVE", "1: DOWN"), True, Verdict.WARN, id="one-down"),
        pytest.param(("1: DOWN",), False, Verdict.WARN, id="down"),
        pytest.param(("1: DOWN",), True, Verdict.FAIL, id="down-but-required"),
    ],
)
def test_rdma_ports_are_judged_by_their_state(tmp_path, states, require, verdict):
    for index, state in enumerate(states):
        add_nic(tmp_path, f"mlx5_{index}", f"pci0000:16/0000:1{index}:00.0", 0, state)
    row = check_rdma(tmp_path, require_rdma=require)
    assert row.verdict is verdict
    assert all(state.partition(": ")[2] in row.finding for state in states)


@pytest.mark.parametrize(
    ("limit", "require", "verdict"),
    [
        pytest.param(resource.RLIM_INFINITY, True, Verdict.OK, id="unlimited"),
        pytest.param(8 << 20, False, Verdict.WARN, id="limited"),
        pytest.param(8 << 20, True, Verdict.FAIL, id="limited-but-required"),
    ],
)
def test_rdma_needs_memory_that_may_be_locked(monkeypatch, limit, require, verdict):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert check_memlock(require_rdma=require).verdict is verdict


def test_memory_of_this_machine_is_sealed_and_the_setting_is_shown(tmp_path):
    setting = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    setting.parent.mkdir(parents=True)
    setting.write_text("always [never]\n", encoding="utf-8")
    seals, pages = check_memory(tmp_path)
    assert seals.verdict is Verdict.OK
    assert pages.verdict in {Verdict.OK, Verdict.WARN}
    assert "always [never]" in pages.finding


def test_namespaces_that_cannot_be_read_are_unknown(tmp_path):
    assert check_namespaces(tmp_path).finding == "pid: unknown, net: unknown"
