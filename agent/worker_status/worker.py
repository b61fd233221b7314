"""One engine's WorkerStatus between two looks at it (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nearkv.agent.kubernetes.pod_engines import PodEngine
from nearkv.agent.worker_status.composing import Json, NodeFacts, Report, compose
from nearkv.agent.worker_status.conditions import ConditionBook, judge
from nearkv.agent.worker_status.observing import EngineFacts
from nearkv.agent.worker_status.prefixes import NamedPrefix, choose_prefixes
from nearkv.agent.worker_status.steadying import SteadyRatio
from nearkv.freshness import Freshness, FreshnessLimits

SETTLE_SECONDS = 10.0
"""How long a condition must have stood before it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a look at all engines of a node has in common; ``stamp`` is its time of day."""

    now: float
    stamp: str
    node: str
    interval_seconds: float
    limits: FreshnessLimits
    max_prefixes: int


@dataclass(slots=True)
class Worker:
    """Keeps what makes an engine's status steady; ``status`` is the newest one."""

    engine: PodEngine
    used: SteadyRatio = field(default_factory=SteadyRatio)
    held: SteadyRatio = field(default_factory=SteadyRatio)
    book: ConditionBook = field(
        default_factory=lambda: ConditionBook(settle_seconds=SETTLE_SECONDS)
    )
    prefixes: tuple[str, ...] = ()
    status: Json = field(default_factory=dict)

    def look(
        self,
        look: Look,
        facts: EngineFacts,
        *,
        prefixes: Sequence[NamedPrefix] | None,
        node_facts: NodeFacts | None,
    ) -> None:
        """Make the status anew."""
        # What was read too long ago says nothing of now.
        is_current = look.limits.classify(facts.metrics_age_seconds) is not Freshness.UNKNOWN
        used = self.used.take(facts.kv_used_ratio if is_current else None, look.now)
        held = self.held.take(_share(facts.kv_held_bytes, facts.kv_total_bytes), look.now)
        was_pressed = self.book.status_of("KVPressure") == "True"
        verdicts = judge(facts, look.limits, used_ratio=used, was_pressed=was_pressed)
        self.book.take(verdicts, now=look.now, stamp=look.stamp)
        chosen = None
        if prefixes is not None:
            chosen = choose_prefixes(prefixes, self.prefixes, limit=look.max_prefixes)
            self.prefixes = chosen
        self.status = compose(
            Report(
                node=look.node,
                observed_at=look.stamp,
                interval_seconds=look.interval_seconds,
                facts=facts,
                used_ratio=used,
                held_ratio=held,
                conditions=self.book.conditions,
                prefixes=chosen,
                prefix_count=None if prefixes is None else len(prefixes),
                node_facts=node_facts,
            )
        )

    def adopt(self, told: Mapping[str, Any]) -> None:
        """Go on from the status of an object that was there already."""
        percent = told.get("kvCacheUsedPercent")
        if isinstance(percent, int):
            self.used.adopt(percent / 100)
        ids = told.get("cachedPrefixes")
        if isinstance(ids, list):
            self.prefixes = tuple(map(str, ids))
        conditions = told.get("conditions")
        self.book.adopt(
            {
                str(each.get("type")): (str(each.get("status")), str(each["lastTransitionTime"]))
                for each in (conditions if isinstance(conditions, list) else ())
                if isinstance(each, dict) and each.get("lastTransitionTime")
            }
        )


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else min(part / whole, 1.0)
