"""Each value that the agent reads of a GPU, with the raw call beside it."""

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from nearkv.agent.gpu.decoding import clock_reasons_of, fabric_problems_of
from nearkv.agent.gpu.model import Device, Reading
from nearkv.agent.gpu.watching import GpuWatch, WatchPlan
from tests.gpu.nvml_raw import (
    LIBRARY,
    OK,
    FabricV3,
    MemoryV2,
    Pci,
    RawAnswer,
    RawCall,
    RawNvml,
    Utilisation,
    active_nvlinks,
    number,
    numbers,
    process_count,
    structure,
    text,
    versioned,
)
from tests.gpu.results import Finding, SkippedError, WrongError

_READ_SECONDS = 90.0
_UINT, _ULL = ctypes.c_uint, ctypes.c_ulonglong


class Verdict(StrEnum):
    """How a value and the raw call compare."""

    SAME = "same"
    MOVED = "moved"
    """Another value, of what changes from one moment to the next."""
    NEITHER = "neither has it"
    WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Row:
    """A value, the raw call for it, and what that call's result should be as a value.

    ``moves`` is set for what may change between the two.
    """

    name: str
    ours: Callable[[Device], Any]
    raw: RawCall
    meaning: Callable[[Any], Any] = lambda raw: raw
    moves: bool = False


def _memory(part: str) -> RawCall:
    def make_empty() -> Any:
        return versioned(MemoryV2, 2)

    return structure("nvmlDeviceGetMemoryInfo_v2", make_empty, lambda raw: getattr(raw, part))


def _fabric(read: Callable[[Any], Any]) -> RawCall:
    return structure("nvmlDeviceGetGpuFabricInfoV", lambda: versioned(FabricV3, 3), read)


def _bus_id(raw: Pci) -> str:
    return str(raw.bus_id.decode().lower())[4:]


def _remapped(device: Device) -> Any:
    rows = device.remapped_rows
    return rows and (rows.corrected, rows.uncorrected, int(rows.pending), int(rows.failure))


_STATES = ("not_supported", "not_started", "in_progress", "completed")
_ECC = "nvmlDeviceGetTotalEccErrors"
ROWS = (
    Row("uuid", lambda d: d.uuid, text("nvmlDeviceGetUUID")),
    Row("name", lambda d: d.name, text("nvmlDeviceGetName")),
    Row("bus_id", lambda d: d.bus_id, structure("nvmlDeviceGetPciInfo_v3", Pci, _bus_id)),
    Row("minor", lambda d: d.minor, number("nvmlDeviceGetMinorNumber")),
    Row("memory_numa_node", lambda d: d.memory_numa_node, number("nvmlDeviceGetNumaNodeId")),
    Row("memory.total_bytes", lambda d: d.memory and d.memory.total_bytes, _memory("total")),
    Row(
        "memory.reserved_bytes",
        lambda d: d.memory and d.memory.reserved_bytes,
        _memory("reserved"),
        moves=True,
    ),
    Row(
        "memory.used_bytes",
        lambda d: d.memory and d.memory.used_bytes,
        _memory("used"),
        moves=True,
    ),
    Row(
        "memory.free_bytes",
        lambda d: d.memory and d.memory.free_bytes,
        _memory("free"),
        moves=True,
    ),
    Row(
        "utilisation.gpu_ratio",
        lambda d: d.utilisation and d.utilisation.gpu_ratio,
        structure("nvmlDeviceGetUtilizationRates", Utilisation, lambda raw: raw.gpu),
        lambda percent: percent / 100,
        moves=True,
    ),
    Row("process_count", lambda d: d.process_count, process_count, moves=True),
    Row("ecc_uncorrected", lambda d: d.ecc_uncorrected, number(_ECC, _ULL, _UINT(1), _UINT(0))),
    Row(
        "ecc_uncorrected_ever",
        lambda d: d.ecc_uncorrected_ever,
        number(_ECC, _ULL, _UINT(1), _UINT(1)),
    ),
    Row("remapped_rows", _remapped, numbers("nvmlDeviceGetRemappedRows", *[_UINT] * 4)),
    Row(
        "clock_reasons",
        lambda d: d.clock_reasons,
        number("nvmlDeviceGetCurrentClocksEventReasons", _ULL),
        clock_reasons_of,
        moves=True,
    ),
    Row(
        "power_watts",
        lambda d: d.power_watts,
        number("nvmlDeviceGetPowerUsage"),
        lambda milliwatts: milliwatts / 1000,
        moves=True,
    ),
    Row(
        "power_limit_watts",
        lambda d: d.power_limit_watts,
        number("nvmlDeviceGetEnforcedPowerLimit"),
        lambda milliwatts: milliwatts / 1000,
    ),
    Row(
        "temperature_celsius",
        lambda d: d.temperature_celsius,
        number("nvmlDeviceGetTemperature", _UINT, _UINT(0)),
        moves=True,
    ),
    Row(
        "pcie_generation",
        lambda d: d.pcie_generation,
        number("nvmlDeviceGetCurrPcieLinkGeneration"),
        moves=True,
    ),
    Row(
        "pcie_generation_max",
        lambda d: d.pcie_generation_max,
        number("nvmlDeviceGetMaxPcieLinkGeneration"),
    ),
    Row("pcie_width", lambda d: d.pcie_width, number("nvmlDeviceGetCurrPcieLinkWidth")),
    Row("pcie_width_max", lambda d: d.pcie_width_max, number("nvmlDeviceGetMaxPcieLinkWidth")),
    Row(
        "nvlinks, active",
        lambda d: None if d.nvlinks is None else sum(link.active for link in d.nvlinks),
        active_nvlinks,
    ),
    Row(
        "mig",
        lambda d: d.mig and (int(d.mig.enabled), int(d.mig.pending)),
        numbers("nvmlDeviceGetMigMode", _UINT, _UINT),
    ),
    Row(
        "fabric.state",
        lambda d: d.fabric and d.fabric.state,
        _fabric(lambda raw: raw.state),
        lambda state: _STATES[state],
    ),
    Row("fabric.status", lambda d: d.fabric and d.fabric.status, _fabric(lambda raw: raw.status)),
    Row(
        "fabric.cluster_uuid",
        lambda d: d.fabric and d.fabric.cluster_uuid.replace("-", ""),
        _fabric(lambda raw: bytes(raw.cluster).hex()),
    ),
    Row("fabric.clique_id", lambda d: d.fabric and d.fabric.clique_id, _fabric(lambda r: r.clique)),
    Row(
        "fabric.problems",
        lambda d: d.fabric and d.fabric.problems,
        _fabric(lambda raw: raw.mask),
        fabric_problems_of,
        moves=True,
    ),
)


def compare(row: Row, device: Device, answer: RawAnswer) -> Verdict:
    """Tell how a value of the agent's goes with the raw call's."""
    ours = row.ours(device)
    if answer.code != OK:
        # The agent knows older versions of some calls, which this does not try.
        return Verdict.NEITHER if ours is None else Verdict.MOVED
    if ours is None:
        mig_hides_it = row.name.startswith("utilisation") and device.mig and device.mig.enabled
        return Verdict.MOVED if mig_hides_it else Verdict.WRONG
    if ours == row.meaning(answer.value):
        return Verdict.SAME
    return Verdict.MOVED if row.moves else Verdict.WRONG


def lines_of(reading: Reading, nvml: RawNvml) -> Iterator[tuple[Verdict, str]]:
    """Yield a line for each value of each device."""
    for device in reading.devices:
        handle = nvml.handle(device.index)
        for row in ROWS:
            answer = row.raw(nvml, handle)
            verdict = compare(row, device, answer)
            ours = row.ours(device)
            field = row.name.partition(".")[0].partition(",")[0]
            shown = ours if ours is not None else f"null: {device.reasons.get(field)}"
            name = f"GPU {device.index} {row.name}"
            yield verdict, f"  {name:28} {shown!s:44} {answer}  [{verdict.value}]"
        numa = device.numa_node
        yield Verdict.SAME, f"  GPU {device.index} numa_node {numa}  (sysfs, {device.bus_id})"
    for pair in reading.pairs:
        told = f"{pair.ancestor}, read {pair.p2p_read}, NVLink {pair.p2p_nvlink}"
        yield Verdict.SAME, f"  {pair.a} - {pair.b}: {told}"


async def read_once(plan: WatchPlan) -> Reading:
    """Return a reading by the agent's own way; raises ``SkippedError`` without a driver."""
    watch = GpuWatch(plan)
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(_READ_SECONDS):
            while watch.reading is None and not watch.ends:  # noqa: ASYNC110 (the watch tells nobody)
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise WrongError(f"no reading within {_READ_SECONDS:.0f} s") from None
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    if watch.reading is None:
        raise SkippedError(f"NVML gives nothing: {watch.missing}")
    return watch.reading


def check_nvml(tell: Callable[[str], object] = print, library_dir: Path | None = None) -> Finding:
    """Print each value of each GPU with the raw call beside it; raises if one is wrong."""
    plan = WatchPlan() if library_dir is None else WatchPlan(library_dir=library_dir)
    reading = asyncio.run(read_once(plan))
    tell(f"  driver {reading.driver_version}, NVML {reading.nvml_version}, Xids {reading.events}")
    path = LIBRARY if library_dir is None else os.fspath(library_dir / LIBRARY)
    nvml = RawNvml(path)
    verdicts: list[Verdict] = []
    wrong: list[str] = []
    try:
        for verdict, line in lines_of(reading, nvml):
            tell(line)
            verdicts.append(verdict)
            if verdict is Verdict.WRONG:
                wrong.append(line)
    finally:
        nvml.close()
    if wrong:
        raise WrongError(f"{len(wrong)} values differ: {wrong[0]}")
    figures = {verdict.value: float(verdicts.count(verdict)) for verdict in Verdict}
    return Finding(f"{len(reading.devices)} GPUs in {reading.seconds:.3f} s", figures)
