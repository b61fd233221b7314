"""One request's engines in terms of cost: from readings and our own counts to seconds.

An engine's wait is estimated from its queue: the requests waiting there, each with as many
tokens as ours there have on average (or as this one has), or the tokens that we sent there
and that are not answered yet, whichever is more, at the engine's seconds per token. An
engine that does not tell these is taken for an average one of its model.
"""

import math
from collections.abc import Sequence

from nearkv.freshness import Freshness
from nearkv.ingress.candidates import cached_tokens
from nearkv.ingress.decisions import SplitRecord
from nearkv.ingress.fleet import EngineView, ModelTraits
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.pairing import Pair, PairCandidate
from nearkv.ingress.pd_costs import EngineCost, local_seconds
from nearkv.ingress.routing import Candidate, Decision, Gate, Rung, has_room, trusted_tokens
from nearkv.ingress.settings import PdSettings
from nearkv.ingress.two_legs import Split
from nearkv.path_cost import PathCost
from nearkv.state.model import TransferInfo

_NIXL = "nixl"


class Weigher:
    """One request's engines, in terms of cost."""

    def __init__(
        self,
        job: Job,
        candidates: Sequence[Candidate],
        traits: ModelTraits,
        settings: PdSettings,
        knowledge: Knowledge,
    ) -> None:
        self._job = job
        self._settings = settings
        self._terms = settings.terms
        self._know = knowledge
        self._candidates = {c.engine: c for c in candidates}
        self._views = {view.info.id: view for view in job.views}
        self._movers = traits.movers
        self._usual_seconds = _mean_seconds_per_token(job.views) or settings.prior.seconds_per_token
        self.knows_tokens = job.prompt is not None
        self.token_count = job.prompt.token_count if job.prompt is not None else 0

    def role(self, engine: str | None) -> str:
        """Return an engine's role."""
        return self._candidates[engine].role if engine is not None else ""

    def missing_tokens(self, engine: str | None) -> int:
        """Return the tokens of the prompt that an engine has to compute; 0 for none."""
        if engine is None:
            return 0
        return max(0, self.token_count - trusted_tokens(self._candidates[engine]))

    def local_seconds(self, engine: str | None) -> float:
        """Return what computing the prompt on one engine costs."""
        return 0.0 if engine is None else local_seconds(self._cost(engine), self._terms)

    def pair_candidates(self, gate: Gate) -> list[PairCandidate]:
        """Return the engines that could be in a pair now: known and ready."""
        return [
            self._pair_candidate(candidate, transfer, gate)
            for view in self._movers
            if (transfer := view.info.transfer) is not None
            and (candidate := self._candidates.get(view.info.id)) is not None
            and not candidate.avoid
            and candidate.freshness is not Freshness.UNKNOWN
            and candidate.engine not in self._job.failed_sources
        ]

    def path_between(self, source: PairCandidate, target: PairCandidate) -> PathCost:
        """Return what the way between two engines costs, measured or as a prior."""
        reading = self._know.fleet.path_between(
            self._views[source.engine], self._views[target.engine]
        )
        if reading is not None:
            return PathCost(reading.setup_seconds, reading.bytes_per_second)
        prior = self._settings.prior
        if source.node == target.node:
            return PathCost(prior.same_node_setup_seconds, prior.same_node_bytes_per_second)
        return PathCost(prior.other_node_setup_seconds, prior.other_node_bytes_per_second)

    def decision(self, pair: Pair) -> Decision:
        """Return the decision that a pair stands for; it names the decode engine."""
        freshness = self._candidates[pair.target.engine].freshness
        rung = Rung.FRESH if freshness is Freshness.FRESH else Rung.AGED
        return Decision(pair.target.engine, pair.outcome, rung)

    def split(self, pair: Pair) -> Split:
        """Return what the two legs need to know of a pair."""
        source = self._candidates[pair.source.engine]
        target = self._candidates[pair.target.engine]
        return Split(
            source=self._views[pair.source.engine],
            target=self._views[pair.target.engine],
            fields=self._job.fields or {},
            source_cached_tokens=source.cached_tokens,
            source_missing_tokens=pair.source.cost.missing_tokens,
            reused_tokens=max(source.cached_tokens, target.cached_tokens),
            target_tokens=self._tokens_to_have(self._views[pair.target.engine]),
        )

    def record(self, outcome: str, why: str, local: Decision, pair: Pair | None) -> SplitRecord:
        """Return the record of a comparison."""
        return SplitRecord(
            outcome=outcome,
            why=why,
            local_engine=local.engine,
            local_seconds=self.local_seconds(local.engine) if self.knows_tokens else None,
            pair_seconds=None if pair is None else pair.seconds,
            prefill_engine=None if pair is None else pair.source.engine,
            decode_engine=None if pair is None else pair.target.engine,
        )

    def _tokens_to_have(self, target: EngineView) -> int:
        """Return the tokens that D will have cached once it has pulled.

        Our connector moves whole blocks, the stock one everything; the last token of a
        prompt is computed in any case.
        """
        transfer, block_size = target.info.transfer, target.info.block_size
        if transfer is not None and transfer.mode == _NIXL:
            return max(0, self.token_count - 1)
        return cached_tokens(block_size, self.token_count, self.token_count)

    def _pair_candidate(
        self, candidate: Candidate, transfer: TransferInfo, gate: Gate
    ) -> PairCandidate:
        view = self._views[candidate.engine]
        return PairCandidate(
            engine=candidate.engine,
            role=candidate.role,
            node=view.info.node,
            compat=(transfer.mode, transfer.compat),
            cached_tokens=trusted_tokens(candidate),
            cost=self._cost(candidate.engine),
            kv_bytes_per_token=self._kv_bytes_per_token(view),
            free_tokens=self._free_tokens(view) if has_room(candidate, gate) else 0.0,
            load=max(candidate.queue or 0, candidate.in_flight),
        )

    def _cost(self, engine: str) -> EngineCost:
        view = self._views[engine]
        gauges = view.gauges
        in_flight = self._know.ledger.at(engine, view.info.incarnation)
        seconds_per_token = self._usual_seconds
        waiting, running = 0, in_flight.requests
        if gauges is not None:
            seconds_per_token = _told_seconds(view) or seconds_per_token
            waiting = gauges.requests_waiting or 0
            running = max(running, gauges.requests_running or 0)
        usual_tokens = (
            in_flight.tokens / in_flight.requests if in_flight.requests else self.token_count
        )
        ours = self._know.computing.at(engine, view.info.incarnation)
        return EngineCost(
            missing_tokens=self.missing_tokens(engine),
            seconds_per_token=seconds_per_token,
            wait_seconds=max(waiting * usual_tokens, ours) * seconds_per_token,
            decoding=running,
        )

    def _free_tokens(self, view: EngineView) -> float | None:
        """Return the KV that an engine has for another pair, in tokens.

        What pairs were promised shows in no reading yet, so it is taken off; of the rest
        that we sent there, the reading knows most.
        """
        gauges = view.gauges
        if gauges is None or gauges.kv_used_ratio is None or not gauges.kv_total_tokens:
            return None
        info = view.info
        staged = self._know.staged.at(info.id, info.incarnation)
        in_flight = self._know.ledger.at(info.id, info.incarnation).tokens
        used = max(gauges.kv_used_ratio * gauges.kv_total_tokens, in_flight - staged)
        return gauges.kv_total_tokens - used - staged

    def _kv_bytes_per_token(self, view: EngineView) -> int:
        transfer, gauges = view.info.transfer, view.gauges
        if transfer is not None and transfer.kv_bytes_per_token:
            return transfer.kv_bytes_per_token
        if gauges is not None and gauges.kv_total_bytes and gauges.kv_total_tokens:
            return max(1, gauges.kv_total_bytes // gauges.kv_total_tokens)
        return self._settings.prior.kv_bytes_per_token


def _told_seconds(view: EngineView) -> float | None:
    """Return what an engine says a token takes, if that can be."""
    told = None if view.gauges is None else view.gauges.prefill_seconds_per_token
    return told if told is not None and 0 < told < math.inf else None


def _mean_seconds_per_token(views: Sequence[EngineView]) -> float | None:
    told = [seconds for view in views if (seconds := _told_seconds(view)) is not None]
    return sum(told) / len(told) if told else None
