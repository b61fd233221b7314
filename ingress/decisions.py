"""Decision records: what was decided for a request, and everything it was decided on."""

from collections.abc import Sequence

import msgspec

from nearkv.ingress.routing import Candidate, Decision


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One decision with its inputs; ``candidates`` are as the policy saw them."""

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


def predicted_tokens(candidates: Sequence[Candidate], decision: Decision) -> int:
    """Return the cached tokens predicted for the engine chosen."""
    for candidate in candidates:
        if candidate.engine == decision.engine:
            return candidate.cached_tokens
    return 0
