"""From readings and our own counts to the terms of each engine's cost.

An engine waits for what we sent there (:mod:`nearkv.ingress.backlog`), and for the requests
of others in its queue, each taken for as long as ours there are on average, or as this one.
An engine that does not tell its speed is taken for an average one of its model.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from nearkv.ingress.fleet import EngineView
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.prefill_fit import PrefillLine
from nearkv.ingress.quoting import EngineTerms
from nearkv.ingress.routing import Candidate
from nearkv.ingress.settings import CostSettings, PdPriorSettings

_MS = 1000.0
_ENOUGH_REQUESTS = 8


class Pricing:
    """Prices engines for one request at a time."""

    def __init__(self, knowledge: Knowledge, cost: CostSettings, prior: PdPriorSettings) -> None:
        self._know = knowledge
        self._cost = cost
        self._prior = prior

    def terms(
        self, views: Mapping[str, EngineView], candidates: Sequence[Candidate], tokens: int
    ) -> Mapping[str, EngineTerms]:
        """Return the terms of each candidate; ``tokens`` is the prompt's length."""
        terms: dict[str, EngineTerms] = {}
        usual_seconds = 0.0
        line_of = self._know.fits.line
        for candidate in candidates:
            engine = candidate.engine
            view = views[engine]
            told = told_seconds(view)
            if told is None and not usual_seconds:
                usual_seconds = self._usual_seconds(views.values())
            line = line_of(engine, told, usual_seconds)
            terms[engine] = self._terms(view, candidate, line, tokens)
        return terms

    def _terms(
        self, view: EngineView, candidate: Candidate, line: PrefillLine, tokens: int
    ) -> EngineTerms:
        engine, incarnation = view.info.id, view.info.incarnation
        per_token = line.seconds_per_token
        ours, wait_seconds = self._know.computing.load(engine, incarnation, per_token)
        decoding = candidate.in_flight - ours
        gauges = view.gauges
        if gauges is not None:
            running, waiting = gauges.requests_running, gauges.requests_waiting
            if running is not None and running > decoding:
                decoding = running
            if waiting and waiting > ours:
                each = self._usual_tokens(engine, incarnation, tokens) * per_token
                wait_seconds += (waiting - ours) * each * candidate.decay
        decoding = max(decoding, 0)
        wait_ms, fixed_ms = wait_seconds * _MS, line.fixed_seconds * _MS
        if not candidate.host_tokens and not candidate.disk_tokens:
            return EngineTerms(wait_ms, fixed_ms, per_token * _MS, decoding)
        kv_ms = kv_bytes_per_token(view, self._prior.kv_bytes_per_token) * _MS
        return EngineTerms(
            wait_ms,
            fixed_ms,
            per_token * _MS,
            decoding,
            kv_ms / self._cost.host_bytes_per_second,
            kv_ms / self._cost.disk_bytes_per_second,
        )

    def _usual_tokens(self, engine: str, incarnation: str, tokens: int) -> float:
        """Return the tokens that a request in an engine's queue has to have computed."""
        placed = self._know.placements.at(engine, incarnation)
        if placed is not None and placed.requests >= _ENOUGH_REQUESTS:
            return placed.new_tokens / placed.requests
        in_flight = self._know.ledger.at(engine, incarnation)
        return in_flight.tokens / in_flight.requests if in_flight.requests else tokens

    def _usual_seconds(self, views: Iterable[EngineView]) -> float:
        told = [seconds for view in views if (seconds := told_seconds(view)) is not None]
        return sum(told) / len(told) if told else self._prior.seconds_per_token


def told_seconds(view: EngineView) -> float | None:
    """Return what an engine says a token takes, if that can be."""
    told = None if view.gauges is None else view.gauges.prefill_seconds_per_token
    return told if told is not None and 0 < told < math.inf else None


def kv_bytes_per_token(view: EngineView, prior_bytes: int) -> int:
    """Return the KV size of one token of an engine's model."""
    transfer, gauges = view.info.transfer, view.gauges
    if transfer is not None and transfer.kv_bytes_per_token:
        return transfer.kv_bytes_per_token
    if gauges is not None and gauges.kv_total_bytes and gauges.kv_total_tokens:
        return max(1, gauges.kv_total_bytes // gauges.kv_total_tokens)
    return prior_bytes
