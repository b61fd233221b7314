"""Fixtures of the contract suite: every test with ``make_rig`` runs once per backend."""

import pytest

from tests.transfer.backends.kinds import KINDS
from tests.transfer.backends.rig import Rig, layout


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request):
    reason = request.param.missing()
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def make_rig(kind):
    rigs = []

    def make(source=None, target=None):
        rigs.append(Rig(kind, source or layout(), target))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
