"""Small decisions: what NVML's numbers mean, what is left out, what is remembered."""

import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.agent.gpu import decoding
from nearkv.agent.gpu.driver_upgrade import must_release
from nearkv.agent.gpu.history import DeviceHistory
from nearkv.agent.gpu.mark import Mark, create_mark_file
from nearkv.agent.gpu.messages import LeftOut
from nearkv.agent.gpu.model import Device, Reading, Xid
from nearkv.agent.gpu.quarantine import FIRST_SECONDS, LONGEST_SECONDS, Quarantine
from nearkv.agent.gpu.reasons import Missing, Reason, reason_of


@given(st.integers(0, 2**64 - 1))
def test_every_clock_reason_has_a_name(mask):
    names = decoding.clock_reasons_of(mask)
    assert len(set(names)) == mask.bit_count()


def test_clock_reasons():
    assert decoding.clock_reasons_of(0) == ()
    assert decoding.clock_reasons_of(0x44) == ("sw_power_cap", "hw_thermal_slowdown")
    assert decoding.clock_reasons_of(1 << 40) == ("bit_40",)


@pytest.mark.parametrize(
    ("mask", "problems"),
    [
        (0, ()),
        (0b10_10_10_10, ()),  # all of them told not to be so
        (0b01, ("degraded_bandwidth",)),
        (0b01_10_01_00, ("route_recovery", "access_timeout_recovery")),
        (0x100, ()),  # no misconfiguration
        (0x410, ("route_unhealthy", "incorrect_configuration_4")),
    ],
)
def test_fabric_problems(mask, problems):
    assert decoding.fabric_problems_of(mask) == problems


def test_padding_of_the_fabrics_state_is_passed_over():
    raw = SimpleNamespace(clusterUuid=bytes(16), status=0, cliqueId=1, state=0xABCD03)
    assert decoding.fabric_of(raw).state == "completed"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("00000000:18:00.0", "0000:18:00.0"), ("00010001:AB:00.0", "10001:ab:00.0")],
)
def test_bus_ids(text, expected):
    assert decoding.bus_id_of(SimpleNamespace(busId=text)) == expected


def test_numbers_that_are_not_known_are_told_as_numbers():
    assert decoding.p2p_of(17) == "status_17"
    assert decoding.ancestor_of(35) == "level_35"
    assert decoding.remote_type_of(9) == "type_9"
    assert reason_of(12345) is Reason.FAILED


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, False),
        ("", False),
        ("upgrade-required", False),
        ("wait-for-jobs-required", False),
        ("pod-deletion-required", True),
        ("drain-required", True),
        ("pod-restart-required", True),
        ("validation-required", True),
        ("upgrade-failed", True),
        ("something-new", True),
        ("uncordon-required", False),
        ("upgrade-done", False),
    ],
)
def test_when_nvml_is_closed_for_an_upgrade(state, expected):
    assert must_release(state) is expected


def test_what_is_left_out_is_tried_again_ever_less_often():
    quarantine = Quarantine()
    quarantine.add(1, "call", Reason.HUNG, now=0.0)
    assert quarantine.left_out(FIRST_SECONDS - 1) == (LeftOut(1, "call", Reason.HUNG),)
    assert quarantine.left_out(FIRST_SECONDS) == ()
    assert quarantine.is_due(since=0.0, now=FIRST_SECONDS)
    assert not quarantine.is_due(since=FIRST_SECONDS, now=FIRST_SECONDS + 1)
    quarantine.add(1, "call", Reason.HUNG, now=1000.0)
    assert quarantine.left_out(1000.0 + 2 * FIRST_SECONDS - 1)
    for _ in range(20):
        quarantine.add(1, "call", Reason.HUNG, now=0.0)
    assert quarantine.left_out(LONGEST_SECONDS) == ()
    quarantine.clear()
    assert quarantine.left_out(0.0) == ()


def test_a_device_with_three_hung_calls_is_left_out():
    quarantine = Quarantine()
    for call in ("a", "b"):
        quarantine.add(1, call, Reason.HUNG, now=0.0)
    assert {entry.call for entry in quarantine.left_out(0.0)} == {"a", "b"}
    quarantine.add(2, "c", Reason.HUNG, now=0.0)
    quarantine.add(1, "c", Reason.CRASHED, now=0.0)
    assert [entry.device_index for entry in quarantine.left_out(0.0) if entry.call == "*"] == [1]


def test_what_is_left_out_is_bounded():
    quarantine = Quarantine()
    for index in range(1000):
        quarantine.add(index, "call", Reason.HUNG, now=0.0)
    assert len(quarantine.left_out(0.0)) == 256


def reading_of(*devices):
    return Reading(devices=devices)


def device(index, **values):
    return Device(index=index, **{"uuid": f"GPU-{index}", **values})


def test_a_device_that_is_not_listed_any_more_stays_as_absent_until_forgotten():
    history = DeviceHistory()
    history.complete(reading_of(device(0), device(1)))
    lacking = history.complete(reading_of(device(0)))
    assert [one.id for one in lacking.devices] == ["GPU-0", "GPU-1"]
    assert lacking.devices[1].gone.reason is Reason.ABSENT
    back = history.complete(reading_of(device(0), device(1)))
    assert back.devices[1].gone is None
    history.forget()
    assert len(history.complete(reading_of(device(0))).devices) == 1


def test_a_device_lost_before_it_had_a_name_is_known_by_its_place():
    history = DeviceHistory()
    history.complete(reading_of(device(0), device(1)))
    lost = Device(index=1, gone=Missing(Reason.GPU_LOST))
    found = history.complete(reading_of(device(0), lost))
    assert [(one.id, one.gone) for one in found.devices] == [
        ("GPU-0", None),
        ("GPU-1", Missing(Reason.GPU_LOST)),
    ]


def test_memory_of_devices_and_xids_is_bounded():
    history = DeviceHistory()
    for index in range(1000):
        history.complete(reading_of(device(index)))
        history.note_xid(Xid(f"GPU-{index}", 79), at=0.0)
        history.note_xid(Xid("GPU-0", index), at=0.0)
    assert len(history.complete(reading_of()).devices) <= 64
    assert len(history.xids_of("GPU-0")) == 16
    assert len(history.xid_counts) <= 1024


def test_a_mark_is_seen_by_the_other_end():
    fd = create_mark_file()
    one, other = Mark(fd), Mark(fd)
    assert other.current() is None
    one.enter(3, "nvmlDeviceGetComputeRunningProcesses_v3", 42)
    assert (other.current().device_index, other.current().started_ns) == (3, 42)
    assert other.current().call == "nvmlDeviceGetComputeRunningProcesses_v3"
    one.leave()
    assert other.current() is None
    os.close(fd)
    one.close()
    other.close()


def test_a_storm_of_xids_is_news_once_in_a_while():
    history = DeviceHistory()
    news = []
    for second in (0, 1, 30, 80, 200):
        news.append(history.is_news(Xid("a", 31), second))
        history.note_xid(Xid("a", 31), second)
    assert news == [True, False, False, False, True]
    assert history.is_news(Xid("a", 79), 200)
    assert history.is_news(Xid("b", 31), 200)
    assert history.xid_counts == {("a", 31): 5}
