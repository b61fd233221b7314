"""What is the device backend's own: see ``test_contract_on_devices`` for the rest."""

import numpy as np
import pytest

from nearkv.transfer.backends.contract import Region, Source
from nearkv.transfer.backends.shm import ShmBackend
from nearkv.transfer.cuda.device_backend import CudaBackend
from nearkv.transfer.cuda.driver import Driver, load_driver
from nearkv.transfer.cuda.regions import DeviceHandle, open_device_region
from nearkv.transfer.errors import LayoutError, PullError, Reason
from tests.transfer.backends.kinds import CHUNK_BYTES
from tests.transfer.backends.rig import HookedStop, layout, patient
from tests.transfer.cuda.device_rig import BrokenError
from tests.transfer.cuda.fake_cuda import Machine

BLOCK = 4096
MANY = layout(layers=4, blocks=64, block_bytes=BLOCK)


def copies(library):
    return library.calls.count("cuMemcpyDtoDAsync_v2")


def test_blocks_that_lie_together_are_one_copy(make_rig, kind):
    rig = make_rig(layout(layers=3, blocks=16, block_bytes=512))
    report = rig.pull(rig.grant(range(8)), range(4, 12))
    assert (report.pieces, copies(kind.library)) == (3, 3)
    report = rig.pull(rig.grant([1, 3, 5], slot=1), [1, 3, 5])
    assert (report.pieces, copies(kind.library)) == (9, 12)


def test_no_copy_is_under_way_when_a_pull_was_cancelled(make_rig, kind):
    rig = make_rig(MANY)
    stop = HookedStop(patient().deadline_ms, nth=3)
    stop.hook = stop.cancel
    grant = rig.grant(range(64))
    link = rig.connect(grant)
    with pytest.raises(PullError) as caught:
        link.pull(rig.request(grant, range(64)), stop)
    assert caught.value.reason is Reason.CANCELLED
    assert not any(kind.library.streams.values())
    done = int((rig.target_bytes == rig.source_bytes).sum())
    assert 2 * CHUNK_BYTES <= done < MANY.size  # both batches that were queued were waited for


def test_a_copy_that_cannot_be_queued_fails_the_pull_and_the_others_are_waited_for(make_rig, kind):
    rig = make_rig(MANY)
    asked = []
    kind.library.fail["cuMemcpyDtoDAsync_v2"] = lambda: asked.append(1) or (len(asked) > 5) * 1
    grant = rig.grant([0, 2, 4, 6, 8])
    with pytest.raises(PullError, match="cuMemcpyDtoDAsync_v2: CUDA error 1") as caught:
        rig.pull(grant, [0, 2, 4, 6, 8])
    assert caught.value.reason is Reason.NO_PATH
    assert not any(kind.library.streams.values())


def test_the_fence_is_looked_at_after_the_last_byte_was_copied(make_rig, kind):
    """The device is late: the lease ends between the last look at ``stop`` and the copy's end."""
    rig = make_rig()
    grant = rig.grant([1, 2])
    real = kind.library.fail

    def close_slot():
        real.clear()
        rig.engine_slots.close(0)
        return 0

    real["cuEventQuery"] = close_slot
    with pytest.raises(Exception, match="slot 0 changed") as caught:
        rig.pull(grant, [1, 2])
    assert caught.value.reason is Reason.STALE


def test_a_mover_whose_context_broke_ends_instead_of_answering(make_rig, kind):
    rig = make_rig()
    grant = rig.grant([1])
    link = rig.connect(grant)
    kind.library.fail["cuEventQuery"] = 719
    with pytest.raises(BrokenError, match="LAUNCH_FAILED"):
        link.pull(rig.request(grant, [0]), patient())
    kind.library.fail.clear()


def test_a_driver_that_knows_no_read_only_memory_pulls_as_well(kind, make_rig):
    kind.library.read_only = False
    rig = make_rig()
    rig.pull(rig.grant([1, 2]), [2, 1])
    assert (rig.target_bytes == rig.expected([1, 2], [2, 1])).all()


def test_a_request_that_goes_by_another_layout_than_the_sources_is_refused(make_rig):
    rig = make_rig()
    grant = rig.grant([1])
    other = layout(blocks=17)
    with pytest.raises(LayoutError, match="not the source's"):
        rig.connect(grant).pull(rig.request(grant, [0], source_layout=other), patient())


def test_one_device_pulls_from_another(make_rig):
    rig = make_rig(ordinals=(0, 1))
    report = rig.pull(rig.grant([1, 2]), [2, 1])
    assert (rig.target_bytes == rig.expected([1, 2], [2, 1])).all()
    assert (report.path.name, report.path.detail) == ("cuda", "from device to device")


def test_devices_that_cannot_reach_each_other_are_no_path(make_rig, machine):
    machine.devices[1].peers = False
    rig = make_rig(ordinals=(0, 1))
    grant = rig.grant([1])
    with pytest.raises(PullError, match="cannot reach the other's memory") as caught:
        rig.connect(grant)
    assert caught.value.reason is Reason.NO_PATH


def test_engines_that_share_by_handle_pull_as_well(machine, make_rig):
    for device in machine.devices:
        device.descriptors = 0
    rig = make_rig()
    rig.pull(rig.grant([5]), [6])
    assert (rig.target_bytes == rig.expected([5], [6])).all()
    assert [engine.kv.kind for engine in rig.engines] == ["cuda_ipc", "cuda_ipc"]


def test_handles_do_not_reach_from_one_device_to_another(machine, make_rig):
    for device in machine.devices:
        device.descriptors = 0
    rig = make_rig(ordinals=(0, 1))
    with pytest.raises(PullError, match="on its own device only") as caught:
        rig.connect(rig.grant([5]))
    assert caught.value.reason is Reason.NO_PATH


def test_host_memory_is_refused_on_either_side(make_rig):
    rig = make_rig()
    host = Region(memoryview(bytearray(rig.target.layout.size)), rig.target.layout)
    for source, target in (
        (rig.source, host),
        (Source(host, rig.source.slots), rig.target),
    ):
        with pytest.raises(PullError, match="does not lie on a device") as caught:
            rig.backend.link(source, target)
        assert caught.value.reason is Reason.NO_PATH


def test_a_target_mapped_for_reading_only_is_refused(make_rig):
    rig = make_rig()
    with pytest.raises(PullError, match="for reading only") as caught:
        rig.backend.link(rig.source, rig.source.region)
    assert caught.value.reason is Reason.MEMORY


def test_a_transport_that_knows_no_devices_refuses_device_memory(make_rig):
    rig = make_rig()
    with pytest.raises(PullError, match="moves host memory only") as caught:
        ShmBackend().link(rig.source, rig.target)
    assert caught.value.reason is Reason.NO_PATH
    assert "DeviceRegion" in repr(rig.target)


def test_nothing_is_served(make_rig):
    rig = make_rig()
    for call in (
        lambda: rig.backend.serve(rig.source),
        lambda: rig.backend.connect(b"", rig.target, patient()),
    ):
        with pytest.raises(PullError, match="handed over") as caught:
            call()
        assert caught.value.reason is Reason.NO_PATH


def test_a_region_on_a_device_that_is_not_seen_is_refused(mover, make_rig):
    rig = make_rig()
    handle = DeviceHandle(kind="cuda_vmm", device="GPU-elsewhere", fd=0)
    with pytest.raises(PullError, match="not among the 2 seen here"):
        open_device_region(mover, handle, rig.target.layout, writable=True)


def test_a_kind_that_is_no_device_memory_is_refused(mover, machine):
    handle = DeviceHandle(kind="memfd", device=machine.devices[0].name)
    with pytest.raises(PullError, match="memory_kind: 'memfd' is no device memory"):
        open_device_region(mover, handle, layout(), writable=True)


def test_the_probe_tells_devices_and_how_they_share(kind, machine):
    machine.devices[1].descriptors = 0
    probe = kind.make().probe()
    assert probe.usable
    assert probe.detail == "CUDA 12.8: Fake 0 (memory by descriptor), Fake 1 (legacy IPC only)"
    assert not kind.library.contexts


def test_the_probe_of_a_host_without_a_driver_says_so():
    probe = CudaBackend(load=lambda: load_driver("libcuda-of-no-machine.so.1")).probe()
    assert not probe.usable
    assert "no CUDA driver here" in probe.detail


def test_the_probe_of_a_host_without_devices_says_so():
    driver = Driver(Machine(devices=0).process())
    driver.initialise()
    probe = CudaBackend(load=lambda: driver).probe()
    assert (probe.usable, probe.detail) == (False, "no device is visible here")


def test_pulls_on_several_threads_have_streams_of_their_own(make_rig, kind):
    rig = make_rig(MANY)
    grants = [rig.grant(range(32), slot=0), rig.grant(range(32, 64), slot=1)]
    links = [rig.connect(grant) for grant in grants]
    assert len(kind.library.streams) == 2
    for link, grant in zip(links, grants, strict=True):
        link.pull(rig.request(grant, grant.block_ids), patient())
    assert np.array_equal(rig.target_bytes, rig.source_bytes)
