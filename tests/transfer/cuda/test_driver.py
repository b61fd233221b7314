"""Calls of the driver: what goes in, what comes out, and how failures are told."""

import pytest

from nearkv.transfer.cuda.context import DeviceContext, find_device
from nearkv.transfer.cuda.driver import CudaError, Driver, load_driver
from nearkv.transfer.errors import PullError, Reason


def test_without_a_driver_there_is_no_path():
    with pytest.raises(PullError, match="no CUDA driver here") as caught:
        load_driver("libcuda-of-no-machine.so.1")
    assert caught.value.reason is Reason.NO_PATH


def test_an_error_names_the_call_its_number_and_its_name(make_driver):
    driver, library = make_driver()
    library.fail["cuDeviceGetCount"] = 999
    with pytest.raises(CudaError, match=r"cuDeviceGetCount: CUDA error 999 \(UNKNOWN\)") as caught:
        driver.device_count()
    assert (caught.value.reason, caught.value.code) == (Reason.NO_PATH, 999)


def test_an_error_that_nobody_named_is_told_by_its_number(make_driver):
    driver, library = make_driver()
    library.fail["cuDeviceGetCount"] = 12345
    with pytest.raises(CudaError, match=r"CUDA error 12345 \(unnamed\)"):
        driver.device_count()


def test_errors_about_memory_have_that_reason(make_driver):
    driver, library = make_driver()
    library.fail["cuMemCreate"] = 2
    with pytest.raises(CudaError, match=r"cuMemCreate: CUDA error 2 \(OUT_OF_MEMORY\)") as caught:
        driver.create_memory(0, 1 << 16)
    assert caught.value.reason is Reason.MEMORY


def test_a_call_that_an_old_driver_does_not_have_is_named():
    class Old:
        def cuInit(self, _):  # noqa: N802 (the driver's name)
            return 0

    driver = Driver(Old())
    driver.initialise()
    with pytest.raises(PullError, match="cuMemCreate: this CUDA driver does not have it"):
        driver.create_memory(0, 1 << 16)


def test_nothing_works_before_it_is_initialised(machine):
    with pytest.raises(CudaError, match="NOT_INITIALIZED"):
        Driver(machine.process()).device_count()


def test_devices_are_described(engine, machine):
    assert engine.version() == "12.8"
    assert engine.device_count() == 2
    assert engine.device_name(1) == "Fake 1"
    assert engine.device_uuid(1) == machine.devices[1].name


def test_a_device_is_found_by_its_uuid(engine, machine):
    assert find_device(engine, machine.devices[1].name) == 1
    for unknown in ("GPU-0", ""):
        with pytest.raises(PullError, match="not among the 2 seen here") as caught:
            find_device(engine, unknown)
        assert caught.value.reason is Reason.NO_PATH


def test_a_context_is_current_only_where_it_is_used(engine):
    context = DeviceContext(engine, 1)
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        engine.free_bytes()
    with context.use() as driver:
        assert driver.free_bytes() == 64 << 20
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        engine.free_bytes()
    context.close()
    context.close()
    with pytest.raises(PullError, match="let go"), context.use():
        pass


def test_a_context_within_another_gives_it_back(engine):
    outer, inner = DeviceContext(engine, 0), DeviceContext(engine, 1)
    with outer.use():
        with inner.use():
            address = engine.allocate(1 << 20)
            assert engine.free_bytes() == 63 << 20
            engine.free(address)
        assert engine.free_bytes() == 64 << 20
    inner.close()
    outer.close()
