"""Fixtures of the contract suite: every test with ``make_rig`` runs once per backend."""

import pytest

from nearkv.transfer.backends.tcp import TcpBackend
from tests.transfer.backends.kinds import CHUNK_BYTES, KINDS, NATIVE, Kind
from tests.transfer.backends.rig import Rig, layout, slow_layout, usable

# Only in the processes that test_native_contract.py starts.
collect_ignore = () if NATIVE else ("test_native_faults.py",)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request):
    return usable(request.param)


@pytest.fixture
def make_rig(kind):
    rigs = []

    def make(source=None, target=None):
        rigs.append(Rig(kind, source or layout(), target))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def make_tcp():
    """Make a rig whose backend has other settings than those of the contract suite."""
    rigs = []

    def make(source_layout=None, **settings):
        settings = {"chunk_bytes": CHUNK_BYTES, "buffer_bytes": CHUNK_BYTES, **settings}
        kind = Kind("tcp", lambda: TcpBackend(**settings), "tcp")
        rigs.append(Rig(kind, source_layout or slow_layout()))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
