"""Putting decision records together: ring, file and spans, as the settings want them."""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from nearkv.errors import NearkvError
from nearkv.ingress.recording.anonymising import Anonymiser
from nearkv.ingress.recording.api import DecisionsApi
from nearkv.ingress.recording.explaining import ExplainRules
from nearkv.ingress.recording.filing import RecordFile
from nearkv.ingress.recording.metrics import RecordMetrics, RingCollector
from nearkv.ingress.recording.outbox import Outbox
from nearkv.ingress.recording.recorder import Recorder
from nearkv.ingress.recording.records import Line, RequestRecord, ages_ms, line_of
from nearkv.ingress.recording.ring import RecordRing
from nearkv.ingress.recording.settings import DecisionSettings
from nearkv.ingress.recording.thinning import Thinning
from nearkv.ingress.recording.watching import Sink, WatchRules
from nearkv.ingress.routing import Gate
from nearkv.ingress.settings import IngressSettings, PdMode
from nearkv.ingress.tracing.context import TraceContext, parse_traceparent, start_context
from nearkv.ingress.tracing.errors import TracingUnavailableError
from nearkv.ingress.tracing.settings import TracingSettings
from nearkv.settings import secret_bytes

_FILE_BATCH = 64
_SPAN_BATCH = 32
_CLOSE_SECONDS = 2.0
_RULING = frozenset({"policy", "cost", "pd", "gate", "freshness"})
"""The settings that decisions depend on."""


class RecordFileError(NearkvError):
    """The file of records cannot be written."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The parts that others need: a recorder for entries, the ring for readers.

    ``settings_id`` names the policy and its weights.
    """

    recorder: Recorder
    ring: RecordRing
    thinning: Thinning
    settings_id: str
    outboxes: tuple[Outbox[RequestRecord], ...]

    def api(self, settings: IngressSettings) -> DecisionsApi:
        """Return the endpoints that read the records."""
        gate = Gate(settings.gate.min_free_bytes, settings.gate.min_free_ratio)
        rules = ExplainRules(self.settings_id, gate, roles=settings.pd.mode is not PdMode.OFF)
        return DecisionsApi(self.ring, self.thinning, rules)

    async def run(self, _app: web.Application) -> AsyncIterator[None]:
        """Write and export for as long as an application runs (a cleanup context)."""
        for outbox in self.outboxes:
            outbox.start()
        yield
        for outbox in self.outboxes:
            await asyncio.to_thread(outbox.close, deadline_seconds=_CLOSE_SECONDS)


def open_recording(settings: IngressSettings, registry: CollectorRegistry) -> Recording:
    """Return what records requests.

    Raises :class:`RecordFileError` where the file cannot be appended to and
    :class:`TracingUnavailableError` where tracing is on without the extra ``otel``.
    """
    own, tracing = settings.decisions, settings.tracing
    ring = RecordRing(limit_bytes=own.max_bytes)
    metrics = RecordMetrics(registry)
    thinning = Thinning(ring.add, per_second=own.per_second)
    registry.register(RingCollector(ring, thinning))
    secret = secret_bytes(settings.cluster_secret) or secrets.token_bytes(32)
    anonymiser = Anonymiser(secret)
    settings_id = identify_settings(settings)
    sinks: list[Sink] = []
    outboxes: list[Outbox[RequestRecord]] = []
    if own.max_bytes:
        sinks.append(thinning.add)
    if own.file is not None:
        outbox = _open_file(own, anonymiser, settings_id, metrics)
        outboxes.append(outbox)
        sinks.append(outbox.put)
    if tracing.enabled:
        outbox = _open_tracing(tracing, metrics)
        outboxes.append(outbox)
        sinks.append(_only_sampled(outbox))
    rules = WatchRules(
        tuple(sinks), anonymiser, own.keys and own.file is not None, time.perf_counter
    )
    start_trace = _tracer(tracing.sampling_ratio) if tracing.enabled else None
    recorder = Recorder(rules, start_trace=start_trace)
    return Recording(recorder, ring, thinning, settings_id, tuple(outboxes))


def identify_settings(settings: IngressSettings) -> str:
    """Return an id of the settings that decisions depend on: equal settings, equal ids."""
    shown = settings.model_dump(mode="json", include=set(_RULING))
    return blake2b(msgspec.json.encode(shown, order="deterministic"), digest_size=4).hexdigest()


def _open_file(
    own: DecisionSettings, anonymiser: Anonymiser, settings_id: str, metrics: RecordMetrics
) -> Outbox[RequestRecord]:
    def read(record: RequestRecord) -> Line:
        line = line_of(record, settings_id)
        choice = record.choice
        if choice is not None:
            line.candidates = choice.decision.candidates
            line.quotes = choice.decision.quotes
            line.ages_ms = ages_ms(choice)
        if own.keys:
            line.hash_ids = anonymiser.ids(record.keys)
        return line

    assert own.file is not None  # noqa: S101 (the caller has looked)
    file = RecordFile(own.file, limit_bytes=own.file_bytes, kept=own.files_kept, read=read)
    try:
        file.check()
    except OSError as error:
        raise RecordFileError(f"decisions.file: {own.file}: {error.strerror}") from error
    return Outbox(
        file.write,
        name="decisions-file",
        limit=own.max_waiting,
        batch=_FILE_BATCH,
        count=metrics.count_file,
    )


def _open_tracing(tracing: TracingSettings, metrics: RecordMetrics) -> Outbox[RequestRecord]:
    try:
        from nearkv.ingress.tracing.exporting import SpanWriter, open_otlp  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError as error:
        raise TracingUnavailableError(
            f"tracing.enabled needs OpenTelemetry ({error}): pip install 'nearkv[otel]'"
        ) from error
    writer = SpanWriter(
        open_otlp(tracing.endpoint, timeout_seconds=tracing.export_seconds), tracing.service_name
    )
    return Outbox(
        writer.write,
        name="spans",
        limit=tracing.max_waiting,
        batch=_SPAN_BATCH,
        count=metrics.count_spans,
        abandon=writer.close,
    )


def _only_sampled(outbox: Outbox[RequestRecord]) -> Sink:
    def put(record: RequestRecord) -> None:
        if record.trace is not None and record.trace.sampled:
            outbox.put(record)

    return put


def _tracer(ratio: float) -> Callable[[str], TraceContext]:
    draw = random.Random().getrandbits  # noqa: S311 (ids have to differ, not to be secret)

    def start(traceparent: str) -> TraceContext:
        parent = parse_traceparent(traceparent) if traceparent else None
        return start_context(parent, ratio, draw)

    return start
