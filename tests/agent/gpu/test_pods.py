"""Which pod has which GPU: the kubelet's answers, read from the bytes on."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.agent.gpu.errors import PodResourcesError
from nearkv.agent.gpu.model import Device, MigInstance
from nearkv.agent.gpu.pod_devices import PodName, device_of, devices_named, pods_by_device
from nearkv.agent.gpu.pod_messages import (
    GivenDevice,
    PodDevices,
    decode_allocatable,
    decode_list,
)
from nearkv.agent.gpu.pod_resources import PodResources
from nearkv.agent.gpu.pod_watching import PodWatch
from nearkv.protobuf import WireError
from tests.agent.gpu.kubelet import (
    Kubelet,
    claim,
    container,
    number,
    plugin_devices,
    pod,
    pod_list,
    serving,
)
from tests.doubles.nvml.hosts import mig_uuid_of, uuid_of

GPU = "nvidia.com/gpu"


# -- The wire format ---------------------------------------------------------------------------


def test_bytes_that_were_written_by_hand():
    # pod_resources { name: "a" namespace: "b" containers { devices {
    #   resource_name: "nvidia.com/gpu" device_ids: "GPU-1" } } }
    data = bytes.fromhex(
        "0a21 0a0161 120162 1a19 1217 0a0e 6e76696469612e636f6d2f677075 1205 4750552d31"
    )
    assert decode_list(data) == (PodDevices("b", "a", (GivenDevice(GPU, "GPU-1"),)),)


@given(st.binary(max_size=200))
def test_any_bytes_give_an_answer_or_an_error(data):
    for decode in (decode_list, decode_allocatable):
        with suppress(WireError):
            decode(data)


def test_pods_without_devices_and_fields_of_the_future_are_passed_over():
    data = pod_list(
        pod("idle", container()),
        pod("busy", container(plugin_devices(GPU, "a", "b")), container(plugin_devices(GPU, "c"))),
    ) + number(99, 7)
    (busy,) = decode_list(data)
    assert (busy.name, [given.device for given in busy.devices]) == ("busy", ["a", "b", "c"])


def test_a_claim_of_two_containers_counts_once():
    both = [container(claims=[claim("gpu.nvidia.com", "gpu-0")])] * 2
    (found,) = decode_list(pod_list(pod("dra", *both)))
    assert found.devices == (GivenDevice("gpu.nvidia.com", "gpu-0"),)


# -- Names of devices --------------------------------------------------------------------------

PART = MigInstance(index=0, uuid=mig_uuid_of(1, 0), gpu_instance=5)
DEVICES = (
    Device(index=0, uuid=uuid_of(0), minor=1),
    Device(index=1, uuid=uuid_of(1), minor=0, mig_instances=(PART,)),
)


@pytest.mark.parametrize(
    ("resource", "name", "device"),
    [
        (GPU, uuid_of(0), uuid_of(0)),
        (GPU, f"{uuid_of(0)}::3", uuid_of(0)),
        ("nvidia.com/gpu.shared", f"{uuid_of(1)}::0", uuid_of(1)),
        (GPU, "0", uuid_of(0)),
        (GPU, "1", uuid_of(1)),
        ("nvidia.com/mig-1g.10gb", mig_uuid_of(1, 0), mig_uuid_of(1, 0)),
        ("nvidia.com/mig-1g.10gb", f"MIG-{uuid_of(1)}/5/0", mig_uuid_of(1, 0)),
        (GPU, "nvidia0", uuid_of(1)),
        (GPU, "nvidia0/gi5", mig_uuid_of(1, 0)),
        (GPU, "nvidia1/vgpu2", uuid_of(0)),
        (GPU, "nvidia0/gi6", None),
        ("gpu.nvidia.com", "gpu-0", uuid_of(1)),
        ("gpu.nvidia.com", "gpu-7", None),
        (GPU, "GPU-other", None),
        (GPU, "7", None),
        ("rdma/hca", uuid_of(0), None),
        ("intel.com/gpu", "0", None),
    ],
)
def test_names_of_devices(resource, name, device):
    assert device_of(DEVICES, GivenDevice(resource, name)) == device


def test_a_device_may_have_several_pods():
    pods = [
        PodDevices("ns", "one", (GivenDevice(GPU, f"{uuid_of(0)}::0"),)),
        PodDevices("ns", "two", (GivenDevice(GPU, f"{uuid_of(0)}::1"), GivenDevice("x/y", "0"))),
    ]
    found = pods_by_device(DEVICES, pods)
    assert found == {uuid_of(0): (PodName("ns", "one"), PodName("ns", "two"))}
    assert devices_named(DEVICES, [GivenDevice(GPU, "1"), GivenDevice(GPU, "9")]) == {uuid_of(1)}


# -- A real server -----------------------------------------------------------------------------


@pytest.fixture
async def kubelet(short_path):
    async with serving(Kubelet(), short_path / "kubelet.sock") as running:
        running.socket = short_path / "kubelet.sock"
        yield running


@pytest.fixture
async def resources(kubelet):
    client = PodResources(kubelet.socket, timeout_seconds=5.0)
    yield client
    await client.close()


async def test_list_and_allocatable(kubelet, resources):
    kubelet.pods = pod_list(pod("engine-0", container(plugin_devices(GPU, uuid_of(0)))))
    kubelet.allocatable = pod_list(plugin_devices(GPU, uuid_of(0), uuid_of(1)))
    (found,) = await resources.pods()
    assert (found.namespace, found.name) == ("default", "engine-0")
    assert [given.device for given in await resources.allocatable()] == [uuid_of(0), uuid_of(1)]
    assert kubelet.asked == ["List", "GetAllocatableResources"]


async def test_an_answer_of_more_than_grpcs_own_limit(kubelet, resources):
    one = pod("p" * 200, container(plugin_devices(GPU, "x" * 1000)))
    kubelet.pods = pod_list(*[one] * 5000)
    assert len(await resources.pods()) == 5000
    assert len(kubelet.pods) > 5 << 20


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("UNIMPLEMENTED", "unimplemented"), ("UNAVAILABLE", "unavailable"), ("INTERNAL", "failed")],
)
async def test_refusals(kubelet, resources, answer, reason):
    kubelet.pods = answer
    with pytest.raises(PodResourcesError) as caught:
        await resources.pods()
    assert caught.value.reason == reason


async def test_nonsense(kubelet, resources):
    kubelet.pods = b"\x0b"
    with pytest.raises(PodResourcesError) as caught:
        await resources.pods()
    assert caught.value.reason == "unreadable"


async def test_a_kubelet_that_does_not_answer(kubelet):
    kubelet.pods = None
    client = PodResources(kubelet.socket, timeout_seconds=0.1)
    with pytest.raises(PodResourcesError) as caught:
        await client.pods()
    assert caught.value.reason == "deadline_exceeded"
    await client.close()
    kubelet.pods = b""


async def test_no_socket(short_path):
    with pytest.raises(PodResourcesError) as caught:
        await PodResources(short_path / "none", timeout_seconds=1.0).pods()
    assert caught.value.reason == "no_socket"


def watch_of(resources, clock):
    return PodWatch(resources, interval_seconds=10.0, is_needed=lambda: True, now=lambda: clock[0])


async def test_what_is_known_is_kept_until_it_is_stale(kubelet, resources):
    clock = [0.0]
    watch = watch_of(resources, clock)
    assert (watch.missing, watch.pods_of(DEVICES)) == ("not_read", None)
    kubelet.pods = pod_list(pod("one", container(plugin_devices(GPU, "0"))))
    kubelet.allocatable = pod_list(plugin_devices(GPU, "0"))
    await watch.ask()
    assert watch.pods_of(DEVICES) == {uuid_of(0): (PodName("default", "one"),)}
    assert watch.allocatable_of(DEVICES) == {uuid_of(0)}
    kubelet.pods = "UNAVAILABLE"
    await watch.ask()
    assert watch.failures == {"unavailable": 1}
    assert watch.pods_of(DEVICES)
    clock[0] = 61.0
    assert (watch.missing, watch.pods_of(DEVICES)) == ("unavailable", None)
    kubelet.pods = b""
    await watch.ask()
    assert (watch.missing, watch.pods_of(DEVICES)) == (None, {})


async def test_a_kubelet_without_allocatable_still_tells_the_pods(kubelet, resources):
    watch = watch_of(resources, [0.0])
    kubelet.allocatable = "UNIMPLEMENTED"
    await watch.ask()
    assert watch.pods_of(DEVICES) == {}
    assert watch.allocatable_of(DEVICES) is None
    assert watch.failures == {"allocatable_unimplemented": 1}


async def test_a_kubelet_that_was_restarted(short_path):
    socket = short_path / "kubelet.sock"
    client = PodResources(socket, timeout_seconds=5.0)
    async with serving(Kubelet(), socket):
        assert await client.pods() == ()
    socket.unlink(missing_ok=True)
    with pytest.raises(PodResourcesError):
        await client.pods()
    async with serving(Kubelet(), socket):
        for _ in range(50):
            try:
                assert await client.pods() == ()
                break
            except PodResourcesError:
                continue
        else:
            pytest.fail("it was not found again")
    await client.close()
