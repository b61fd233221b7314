"""A machine with devices that exist in Python only; what a test leaves behind fails it."""

import pytest

from nearkv.transfer.cuda.driver import Driver
from tests.transfer.backends.rig import layout
from tests.transfer.cuda.device_rig import CudaKind, DeviceRig
from tests.transfer.cuda.fake_cuda import Machine


@pytest.fixture
def machine():
    machine = Machine(devices=2)
    yield machine
    machine.check()


@pytest.fixture
def make_driver(machine):
    """Return the driver of one more process, and its library."""

    def make(**options):
        library = machine.process(**options)
        driver = Driver(library)
        driver.initialise()
        return driver, library

    return make


@pytest.fixture
def engine(make_driver):
    driver, _ = make_driver()
    return driver


@pytest.fixture
def mover(make_driver):
    driver, _ = make_driver()
    return driver


@pytest.fixture
def kind(machine):
    """The kind of backend that the contract suite is run with in this folder."""
    return CudaKind(machine)


@pytest.fixture
def make_rig(kind):
    rigs = []

    def make(source=None, target=None, **options):
        rigs.append(DeviceRig(kind, source or layout(), target, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
