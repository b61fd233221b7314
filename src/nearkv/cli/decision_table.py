"""The text of ``nearkv decisions`` and ``nearkv explain request`` (pure).

What is not known is "-", never zero.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from nearkv.cli.decision_model import EngineLine, RequestExplanation, RequestLine
from nearkv.cli.status_table import UNKNOWN

_SECOND_MS = 1000.0
_LIST = (
    *("AT", "REQUEST", "MODEL", "TOKENS", "CACHED", "ENGINE", "REASON", "OUTCOME"),
    *("FIRST TOKEN", "PREDICTED", "TOTAL"),
)
_ENGINES = (
    *("ENGINE", "CACHED", "FREE", "LOAD", "STATE", "AGE"),
    *("WAIT", "COMPUTE", "BRING BACK", "TROUBLE", "COST", "WHY"),
)


def list_table(lines: Sequence[RequestLine]) -> Table:
    """Return a table of requests."""
    return _table(_LIST, [(_cells(line), "") for line in lines])


def engine_table(engines: Sequence[EngineLine]) -> Table:
    """Return a table of the engines that a request could have gone to, with the reasons."""
    rows = [(_engine_cells(engine), "bold" if engine.chosen else "") for engine in engines]
    return _table(_ENGINES, rows)


def headline(explanation: RequestExplanation) -> Iterator[str]:
    """Yield what is said of a request before the engines."""
    request = explanation.request
    yield f"{request.id}  {_at(request.at_seconds)}  {request.model or UNKNOWN}"
    yield explanation.summary
    yield (
        f"prompt: {_count(request.prompt_tokens)} tokens (from {request.tokens_from or UNKNOWN}), "
        f"priority {request.priority}; policy {request.policy or UNKNOWN}, "
        f"settings {request.settings or UNKNOWN}, state {request.rung or UNKNOWN}"
    )


def _cells(line: RequestLine) -> tuple[str, ...]:
    engine = line.engine or UNKNOWN
    return (
        _at(line.at_seconds),
        line.id,
        line.model or UNKNOWN,
        _count(line.prompt_tokens),
        _cached(line),
        f"{line.prefill_engine} > {engine}" if line.prefill_engine else engine,
        line.reason or UNKNOWN,
        line.outcome if line.outcome == "ok" else f"{line.outcome} {line.status or ''}".strip(),
        format_ms(line.first_token_ms),
        format_ms(line.predicted_first_token_ms),
        format_ms(line.total_ms),
    )


def _cached(line: RequestLine) -> str:
    """Say how many tokens were cached, and what was predicted where that differs."""
    reported, predicted = line.reported_cached_tokens, line.predicted_cached_tokens
    if reported is None:
        return UNKNOWN if predicted is None else f"~{predicted}"
    return str(reported) if predicted in (None, reported) else f"{reported} (~{predicted})"


def _engine_cells(engine: EngineLine) -> tuple[str, ...]:
    return (
        engine.engine,
        _count(engine.cached_tokens),
        UNKNOWN if engine.free_ratio is None else f"{engine.free_ratio:.0%}",
        str(max(engine.queue or 0, engine.in_flight or 0)),
        engine.gate or engine.freshness or UNKNOWN,
        format_ms(engine.age_ms),
        format_ms(engine.wait_ms),
        format_ms(engine.recompute_ms),
        format_ms(engine.load_ms),
        format_ms(engine.disturb_ms),
        format_ms(engine.cost_ms),
        engine.why,
    )


def format_ms(value: float | None) -> str:
    """Return a time for people."""
    if value is None:
        return UNKNOWN
    if value >= _SECOND_MS:
        return f"{value / _SECOND_MS:.2f} s"
    return f"{value:.3g} ms"


def _at(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _table(columns: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for cells, style in rows:
        # Text, not str: ids come from clients and may look like markup.
        table.add_row(*(Text(cell, style) for cell in cells))
    return table
