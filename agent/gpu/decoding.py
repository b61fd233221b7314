"""What NVML's numbers mean (pure): raw answers of ``nvidia-ml-py`` in, values of the model out."""

import uuid

from nearkv.agent.gpu.model import Fabric, Memory, MigMode, RemappedRows, Utilisation
from nearkv.agent.gpu.raw import Raw

_CLOCK_REASONS = (
    (0x1, "gpu_idle"),
    (0x2, "applications_clocks"),
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal_slowdown"),
    (0x40, "hw_thermal_slowdown"),
    (0x80, "hw_power_brake"),
    (0x100, "display_clock"),
    (0x200, "board_limit"),
    (0x400, "reliability"),
)
_ANCESTORS = (
    (0, "internal"),
    (10, "single_switch"),
    (20, "multiple_switches"),
    (30, "host_bridge"),
    (40, "numa_node"),
    (50, "system"),
)
_P2P = (
    "ok",
    "chipset_not_supported",
    "gpu_not_supported",
    "topology_not_supported",
    "disabled_by_regkey",
    "not_supported",
    "unknown",
)
_REMOTE_TYPES = ((0, "gpu"), (1, "ibm_npu"), (2, "switch"), (255, "unknown"))
_FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")
_FABRIC_SUMMARIES = (None, "healthy", "unhealthy", "limited_capacity")
_FABRIC_FLAGS = (
    (0, "degraded_bandwidth"),
    (2, "route_recovery"),
    (4, "route_unhealthy"),
    (6, "access_timeout_recovery"),
)
"""Where two bits of the health mask are 1, this is so; 0 is not supported, 2 is not so."""
_FABRIC_MISCONFIGURED_SHIFT = 8
_FABRIC_MISCONFIGURED_NONE = 1


def memory_of(raw: Raw) -> Memory:
    """Return memory of either version of NVML's structure."""
    reserved = getattr(raw, "reserved", None)
    return Memory(raw.total, raw.free, raw.used, reserved)


def utilisation_of(raw: Raw) -> Utilisation:
    """Return shares; NVML has percents."""
    return Utilisation(raw.gpu / 100, raw.memory / 100)


def remapped_rows_of(raw: tuple[int, int, int, int]) -> RemappedRows:
    """Return NVML's four numbers by name."""
    corrected, uncorrected, pending, failure = raw
    return RemappedRows(corrected, uncorrected, bool(pending), bool(failure))


def clock_reasons_of(mask: int) -> tuple[str, ...]:
    """Return a mask as names; bits without one as ``bit_<n>``."""
    named = dict(_CLOCK_REASONS)
    bits = (1 << place for place in range(mask.bit_length()))
    return tuple(named.get(bit, f"bit_{bit.bit_length() - 1}") for bit in bits if mask & bit)


def mig_mode_of(raw: tuple[int, int]) -> MigMode:
    """Return the mode now and the one after a reset."""
    current, pending = raw
    return MigMode(enabled=current == 1, pending=pending == 1)


def watts_of(milliwatts: int) -> float:
    """Return watts."""
    return milliwatts / 1000


def bus_id_of(raw: Raw) -> str:
    """Return a PCI address as sysfs writes it: ``0000:18:00.0``; NVML has eight digits first."""
    domain, _, rest = str(raw.busId).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def cuda_version_of(raw: int) -> str:
    """Return a version such as ``12.8``."""
    return f"{raw // 1000}.{raw % 1000 // 10}"


def ancestor_of(level: int) -> str:
    """Return the name of a level of the PCIe tree."""
    return dict(_ANCESTORS).get(level, f"level_{level}")


def p2p_of(status: int) -> str:
    """Return ``ok``, or why two devices cannot reach each other."""
    return _P2P[status] if 0 <= status < len(_P2P) else f"status_{status}"


def remote_type_of(raw: int) -> str:
    """Return what is at the other end of an NVLink."""
    return dict(_REMOTE_TYPES).get(raw, f"type_{raw}")


def fabric_of(raw: Raw) -> Fabric:
    """Return any version of the fabric's structure; later ones say more about health."""
    state = raw.state & 0xFF  # one byte in nvml.h, and padding that nobody has to clear
    summary = getattr(raw, "healthSummary", 0)
    return Fabric(
        state=_FABRIC_STATES[state] if state < len(_FABRIC_STATES) else f"state_{state}",
        status=raw.status,
        cluster_uuid=str(uuid.UUID(bytes=bytes(raw.clusterUuid))),
        clique_id=raw.cliqueId,
        problems=fabric_problems_of(getattr(raw, "healthMask", 0)),
        summary=_FABRIC_SUMMARIES[summary] if summary < len(_FABRIC_SUMMARIES) else None,
    )


def fabric_problems_of(mask: int) -> tuple[str, ...]:
    """Return what a health mask complains about."""
    problems = [name for shift, name in _FABRIC_FLAGS if mask >> shift & 0x3 == 1]
    wrong = mask >> _FABRIC_MISCONFIGURED_SHIFT & 0xF
    if wrong > _FABRIC_MISCONFIGURED_NONE:
        problems.append(f"incorrect_configuration_{wrong}")
    return tuple(problems)
