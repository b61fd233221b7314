"""Whole hosts read by the reader process, through the real nvidia-ml-py and a real library."""

import msgspec
import pytest

from nearkv.agent.gpu.health import verdict
from nearkv.agent.gpu.model import Device, MigInstance, NvLink
from nearkv.agent.gpu.reasons import Reason
from tests.agent.gpu.conftest import read, until, watching
from tests.doubles.nvml.hosts import (
    GB200_WITHOUT,
    GIB,
    consumer,
    eight_h100,
    gb200,
    hosts_with,
    mig_host,
    mig_uuid_of,
    uuid_of,
)


def values_of(device):
    """Return the fields that are values."""
    return {
        name: getattr(device, name)
        for name in device.__struct_fields__
        if name not in ("reasons", "gone", "index")
    }


def unexplained(struct):
    """Return the fields that are null and do not say why, of a struct and of those in it."""
    lacking = [
        name
        for name in struct.__struct_fields__
        if getattr(struct, name) is None and name not in struct.reasons and name != "gone"
    ]
    for name in struct.__struct_fields__:
        inner = getattr(struct, name)
        if isinstance(inner, tuple):
            for one in inner:
                if isinstance(one, (Device, NvLink, MigInstance)):
                    lacking += [f"{name}.{field}" for field in unexplained(one)]
    return lacking


async def test_eight_gpus(nvml, tmp_path):
    double = nvml()
    for index in range(8):
        folder = tmp_path / f"sys/bus/pci/devices/0000:{0x18 + index:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{index // 4}\n")
    async with watching(double, sysfs=tmp_path / "sys") as watch:
        reading = await read(watch)
    assert [device.uuid for device in reading.devices] == [uuid_of(index) for index in range(8)]
    assert [device.numa_node for device in reading.devices] == [0] * 4 + [1] * 4
    assert (reading.driver_version, reading.cuda_version) == ("570.124.06", "12.8")
    device = reading.devices[3]
    assert device.bus_id == "0000:1b:00.0"
    assert device.memory.total_bytes == 80 * GIB
    assert device.memory.reserved_bytes == GIB // 2
    assert device.memory.free_bytes == 80 * GIB - GIB // 2
    assert (device.power_watts, device.power_limit_watts) == (70.5, 700.0)
    assert device.temperature_celsius == 31
    assert device.clock_reasons == ("gpu_idle",)
    assert len(device.nvlinks) == 18
    assert device.nvlinks[1].remote_type == "switch"
    assert device.nvlinks[1].remote_bus_id == "0000:06:00.0"
    assert device.fabric.state == "completed"
    assert device.fabric.summary == "healthy"
    assert verdict(device).health == "ok"


async def test_pairs_are_read_once(nvml):
    double = nvml()
    async with watching(double) as watch:
        reading = await read(watch)
        assert len(reading.pairs) == 28
        levels = {(pair.a, pair.b): pair.ancestor for pair in reading.pairs}
        assert levels[uuid_of(0), uuid_of(3)] == "numa_node"
        assert levels[uuid_of(0), uuid_of(4)] == "system"
        assert {pair.p2p_nvlink for pair in reading.pairs} == {"ok"}
        double.change(lambda host: host.update(fail={"nvmlDeviceGetTopologyCommonAncestor": 999}))
        assert (await read(watch)).pairs == reading.pairs


@pytest.mark.parametrize(
    "host", [eight_h100, gb200, consumer, mig_host], ids=lambda host: host.__name__
)
async def test_nothing_is_null_without_a_reason(nvml, host):
    async with watching(nvml(host())) as watch:
        for device in (await read(watch)).devices:
            assert unexplained(device) == []


async def test_a_device_that_says_nothing_at_all_gives_reasons(nvml):
    async with watching(nvml({"devices": [{}, {}]})) as watch:
        reading = await read(watch)
    for device in reading.devices:
        assert unexplained(device) == []
        assert not any(value is not None for value in values_of(device).values())
    assert [device.id for device in reading.devices] == ["nvml-index-0", "nvml-index-1"]
    assert reading.reasons["driver_version"].reason is Reason.NOT_SUPPORTED
    assert reading.pairs[0].reasons["ancestor"].reason is Reason.NOT_SUPPORTED


async def test_gb200_without_what_newer_drivers_drop(nvml):
    async with watching(nvml(gb200(), without=GB200_WITHOUT)) as watch:
        device, other = (await read(watch)).devices
    assert device.temperature_celsius == 31
    assert device.clock_reasons == ("gpu_idle",)
    assert device.fabric.clique == "4fd71ac0-c1d9-4a5f-8d2b-000000000001.32766"
    assert (device.memory_numa_node, other.memory_numa_node) == (2, 10)
    assert device.reasons["pcie_width"].reason is Reason.NOT_SUPPORTED
    assert device.reasons["remapped_rows"].reason is Reason.NOT_SUPPORTED
    assert verdict(device).health == "ok"


async def test_an_old_driver(nvml):
    lacking = (
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetNumaNodeId",
        "nvmlDeviceGetPowerUsage",
    )
    async with watching(nvml(hosts_with(1), without=lacking)) as watch:
        (device,) = (await read(watch)).devices
    assert device.memory.reserved_bytes is None
    assert device.memory.used_bytes == GIB // 2
    assert device.temperature_celsius == 31
    assert device.fabric.state == "completed"
    assert device.fabric.summary is None
    assert device.clock_reasons == ("gpu_idle",)
    assert device.reasons["power_watts"].reason is Reason.MISSING_SYMBOL
    assert device.reasons["memory_numa_node"].reason is Reason.MISSING_SYMBOL


async def test_a_driver_with_the_second_version_of_the_fabric(nvml):
    host = hosts_with(1) | {"fabric_version": 2}
    host["devices"][0]["fabric"]["mask"] = 0b01  # degraded bandwidth
    async with watching(nvml(host)) as watch:
        (device,) = (await read(watch)).devices
    assert device.fabric.problems == ("degraded_bandwidth",)
    assert device.fabric.summary is None


FIELD_BY_CALL = {
    "nvmlDeviceGetMemoryInfo_v2": "memory",
    "nvmlDeviceGetUtilizationRates": "utilisation",
    "nvmlDeviceGetComputeRunningProcesses_v3": "process_count",
    "nvmlDeviceGetRemappedRows": "remapped_rows",
    "nvmlDeviceGetCurrentClocksEventReasons": "clock_reasons",
    "nvmlDeviceGetPowerUsage": "power_watts",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_watts",
    "nvmlDeviceGetTemperatureV": "temperature_celsius",
    "nvmlDeviceGetCurrPcieLinkGeneration": "pcie_generation",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie_width",
    "nvmlDeviceGetNvLinkState": "nvlinks",
    "nvmlDeviceGetMigMode": "mig",
    "nvmlDeviceGetGpuFabricInfoV": "fabric",
}


async def test_a_failing_call_hides_no_other(nvml):
    double = nvml(hosts_with(3))
    async with watching(double) as watch:
        sound = await read(watch)
        for call, field in FIELD_BY_CALL.items():
            double.change(lambda host, call=call: host["devices"][1].update(fail={call: 999}))
            reading = await read(watch)
            failing = reading.devices[1]
            assert failing.reasons[field].reason is Reason.FAILED, call
            assert "NVML 999" in failing.reasons[field].detail
            expected = values_of(sound.devices[1]) | {field: None}
            assert values_of(failing) == expected, call
            assert (reading.devices[0], reading.devices[2]) == (sound.devices[0], sound.devices[2])
        double.change(lambda host: host["devices"][1].pop("fail"))
        assert (await read(watch)).devices == sound.devices
        assert double.calls() == {"init": 1}


@pytest.mark.parametrize("call", ["nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo_v3"])
async def test_a_device_without_an_identity_is_still_read(nvml, call):
    host = hosts_with(2)
    host["devices"][0]["fail"] = {call: 999}
    async with watching(nvml(host)) as watch:
        device, other = (await read(watch)).devices
    assert device.memory == other.memory
    assert unexplained(device) == []


async def test_memory_and_processes_follow(nvml):
    double = nvml(hosts_with(1))
    async with watching(double) as watch:
        assert (await read(watch)).devices[0].process_count == 0
        double.change(
            lambda host: host["devices"][0].update(
                processes=2, memory={"total": 80 * GIB, "reserved": 0, "used": 72 * GIB}
            )
        )
        (device,) = (await read(watch)).devices
    assert (device.process_count, device.memory.used_bytes) == (2, 72 * GIB)


async def test_what_seldom_changes_is_read_seldom(nvml):
    double = nvml(hosts_with(1))
    async with watching(double, thorough_seconds=3600.0) as watch:
        await read(watch)
        double.change(lambda host: host["devices"][0]["pcie"].update(width=8))
        double.change(lambda host: host["devices"][0].update(temperature=77))
        (device,) = (await read(watch)).devices
    assert device.temperature_celsius == 77
    assert (device.pcie_width, device.pcie_width_max) == (16, 16)


async def test_mig(nvml):
    async with watching(nvml(mig_host())) as watch:
        split, whole = (await read(watch)).devices
    assert split.mig.enabled
    assert split.utilisation is None
    assert split.reasons["utilisation"].reason is Reason.MIG
    assert [part.uuid for part in split.mig_instances] == [mig_uuid_of(0, 0), mig_uuid_of(0, 1)]
    assert [part.gpu_instance for part in split.mig_instances] == [1, 2]
    assert [part.memory.used_bytes for part in split.mig_instances] == [0, 10 * GIB]
    assert whole.utilisation is not None
    assert whole.reasons["mig_instances"].detail == "MIG is not on"


async def test_an_nvlink_that_is_down(nvml):
    host = hosts_with(1)
    host["devices"][0]["nvlinks"][4]["active"] = 0
    async with watching(nvml(host)) as watch:
        (device,) = (await read(watch)).devices
    assert [link.link for link in device.nvlinks if not link.active] == [4]
    assert unexplained(device) == []


async def test_readings_survive_the_wire(nvml):
    async with watching(nvml(mig_host())) as watch:
        reading = await read(watch)
    packed = msgspec.msgpack.encode(reading)
    assert msgspec.msgpack.decode(packed, type=type(reading)) == reading


async def test_nvml_stays_open_between_readings(nvml):
    double = nvml(hosts_with(2))
    async with watching(double) as watch:
        for _ in range(5):
            await read(watch)
        assert double.calls() == {"init": 1}
        held = double.files_held_by(watch.reader_pid)
        assert held == ["nvidia0", "nvidia1", "nvidiactl"]
        await until(lambda: watch.opened == 1)
    assert double.calls() == {"init": 1, "shutdown": 1}


async def test_each_number_ends_in_its_own_field(nvml):
    host = hosts_with(1)
    host["devices"][0] |= {
        "utilisation": {"gpu": 91, "memory": 42},
        "ecc": {"since_driver": 2, "ever": 7},
        "remapped_rows": {"corrected": 3, "uncorrected": 4, "pending": 1, "failure": 0},
        "pcie": {"generation": 3, "generation_max": 5, "width": 8, "width_max": 16},
        "mig": {"enabled": 0, "pending": 1},
        "fabric": {"state": 2, "status": 5, "cluster": "0f" * 16, "clique": 9, "summary": 3},
        "p2p": {"read": 3, "nvlink": 5},
    }
    async with watching(nvml(host)) as watch:
        (device,) = (await read(watch)).devices
    assert (device.utilisation.gpu_ratio, device.utilisation.memory_ratio) == (0.91, 0.42)
    assert (device.ecc_uncorrected, device.ecc_uncorrected_ever) == (2, 7)
    rows = device.remapped_rows
    assert (rows.corrected, rows.uncorrected, rows.pending, rows.failure) == (3, 4, True, False)
    assert (device.pcie_generation, device.pcie_generation_max) == (3, 5)
    assert (device.pcie_width, device.pcie_width_max) == (8, 16)
    assert (device.mig.enabled, device.mig.pending) == (False, True)
    fabric = device.fabric
    assert (fabric.state, fabric.status, fabric.clique_id) == ("in_progress", 5, 9)
    assert fabric.summary == "limited_capacity"


async def test_pairs_tell_what_is_in_the_way(nvml):
    host = hosts_with(2)
    host["devices"][0]["p2p"] = {"read": 3, "nvlink": 5}
    async with watching(nvml(host)) as watch:
        (pair,) = (await read(watch)).pairs
    assert (pair.p2p_read, pair.p2p_nvlink) == ("topology_not_supported", "not_supported")
