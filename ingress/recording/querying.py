"""Questions about the records kept: parsed and answered (pure)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nearkv.errors import NearkvError
from nearkv.ingress.recording.records import RequestRecord

_USUAL_LIMIT = 50
_MOST_RECORDS = 1000
_USUAL_ENGINES = 20
_MOST_ENGINES = 10_000
_LIST_FIELDS = frozenset({"limit", "model", "engine", "reason", "min_error_ratio"})
_EXPLAIN_FIELDS = frozenset({"request", "limit"})


class QuestionError(NearkvError):
    """A question that cannot be answered as it was put; names the field."""


@dataclass(frozen=True, slots=True)
class RecordQuestion:
    """Which records are wanted; empty fields do not restrict."""

    limit: int = _USUAL_LIMIT
    model: str = ""
    engine: str = ""
    reason: str = ""
    min_error_ratio: float | None = None

    def takes(self, record: RequestRecord) -> bool:
        """Tell whether a record is asked for; ``engine`` is who answered or prefilled."""
        if self.model and record.model != self.model:
            return False
        if self.engine and self.engine not in (record.engine, record.prefill_engine):
            return False
        if self.reason and record.reason != self.reason:
            return False
        if self.min_error_ratio is None:
            return True
        ratio = record.first_token_error_ratio
        return ratio is not None and ratio >= self.min_error_ratio


@dataclass(frozen=True, slots=True)
class ExplainQuestion:
    """The request to be explained, and with how many engines."""

    request: str
    limit: int = _USUAL_ENGINES


def read_record_question(query: Mapping[str, str]) -> RecordQuestion:
    """Return what a query asks for; raises :class:`QuestionError`."""
    _refuse_unknown(query, _LIST_FIELDS)
    ratio = query.get("min_error_ratio")
    return RecordQuestion(
        limit=_whole(query, "limit", _USUAL_LIMIT, _MOST_RECORDS),
        model=query.get("model", ""),
        engine=query.get("engine", ""),
        reason=query.get("reason", ""),
        min_error_ratio=None if ratio is None else _share(ratio),
    )


def read_explain_question(query: Mapping[str, str]) -> ExplainQuestion:
    """Return whom a query asks about; raises :class:`QuestionError`."""
    _refuse_unknown(query, _EXPLAIN_FIELDS)
    request = query.get("request", "")
    if not request:
        raise QuestionError("request: give the X-Request-Id of a request")
    return ExplainQuestion(request, _whole(query, "limit", _USUAL_ENGINES, _MOST_ENGINES))


class Selection:
    """The first records asked for, and how many there are of them in all."""

    def __init__(self, question: RecordQuestion) -> None:
        self.found: list[RequestRecord] = []
        self.count = 0
        self._takes: Callable[[RequestRecord], bool] = question.takes
        self._limit = question.limit

    def add(self, records: Iterable[RequestRecord]) -> None:
        """Look at more records, later ones first."""
        for record in records:
            if self._takes(record):
                self.count += 1
                if len(self.found) < self._limit:
                    self.found.append(record)


def _refuse_unknown(query: Mapping[str, str], known: frozenset[str]) -> None:
    for name in query:
        if name not in known:
            raise QuestionError(
                f"{name[:40]}: no such parameter; known: {', '.join(sorted(known))}"
            )


def _whole(query: Mapping[str, str], name: str, usual: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return usual
    value = (
        int(text) if text.isascii() and text.isdecimal() and len(text) < len(str(most)) + 1 else 0
    )
    if not 1 <= value <= most:
        raise QuestionError(f"{name}: expected 1 to {most}, got {text[:20]!r}")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise QuestionError(f"min_error_ratio: expected a number from 0 up, got {text[:20]!r}")
    return value
