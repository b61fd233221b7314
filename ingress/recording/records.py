"""The record of one request, as it is gathered, and as it is read (pure).

While a request is served only references are taken; what people and files read is worked out
from them later, by :func:`line_of`. No prompt and no block key is kept, except where
``decisions.keys`` asks for keys, which are made unrecognisable before they are written.
"""

from collections.abc import Sequence

import msgspec

from nearkv.ingress.decisions import DecisionRecord
from nearkv.ingress.quoting import Quote
from nearkv.ingress.routing import Candidate
from nearkv.ingress.tracing.context import TraceContext

OPEN = "open"
_NO_ROOM = "no_kv_room"


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """One decision and when it was made.

    ``at`` is on the clock of the request's arrival; ``now`` and ``heard_at``, when each
    candidate's reading came, are on the fleet's. ``pull_bytes`` is the KV that would be moved,
    ``pull_path`` how, where two engines serve.
    """

    decision: DecisionRecord
    at: float
    now: float
    heard_at: Sequence[float | None] = ()
    pull_bytes: int | None = None
    pull_path: str = ""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An engine that failed before its first byte; ``leg`` is ``prefill`` or ``answer``."""

    engine: str
    leg: str
    why: str
    at: float


class RequestRecord(msgspec.Struct, kw_only=True, array_like=True):
    """All that is kept of one request.

    ``at`` is its arrival in Unix seconds, ``arrived_at`` the same on the clock of all other
    times here. ``session`` stands for the prefix id that the client named.
    """

    request_id: str
    path: str
    at: float
    arrived_at: float
    trace: TraceContext | None = None
    model: str = ""
    tenant: str = ""
    session: str = ""
    stream: bool = False
    block_tokens: int | None = None
    key_count: int = 0
    keys: Sequence[int] = ()
    choices: list[Choice] = []
    failures: list[Failure] = []
    queued_at: float | None = None
    prefill_outcome: str = ""
    prefilled_at: float | None = None
    began_at: float | None = None
    ended_at: float | None = None
    engine: str = ""
    prefill_engine: str = ""
    reason: str = ""
    status: int = 0
    outcome: str = OPEN
    error: str = ""
    predicted_cached_tokens: int | None = None
    reported_cached_tokens: int | None = None
    output_tokens: int | None = None
    output_chunks: int | None = None

    @property
    def choice(self) -> Choice | None:
        """The decision that counted: the last one for the engine that answered, or of all."""
        for choice in reversed(self.choices):
            if choice.decision.engine == self.engine:
                return choice
        return self.choices[-1] if self.choices else None

    @property
    def attempts(self) -> int:
        """How many engines were asked for the answer, one after the other."""
        failed = sum(failure.leg == "answer" for failure in self.failures)
        return failed + bool(self.engine)

    @property
    def predicted_first_token_ms(self) -> float | None:
        """What was predicted from dispatch to first token, for one engine alone."""
        choice = self.choice
        if choice is None or (choice.decision.split is not None and self.prefill_engine):
            return None
        return choice.decision.first_token_ms

    @property
    def first_token_ms(self) -> float | None:
        """What it took; answers that are not streamed do not show it."""
        choice = self.choice
        if choice is None or self.began_at is None or not self.stream:
            return None
        return (self.began_at - choice.at) * 1000

    @property
    def first_token_error_ratio(self) -> float | None:
        """How far the prediction was off, as a share of what it took."""
        predicted, measured = self.predicted_first_token_ms, self.first_token_ms
        if predicted is None or not measured:
            return None
        return abs(predicted - measured) / measured

    @property
    def left_queue_at(self) -> float | None:
        """When the wait for room was over, where it had to wait."""
        queued_at = self.queued_at
        if queued_at is None:
            return None
        for choice in self.choices:
            if choice.at >= queued_at and choice.decision.reason != _NO_ROOM:
                return choice.at
        return self.ended_at


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether two engines should serve, why, and the KV that was to be moved.

    ``bytes`` are predicted: what the decode engine lacked of the prefix.
    """

    outcome: str
    why: str
    source: str | None = None
    target: str | None = None
    path: str = ""
    bytes: int | None = None
    local_ms: float | None = None
    pair_ms: float | None = None
    prefill: str = ""


class FailureLine(msgspec.Struct, frozen=True, kw_only=True):
    """A failure, with the time since the request's arrival."""

    engine: str
    leg: str
    why: str
    after_ms: float


class Line(msgspec.Struct, kw_only=True):
    """A record to be read: times in milliseconds, unknown is null; see docs/http-api.md.

    ``hash_ids``, ``candidates``, ``quotes`` and ``ages_ms`` are left out where not wanted.
    """

    id: str
    at_seconds: float
    path: str
    model: str
    tenant: str
    session: str
    stream: bool
    priority: int
    prompt_tokens: int | None
    tokens_from: str
    key_count: int
    block_tokens: int | None
    policy: str
    settings: str
    engine: str | None
    reason: str
    rung: str
    prefill_engine: str | None
    attempts: int
    outcome: str
    status: int
    error: str
    predicted_cached_tokens: int | None
    reported_cached_tokens: int | None
    output_tokens: int | None
    output_chunks: int | None
    predicted_first_token_ms: float | None
    first_token_ms: float | None
    first_token_error_ratio: float | None
    routed_ms: float | None
    waited_ms: float | None
    prefill_ms: float | None
    first_byte_ms: float | None
    total_ms: float | None
    failures: list[FailureLine]
    transfer: Transfer | None
    trace_id: str | None
    candidates: Sequence[Candidate] | msgspec.UnsetType = msgspec.UNSET
    quotes: Sequence[Quote] | msgspec.UnsetType = msgspec.UNSET
    ages_ms: Sequence[float | None] | msgspec.UnsetType = msgspec.UNSET
    hash_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


def line_of(record: RequestRecord, settings: str) -> Line:
    """Return a record to be read; ``settings`` names the weights it was decided by."""
    choice = record.choice
    decision = None if choice is None else choice.decision
    return Line(
        id=record.request_id,
        at_seconds=round(record.at, 6),
        path=record.path,
        model=record.model,
        tenant=record.tenant,
        session=record.session,
        stream=record.stream,
        priority=0 if decision is None else decision.priority,
        prompt_tokens=None if decision is None else decision.prompt_tokens,
        tokens_from="none" if decision is None else decision.tokens_from,
        key_count=record.key_count,
        block_tokens=record.block_tokens,
        policy="" if decision is None else decision.policy,
        settings=settings,
        engine=record.engine or None,
        reason=record.reason,
        rung="" if decision is None else decision.rung,
        prefill_engine=record.prefill_engine or None,
        attempts=record.attempts,
        outcome=record.outcome,
        status=record.status,
        error=record.error,
        predicted_cached_tokens=record.predicted_cached_tokens,
        reported_cached_tokens=record.reported_cached_tokens,
        output_tokens=record.output_tokens,
        output_chunks=record.output_chunks,
        predicted_first_token_ms=_rounded(record.predicted_first_token_ms),
        first_token_ms=_rounded(record.first_token_ms),
        first_token_error_ratio=_rounded(record.first_token_error_ratio),
        routed_ms=_between(record.arrived_at, None if choice is None else choice.at),
        waited_ms=_between(record.queued_at, record.left_queue_at),
        prefill_ms=_between(None if choice is None else choice.at, record.prefilled_at),
        first_byte_ms=_between(record.arrived_at, record.began_at),
        total_ms=_between(record.arrived_at, record.ended_at),
        failures=[
            FailureLine(
                engine=failure.engine,
                leg=failure.leg,
                why=failure.why,
                after_ms=round((failure.at - record.arrived_at) * 1000, 3),
            )
            for failure in record.failures
        ],
        transfer=None if choice is None else _transfer(choice, record),
        trace_id=None if record.trace is None else f"{record.trace.trace_id:032x}",
    )


def ages_ms(choice: Choice) -> list[float | None]:
    """Return the age of each candidate's reading when the decision was made."""
    return [None if at is None else round((choice.now - at) * 1000, 1) for at in choice.heard_at]


def _transfer(choice: Choice, record: RequestRecord) -> Transfer | None:
    split = choice.decision.split
    if split is None:
        return None
    is_pair = split.outcome != "local"
    return Transfer(
        outcome=split.outcome,
        why=split.why,
        source=split.prefill_engine if is_pair else None,
        target=split.decode_engine if is_pair else None,
        path=choice.pull_path,
        bytes=choice.pull_bytes,
        local_ms=_milliseconds(split.local_seconds),
        pair_ms=_milliseconds(split.pair_seconds),
        prefill=record.prefill_outcome,
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round((end - start) * 1000, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
