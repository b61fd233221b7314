"""Fake sysfs trees for the tests of links."""

import pytest

from tests.agent.links.sysfs_tree import SysfsTree, two_sockets


@pytest.fixture
def tree(tmp_path):
    """A host without any device."""
    return SysfsTree(tmp_path)


@pytest.fixture
def sockets(tmp_path):
    """Two GPUs and two InfiniBand devices on two NUMA nodes."""
    return two_sockets(tmp_path)
