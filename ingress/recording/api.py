"""``GET /v1/decisions`` and ``GET /v1/explain``: this replica's own records."""

import asyncio
import time
from collections.abc import Callable
from itertools import islice

import msgspec
from aiohttp import web

from nearkv.ingress.answers import ENGINE_HEADER, NO_ENGINE, REASON_HEADER
from nearkv.ingress.recording.explaining import ExplainRules, explain
from nearkv.ingress.recording.querying import (
    QuestionError,
    Selection,
    read_explain_question,
    read_record_question,
)
from nearkv.ingress.recording.records import line_of
from nearkv.ingress.recording.ring import RecordRing
from nearkv.ingress.recording.thinning import Thinning

_RECORDS_AT_ONCE = 200


class DecisionsApi:
    """Answers questions about the records kept; ``wall`` is Unix seconds."""

    def __init__(
        self,
        ring: RecordRing,
        thinning: Thinning,
        rules: ExplainRules,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ring = ring
        self._thinning = thinning
        self._rules = rules
        self._wall = wall

    async def decisions(self, request: web.Request) -> web.Response:
        """List records, latest first, without their candidates."""
        try:
            question = read_record_question(request.query)
        except QuestionError as error:
            return _refusal(400, "bad_request", str(error))
        selection = Selection(question)
        records = self._ring.latest()
        while some := list(islice(records, _RECORDS_AT_ONCE)):
            selection.add(some)
            await asyncio.sleep(0)  # requests go on in between
        lines = [line_of(record, self._rules.settings_id) for record in selection.found]
        return _json({"kept": len(self._ring), "matching": selection.count, "decisions": lines})

    async def explain(self, request: web.Request) -> web.Response:
        """Say why one request went where it did."""
        try:
            question = read_explain_question(request.query)
        except QuestionError as error:
            return _refusal(400, "bad_request", str(error))
        record = self._ring.get(question.request)
        if record is None:
            return _refusal(404, "unknown_request", self._not_found(question.request))
        return _json(explain(record, self._rules, limit=question.limit))

    def _not_found(self, request_id: str) -> str:
        """Say that a request is unknown, and how long records live."""
        said = f"no record of request {request_id[:128]!r}: it is unknown here, still running, or"
        oldest = self._ring.oldest
        if not self._ring.limit_bytes:
            return f"{said} not kept (decisions.max_bytes is 0)"
        if oldest is None:
            return f"{said} gone; no request has ended yet"
        if self._thinning.skipped:
            said += f" one of {self._thinning.skipped} not kept (decisions.per_second), or"
        age_seconds = max(0.0, self._wall() - oldest.at)
        return (
            f"{said} too old; this replica keeps its last {len(self._ring)} requests "
            f"({age_seconds:.0f} s) in {self._ring.limit_bytes} bytes (decisions.max_bytes)"
        )


def _refusal(status: int, reason: str, message: str) -> web.Response:
    return _json({"error": message, "reason": reason}, status)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        content_type="application/json",
        headers={ENGINE_HEADER: NO_ENGINE, REASON_HEADER: "own_answer"},
    )
