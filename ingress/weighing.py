"""One request's engines as sources and targets of KV: what pairs are possible, and their cost."""

from collections.abc import Mapping, Sequence

from nearkv.freshness import Freshness
from nearkv.ingress.candidates import cached_tokens
from nearkv.ingress.decisions import SplitRecord
from nearkv.ingress.fleet import EngineView, ModelTraits
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.pairing import Pair, PairCandidate
from nearkv.ingress.pd_costs import CostTerms, EngineCost, local_seconds
from nearkv.ingress.pricing import kv_bytes_per_token
from nearkv.ingress.quoting import EngineTerms
from nearkv.ingress.routing import Candidate, Decision, Gate, Rung, has_room, trusted_tokens
from nearkv.ingress.settings import PdSettings
from nearkv.ingress.two_legs import Split
from nearkv.path_cost import PathCost
from nearkv.state.model import TransferInfo

_NIXL = "nixl"


class Weigher:
    """One request's engines, in terms of cost; ``engines`` are the terms of each."""

    def __init__(  # noqa: PLR0913 - what one request's weighing is about, by keyword
        self,
        job: Job,
        candidates: Sequence[Candidate],
        traits: ModelTraits,
        *,
        engines: Mapping[str, EngineTerms],
        terms: CostTerms,
        settings: PdSettings,
        knowledge: Knowledge,
    ) -> None:
        self._job = job
        self._settings = settings
        self._engines = engines
        self.terms = terms
        self._know = knowledge
        self._candidates = {c.engine: c for c in candidates}
        self._views = {view.info.id: view for view in job.views}
        self._movers = traits.movers
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
        return 0.0 if engine is None else local_seconds(self._cost(engine), self.terms)

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
            kv_bytes_per_token=kv_bytes_per_token(view, self._settings.prior.kv_bytes_per_token),
            free_tokens=self._free_tokens(view) if has_room(candidate, gate) else 0.0,
            load=max(candidate.queue or 0, candidate.in_flight),
        )

    def _cost(self, engine: str) -> EngineCost:
        terms = self._engines[engine]
        return EngineCost(
            missing_tokens=self.missing_tokens(engine),
            seconds_per_token=terms.ms_per_token / 1000,
            wait_seconds=(terms.wait_ms + terms.fixed_ms) / 1000,
            decoding=terms.decoding,
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
