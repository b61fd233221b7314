"""Set-up of the replay's tests."""

import logging

import pytest
import structlog


@pytest.fixture(autouse=True)
def _quiet():
    """Keep thousands of decisions out of the output; undone after each test."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.configure(**before)
