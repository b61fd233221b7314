"""Who is registered: complete engines, newer boots, and what must be cleared away."""

import msgspec
import pytest

from nearkv.agent.transfer.abilities import TransferAbilities, configured_name
from nearkv.agent.transfer.compatibility import digest_compatibility
from nearkv.agent.transfer.leasing import LeaseLimits
from nearkv.agent.transfer.registry import MAX_SLOTS, Registry
from nearkv.state.model import EngineInfo, EngineState
from nearkv.transfer.errors import Reason, TransferError
from nearkv.transfer.messages import PROTOCOL, RegisterScheduler, RegisterWorker
from tests.doubles.kv_engine import KvShape


class Owner:
    """A connection that nobody speaks on."""

    def send(self, message):
        raise AssertionError(message)

    def replaced(self):
        raise AssertionError


def worker(engine="e", epoch="1", rank=0, shape=None, **fields):
    shape = shape or KvShape()
    message = RegisterWorker(
        protocol=PROTOCOL,
        engine=engine,
        epoch=epoch,
        compatibility=shape.compatibility(rank),
        memory=shape.memory,
    )
    return msgspec.structs.replace(message, **fields)


def scheduler(engine="e", epoch="1", **fields):
    message = RegisterScheduler(protocol=PROTOCOL, engine=engine, epoch=epoch, slots=8)
    return msgspec.structs.replace(message, **fields)


class Desk:
    """A registry that hands out descriptors and owners."""

    def __init__(self):
        self.registry = Registry(LeaseLimits())
        self.fd = 100

    def add(self, message):
        self.fd += 1
        owner = Owner()
        add = (
            self.registry.add_worker
            if isinstance(message, RegisterWorker)
            else self.registry.add_scheduler
        )
        return owner, self.fd, add(message, self.fd, owner)

    def refusal(self, message):
        before = dict(self.registry.engines)
        with pytest.raises(TransferError) as raised:
            self.add(message)
        assert self.registry.engines == before
        return raised.value.reason

    def is_found(self, engine="e", epoch="1"):
        try:
            return self.registry.find(engine, epoch).is_complete
        except TransferError:
            return False


@pytest.fixture
def desk():
    return Desk()


def test_an_engine_is_complete_with_its_scheduler_and_every_rank(desk):
    shape = KvShape(tp_size=2)
    for message in (worker(rank=1, shape=shape), scheduler(), worker(rank=0, shape=shape)):
        assert not desk.is_found()
        assert desk.add(message)[2] == []
    assert desk.is_found()
    memories = desk.registry.engines["e"].memories
    assert {rank: memory.fd for rank, memory in memories.items()} == {0: 103, 1: 101}
    assert {memory.slots_fd for memory in memories.values()} == {102}
    assert len({memory.key for memory in memories.values()}) == 2


def test_the_end_of_any_connection_makes_it_incomplete(desk):
    owner, _, _ = desk.add(worker())
    chief, chief_fd, _ = desk.add(scheduler())
    left = desk.registry.remove(chief)
    assert (left.fds, len(left.memories), left.leases is not None) == ([chief_fd], 1, True)
    assert not desk.is_found()
    assert desk.registry.remove(chief) is None
    left = desk.registry.remove(owner)
    assert (left.fds, left.memories, left.leases) == ([101], [], None)
    assert desk.registry.engines == {}


def test_memory_that_comes_back_has_a_new_name(desk):
    desk.add(worker())
    chief, _, _ = desk.add(scheduler())
    key = desk.registry.engines["e"].memories[0].key
    desk.registry.remove(chief)
    desk.add(scheduler())
    assert desk.registry.engines["e"].memories[0].key != key


def test_a_newer_boot_replaces_the_older_for_good(desk):
    owner, fd, _ = desk.add(worker())
    chief, chief_fd, _ = desk.add(scheduler())
    _, _, (left,) = desk.add(worker(epoch="2"))
    assert (sorted(left.fds), set(left.owners)) == (sorted([fd, chief_fd]), {owner, chief})
    assert left.leases is not None
    assert desk.refusal(worker()) is Reason.EPOCH
    assert desk.refusal(scheduler()) is Reason.EPOCH
    assert desk.registry.remove(owner) is None
    with pytest.raises(TransferError) as raised:
        desk.registry.find("e", "1")
    assert raised.value.reason is Reason.EPOCH


def test_a_boot_that_left_by_itself_may_come_back(desk):
    owner, _, _ = desk.add(worker())
    desk.registry.remove(owner)
    desk.add(worker())


def test_a_rank_that_registers_again_replaces_itself(desk):
    owner, fd, _ = desk.add(worker())
    chief, chief_fd, _ = desk.add(scheduler())
    _, _, (left,) = desk.add(worker())
    assert (left.owners, left.fds, len(left.memories)) == ([owner], [fd], 1)
    assert desk.is_found()
    _, _, (left,) = desk.add(scheduler())
    assert (left.owners, left.fds, len(left.memories)) == ([chief], [chief_fd], 1)
    assert left.leases is not None
    assert desk.is_found()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (worker(protocol=2), Reason.VERSION),
        (scheduler(protocol=0), Reason.VERSION),
        (worker(engine=""), Reason.MALFORMED),
        (worker(epoch=""), Reason.MALFORMED),
        (worker(engine="x" * 513), Reason.MALFORMED),
        (scheduler(slots=0), Reason.RANGE),
        (scheduler(slots=MAX_SLOTS + 1), Reason.RANGE),
        (worker(memory=msgspec.structs.replace(KvShape().memory, size=1)), Reason.LAYOUT),
        (worker(memory=msgspec.structs.replace(KvShape().memory, blocks=-1)), Reason.LAYOUT),
        (worker(memory=msgspec.structs.replace(KvShape().memory, layers=1)), Reason.LAYOUT),
        (worker(compatibility=KvShape(block_size=0).compatibility()), Reason.LAYOUT),
        (worker(compatibility=KvShape(block_bytes=512).compatibility()), Reason.LAYOUT),
        (worker(rank=2, shape=KvShape(tp_size=2)), Reason.TOPOLOGY),
        (worker(shape=KvShape(tp_size=0)), Reason.TOPOLOGY),
        (worker(shape=KvShape(tp_size=1000)), Reason.TOPOLOGY),
    ],
)
def test_nonsense_is_refused_with_its_reason(desk, message, reason):
    assert desk.refusal(message) is reason


def test_pipeline_stages_are_refused(desk):
    compatibility = KvShape().compatibility()
    stages = msgspec.structs.replace(compatibility.parallelism, pp_size=2)
    staged = msgspec.structs.replace(compatibility, parallelism=stages)
    assert desk.refusal(worker(compatibility=staged)) is Reason.TOPOLOGY


def test_ranks_of_one_boot_must_be_of_one_kind(desk):
    desk.add(worker(rank=0, shape=KvShape(tp_size=2)))
    other = KvShape(tp_size=2, config_hash="other")
    assert desk.refusal(worker(rank=1, shape=other)) is Reason.TOPOLOGY
    alike = worker(rank=1, shape=KvShape(tp_size=2))
    assert desk.refusal(msgspec.structs.replace(alike, tenant="t")) is Reason.TENANT


def test_there_are_only_so_many_engines(desk):
    for number in range(256):
        desk.add(worker(engine=f"e{number}"))
    assert desk.refusal(worker(engine="more")) is Reason.BUSY


def test_nobody_is_found_who_is_not_there(desk):
    with pytest.raises(TransferError) as raised:
        desk.registry.find("nobody", "1")
    assert raised.value.reason is Reason.NO_SOURCE


# -- What is published ---------------------------------------------------------------------


def test_digests_are_equal_for_ranks_and_names_and_for_nothing_else():
    plain = digest_compatibility(KvShape(tp_size=2).compatibility(0))
    assert digest_compatibility(KvShape(tp_size=2).compatibility(1)) == plain
    assert digest_compatibility(KvShape(tp_size=2, model="alias").compatibility(0)) == plain
    for change in ("config_hash", "kv_dtype", "layout"):
        assert digest_compatibility(KvShape(tp_size=2, **{change: "x"}).compatibility(0)) != plain
    for change in ("tp_size", "layers", "block_size", "block_bytes"):
        other = KvShape(**{"tp_size": 2, change: 16})
        assert digest_compatibility(other.compatibility(0)) != plain


def info(engine="e", **fields):
    return EngineInfo(
        **{
            "id": engine,
            "incarnation": "1",
            "url": "http://e",
            "model": "tiny",
            "state": EngineState.READY,
            "block_size": 16,
            "engine_version": "0.32.0",
            **fields,
        }
    )


def test_a_registered_engine_is_published_with_its_size_over_all_ranks(desk):
    shape = KvShape(tp_size=2, layers=3, block_bytes=1024, block_size=4)
    for rank in (0, 1):
        desk.add(worker(rank=rank, shape=shape))
    desk.add(scheduler())
    abilities = TransferAbilities({"e": "agent"})
    assert abilities.of(info()) is None
    abilities.set_registered(desk.registry.find("e", "1"), agent_url="http://agent")
    published = abilities.of(info())
    assert (published.mode, published.agent) == ("agent", "http://agent")
    assert published.kv_bytes_per_token == 3 * 1024 * 2 // 4
    abilities.set_gone("e")
    assert abilities.of(info()) is None


def test_an_engine_of_mode_nixl_is_published_while_it_is_ready():
    abilities = TransferAbilities({"e": "nixl"})
    published = abilities.of(info())
    assert (published.mode, published.agent) == ("nixl", "")
    assert abilities.of(info(role="decode", url="http://other")) == published
    for change in ({"engine_version": "0.31.0"}, {"model": "x"}, {"block_size": 32}):
        assert abilities.of(info(**change)).compat != published.compat
    for change in ({"state": EngineState.ASLEEP}, {"engine_version": None}, {"block_size": None}):
        assert abilities.of(info(**change)) is None


def test_ranks_of_an_engine_have_its_mode():
    abilities = TransferAbilities({"e": "off", "odd/dp1": "nixl"})
    assert (abilities.mode_of("e/dp3"), abilities.mode_of("odd/dp1")) == ("off", "nixl")
    assert abilities.mode_of("unknown") == "agent"
    assert (configured_name("e/dp12"), configured_name("e/dpx")) == ("e", "e/dpx")
