import pytest

from nearkv.agent.gpu.health import verdict
from nearkv.agent.gpu.model import Device, Fabric, RemappedRows
from nearkv.agent.gpu.reasons import Missing, Reason


def fabric(state="completed", status=0, problems=(), summary=None):
    return Fabric(state, status, "0", 0, problems, summary)


def rows(*, pending=False, failure=False):
    return RemappedRows(0, 1, pending, failure)


@pytest.mark.parametrize(
    ("values", "xids", "health", "why"),
    [
        ({}, [], "ok", ""),
        ({}, [13, 31, 43, 45, 68, 109], "ok", ""),
        ({}, [31, 79, 48], "failed", "Xid 48, 79"),
        ({"remapped_rows": rows()}, [], "ok", ""),
        ({"remapped_rows": rows(pending=True)}, [], "ok", "pending"),
        ({"remapped_rows": rows(failure=True)}, [], "failed", "remapping has failed"),
        ({"fabric": fabric()}, [], "ok", ""),
        ({"fabric": fabric("not_supported", 3)}, [], "ok", ""),
        ({"fabric": fabric("in_progress")}, [], "unknown", "in progress"),
        ({"fabric": fabric(status=999)}, [], "failed", "999"),
        ({"fabric": fabric(summary="unhealthy")}, [], "failed", "unhealthy"),
        ({"fabric": fabric(summary="limited_capacity")}, [], "ok", ""),
        ({"fabric": fabric(problems=("degraded_bandwidth",))}, [], "ok", "degraded"),
        ({"fabric": fabric(problems=("route_unhealthy",))}, [], "failed", "route_unhealthy"),
        ({"fabric": fabric(problems=("incorrect_configuration_4",))}, [], "failed", "_4"),
        ({"gone": Missing(Reason.GPU_LOST)}, [], "failed", "gone: gpu_lost"),
        ({"reasons": {"memory": Missing(Reason.RESET_REQUIRED)}}, [], "failed", "reset"),
        ({"reasons": {"memory": Missing(Reason.HUNG)}}, [], "unknown", "memory"),
        ({"reasons": {"memory": Missing(Reason.NOT_SUPPORTED)}}, [], "ok", ""),
        ({"clock_reasons": ("hw_thermal_slowdown",)}, [], "ok", "clocks down"),
        ({"clock_reasons": ("gpu_idle", "sw_power_cap")}, [], "ok", ""),
    ],
)
def test_verdict(values, xids, health, why):
    found = verdict(Device(index=0, **values), xids)
    assert found.health == health
    assert why in found.why
    assert bool(found.why) == bool(why)


def test_which_xids_count_can_be_set():
    assert verdict(Device(index=0), [63], ignored=(63,)).health == "ok"
    assert verdict(Device(index=0), [31], ignored=()).health == "failed"
