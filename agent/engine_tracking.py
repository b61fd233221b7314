"""What the agent knows of one engine rank, and how each observation changes it (pure).

Observations come in (event messages, replays, scrapes, failed probes), published state goes
out through the :class:`~nearkv.agent.state_log.StateLog`. No I/O, no clock: callers pass
``now`` in monotonic seconds.

Completeness of the block table is tracked as its own fact: it is complete after a replay
from 0, after a clear, and after a restart seen from its first message; it stops being so
when messages were lost for good. An incomplete table is rebuilt from what the replay still
holds, because a missed removal would otherwise stand as a false hit for ever.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nearkv.agent.block_table import BlockTable
from nearkv.agent.engine_metrics import RankReading
from nearkv.agent.errors import EventDecodeError
from nearkv.agent.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    decode_batch,
)
from nearkv.agent.prefill_speed import PrefillSpeed
from nearkv.agent.sequencing import Arrival, SequenceTracker
from nearkv.agent.state_log import StateLog
from nearkv.block_keys import KeyNamespace, root_key
from nearkv.state.model import EngineGauges, EngineInfo, EngineState, EventsState

_WIRE_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine says of itself at its start (or its configuration says for it)."""

    id: str
    url: str
    node: str
    model: str
    models: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    role: str = "both"
    group: str = ""
    key_model: str = ""
    max_model_len: int | None = None
    engine_version: str | None = None
    dp_rank: int | None = None
    kv_bytes_per_token: int | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class EventCounts:
    """Messages and events by outcome, since the agent's start."""

    messages: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    gaps: int = 0
    restarts: int = 0
    truncated_replays: int = 0
    unanswered_replays: int = 0
    undecodable: int = 0
    skipped: dict[str, int] = field(default_factory=dict)


class EngineTracker:
    """One engine rank: identity, incarnation, blocks, gauges."""

    def __init__(
        self, identity: EngineIdentity, log: StateLog, *, secret: bytes, table_limit_bytes: int
    ) -> None:
        self._log = log
        self.identity = identity
        self.table = BlockTable(
            key_model=identity.key_model, secret=secret, limit_bytes=table_limit_bytes
        )
        self.counts = EventCounts()
        self.metrics_at: float | None = None
        self.events_at: float | None = None
        self.last_reading = RankReading()
        self._key_check = root_key(KeyNamespace(identity.key_model), secret)
        self._sequence = SequenceTracker()
        self._prefill_speed = PrefillSpeed()
        self._state = EngineState.STARTING
        self._events = EventsState.OFF
        self._is_connected: bool | None = None
        self._is_replaying = False
        self._complete = False
        self._is_reduced = False
        self._incarnation = ""
        self._start_time_seconds: float | None = None
        self._restart_noticed = False
        self._admitted = True
        self._draining = False
        self.stream = 0
        """Changes when the event stream turns out to be another process's, or to be dead: what a
        replay has brought that was asked for before is of no use then."""

    @property
    def incarnation(self) -> str:
        """Changes at every engine start; empty until the engine first answered."""
        return self._incarnation

    @property
    def is_reduced(self) -> bool:
        """Whether blocks are missing from the table because it has to stay in bounds."""
        return self._is_reduced

    @property
    def info(self) -> EngineInfo:
        """What is published of this engine."""
        identity = self.identity
        return EngineInfo(
            id=identity.id,
            incarnation=self._incarnation,
            url=identity.url,
            node=identity.node,
            model=identity.model,
            models=identity.models,
            adapters=identity.adapters,
            role=identity.role,
            group=identity.group,
            state=self._state,
            events=self._events,
            block_size=self.table.block_size or self.last_reading.block_size,
            key_model=identity.key_model,
            key_check=self._key_check,
            max_model_len=identity.max_model_len,
            engine_version=identity.engine_version,
            dp_rank=identity.dp_rank,
        )

    @property
    def next_wanted(self) -> int:
        """The sequence number to ask a replay from."""
        return self._sequence.next_wanted

    # -- KV events ---------------------------------------------------------------------

    def on_message(self, seq: int, payload: bytes, now: float) -> Arrival:
        """Take a live message; it is applied only when ``IN_ORDER`` is returned.

        ``FIRST``, ``GAP`` and ``RESTART`` ask the caller for a replay first; after a
        replay, offer the message again with :meth:`on_message_after_replay`.
        """
        arrival = self._sequence.classify(seq)
        if arrival is Arrival.IN_ORDER:
            self._take(seq, payload, now)
            if seq == 0:
                self._set_complete(complete=True)
        elif arrival is Arrival.GAP:
            self.counts.gaps += 1
        elif arrival is Arrival.RESTART:
            self.restart(noticed_by_events=True)
        if arrival is Arrival.IN_ORDER or arrival is Arrival.REPEAT:
            self._sequence.saw_live(seq)
        return arrival

    def on_message_after_replay(self, seq: int, payload: bytes, now: float) -> None:
        """Take the message that made a replay necessary, whatever the replay brought."""
        arrival = self._sequence.classify(seq)
        self._sequence.saw_live(seq)
        if arrival is Arrival.GAP or arrival is Arrival.FIRST:
            # The replay did not reach up to here: what lies between is lost for good.
            self._forget_blocks()
            self._set_complete(complete=False)
        if arrival is not Arrival.REPEAT:
            self._take(seq, payload, now)
            if seq == 0:
                self._set_complete(complete=True)

    def on_replay(
        self, asked: int, messages: Sequence[tuple[int, bytes]] | None, now: float
    ) -> None:
        """Apply a replay that was asked from ``asked``; ``None`` when it went unanswered."""
        for _ in self.replaying(asked, messages, now):
            pass

    def replaying(
        self, asked: int, messages: Sequence[tuple[int, bytes]] | None, now: float
    ) -> Iterator[None]:
        """Apply a replay as :meth:`on_replay` does, one message for each step.

        Whoever stops in between calls :meth:`on_replay_given_up`.
        """
        if messages is None:
            self.counts.unanswered_replays += 1
            self._end_replay()
            return
        if asked == 0:
            self._complete = True
        expected = asked
        for seq, payload in messages:
            if seq > expected:
                # Cut off at the start, or dropped in between where the engine's send queue
                # was full (it has a limit before 0.33): lost for good.
                self.counts.truncated_replays += 1
                self._forget_blocks()
                self._complete = False
            expected = max(expected, seq + 1)
            if self._sequence.applied is None or seq > self._sequence.applied:
                self._take(seq, payload, now)
            yield
        self._end_replay()

    def on_replay_started(self) -> None:
        """Publish that the table is catching up."""
        self._is_replaying = True
        self._publish_events(EventsState.REPLAYING)

    def on_replay_given_up(self) -> None:
        """Take note that a replay is of no use any more: the engine was another process."""
        self._complete = False
        self._end_replay()

    def _end_replay(self) -> None:
        self._is_replaying = False
        self._set_complete(complete=self._complete)

    def on_subscription(self, *, connected: bool) -> None:
        """Publish that the event stream is there, or broken, or was never there.

        A broken one stays so whatever a replay brings, which may come from another port.
        """
        self._is_connected = connected
        if not connected:
            self._publish_events(EventsState.LOST)
        elif self._events is EventsState.LOST:
            self._set_complete(complete=self._complete)

    def _take(self, seq: int, payload: bytes, now: float) -> None:
        self._sequence.advance(seq)
        self.counts.messages += 1
        self.events_at = now
        try:
            batch = decode_batch(payload)
        except EventDecodeError:
            self.counts.undecodable += 1
            return
        for reason, count in batch.skipped.items():
            self.counts.skipped[reason] = self.counts.skipped.get(reason, 0) + count
        self._count_blocks(batch.events)
        block_size = self.table.block_size
        refused = self.table.counts.refused
        self.table.apply(batch.events, self._log.blocks_of(self.identity.id), now)
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self._is_reduced = False
            self._set_complete(complete=True)
        if self.table.counts.refused != refused and not self._is_reduced:
            self._is_reduced = True
            self._set_complete(complete=self._complete)
        if self.table.block_size != block_size:
            self._publish()

    def _count_blocks(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.counts.blocks_stored += len(event.handles)
            elif isinstance(event, BlockRemoved):
                self.counts.blocks_removed += len(event.handles)

    def evict(self, free_bytes: int) -> int:
        """Give up blocks used least, so that memory stays in bounds; returns the bytes freed.

        What is left is a lower bound, and published as such.
        """
        freed = self.table.evict(free_bytes, self._log.blocks_of(self.identity.id))
        if freed and not self._is_reduced:
            self._is_reduced = True
            if self._events is EventsState.LIVE:
                self._set_complete(complete=self._complete)
        return freed

    def _drop_dead(self) -> None:
        if self._is_replaying:
            self.stream += 1
        if self.table.block_count or self.table.orphan_count:
            self._forget_blocks()
            self._sequence.restart()
            self._complete = False

    def _forget_blocks(self) -> None:
        self._is_reduced = False
        self.table.clear()
        self._log.blocks_of(self.identity.id).clear()

    def _set_complete(self, *, complete: bool) -> None:
        self._complete = complete
        is_whole = complete and not self._is_reduced
        if self._is_replaying:
            self._publish_events(EventsState.REPLAYING)
        else:
            self._publish_events(EventsState.LIVE if is_whole else EventsState.PARTIAL)

    def _publish_events(self, events: EventsState) -> None:
        if self._is_connected is False:
            events = EventsState.LOST
        if self._events is not events:
            self._events = events
            self._publish()

    # -- Scrapes -----------------------------------------------------------------------

    def on_reading(
        self, reading: RankReading, *, start_time_seconds: float | None, boot: str, now: float
    ) -> bool:
        """Take a scrape; returns True when it shows that the engine is a new process."""
        restarted = self._check_start_time(start_time_seconds, boot) or (
            start_time_seconds is None and self._check_counters(reading)
        )
        self.metrics_at = now
        self.last_reading = reading
        self._prefill_speed.observe(reading)
        self._state = self._answering_state()
        if reading.awake is False and (self.table.block_count or self.table.orphan_count):
            # A sleeping engine has dropped its cache but may hold the event for ever
            # (reference/vllm.md 1.6).
            self._forget_blocks()
        self._publish()
        self._log.put_gauges(self._gauges(reading))
        return restarted

    def on_unreachable(self, *, nobody_listens: bool = False) -> None:
        """Publish that the engine does not answer.

        Its blocks stay, as it may only be busy. Where its port is closed and its event stream
        broken, the process is gone, and its blocks with it; should it turn out to be the same one
        after all, a replay brings them back.
        """
        if nobody_listens and self._events in (EventsState.LOST, EventsState.OFF):
            self._drop_dead()
        if self._state is not EngineState.UNREACHABLE:
            self._state = EngineState.UNREACHABLE
            self._publish()

    def drain(self) -> None:
        """Publish that the engine must get nothing new, for good."""
        self._draining = True
        self._state = EngineState.DRAINING
        self._publish()

    def admit(self, *, admitted: bool) -> None:
        """Say whether the engine may get requests; one that may not counts as starting."""
        if admitted is self._admitted:
            return
        self._admitted = admitted
        if self.metrics_at is not None and self._state is not EngineState.UNREACHABLE:
            self._state = self._answering_state()
            self._publish()

    def serve_adapters(self, adapters: tuple[str, ...]) -> None:
        """Take the LoRA adapters that the engine has now."""
        if adapters == self.identity.adapters:
            return
        self.identity = replace(self.identity, adapters=adapters)
        self._publish()

    def _answering_state(self) -> EngineState:
        if self._draining:
            return EngineState.DRAINING
        if not self._admitted:
            return EngineState.STARTING
        return EngineState.ASLEEP if self.last_reading.awake is False else EngineState.READY

    def restart(self, *, noticed_by_events: bool, incarnation: str | None = None) -> None:
        """Start a new incarnation: everything old is dropped."""
        self.counts.restarts += 1
        self.stream += 1
        self._restart_noticed = noticed_by_events
        if incarnation is None:
            # Told apart by a number: a name that grew would grow for ever.
            incarnation = f"{self._incarnation.partition('+')[0]}+{self.counts.restarts}"
        self._incarnation = incarnation
        self._sequence.restart()
        self._forget_blocks()
        self.table.block_size = None
        self.last_reading = RankReading()
        self._prefill_speed = PrefillSpeed()
        self._complete = False
        self._publish()

    def _check_start_time(self, start_time_seconds: float | None, boot: str) -> bool:
        if not self._incarnation:
            self._start_time_seconds = start_time_seconds
            self._incarnation = _name_incarnation(start_time_seconds, boot)
            return False
        if start_time_seconds is None or start_time_seconds == self._start_time_seconds:
            return False
        self._start_time_seconds = start_time_seconds
        if self._restart_noticed:
            # The event stream was faster; dropping the new process's blocks would be wrong.
            self._restart_noticed = False
            return False
        self.restart(
            noticed_by_events=False, incarnation=_name_incarnation(start_time_seconds, boot)
        )
        return True

    def _check_counters(self, reading: RankReading) -> bool:
        """Tell a new process by a sum that fell, where the engine does not tell its start.

        vLLM with several API servers does not, nor do older SGLangs.
        """
        before, counted = self.last_reading.prompt_tokens, reading.prompt_tokens
        if before is None or (counted is not None and counted >= before):
            return False
        self.restart(noticed_by_events=False)
        return True

    def _gauges(self, reading: RankReading) -> EngineGauges:
        total_bytes = reading.kv_total_bytes
        per_token = self.identity.kv_bytes_per_token
        if per_token is not None and reading.kv_total_tokens is not None:
            total_bytes = reading.kv_total_tokens * per_token
        return EngineGauges(
            id=self.identity.id,
            kv_used_ratio=reading.kv_used_ratio,
            kv_total_tokens=_whole(reading.kv_total_tokens),
            kv_total_bytes=_whole(total_bytes),
            requests_running=_whole(reading.requests_running),
            requests_waiting=_whole(reading.requests_waiting),
            prefix_hits_tokens=_whole(reading.prefix_hits_tokens),
            prefix_queries_tokens=_whole(reading.prefix_queries_tokens),
            prompt_tokens=_whole(reading.prompt_tokens),
            computed_tokens=_whole(reading.computed_tokens),
            prefill_seconds_per_token=self._prefill_speed.seconds_per_token,
        )

    def _publish(self) -> None:
        self._log.put_info(self.info)


def _whole(value: float | None) -> int | None:
    """Return a whole number that the wire can carry; what an engine makes up is unknown."""
    return None if value is None or abs(value) >= _WIRE_LIMIT else round(value)


def _name_incarnation(start_time_seconds: float | None, boot: str) -> str:
    """Name an incarnation by the process's start, so that it survives agent restarts."""
    return f"boot-{boot}" if start_time_seconds is None else f"{round(start_time_seconds * 1000):x}"
