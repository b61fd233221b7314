"""One request at one engine: in the ledger, and perhaps the trial of a breaker."""

import msgspec

from nearkv.ingress.deciding import Decided
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.ledger import LedgerEntry
from nearkv.ingress.planning import Plan


class Leg(msgspec.Struct, frozen=True):
    """What was sent where, and the books it is in until :meth:`close`."""

    plan: Plan
    view: EngineView
    predicted: int
    entry: LedgerEntry
    is_trial: bool
    knowledge: Knowledge

    @property
    def reason(self) -> str:
        """Why this engine was chosen."""
        return self.plan.decision.reason

    def close(self) -> None:
        """Take it off the books, once."""
        know, info = self.knowledge, self.view.info
        know.ledger.close(self.entry)
        if self.is_trial:
            know.suspects.end_trial(info.id, info.incarnation)


def begin_leg(
    knowledge: Knowledge, decided: Decided, view: EngineView, *, tokens: int, now: float
) -> Leg:
    """Count a request of ``tokens`` before it is sent, so that the next one sees it."""
    info = view.info
    new_tokens = max(0, tokens - decided.predicted)
    entry = knowledge.ledger.open(info.id, info.incarnation, new_tokens)
    is_trial = knowledge.suspects.begin(info.id, info.incarnation, now)
    return Leg(decided.plan, view, decided.predicted, entry, is_trial, knowledge)
