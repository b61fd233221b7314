"""Hosts to be described to the library: what their NVML would say."""

from typing import Any

Host = dict[str, Any]
GIB = 1 << 30
H100_BYTES = 80 * GIB
_SWITCH, _GPU = 2, 0
_NUMA, _SYSTEM = 40, 50


def uuid_of(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def mig_uuid_of(index: int, instance: int) -> str:
    return f"MIG-00000000-0000-0000-{index:04d}-{instance:012d}"


def bus_id_of(index: int) -> str:
    return f"00000000:{0x18 + index:02X}:00.0"


def h100(index: int, of: int = 8) -> dict[str, Any]:
    """One of the GPUs of a host with NVSwitches, idle and sound."""
    return {
        "uuid": uuid_of(index),
        "name": "NVIDIA H100 80GB HBM3",
        "bus_id": bus_id_of(index),
        "minor": index,
        "memory": {"total": H100_BYTES, "reserved": GIB // 2, "used": 0},
        "utilisation": {"gpu": 0, "memory": 0},
        "processes": 0,
        "ecc": {"since_driver": 0, "ever": 0},
        "remapped_rows": {},
        "clock_reasons": 0x1,
        "power_mw": 70_500,
        "power_limit_mw": 700_000,
        "temperature": 31,
        "pcie": {"generation": 5, "generation_max": 5, "width": 16, "width_max": 16},
        "nvlinks": [
            {
                "active": 1,
                "version": 4,
                "remote_type": _SWITCH,
                "remote_bus_id": f"00000000:{5 + link % 4:02X}:00.0",
            }
            for link in range(18)
        ],
        "mig": {"enabled": 0},
        "fabric": {"state": 3, "status": 0, "cluster": "0" * 32, "clique": 0, "summary": 1},
        "ancestors": [_NUMA if other // 4 == index // 4 else _SYSTEM for other in range(of)],
        "p2p": {"read": 0, "nvlink": 0},
    }


def eight_h100() -> Host:
    """Eight GPUs behind NVSwitches, four on each of two CPUs."""
    return {
        "driver_version": "570.124.06",
        "nvml_version": "12.570.124.06",
        "cuda_version": 12080,
        "devices": [h100(index) for index in range(8)],
    }


def hosts_with(count: int) -> Host:
    """The same with fewer GPUs."""
    return {**eight_h100(), "devices": [h100(index, count) for index in range(count)]}


def mig_host() -> Host:
    """Two GPUs, the first one split into two parts. Its utilisation is said to be 0."""
    host = hosts_with(2)
    host["devices"][0]["mig"] = {
        "enabled": 1,
        "instances": [
            {
                "uuid": mig_uuid_of(0, place),
                "gpu_instance": 1 + place,
                "compute_instance": 0,
                "memory": {"total": 40 * GIB, "reserved": 0, "used": place * 10 * GIB},
                "processes": place,
            }
            for place in range(2)
        ],
    }
    return host


GB200_WITHOUT = (
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetGpuFabricInfo",
)
"""Calls that a driver newer than this project's nvidia-ml-py may have dropped."""


def gb200() -> Host:
    """Two of the GPUs of an NVLink domain over many hosts: no PCIe tree, memory of its own."""
    host = hosts_with(2)
    cluster = "4fd71ac0c1d94a5f8d2b000000000001"
    for device in host["devices"]:
        device["name"] = "NVIDIA GB200"
        device["memory"]["total"] = 186 * GIB
        device["memory_numa_node"] = 2 + 8 * device["minor"]
        device["fabric"] = {**device["fabric"], "cluster": cluster, "clique": 32766}
        for missing in ("ancestors", "remapped_rows", "pcie"):
            del device[missing]
    return host


def consumer() -> Host:
    """One card for a desktop: no ECC, no NVLink, no MIG, no fabric."""
    host = hosts_with(1)
    (device,) = host["devices"]
    device["name"] = "NVIDIA GeForce RTX 4090"
    for missing in ("ecc", "remapped_rows", "nvlinks", "mig", "fabric", "p2p"):
        del device[missing]
    return host
