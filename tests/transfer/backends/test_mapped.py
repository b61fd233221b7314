"""What backends that copy for themselves refuse on top of the contract."""

import dataclasses

import pytest

from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.backends.shm import ShmBackend
from nearkv.transfer.errors import PullError, Reason, TransferError
from tests.transfer.backends.kinds import KINDS
from tests.transfer.backends.rig import UNTOUCHED, Rig, layout, patient

MAPPED = [kind for kind in KINDS if kind.name in ("inproc", "shm", "shm-memmove")]
# Else, whoever maps the memory is trusted with all of it.
by_a_server = pytest.mark.parametrize(
    "rig",
    [kind for kind in MAPPED if not kind.handed_over],
    indirect=True,
    ids=lambda kind: kind.name,
)


@pytest.fixture(params=MAPPED, ids=lambda kind: kind.name)
def rig(request):
    rig = Rig(request.param, layout())
    yield rig
    rig.close()


def refused(rig, grant, **changes):
    link = rig.connect(grant)
    with pytest.raises(TransferError) as caught:
        link.pull(rig.request(grant, [0, 1], **changes), patient())
    assert (rig.target_bytes == UNTOUCHED).all()
    return caught.value.reason


@pytest.mark.parametrize(
    "change", [{"size": 20_000}, {"blocks": 15}, {"offset": 1, "size": 20_000}], ids=str
)
def test_a_request_that_takes_the_source_for_another_is_refused(rig, change):
    other = dataclasses.replace(rig.source.region.layout, **change)
    assert refused(rig, rig.grant([1, 2]), source_layout=other) is Reason.LAYOUT


@by_a_server
def test_a_request_for_blocks_that_the_grant_does_not_have_is_refused_by_a_server(rig):
    grant = rig.grant([1, 2])
    assert refused(rig, grant, source_blocks=(1, 3)) is Reason.RANGE


@by_a_server
def test_a_request_under_another_fence_than_the_grants_is_refused_by_a_server(rig):
    grant = rig.grant([1, 2])
    other = dataclasses.replace(grant.fence, slot=1)
    rig.engine_slots.open(1, expiry_ms=monotonic_ms() + 60_000)
    assert refused(rig, grant, fence=other) is Reason.RANGE


def test_shared_memory_is_neither_served_nor_connected_to(rig):
    backend = ShmBackend()
    for call in (
        lambda: backend.serve(rig.source),
        lambda: backend.connect(b"", rig.target, patient()),
    ):
        with pytest.raises(PullError) as caught:
            call()
        assert caught.value.reason is Reason.NO_PATH
