"""Following events over real sockets: hostile frames, long replays, too few sockets."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.event_sources import EventSource
from nearkv.agent.node_state import NodeState
from nearkv.agent.state_log import StateLog
from nearkv.agent.subscribing import (
    EventSubscription,
    Notifications,
    SubscriptionLimits,
    open_context,
)
from nearkv.state.model import EventsState
from tests.integration.stack import eventually

END = b"\xff" * 8
NOBODY = EventSource("tcp://127.0.0.1:1", "tcp://127.0.0.1:1")


def stored(*blocks):
    events = [["BlockStored", [block], None, [block, block], 2] for block in blocks]
    return msgspec.msgpack.encode([0.0, events, 0])


def number(seq):
    return seq.to_bytes(8, "big", signed=seq < 0)


def node_state():
    log = StateLog(boot="b", node="n", version="1")
    now = asyncio.get_running_loop().time
    return NodeState(log, boot="b", flush_seconds=0.0, now=now)


def tracker_in(state, name="e"):
    identity = EngineIdentity(name, "http://e", "n", "tiny", ("tiny",), key_model="tiny")
    tracker = EngineTracker(identity, state.log, secret=b"", table_limit_bytes=64 << 20)
    state.add(tracker)
    return tracker


def subscription_to(source, tracker, state, context, **limits):
    return EventSubscription(
        source,
        tracker,
        context=context,
        notify=Notifications(now=state.now, changed=state.changed, suspect=lambda: None),
        limits=SubscriptionLimits(**limits),
    )


@dataclass
class Line:
    """Both ends of a subscription; the test publishes and replays itself."""

    live: Any
    replay: Any
    tracker: EngineTracker
    task: asyncio.Task

    async def send(self, seq, payload):
        await self.live.send_multipart([b"", number(seq), payload])

    async def asked(self):
        """Wait for a question; returns how to answer it, and from where."""
        identity, *_, seq = await self.replay.recv_multipart()

        async def answer(seq, payload=b""):
            await self.replay.send_multipart([identity, b"", number(seq), payload])

        return answer, int.from_bytes(seq, "big")


@asynccontextmanager
async def line(**limits):
    context = open_context()
    live, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    replay.setsockopt(zmq.SNDHWM, 0)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (live, replay)]
    source = EventSource(*(f"tcp://127.0.0.1:{port}" for port in ports))
    state = node_state()
    tracker = tracker_in(state)
    task = asyncio.create_task(subscription_to(source, tracker, state, context, **limits).run())
    try:
        async with asyncio.timeout(30):
            await live.recv()  # the subscription
            yield Line(live, replay, tracker, task)
            assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


async def test_a_number_beyond_all_bounds_is_passed_over():
    async with line() as engine:
        answer, _ = await engine.asked()
        await answer(-1)
        for seq in (2**64 - 1, 2**63):
            await engine.send(seq, stored(seq % 7))
        await engine.send(0, stored(3))
        await eventually(lambda: engine.tracker.table.block_count == 1, what="it goes on")
        assert engine.tracker.counts.undecodable == 2
        await engine.send(5, stored(4))
        _, asked = await engine.asked()
        assert asked == 1


async def test_a_replay_with_numbers_below_zero_is_read_without_them():
    async with line() as engine:
        answer, _ = await engine.asked()
        for seq in (-5, 0, -(2**63), 1):
            await answer(seq, stored(10 + seq % 7))
        await answer(-1)
        await eventually(lambda: engine.tracker.info.events == "live", what="it is caught up")
        assert engine.tracker.next_wanted == 2
        assert engine.tracker.table.block_count == 2


async def test_a_replay_of_another_process_is_dropped():
    async with line() as engine:
        answer, _ = await engine.asked()
        await answer(0, stored(1))
        await eventually(lambda: engine.tracker.info.events == "replaying", what="it is asked")
        engine.tracker.restart(noticed_by_events=False)  # as a scrape sees it
        await answer(-1)
        answer, asked = await engine.asked()
        assert (asked, engine.tracker.table.block_count) == (0, 0)
        await answer(0, stored(2))
        await answer(-1)
        await eventually(lambda: engine.tracker.info.events == "live", what="it is caught up")
        assert engine.tracker.table.block_count == 1


async def test_a_long_replay_lets_others_have_their_turn():
    async with line() as engine:
        tracker = engine.tracker
        answer, _ = await engine.asked()
        for seq in range(1000):
            await answer(seq, stored(*range(40 * seq, 40 * seq + 40)))
        await answer(-1)
        seen = set()
        while tracker.info.events is not EventsState.LIVE:
            seen.add(tracker.table.block_count)
            await asyncio.sleep(0)
        assert tracker.table.block_count == 40_000
        assert len(seen) > 3


async def test_a_replay_that_would_fill_the_memory_is_given_up():
    async with line(replay_bytes=10_000) as engine:
        answer, _ = await engine.asked()
        for seq in range(100):
            await answer(seq, stored(*range(50)))
        await eventually(lambda: engine.tracker.counts.unanswered_replays, what="it is given up")
        assert engine.tracker.table.block_count == 0
        await engine.send(100, stored(1))
        answer, _ = await engine.asked()
        await answer(-1)
        await eventually(lambda: engine.tracker.table.block_count == 1, what="it goes on")


async def test_where_nobody_publishes_events_are_lost_whatever_a_replay_says():
    context, state = open_context(), node_state()
    tracker = tracker_in(state)
    task = asyncio.create_task(
        subscription_to(NOBODY, tracker, state, context, replay_step_seconds=0.1).run()
    )
    await eventually(lambda: tracker.counts.unanswered_replays, what="a replay was asked for")
    assert tracker.info.events is EventsState.LOST
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    context.destroy(linger=0)


async def test_there_are_sockets_for_all_ranks_of_a_large_node():
    context, state = open_context(), node_state()
    trackers = [tracker_in(state, f"e{index}") for index in range(400)]
    tasks = [
        asyncio.create_task(
            subscription_to(NOBODY, tracker, state, context, replay_step_seconds=0.1).run()
        )
        for tracker in trackers
    ]
    await eventually(
        lambda: all(tracker.counts.unanswered_replays for tracker in trackers), what="all asked"
    )
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)


async def test_who_gets_no_socket_waits_for_one():
    context, state = zmq.asyncio.Context(), node_state()
    context.set(zmq.MAX_SOCKETS, 4)
    first, second = (tracker_in(state, name) for name in "ab")
    limits = {"replay_step_seconds": 0.1, "retry_seconds": 0.05}
    tasks = []
    for tracker in (first, second):
        subscription = subscription_to(NOBODY, tracker, state, context, **limits)
        tasks.append(asyncio.create_task(subscription.run()))
        await asyncio.sleep(0)
    await eventually(lambda: first.counts.unanswered_replays, what="the first one has sockets")
    assert (second.counts.unanswered_replays, tasks[1].done()) == (0, False)
    tasks[0].cancel()
    await eventually(lambda: second.counts.unanswered_replays, what="then the second has")
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)
