"""Set-up shared by all tests."""

import asyncio
import gc

import pytest
from hypothesis import HealthCheck, settings

LONG_FILES = frozenset(
    {
        "test_envoy",
        "test_envoy_picker",
        "test_native_contract",
        "test_scheduling",
        "test_showing",
        "test_store",
        "test_store_faults",
        "test_transfer_faults",
        "test_transfer_faults_hostile",
        "test_transfer_faults_leases",
        "test_transfer_faults_shortage",
        "test_transfer_isolation",
        "test_watching",
    }
)
"""Begun first: where files run beside each other, the others fill the gaps at the end."""


def pytest_configure() -> None:
    """Keep the machine's speed out of the tests, and pytest-asyncio from leaving a loop open."""
    # Hypothesis fails an example that took 200 ms: on a busy machine any does now and then.
    settings.register_profile("nearkv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("nearkv")
    # On Python 3.11 pytest-asyncio would make an event loop that nobody closes.
    asyncio.set_event_loop(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first (see the Makefile), and leave the order as it is otherwise."""
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)


def pytest_collection_finish() -> None:
    """Spare collections of garbage the modules of all tests: each took half a second."""
    gc.collect()
    gc.freeze()
