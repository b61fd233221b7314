"""Decision records: what was decided for a request, and everything it was decided on."""

import msgspec

from nearkv.ingress.routing import Candidate, Decision


class CandidateRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A candidate as it stood."""

    engine: str
    freshness: str
    cached_tokens: int = 0
    free_ratio: float | None = None
    queue: int | None = None
    in_flight: int = 0
    hinted: bool = False
    avoid: str = ""


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One decision with its inputs."""

    request_id: str
    path: str
    model: str
    policy: str
    engine: str | None
    reason: str
    rung: str
    attempt: int
    prompt_tokens: int | None
    predicted_cached_tokens: int
    tokens_from: str
    candidates: tuple[CandidateRecord, ...]


def record_candidates(candidates: list[Candidate]) -> tuple[CandidateRecord, ...]:
    """Return the candidates in the form they are recorded in."""
    return tuple(
        CandidateRecord(
            engine=c.engine,
            freshness=c.freshness.value,
            cached_tokens=c.cached_tokens,
            free_ratio=None if c.free_ratio is None else round(c.free_ratio, 4),
            queue=c.queue,
            in_flight=c.in_flight,
            hinted=c.hinted,
            avoid=c.avoid,
        )
        for c in candidates
    )


def predicted_tokens(candidates: list[Candidate], decision: Decision) -> int:
    """Return the cached tokens predicted for the engine chosen."""
    return next((c.cached_tokens for c in candidates if c.engine == decision.engine), 0)
