"""Watching one request from its arrival to its end; whoever serves it says what happens.

Everything here is on the way of each request, so it only notes references and times.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from nearkv.ingress.decisions import DecisionRecord
from nearkv.ingress.recording.anonymising import Anonymiser
from nearkv.ingress.recording.records import OPEN, Choice, Failure, RequestRecord

Sink = Callable[[RequestRecord], None]

_MOST_CHOICES = 16
"""A request that waits for room is decided on anew each time an engine gets some."""


@dataclass(frozen=True, slots=True)
class WatchRules:
    """What all watches share: who gets records, what is noted of names and keys, the clock."""

    sinks: Sequence[Sink]
    anonymiser: Anonymiser
    keeps_keys: bool
    clock: Callable[[], float]


class AnswerEnd(Protocol):
    """How an answer ended: what the engine reported, how many pieces came, why it broke off."""

    @property
    def reported_cached_tokens(self) -> int | None:
        """Prompt tokens that the engine had cached."""

    @property
    def output_tokens(self) -> int | None:
        """Tokens that it answered."""

    @property
    def chunks(self) -> int | None:
        """Pieces that a streamed answer came in."""

    @property
    def error(self) -> str | None:
        """The cause, where it broke off."""


class RequestWatch:
    """Notes what becomes of one request; the first :meth:`close` hands the record over."""

    __slots__ = ("_clock", "_rules", "record")

    def __init__(self, record: RequestRecord, rules: WatchRules) -> None:
        self.record = record
        self._rules = rules
        self._clock = rules.clock

    @property
    def traceparent(self) -> str:
        """The header for the engine that answers; empty: the client's own goes on."""
        trace = self.record.trace
        return "" if trace is None else trace.header

    @property
    def prefill_traceparent(self) -> str:
        """The header for an engine that only prefills; empty as above."""
        trace = self.record.trace
        return "" if trace is None else trace.prefill_header

    def accepted(
        self, *, model: str | None, stream: bool, tenant: str, prefix_ids: Sequence[str]
    ) -> None:
        """Note what is asked for, and by whom."""
        record = self.record
        record.model, record.stream, record.tenant = model or "", stream, tenant
        if prefix_ids:
            record.session = self._rules.anonymiser.name(prefix_ids[0])

    def keyed(self, keys: Sequence[int], block_tokens: int | None) -> None:
        """Note the prompt's block keys: how many, and which if they are to be written."""
        record = self.record
        record.key_count, record.block_tokens = len(keys), block_tokens
        if self._rules.keeps_keys:
            record.keys = keys

    def decided(
        self,
        decision: DecisionRecord,
        *,
        now: float,
        heard_at: Sequence[float | None] = (),
        pull: tuple[int | None, str] = (None, ""),
    ) -> None:
        """Note a decision; of very many the first and the last count."""
        choices = self.record.choices
        if len(choices) >= _MOST_CHOICES:
            choices.pop()
        choices.append(Choice(decision, self._clock(), now, heard_at, *pull))

    def queued(self) -> None:
        """Note that it waits for room from now on."""
        self.record.queued_at = self._clock()

    def prefilled(self, outcome: str) -> None:
        """Note how the first of two legs ended."""
        self.record.prefill_outcome = outcome
        self.record.prefilled_at = self._clock()

    def failed(self, engine: str, why: str, *, leg: str = "answer") -> None:
        """Note an engine that failed before its first byte."""
        self.record.failures.append(Failure(engine, leg, why, self._clock()))

    def began(self) -> None:
        """Note the first byte; once."""
        if self.record.began_at is None:
            self.record.began_at = self._clock()

    def served(
        self, engine: str, reason: str, *, predicted: int | None, prefill_engine: str = ""
    ) -> None:
        """Note who answers, why, and what it should have cached."""
        record = self.record
        record.engine, record.reason = engine, reason
        record.predicted_cached_tokens, record.prefill_engine = predicted, prefill_engine

    def ended(self, status: int, end: AnswerEnd) -> None:
        """Note the answer's end."""
        record = self.record
        record.status = status
        record.reported_cached_tokens = end.reported_cached_tokens
        record.output_tokens, record.output_chunks = end.output_tokens, end.chunks
        if end.error is not None:
            record.outcome, record.error = "broken", end.error
        elif record.outcome == OPEN:
            record.outcome = "ok" if status < HTTPStatus.BAD_REQUEST else "engine_error"

    def refused(self, reason: str, status: int, message: str) -> None:
        """Note an error of our own that the client got."""
        record = self.record
        record.outcome, record.reason = "refused", reason
        record.status, record.error = status, message[:500]

    def close(self) -> None:
        """Hand the record over; whoever left without a word went with the client."""
        record = self.record
        if record.ended_at is not None:
            return
        record.ended_at = self._clock()
        if record.outcome == OPEN:
            record.outcome, record.error = "broken", "client_gone"
        for sink in self._rules.sinks:
            sink(record)


def unwatched() -> RequestWatch:
    """Return a watch that nobody reads, for requests outside a server."""
    record = RequestRecord(request_id="", path="", at=0.0, arrived_at=0.0)
    rules = WatchRules((), Anonymiser(secrets.token_bytes(16)), False, time.perf_counter)  # noqa: FBT003 (no keys)
    return RequestWatch(record, rules)
