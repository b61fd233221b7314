"""One replay: a trace, a simulated fleet and a router (pure; the same input, the same output).

Events are ordered by time, then by the order in which they were made. What engines do reaches
the router after ``state_lag_seconds``; readings every ``gauges_seconds``, as from an agent.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from nearkv.replay.engine_model import Change, FirstToken, SimulatedEngine, Work
from nearkv.replay.fleet_feed import FleetFeed, LinkProfile
from nearkv.replay.routing import Clock, Route, Router
from nearkv.replay.traces import Arrival, Trace
from nearkv.state.model import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is between engines and router."""

    state_lag_seconds: float = 0.05
    gauges_seconds: float = 1.0
    link: LinkProfile | None = None


@dataclass(slots=True)
class Outcome:
    """What became of one request; ``None`` for what did not happen. Times in seconds."""

    arrival: Arrival
    engine: str = ""
    source: str | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None
    refused: str = ""


@dataclass(slots=True)
class _Running:
    outcome: Outcome
    route: Route
    work: Work
    prefill: Work | None = None


@dataclass(order=True, slots=True)
class _Event:
    at: float
    number: int
    act: Callable[[], None] = field(compare=False)


class Simulation:
    """Runs one trace; use once."""

    def __init__(
        self,
        engines: Mapping[str, SimulatedEngine],
        feed: FleetFeed,
        surroundings: Surroundings,
        *,
        clock: Clock,
        router: Router,
    ) -> None:
        self._clock = clock
        self._router = router
        self._around = surroundings
        self._feed = feed
        self.engines = engines
        self._wakes = dict.fromkeys(self.engines, -1)
        self._events: list[_Event] = []
        self._numbers = count()
        self._running: dict[int, _Running] = {}
        self._waiting: deque[tuple[int, Outcome]] = deque()
        self._left = 0

    def run(self, trace: Trace, progress: Callable[[int], None] | None = None) -> list[Outcome]:
        """Replay the trace to its end; ``progress`` is told how many requests are done."""
        outcomes = [Outcome(arrival) for arrival in trace.arrivals]
        self._left = len(outcomes)
        for frame in [*self._feed.snapshot(), *self._feed.gauges(self.engines)]:
            self._router.hear(frame)
        self._later(self._around.gauges_seconds, self._scrape)
        for number, outcome in enumerate(outcomes):
            self._at(outcome.arrival.at, partial(self._arrive, number, outcome))
        told = self._left
        while self._events and self._left:
            event = heappop(self._events)
            self._clock.seconds = event.at
            event.act()
            if progress is not None and self._left != told:
                told = self._left
                progress(len(outcomes) - told)
        return outcomes

    # -- Time --------------------------------------------------------------------------

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        heappush(self._events, _Event(seconds, next(self._numbers), act))

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._at(self._clock.seconds + seconds, act)

    def _scrape(self) -> None:
        """Read all engines, and again after a while."""
        self._advance_all()
        for frame in self._feed.gauges(self.engines):
            self._tell(frame)
        self._try_waiting()
        self._later(self._around.gauges_seconds, self._scrape)

    def _tell(self, frame: Frame) -> None:
        self._later(self._around.state_lag_seconds, lambda: self._router.hear(frame))

    # -- Requests ----------------------------------------------------------------------

    def _arrive(self, number: int, outcome: Outcome) -> None:
        if not self._waiting and self._try(number, outcome):
            return
        if self._router.wait_seconds <= 0:
            self._refuse(outcome, "no_kv_room")
        elif len(self._waiting) >= self._router.max_waiting:
            self._refuse(outcome, "queue_full")
        else:
            waiter = (number, outcome)
            self._waiting.append(waiter)
            self._later(self._router.wait_seconds, lambda: self._give_up(waiter))

    def _give_up(self, waiter: tuple[int, Outcome]) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            if not self._try(*waiter):
                self._refuse(waiter[1], "no_kv_room")

    def _refuse(self, outcome: Outcome, why: str) -> None:
        outcome.refused = why
        self._left -= 1

    def _try_waiting(self) -> None:
        while self._waiting and self._try(*self._waiting[0]):
            self._waiting.popleft()

    def _try(self, number: int, outcome: Outcome) -> bool:
        arrival = outcome.arrival
        route = self._router.route(number, arrival)
        if route is None:
            return False
        outcome.engine, outcome.source = route.engine, route.source
        work = Work(number, arrival.keys, arrival.prompt_tokens, arrival.output_tokens)
        running = self._running[number] = _Running(outcome, route, work)
        if route.source is None:
            self._submit(route.engine, work)
        else:
            running.prefill = Work(
                number, arrival.keys, arrival.prompt_tokens, 1, prefill_only=True
            )
            self._submit(route.source, running.prefill)
        return True

    def _pulled(self, running: _Running) -> None:
        """Let the decode engine begin with the KV that came, and the source forget its own."""
        assert running.prefill is not None  # noqa: S101 (for the type checker)
        running.work.pulled_tokens = running.work.prompt_tokens
        self._submit(running.route.engine, running.work)
        assert running.route.source is not None  # noqa: S101 (as above)
        source = self._advance(running.route.source)
        self._follow(source, source.let_go(running.prefill))

    # -- Engines -----------------------------------------------------------------------

    def _submit(self, engine: str, work: Work) -> None:
        simulated = self._advance(engine)
        self._follow(simulated, simulated.submit(work, self._clock.seconds))

    def _advance_all(self) -> None:
        for engine in self.engines:
            self._advance(engine)

    def _advance(self, engine: str) -> SimulatedEngine:
        """Let an engine's time pass up to now, and tell of what happened."""
        simulated = self.engines[engine]
        self._follow(simulated, simulated.advance(self._clock.seconds))
        return simulated

    def _follow(self, engine: SimulatedEngine, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, FirstToken):
                self._begin_answer(engine, change)
            else:
                self._end(change.work, fits=change.fits)
        removed = engine.store.take_removed()
        if removed:
            self._tell(self._feed.blocks(engine.name, (), removed))
        self._wake(engine)

    def _wake(self, engine: SimulatedEngine) -> None:
        """Come back when the engine's next event is due, unless that changes before."""
        due = engine.next_at()
        number = self._wakes[engine.name] = next(self._numbers)
        if due < float("inf"):
            self._at(due, lambda: self._woken(engine, number))

    def _woken(self, engine: SimulatedEngine, number: int) -> None:
        if self._wakes[engine.name] == number:
            self._advance(engine.name)

    def _begin_answer(self, engine: SimulatedEngine, change: FirstToken) -> None:
        if change.stored or change.removed:
            self._tell(self._feed.blocks(engine.name, change.stored, change.removed))
        running = self._running[change.work.number]
        outcome, work = running.outcome, change.work
        outcome.computed_tokens += work.computed_tokens
        if work is running.prefill:
            outcome.cached_tokens = work.cached_tokens
            self._router.prefilled(work.number)
            self._later(running.route.transfer_seconds, lambda: self._pulled(running))
            return
        outcome.first_token_at = self._clock.seconds
        if running.prefill is None:
            outcome.cached_tokens = work.cached_tokens
        self._router.first_token(work.number)

    def _end(self, work: Work, *, fits: bool) -> None:
        running = self._running[work.number]
        if fits and work is running.prefill:
            return
        del self._running[work.number]
        if fits:
            running.outcome.ended_at = self._clock.seconds
            self._left -= 1
        else:
            self._refuse(running.outcome, "too_long")
        self._router.ended(work.number, work.cached_tokens)
        if self._waiting:
            self._later(0.0, self._try_waiting)
