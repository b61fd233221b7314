"""A fleet, and one agent that tells it of its engines."""

import pytest

from nearkv.ingress.fleet import Fleet
from nearkv.ingress.prefix_index import PrefixIndex
from tests.ingress.fleet_agent import Agent


@pytest.fixture
def fleet():
    return Fleet(PrefixIndex())


@pytest.fixture
def agent(fleet):
    return Agent(fleet)
