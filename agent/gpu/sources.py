"""Which call of NVML each value of a device comes from; the check on a GPU host uses it, too.

Several names are versions of one call, newest first: older drivers lack the newer ones, and
newer ones are about to drop the oldest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nearkv.agent.gpu.decoding import (
    bus_id_of,
    clock_reasons_of,
    fabric_of,
    memory_of,
    mig_mode_of,
    remapped_rows_of,
    utilisation_of,
    watts_of,
)

_UNCORRECTED = 1
_SINCE_DRIVER, _EVER = 0, 1
_GPU_SENSOR = 0


@dataclass(frozen=True, slots=True)
class Source:
    """Where a field of :class:`~nearkv.agent.gpu.model.Device` comes from.

    ``names`` are calls that take the device and ``arguments``.
    """

    field: str
    names: tuple[str, ...]
    decode: Callable[[Any], Any]
    arguments: tuple[Any, ...] = ()


IDENTITY = (
    Source("uuid", ("nvmlDeviceGetUUID",), str),
    Source("name", ("nvmlDeviceGetName",), str),
    Source("bus_id", ("nvmlDeviceGetPciInfo_v3",), bus_id_of),
    Source("minor", ("nvmlDeviceGetMinorNumber",), int),
    Source("memory_numa_node", ("nvmlDeviceGetNumaNodeId",), int),
    Source("pcie_generation_max", ("nvmlDeviceGetMaxPcieLinkGeneration",), int),
    Source("pcie_width_max", ("nvmlDeviceGetMaxPcieLinkWidth",), int),
)
"""What stays as it is while NVML is open."""

SELDOM = (
    Source("mig", ("nvmlDeviceGetMigMode",), mig_mode_of),
    Source("pcie_generation", ("nvmlDeviceGetCurrPcieLinkGeneration",), int),
    Source("pcie_width", ("nvmlDeviceGetCurrPcieLinkWidth",), int),
    Source("power_limit_watts", ("nvmlDeviceGetEnforcedPowerLimit",), watts_of),
    Source(
        "fabric",
        (
            "nvmlDeviceGetGpuFabricInfoV(3)",
            "nvmlDeviceGetGpuFabricInfoV(2)",
            "nvmlDeviceGetGpuFabricInfo",
        ),
        fabric_of,
    ),
    Source(
        "ecc_uncorrected_ever",
        ("nvmlDeviceGetTotalEccErrors",),
        int,
        (_UNCORRECTED, _EVER),
    ),
)
"""What a thorough look reads; NVLinks and MIG instances come on top."""

MEMORY_CALLS = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo")
PROCESS_CALLS = ("nvmlDeviceGetComputeRunningProcesses_v3",)

OFTEN = (
    Source("memory", MEMORY_CALLS, memory_of),
    Source("utilisation", ("nvmlDeviceGetUtilizationRates",), utilisation_of),
    Source("process_count", PROCESS_CALLS, len),
    Source(
        "ecc_uncorrected",
        ("nvmlDeviceGetTotalEccErrors",),
        int,
        (_UNCORRECTED, _SINCE_DRIVER),
    ),
    Source("remapped_rows", ("nvmlDeviceGetRemappedRows",), remapped_rows_of),
    Source(
        "clock_reasons",
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        clock_reasons_of,
    ),
    Source("power_watts", ("nvmlDeviceGetPowerUsage",), watts_of),
    Source(
        "temperature_celsius",
        ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"),
        int,
        (_GPU_SENSOR,),
    ),
)
"""What every look reads."""
