"""Engines that failed us lately: a circuit breaker for each that did (pure).

The agent will say within seconds that an engine is gone; until then this keeps requests
from running into it one after another. It is advice, not a ban: when nobody else is left,
a suspect is tried all the same.

Breakers are kept by engine and incarnation, so a restarted engine begins anew. Engines without
failures have none, which keeps the usual request from paying for this.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from nearkv.ingress.breaker import Breaker, BreakerRules, BreakerState, Strike
from nearkv.ingress.fleet import EngineView
from nearkv.state.model import EngineState

_OPENED, _CLOSED = "opened", "closed"
_USUAL_RULES = BreakerRules()
_WORTH = (
    EngineState.READY,  # and failing: it may be over
    EngineState.UNREACHABLE,
    EngineState.STARTING,
    EngineState.DRAINING,
    EngineState.ASLEEP,
)
"""States by how likely an engine answers when no engine is fit to be asked."""


class Suspects:
    """The breakers, by engine and incarnation.

    ``jitter`` gives the factor by which a pause is stretched, so that replicas do not all come
    back at once; ``changes`` counts breakers that opened and closed.
    """

    def __init__(
        self, rules: BreakerRules = _USUAL_RULES, *, jitter: Callable[[], float] = lambda: 1.0
    ) -> None:
        self._rules = rules
        self._jitter = jitter
        self._of: dict[tuple[str, str], Breaker] = {}
        self.changes: Counter[str] = Counter()

    def failed(self, engine: str, incarnation: str, now: float, *, reached: bool = False) -> Strike:
        """Note a failure before the end of an answer; the strike can be taken back.

        Where the engine had taken the request (``reached``), the request may be at fault, so
        one failure says little; where it could not be reached, one says it all.
        """
        breaker = self._of.get((engine, incarnation))
        if breaker is None:
            breaker = self._of[engine, incarnation] = Breaker(self._rules)
        strike = breaker.failed(now, reached=reached, stretch=self._jitter())
        self.changes[_OPENED] += strike.opened
        return strike

    def retract(self, strike: Strike) -> None:
        """Take a failure back: it was the request's fault."""
        strike.breaker.retract(strike)

    def succeeded(self, engine: str, incarnation: str, now: float) -> None:
        """Note that an engine answered, be it with an error of the client's."""
        if not self._of:
            return
        breaker = self._of.get((engine, incarnation))
        if breaker is None:
            return
        self.changes[_CLOSED] += breaker.succeeded(now)
        if breaker.is_well(now):
            del self._of[engine, incarnation]

    def begin(self, engine: str, incarnation: str, now: float) -> bool:
        """Note that a request is sent; returns whether it is the trial of a breaker.

        A trial that says nothing about the engine is ended with :meth:`end_trial`.
        """
        breaker = self._of.get((engine, incarnation)) if self._of else None
        return breaker is not None and breaker.begin(now)

    def end_trial(self, engine: str, incarnation: str) -> None:
        """Note that a trial ended, with a verdict or without."""
        breaker = self._of.get((engine, incarnation))
        if breaker is not None:
            breaker.end_trial()

    def is_suspect(self, engine: str, incarnation: str, now: float) -> bool:
        """Tell whether an engine is best left alone now."""
        if not self._of:
            return False
        breaker = self._of.get((engine, incarnation))
        return breaker is not None and breaker.blocks(now)

    def state_of(self, engine: str, incarnation: str, now: float) -> BreakerState:
        """Return the state of an engine's breaker."""
        breaker = self._of.get((engine, incarnation))
        return BreakerState.CLOSED if breaker is None else breaker.state_at(now)

    def forget(self, known: set[tuple[str, str]]) -> None:
        """Drop breakers of engines and incarnations that are no longer known."""
        self._of = {key: breaker for key, breaker in self._of.items() if key in known}

    def worth_asking(
        self, views: Sequence[EngineView], tried: Collection[str], now: float
    ) -> Sequence[EngineView]:
        """Return the engines to choose from: all, or, where none is fit, the most promising.

        Without this, an engine that is being shut down would be as good as one whose breaker
        is about to close. Of open breakers, the one that is tried next by itself comes first;
        while its trial is under way, the one after it, and so on.
        """
        for view in views:
            info = view.info
            is_able = info.state is EngineState.READY and info.id not in tried
            if is_able and not self.is_suspect(info.id, info.incarnation, now):
                return views
        left = [view for view in views if view.info.id not in tried]
        for state in _WORTH:
            of_state = [view for view in left if view.info.state is state]
            if of_state:
                return self._next_on_trial(of_state, now) or of_state
        return views

    def _next_on_trial(self, views: Sequence[EngineView], now: float) -> list[EngineView]:
        waiting = []
        for view in views:
            breaker = self._of.get((view.info.id, view.info.incarnation))
            if breaker is not None and breaker.until is not None and not breaker.has_trial(now):
                waiting.append((breaker.until, view.info.id, view))
        return [min(waiting, key=lambda entry: entry[:2])[2]] if waiting else []
