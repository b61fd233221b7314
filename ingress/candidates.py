"""From the fleet to candidates: what the router sees for one request (pure)."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from nearkv.freshness import Freshness, FreshnessLimits
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.hints import PrefixHint
from nearkv.ingress.ledger import EngineLoad, Ledger
from nearkv.ingress.parity import ParityCheck
from nearkv.ingress.routing import Candidate
from nearkv.ingress.suspects import Suspects
from nearkv.state.model import EngineState


class PromptView(msgspec.Struct, frozen=True):
    """What one request's prompt means to the fleet: blocks matched per engine, and a hint."""

    token_count: int
    depths: Mapping[str, int]
    hint: PrefixHint | None = None
    tried: Collection[str] = ()


class CandidateBuilder:
    """Combines agents' readings with this replica's own knowledge."""

    def __init__(
        self, ledger: Ledger, parity: ParityCheck, suspects: Suspects, limits: FreshnessLimits
    ) -> None:
        self._ledger = ledger
        self._parity = parity
        self._suspects = suspects
        self._limits = limits

    def build(self, views: Iterable[EngineView], prompt: PromptView, now: float) -> list[Candidate]:
        """Return one candidate for each engine not tried yet."""
        return [
            self._candidate(view, prompt, now) for view in views if view.info.id not in prompt.tried
        ]

    def _candidate(self, view: EngineView, prompt: PromptView, now: float) -> Candidate:
        info = view.info
        age_seconds = view.age_seconds(now)
        freshness = self._limits.classify(age_seconds)
        in_flight = self._ledger.at(info.id, info.incarnation)
        depth = prompt.depths.get(info.id, 0)
        gauges = view.gauges
        queue = None
        if gauges is not None and gauges.requests_running is not None:
            queue = gauges.requests_running + (gauges.requests_waiting or 0)
        return Candidate(
            engine=info.id,
            role=info.role,
            freshness=freshness,
            decay=1.0 if freshness is Freshness.FRESH else self._decay(age_seconds),
            trust=self._parity.trust_ratio(info.id, info.incarnation),
            cached_tokens=cached_tokens(info.block_size, depth, prompt.token_count),
            free_ratio=_free_ratio(view, in_flight),
            total_bytes=None if gauges is None else gauges.kv_total_bytes,
            queue=queue,
            in_flight=in_flight.requests,
            hinted=prompt.hint is not None
            and (prompt.hint.engine, prompt.hint.incarnation) == (info.id, info.incarnation),
            avoid=self._why_avoid(view, now),
        )

    def _decay(self, age_seconds: float | None) -> float:
        """Return 1 for fresh data, falling to 0 where it becomes unknown."""
        fresh, aged = self._limits.fresh_seconds, self._limits.aged_seconds
        if age_seconds is None:
            return 0.0
        if age_seconds <= fresh or aged <= fresh:
            return 1.0
        return max(0.0, (aged - age_seconds) / (aged - fresh))

    def _why_avoid(self, view: EngineView, now: float) -> str:
        info = view.info
        if info.state is not EngineState.READY:
            return info.state.value
        if self._suspects.is_suspect(info.id, info.incarnation, now):
            return "failing"
        return ""


def cached_tokens(block_size: int | None, depth: int, token_count: int) -> int:
    """Return the tokens that an engine holding ``depth`` leading blocks finds in its cache.

    At least the last prompt token is always computed, so a prompt that is cached whole
    counts one block less where it ends on a block's edge.
    """
    if not depth or not block_size:
        return 0
    return min(depth, max(0, token_count - 1) // block_size) * block_size


def _free_ratio(view: EngineView, in_flight: EngineLoad) -> float | None:
    """Return the share of KV free for new requests.

    The engine's reading may be older than our last dispatches, so the larger of the two
    counts of use is taken. Whatever an agent sends, the result is within 0..1.
    """
    gauges = view.gauges
    if gauges is None or gauges.kv_used_ratio is None:
        return None
    used = gauges.kv_used_ratio
    if gauges.kv_total_tokens:
        used = max(used, in_flight.tokens / gauges.kv_total_tokens)
    return max(0.0, min(1.0, 1.0 - used))
