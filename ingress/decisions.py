"""Decision records: what was decided for a request, and everything it was decided on."""

from collections.abc import Sequence

import msgspec

from nearkv.ingress.quoting import Quote
from nearkv.ingress.routing import Candidate, Decision


class SplitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a request was split, why, and what either way was predicted to cost.

    ``outcome`` is ``pd``, ``pull`` or ``local``. ``local_engine`` is the engine that would
    serve it alone; costs in seconds, ``None`` where they were not looked at.
    """

    outcome: str
    why: str
    local_engine: str | None = None
    local_seconds: float | None = None
    pair_seconds: float | None = None
    prefill_engine: str | None = None
    decode_engine: str | None = None


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision with its inputs; ``candidates`` are as the policy saw them.

    ``split`` is there only where the request could have been split; ``quotes``, each engine's
    terms of the cost in milliseconds, and ``first_token_ms``, the predicted time to the first
    token where one engine serves alone, only under policy ``cost``.
    """

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
    candidates: Sequence[Candidate]
    split: SplitRecord | None = None
    priority: int = 0
    quotes: Sequence[Quote] = ()
    first_token_ms: float | None = None


def predicted_tokens(candidates: Sequence[Candidate], decision: Decision) -> int:
    """Return the cached tokens predicted for the engine chosen."""
    for candidate in candidates:
        if candidate.engine == decision.engine:
            return candidate.cached_tokens
    return 0
