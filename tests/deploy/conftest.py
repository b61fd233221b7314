"""Renderings, once a session, since nothing changes them."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.deploy.chart import Rendered, profile, render

Renders = Callable[[str], Rendered]


@pytest.fixture(scope="session")
def rendered() -> Renders:
    """Return what renders a profile."""
    return cache(lambda name: render(profile(name)))
