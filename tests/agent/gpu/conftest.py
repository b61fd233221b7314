"""Hosts with GPUs that exist in a JSON file only, and agents that read them."""

import asyncio
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nearkv.agent.gpu.process import ReaderLimits
from nearkv.agent.gpu.watching import GpuWatch, WatchPlan
from tests.doubles.nvml.building import build_library, has_compiler
from tests.doubles.nvml.double import NvmlDouble
from tests.doubles.nvml.hosts import eight_h100

DEADLINE_SECONDS = 40.0
QUICK = {"interval_seconds": 0.02, "thorough_seconds": 0.0, "retry_seconds": 0.02}


@pytest.fixture(scope="session")
def library_cache(tmp_path_factory):
    if not has_compiler():
        pytest.skip("no gcc here")
    return tmp_path_factory.mktemp("nvml-library")


@pytest.fixture
def nvml(library_cache, tmp_path, monkeypatch):
    """Return a function that makes a host: what it has, and the calls that its NVML lacks."""

    def make(host=None, without=()):
        double = NvmlDouble(tmp_path, build_library(library_cache, without), host or eight_h100())
        monkeypatch.setenv("NVML_DOUBLE", double.environment["NVML_DOUBLE"])
        return double

    return make


@pytest.fixture
def short_path():
    """Return a folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="nk") as folder:
        yield Path(folder)


def plan_for(double, *, limits=None, **plan):
    return WatchPlan(
        **{**QUICK, **plan},
        library_dir=double.library_dir,
        limits=ReaderLimits(**{"quit_seconds": 15.0, **(limits or {})}),
    )


async def until(condition, what="it"):
    """Wait until a condition holds; returns what it gave."""
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE_SECONDS
    while not (found := condition()):
        assert loop.time() < end, f"not in time: {what}"
        await asyncio.sleep(0.01)
    return found


@asynccontextmanager
async def watching(double, **plan):
    """Watch a host's GPUs until the block ends."""
    watch = GpuWatch(plan_for(double, **plan))
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert double.holders() == []


async def read(watch):
    """Return a reading that was begun after now."""
    before = watch.reading
    await until(lambda: watch.reading is not None and watch.reading is not before, "a reading")
    first = watch.reading
    return await until(
        lambda: watch.reading if watch.reading is not first else None, "another reading"
    )
