"""The limit on open files, of this very process: put back as it was."""

import resource
import sys

import pytest

from nearkv.descriptors import descriptor_limit, raise_descriptor_limit


@pytest.fixture
def hard():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(hard):
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    assert descriptor_limit() == soft - 1
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert descriptor_limit() == (sys.maxsize if hard == resource.RLIM_INFINITY else hard)
