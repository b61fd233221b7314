"""Whether a device can be used, from what is known of it (pure)."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from nearkv.agent.gpu.model import Device, Fabric
from nearkv.agent.gpu.reasons import Reason
from nearkv.node_summary import Health

APPLICATION_XIDS = (13, 31, 43, 45, 68, 109)
"""Xids that a faulty program causes; NVIDIA's device plugin passes over them, too."""

_UNUSABLE = (Reason.RESET_REQUIRED,)
_DOUBTFUL = (Reason.HUNG, Reason.CRASHED)
_SLOWED_BY = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake")
_FABRIC_FAILURES = ("route_unhealthy",)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A device's health and why; an ``ok`` may have a ``why`` to know of."""

    health: Health
    why: str = ""


def verdict(
    device: Device, xids: Iterable[int] = (), ignored: Collection[int] = APPLICATION_XIDS
) -> Verdict:
    """Return whether a device can be used; ``xids`` were seen since NVML was first opened.

    ``failed`` is what makes it useless for new work, ``unknown`` what leaves this open.
    """
    failures = [*_failures(device), *_xid_failures(xids, ignored)]
    if failures:
        return Verdict("failed", "; ".join(failures))
    doubts = list(_doubts(device))
    if doubts:
        return Verdict("unknown", "; ".join(doubts))
    return Verdict("ok", "; ".join(_warnings(device)))


def _failures(device: Device) -> Iterable[str]:
    if device.gone is not None:
        yield f"gone: {device.gone}"
    if any(missing.reason in _UNUSABLE for missing in device.reasons.values()):
        yield "the GPU must be reset"
    rows = device.remapped_rows
    if rows is not None and rows.failure:
        yield "row remapping has failed"
    if device.fabric is not None:
        yield from _fabric_failures(device.fabric)


def _fabric_failures(fabric: Fabric) -> Iterable[str]:
    if fabric.state == "completed" and fabric.status != 0:
        yield f"joining the NVLink fabric failed (NVML {fabric.status})"
    if fabric.summary == "unhealthy":
        yield f"NVLink fabric unhealthy {', '.join(fabric.problems)}".rstrip()
        return
    wrong = [
        name
        for name in fabric.problems
        if name in _FABRIC_FAILURES or name.startswith("incorrect_configuration")
    ]
    if wrong:
        yield f"NVLink fabric: {', '.join(wrong)}"


def _xid_failures(xids: Iterable[int], ignored: Collection[int]) -> Iterable[str]:
    hard = sorted(set(xids) - set(ignored))
    if hard:
        yield f"Xid {', '.join(map(str, hard))}"


def _doubts(device: Device) -> Iterable[str]:
    stuck = [name for name, why in device.reasons.items() if why.reason in _DOUBTFUL]
    if stuck:
        yield f"calls that do not come back: {', '.join(sorted(stuck))}"
    if device.fabric is not None and device.fabric.state in ("not_started", "in_progress"):
        yield f"NVLink fabric {device.fabric.state.replace('_', ' ')}"


def _warnings(device: Device) -> Iterable[str]:
    rows = device.remapped_rows
    if rows is not None and rows.pending:
        yield "row remapping pending: reset the GPU when idle"
    if device.fabric is not None and device.fabric.problems:
        yield f"NVLink fabric: {', '.join(device.fabric.problems)}"
    slow = set(device.clock_reasons or ()) & {
        "hw_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake",
    }
    if slow:
        yield f"clocks down: {', '.join(sorted(slow))}"
