"""The worker's side, with an agent on a real socket."""

import pytest

from nearkv.transfer.connector.allocation import SharedMemory
from nearkv.transfer.connector.settings import read_settings
from nearkv.transfer.connector.steps import LoadJob, StepPlan
from nearkv.transfer.connector.worker_side import WorkerSide
from nearkv.transfer.manifest import (
    BlockLayout,
    Compatibility,
    ModelIdentity,
    Numerics,
    Parallelism,
)
from nearkv.transfer.memory import create_memory
from nearkv.transfer.messages import (
    MOVER_GRACE_MS,
    CancelPull,
    LeaseAddress,
    MemoryMap,
    PullDone,
    RegisterWorker,
    StartPull,
)

ADDRESS = LeaseAddress(lease="l1", engine="p", epoch="e0")
SAME = Compatibility(
    model=ModelIdentity(name="m", config_hash="h"),
    numerics=Numerics(kv_dtype="bfloat16"),
    parallelism=Parallelism(),
    layout=BlockLayout(
        name="x", block_size=32, layers=1, layer_stride=0, block_stride=0, block_bytes=4096
    ),
)
MEMORY = MemoryMap(
    size=16 * 4096, layers=1, blocks=16, layer_stride=65536, block_stride=4096, block_bytes=4096
)


class Clock:
    ms = 1000

    def __call__(self):
        return self.ms


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def side(agent_path, clock):
    memory = create_memory(MEMORY.size)
    side = WorkerSide(read_settings({"engine": "d", "socket": str(agent_path)}, {}), now_ms=clock)
    side.register(epoch="e1", shared=SharedMemory((memory.fd,)), memory=MEMORY, compatibility=SAME)
    yield side
    side.close()
    memory.close()


@pytest.fixture
def registered(side, agent, eventually):
    agent.register()
    eventually(lambda: side._client.registered)
    return side


def load(request_id="r1", blocks=(4, 5)):
    return LoadJob(request_id, ADDRESS, 1, tuple(blocks), deadline_ms=3000)


def test_it_registers_its_memory(side, agent):
    hello = agent.register()
    assert isinstance(hello, RegisterWorker)
    assert (hello.engine, hello.epoch, hello.memory) == ("d", "e1", MEMORY)
    assert hello.compatibility == SAME
    assert len(agent.fds) == 1


def test_a_load_goes_to_the_agent_and_comes_back_done(registered, agent, eventually):
    registered.begin(StepPlan(loads=[load()]))
    pull = agent.next()
    assert isinstance(pull, StartPull)
    assert (pull.address, pull.first_block, pull.target_blocks) == (ADDRESS, 1, (4, 5))
    assert pull.deadline_ms == 3000
    assert registered.take_ended().request_ids == set()
    agent.say(PullDone(id=pull.id, path="shm"))
    ended = []
    eventually(lambda: ended.append(registered.take_ended()) or ended[-1].request_ids)
    assert ended[-1].request_ids == {"r1"}
    assert ended[-1].failed_blocks == set()
    assert registered.take_ended().request_ids == set()
    assert registered.tally.take() == {"load/done": 1}


def test_a_failed_load_names_its_blocks(registered, agent, eventually):
    registered.begin(StepPlan(loads=[load()]))
    agent.say(PullDone(id=agent.next().id, reason="stale"))
    ended = []
    eventually(lambda: ended.append(registered.take_ended()) or ended[-1].request_ids)
    assert ended[-1].failed_blocks == {4, 5}
    assert registered.tally.take() == {"load/stale": 1}


def test_without_an_agent_a_load_fails_at_once(side):
    side.begin(StepPlan(loads=[load()]))
    ended = side.take_ended()
    assert (ended.request_ids, ended.failed_blocks) == ({"r1"}, {4, 5})
    assert side.tally.take() == {"load/no_agent": 1}


def test_blocks_are_not_given_back_while_a_mover_may_write(registered, agent, clock):
    registered.begin(StepPlan(loads=[load()]))
    agent.next()
    clock.ms = 3000 + MOVER_GRACE_MS
    assert registered.take_ended().request_ids == set()
    clock.ms = 3000 + 2 * MOVER_GRACE_MS
    assert registered.take_ended().request_ids == {"r1"}
    assert registered.tally.take() == {"load/agent_lost": 1}


def test_a_late_answer_changes_nothing(registered, agent, clock, eventually):
    registered.begin(StepPlan(loads=[load()]))
    pull = agent.next()
    clock.ms = 10_000
    registered.take_ended()
    registered.begin(StepPlan(loads=[load("r2")]))
    second = agent.next()
    agent.say(PullDone(id=pull.id))
    agent.say(PullDone(id=second.id))
    ended = []
    eventually(lambda: ended.append(registered.take_ended()) or ended[-1].request_ids)
    assert ended[-1].request_ids == {"r2"}


def test_a_lost_agent_ends_loads_soon_but_not_before_its_movers_are_dead(
    registered, agent, clock, eventually
):
    registered.begin(StepPlan(loads=[load()]))
    agent.next()
    agent.hang_up()
    eventually(lambda: registered._client.registered is None)
    assert registered.take_ended().request_ids == set()
    clock.ms += 999
    assert registered.take_ended().request_ids == set()
    clock.ms += 1
    assert registered.take_ended().failed_blocks == {4, 5}


@pytest.fixture
def impatient(monkeypatch):
    """Clients that give up soon on an agent that takes nothing."""
    monkeypatch.setattr("nearkv.transfer.agent_client._SEND_SECONDS", 0.2)


def test_an_agent_that_is_only_stopped_does_not_end_loads_early(
    impatient, registered, clock, eventually
):
    """Its movers are alive and write; only their deadline ends them."""
    for number in range(100):
        job = load(f"r{number}", blocks=range(20_000 * number, 20_000 * (number + 1)))
        registered.begin(StepPlan(loads=[job]))
    eventually(lambda: registered._client.registered is None)
    clock.ms = 3000 + MOVER_GRACE_MS
    ended = registered.take_ended()
    assert registered.tally.take().get("load/agent_lost") is None
    assert "r0" not in ended.request_ids
    clock.ms = 3000 + 2 * MOVER_GRACE_MS
    assert "r0" in registered.take_ended().request_ids


def test_cancelling_waits_for_the_agents_word(registered, agent, eventually):
    registered.begin(StepPlan(loads=[load()]))
    pull = agent.next()
    registered.begin(StepPlan(cancels=["r1", "never-loaded"]))
    assert agent.next() == CancelPull(id=pull.id)
    assert registered.take_ended().request_ids == set()
    agent.say(PullDone(id=pull.id, reason="cancelled"))
    eventually(lambda: registered.take_ended().request_ids == {"r1"})


def test_it_registers_again_with_an_agent_that_comes_back(registered, agent):
    agent.hang_up()
    hello = agent.register()
    assert (hello.engine, hello.memory) == ("d", MEMORY)
    assert len(agent.fds) == 2
