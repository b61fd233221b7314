"""From the fleet to candidates: what the router sees for one request (pure)."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from nearkv.freshness import Freshness, FreshnessLimits
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.hints import PrefixHint
from nearkv.ingress.ledger import Ledger
from nearkv.ingress.parity import ParityCheck
from nearkv.ingress.routing import Candidate
from nearkv.ingress.suspects import Suspects
from nearkv.state.model import EngineInfo, EngineState


class PromptView(msgspec.Struct, frozen=True):
    """What one request's prompt means to the fleet: blocks matched per engine, and a hint.

    ``faster`` says how many of the blocks are on the device, and on device or host, for
    engines that have more tiers than the device.
    """

    token_count: int
    depths: Mapping[str, int]
    hint: PrefixHint | None = None
    tried: Collection[str] = ()
    faster: Mapping[str, tuple[int, int]] = {}


class CandidateBuilder:
    """Combines agents' readings with this replica's own knowledge."""

    def __init__(
        self, ledger: Ledger, parity: ParityCheck, suspects: Suspects, limits: FreshnessLimits
    ) -> None:
        self._ledger = ledger
        self._parity = parity
        self._suspects = suspects
        self._limits = limits
        self._fresh_seconds = limits.fresh_seconds

    def build(self, views: Iterable[EngineView], prompt: PromptView, now: float) -> list[Candidate]:
        """Return one candidate for each engine not tried yet."""
        tried = prompt.tried
        return [self._candidate(view, prompt, now) for view in views if view.info.id not in tried]

    def _candidate(self, view: EngineView, prompt: PromptView, now: float) -> Candidate:
        info = view.info
        engine, incarnation = info.id, info.incarnation
        freshness, decay = Freshness.FRESH, 1.0
        if view.gauges_at is None or now - view.gauges_at > self._fresh_seconds:
            age_seconds = view.age_seconds(now)
            freshness, decay = self._limits.classify(age_seconds), self._decay(age_seconds)
        in_flight = self._ledger.at(engine, incarnation)
        cached = host = disk = 0
        depth = prompt.depths.get(engine, 0)
        if depth:
            cached = cached_tokens(info.block_size, depth, prompt.token_count)
            if engine in prompt.faster:
                host, disk = _slower_tokens(cached, info.block_size or 0, prompt.faster[engine])
        queue = total_bytes = free_ratio = free_tokens = None
        gauges = view.gauges
        if gauges is not None:
            running, total_tokens = gauges.requests_running, gauges.kv_total_tokens
            if running is not None:
                queue = running + (gauges.requests_waiting or 0)
            total_bytes = gauges.kv_total_bytes
            used_ratio = gauges.kv_used_ratio
            if used_ratio is not None:
                free_ratio = _free_ratio(used_ratio, total_tokens, in_flight.tokens)
                if total_tokens:
                    free_tokens = int(free_ratio * total_tokens)
        hint = prompt.hint
        return Candidate(
            engine,
            info.role,
            freshness,
            decay,
            self._parity.trust_ratio(engine, incarnation),
            cached,
            free_ratio,
            total_bytes,
            queue,
            in_flight.requests,
            hint is not None and hint.engine == engine and hint.incarnation == incarnation,
            self._why_avoid(info, now),
            host,
            disk,
            free_tokens,
        )

    def _decay(self, age_seconds: float | None) -> float:
        """Return 1 for fresh data, falling to 0 where it becomes unknown."""
        fresh, aged = self._limits.fresh_seconds, self._limits.aged_seconds
        if age_seconds is None:
            return 0.0
        if age_seconds <= fresh or aged <= fresh:
            return 1.0
        return max(0.0, (aged - age_seconds) / (aged - fresh))

    def _why_avoid(self, info: EngineInfo, now: float) -> str:
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


def _slower_tokens(cached: int, block_size: int, faster: tuple[int, int]) -> tuple[int, int]:
    """Return how many of the cached tokens are on the host, and on disk."""
    on_device, on_host = (min(cached, blocks * block_size) for blocks in faster)
    return on_host - on_device, cached - on_host


def _free_ratio(used_ratio: float, total_tokens: int | None, in_flight_tokens: int) -> float:
    """Return the share of KV free for new requests.

    The engine's reading may be older than our last dispatches, so the larger of the two
    counts of use is taken. Whatever an agent sends, the result is within 0..1.
    """
    if total_tokens and in_flight_tokens > used_ratio * total_tokens:
        used_ratio = in_flight_tokens / total_tokens
    free_ratio = 1.0 - used_ratio
    return free_ratio if 0.0 <= free_ratio <= 1.0 else max(0.0, min(1.0, free_ratio))
