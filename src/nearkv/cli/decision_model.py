"""What ingresses answer about requests, as far as the command line shows it.

Every field has a default, so that a newer or older ingress can still be read.
"""

import msgspec


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request's record."""

    id: str = ""
    at_seconds: float | None = None
    model: str = ""
    priority: int = 0
    prompt_tokens: int | None = None
    tokens_from: str = ""
    policy: str = ""
    settings: str = ""
    engine: str | None = None
    reason: str = ""
    rung: str = ""
    prefill_engine: str | None = None
    outcome: str = ""
    status: int | None = None
    predicted_cached_tokens: int | None = None
    reported_cached_tokens: int | None = None
    output_tokens: int | None = None
    predicted_first_token_ms: float | None = None
    first_token_ms: float | None = None
    first_byte_ms: float | None = None
    total_ms: float | None = None


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/v1/decisions`` answers."""

    decisions: tuple[RequestLine, ...]
    kept: int | None = None
    matching: int | None = None


class EngineLine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that could have served a request."""

    engine: str = ""
    chosen: bool = False
    gate: str = ""
    why: str = ""
    freshness: str = ""
    age_ms: float | None = None
    cached_tokens: int | None = None
    free_ratio: float | None = None
    queue: int | None = None
    in_flight: int | None = None
    wait_ms: float | None = None
    recompute_ms: float | None = None
    load_ms: float | None = None
    disturb_ms: float | None = None
    cost_ms: float | None = None


class RequestExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/v1/explain`` answers."""

    request: RequestLine
    engines: tuple[EngineLine, ...]
    summary: str = ""
    story: tuple[str, ...] = ()
    engines_total: int | None = None
