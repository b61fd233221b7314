"""What can happen to the GPUs, the driver and the reader while the agent runs."""

import asyncio
import os
import signal
import sys
import time

import pytest
import structlog

from nearkv.agent.gpu.health import verdict
from nearkv.agent.gpu.reasons import Reason
from nearkv.agent.gpu.watching import GpuWatch, WatchPlan
from tests.agent.gpu.conftest import plan_for, read, until, watching
from tests.doubles.nvml.hosts import hosts_with, uuid_of

IMPATIENT = {"limits": {"call_seconds": 1.0, "open_seconds": 2.0, "quit_seconds": 1.0}}


def told(logs):
    return [entry["event"] for entry in logs if entry["event"] in ("no_gpus", "gpus_not_read")]


# -- Devices -----------------------------------------------------------------------------------


async def test_a_gpu_that_falls_off_the_bus_leaves_the_others(nvml):
    double = nvml(hosts_with(4))
    async with watching(double, retry_seconds=3600.0) as watch:
        sound = await read(watch)
        double.change(lambda host: host["devices"][2].update(lost=True))
        await until(lambda: watch.reading.devices[2].gone)
        reading = watch.reading
        assert reading.devices[2].gone.reason is Reason.GPU_LOST
        assert reading.devices[2].uuid == uuid_of(2)
        assert verdict(reading.devices[2]).health == "failed"
        for index in (0, 1, 3):
            assert reading.devices[index] == sound.devices[index]


async def test_a_gpu_that_is_taken_out_is_told_absent_once_nvml_is_opened_anew(nvml):
    double = nvml(hosts_with(3))
    async with watching(double) as watch:
        await read(watch)
        double.change(lambda host: host["devices"].pop())
        await until(
            lambda: (
                watch.reading.devices[2].gone
                and watch.reading.devices[2].gone.reason is Reason.ABSENT
            )
        )
        assert [device.id for device in watch.reading.devices] == [uuid_of(n) for n in range(3)]
        assert watch.reading.devices[0].gone is None
        assert double.calls()["init"] > 1


async def test_a_gpu_that_comes_back_is_seen_again(nvml):
    double = nvml(hosts_with(2))
    async with watching(double) as watch:
        await read(watch)
        double.change(lambda host: host["devices"][1].update(lost=True))
        await until(lambda: watch.reading.devices[1].gone)
        await until(lambda: double.calls()["init"] > 2)  # it is lost while NVML is opened, too
        assert watch.reading.devices[1].uuid == uuid_of(1)
        double.change(lambda host: host["devices"][1].pop("lost"))
        await until(lambda: not watch.reading.devices[1].gone)
        assert watch.reading.devices[1].memory is not None


async def test_xids(nvml):
    double = nvml(hosts_with(4))
    async with watching(double) as watch:
        device = (await read(watch)).devices[3]
        for xid in (31, 79, 31):
            double.raise_xid(3, xid)
        await until(lambda: watch.history.xid_counts.get((uuid_of(3), 31)) == 2)
        codes = [seen.code for seen in watch.history.xids_of(uuid_of(3))]
        assert codes == [79, 31]
        assert verdict(device, codes).health == "failed"
        assert verdict(device, [31]).health == "ok"
        assert watch.history.xids_of(uuid_of(0)) == ()


async def test_xids_outlive_the_reader_but_not_a_release(nvml):
    double = nvml(hosts_with(1))
    async with watching(double) as watch:
        await read(watch)
        double.raise_xid(0, 79)
        await until(lambda: watch.history.xids_of(uuid_of(0)))
        os.kill(watch.reader_pid, signal.SIGKILL)
        await until(lambda: watch.opened == 2)
        assert watch.history.xids_of(uuid_of(0))
        await watch.release("test")
        watch.resume("test")
        assert watch.history.xids_of(uuid_of(0)) == ()


async def test_devices_without_events_say_so(nvml):
    host = hosts_with(2)
    host["devices"][1]["event_types"] = 0
    double = nvml(host)
    async with watching(double) as watch:
        assert (await read(watch)).events.reason is Reason.NOT_SUPPORTED
        double.raise_xid(0, 79)
        await until(lambda: watch.history.xids_of(uuid_of(0)))


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlEventSetWait_v2"])
async def test_no_events_at_all_hide_no_reading(nvml, call):
    async with watching(nvml(hosts_with(1) | {"fail": {call: 999}})) as watch:
        await until(lambda: watch.reading and watch.reading.events)
        assert watch.reading.events.reason is Reason.FAILED
        assert watch.reading.devices[0].memory is not None


# -- Calls that do not come back ---------------------------------------------------------------


async def test_a_call_that_hangs_is_left_out_and_hides_no_other(nvml):
    double = nvml(hosts_with(3))
    async with watching(double, **IMPATIENT) as watch:
        sound = await read(watch)
        double.change(
            lambda host: host["devices"][1].update(hang=["nvmlDeviceGetUtilizationRates"])
        )
        await until(lambda: "utilisation" in watch.reading.devices[1].reasons)
        reading = watch.reading
        assert reading.devices[1].reasons["utilisation"].reason is Reason.HUNG
        assert reading.devices[1].memory == sound.devices[1].memory
        assert reading.devices[1].power_watts == sound.devices[1].power_watts
        assert (reading.devices[0], reading.devices[2]) == (sound.devices[0], sound.devices[2])
        assert verdict(reading.devices[1]).health == "unknown"
        assert watch.ends == {"hung": 1}
        opened = watch.opened
        for _ in range(3):
            await read(watch)
        assert watch.opened == opened


async def test_a_device_that_hangs_in_everything_is_given_up(nvml):
    double = nvml(hosts_with(2))
    async with watching(double, **IMPATIENT) as watch:
        sound = await read(watch)
        calls = [
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetUtilizationRates",
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetPowerUsage",
        ]
        double.change(lambda host: host["devices"][1].update(hang=calls))
        await until(lambda: watch.reading.devices[1].gone)
        assert watch.reading.devices[1].uuid == uuid_of(1)
        assert watch.reading.devices[1].gone.reason is Reason.HUNG
        assert watch.reading.devices[0] == sound.devices[0]
        assert watch.ends == {"hung": 3}


async def test_a_call_that_crashes_is_left_out(nvml):
    double = nvml(hosts_with(2))
    async with watching(double) as watch:
        sound = await read(watch)
        double.change(lambda host: host["devices"][0].update(crash=["nvmlDeviceGetMigMode"]))
        await until(lambda: "mig" in watch.reading.devices[0].reasons)
        assert watch.reading.devices[0].reasons["mig"].reason is Reason.CRASHED
        assert watch.reading.devices[1] == sound.devices[1]
        assert watch.ends == {"crashed": 1}


async def test_a_slow_call_is_waited_for(nvml):
    double = nvml(hosts_with(2) | {"delay_ms": {"nvmlDeviceGetPowerUsage": 150}})
    async with watching(double, limits={"call_seconds": 5.0}) as watch:
        reading = await read(watch)
        assert reading.devices[1].power_watts == 70.5
        assert reading.seconds > 0.29
        assert watch.ends == {}


async def test_readings_before_a_hang_are_kept_until_they_are_stale(nvml):
    double = nvml(hosts_with(1))
    clock = [1000.0]
    watch = GpuWatch(WatchPlan(), now=lambda: clock[0])
    async with watching(double) as real:
        reading = await read(real)
    watch._publish(reading)
    assert watch.missing is None
    clock[0] += 4 * 5.0 + 30.0
    assert watch.reading is not None
    clock[0] += 0.1
    assert watch.reading is None
    assert watch.missing.reason is Reason.STALE


async def test_an_nvml_that_hangs_when_opened_is_told_and_tried_again(nvml):
    double = nvml(hosts_with(1) | {"hang": ["nvmlInitWithFlags"]})
    async with watching(double, **IMPATIENT) as watch:
        await until(lambda: watch.missing and watch.missing.reason is Reason.HUNG)
        assert "nvmlInit" in watch.missing.detail
        double.change(lambda host: host.pop("hang"))
        assert (await read(watch)).devices[0].memory is not None


# -- No driver, another driver -----------------------------------------------------------------


async def test_no_library_is_normal_and_told_once(nvml, tmp_path):
    double = nvml(hosts_with(1))
    (tmp_path / "empty").mkdir()
    double.library_dir = tmp_path / "empty"
    with structlog.testing.capture_logs() as logs:
        async with watching(double) as watch:
            await until(lambda: watch.ends["no_driver"] >= 3)
            assert watch.missing.reason is Reason.NO_DRIVER
            assert watch.reading is None
    assert told(logs) == ["no_gpus"]


async def test_without_the_drivers_files_no_process_is_started():
    plan = WatchPlan(driver_files=("/nowhere/nvidiactl",), command=("/nowhere/python",))
    with structlog.testing.capture_logs() as logs:
        watch = GpuWatch(plan)
        task = asyncio.create_task(watch.run())
        await until(lambda: watch.missing.reason is Reason.NO_DRIVER)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert told(logs) == ["no_gpus"]


@pytest.mark.parametrize(
    ("code", "reason", "event"),
    [
        (9, Reason.NO_DRIVER, "no_gpus"),
        (18, Reason.DRIVER_MISMATCH, "gpus_not_read"),
        (4, Reason.NO_PERMISSION, "gpus_not_read"),
        (999, Reason.FAILED, "gpus_not_read"),
    ],
)
async def test_an_nvml_that_does_not_open_is_tried_until_it_does(nvml, code, reason, event):
    double = nvml(hosts_with(1) | {"fail": {"nvmlInitWithFlags": code}})
    with structlog.testing.capture_logs() as logs:
        async with watching(double) as watch:
            await until(lambda: watch.ends[reason.value] >= 2)
            assert watch.missing.reason is reason
            double.change(lambda host: host.pop("fail"))
            await read(watch)
            assert watch.missing is None
    assert told(logs) == [event]


async def test_a_reader_that_cannot_start_is_told(nvml):
    double = nvml(hosts_with(1))
    async with watching(double, command=("/nowhere/python",)) as watch:
        await until(lambda: watch.ends["failed"] >= 2)
        assert "cannot start" in watch.missing.detail


# -- Letting go --------------------------------------------------------------------------------


async def test_release_closes_nvml_and_every_file_until_resume(nvml):
    double = nvml(hosts_with(2))
    async with watching(double) as watch:
        await read(watch)
        assert double.files_held_by(watch.reader_pid)
        assert await watch.release("label")
        assert double.holders() == []
        assert double.calls() == {"init": 1, "shutdown": 1}
        assert watch.reading is None
        assert watch.missing.reason is Reason.RELEASED
        assert watch.reader_pid is None
        for _ in range(10):  # nothing comes back by itself
            await asyncio.sleep(0)
        assert double.calls() == {"init": 1, "shutdown": 1}
        watch.resume("label")
        assert len((await read(watch)).devices) == 2
        assert double.calls() == {"init": 2, "shutdown": 1}
        assert watch.ends == {}
        assert watch.ends == {}  # it was no failure


async def test_nvml_stays_closed_while_anybody_wants_it_closed(nvml):
    double = nvml(hosts_with(1))
    async with watching(double) as watch:
        await read(watch)
        await watch.release("label")
        await watch.release("signal")
        watch.resume("label")
        watch.resume("label")
        assert watch.holds == ("signal",)
        assert double.holders() == []
        watch.resume("signal")
        await read(watch)


async def test_release_before_nvml_was_opened(nvml):
    double = nvml(hosts_with(1))
    watch = GpuWatch(WatchPlan(library_dir=double.library_dir))
    assert await watch.release("label")
    task = asyncio.create_task(watch.run())
    for _ in range(10):
        await asyncio.sleep(0)
    assert double.calls() == {}
    watch.resume("label")
    await until(lambda: watch.reading)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_release_in_the_middle_of_a_call_that_hangs(nvml):
    double = nvml(hosts_with(1))
    async with watching(double, limits={"quit_seconds": 0.3}) as watch:
        await read(watch)
        double.change(lambda host: host.update(hang=["nvmlDeviceGetPowerUsage"]))
        await until(lambda: watch._process and watch._process._mark.current())
        assert await watch.release("label")
        assert double.holders() == []
        double.change(lambda host: host.pop("hang"))
        watch.resume("label")
        assert (await read(watch)).devices[0].power_watts == 70.5
        assert watch.ends == {}  # it was no failure
        assert watch.ends == {}  # it was no failure


async def test_a_reader_that_the_kernel_keeps_does_not_keep_the_agent(nvml):
    double = nvml(hosts_with(1))
    watch = GpuWatch(plan_for(double))
    task = asyncio.create_task(watch.run())
    await read(watch)
    process = watch._process

    async def refuse():
        await asyncio.sleep(0)
        return False

    stop, process.stop = process.stop, refuse
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.done()
    assert await stop()


async def test_another_library_is_loaded_after_a_release(nvml, library_cache):
    double = nvml(hosts_with(1), without=("nvmlDeviceGetPowerUsage",))
    async with watching(double) as watch:
        assert (await read(watch)).devices[0].power_watts is None
        await watch.release("upgrade")
        library = double.library_dir / "libnvidia-ml.so.1"
        newer = nvml(hosts_with(1)).library_dir / "libnvidia-ml.so.1"
        before = library.read_bytes()
        try:
            library.unlink()
            library.write_bytes(newer.read_bytes())
            watch.resume("upgrade")
            assert (await read(watch)).devices[0].power_watts == 70.5
        finally:
            library.unlink()
            library.write_bytes(before)


async def test_a_killed_agent_leaves_no_reader_not_even_one_that_hangs(nvml):
    double = nvml(hosts_with(1) | {"hang": ["nvmlDeviceGetName"]})
    program = (
        "import asyncio\n"
        "from pathlib import Path\n"
        "from nearkv.agent.gpu.watching import GpuWatch, WatchPlan\n"
        f"plan = WatchPlan(library_dir=Path({str(double.library_dir)!r}))\n"
        "asyncio.run(GpuWatch(plan).run())\n"
    )
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    try:
        await until(double.holders)
        assert agent.pid not in double.holders()
    finally:
        agent.kill()
        await agent.wait()
    await until(lambda: not double.holders())


async def test_sigterm_to_the_whole_group_leaves_the_reader_to_the_agent(nvml):
    double = nvml(hosts_with(1))
    async with watching(double) as watch:
        await read(watch)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(watch.reader_pid, number)
        await read(watch)
        assert watch.opened == 1
    assert double.calls() == {"init": 1, "shutdown": 1}


def test_pauses_double_up_to_a_bound():
    watch = GpuWatch(WatchPlan(), now=time.monotonic, jitter=lambda: 0.5)
    pauses = []
    for failures in (0, 1, 2, 3, 7, 500):
        watch._failures = failures
        pauses.append(watch._retry_seconds())
    assert pauses == [0.0, 5.0, 10.0, 20.0, 300.0, 300.0]


async def test_what_was_left_out_is_asked_again_after_a_release(nvml):
    double = nvml(hosts_with(1) | {"hang": ["nvmlDeviceGetPowerUsage"]})
    async with watching(double, **IMPATIENT) as watch:
        await until(lambda: watch.reading and "power_watts" in watch.reading.devices[0].reasons)
        double.change(lambda host: host.pop("hang"))
        assert (await read(watch)).devices[0].power_watts is None
        await watch.release("upgrade")
        watch.resume("upgrade")
        assert (await read(watch)).devices[0].power_watts == 70.5
