"""How long to wait for an engine's first byte while another engine could serve.

An engine whose process hangs still takes connections, so nothing breaks and only time tells.
Two things end a wait early: its agent cannot reach the engine either, or a streamed answer is
very much later than predicted. Both only where another engine is fit to be asked; the last
word has the forwarder's own deadline.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from nearkv.ingress.engine_failures import FailureKind
from nearkv.ingress.fleet import EngineView, Fleet
from nearkv.ingress.patience_rules import PatienceRules
from nearkv.ingress.suspects import Suspects
from nearkv.ingress.upstream.answer import Answer
from nearkv.state.model import EngineState

_LOOK_SECONDS = 0.25


@dataclass(slots=True, eq=False)
class Wait:
    """One request that waits for one engine; ``why`` says why it was ended early.

    ``late_at`` is when its silence is too long, ``answer`` what the forwarder waits for.
    """

    engine: str
    views: Sequence[EngineView]
    tried: Collection[str]
    late_at: float | None = None
    unreachable_since: float | None = None
    answer: Answer | None = None
    why: FailureKind | None = None

    def end(self, why: FailureKind) -> None:
        """End the wait at once."""
        if self.answer is not None and self.why is None:
            self.why = why
            self.answer.be_overdue(TimeoutError())


class Patience:
    """All waits of a replica; one loop looks at them, so that each costs next to nothing."""

    def __init__(
        self, rules: PatienceRules, fleet: Fleet, suspects: Suspects, now: Callable[[], float]
    ) -> None:
        self._rules = rules
        self._fleet = fleet
        self._suspects = suspects
        self._now = now
        self._waits: set[Wait] = set()

    def begin(
        self,
        engine: str,
        views: Sequence[EngineView],
        tried: Collection[str],
        *,
        predicted_ms: float | None = None,
    ) -> Wait:
        """Note that a request waits for an engine, one of ``views``; :meth:`end` follows."""
        wait = Wait(engine, views, tried)
        if predicted_ms is not None:
            rules = self._rules
            wait.late_at = self._now() + rules.least_seconds + rules.factor * predicted_ms / 1000
        self._waits.add(wait)
        return wait

    def end(self, wait: Wait) -> None:
        """Note that a wait is over."""
        self._waits.discard(wait)

    @property
    def count(self) -> int:
        """How many wait."""
        return len(self._waits)

    async def watch(self) -> None:
        """Look at all waits again and again."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """End the waits that take too long."""
        now = self._now()
        for wait in tuple(self._waits):
            why = self._why_end(wait, now)
            if why is not None and self._others_can_serve(wait, now):
                wait.end(why)

    def _why_end(self, wait: Wait, now: float) -> FailureKind | None:
        view = self._fleet.engines.get(wait.engine)
        if view is None or view.info.state is not EngineState.UNREACHABLE:
            wait.unreachable_since = None
        elif wait.unreachable_since is None:
            wait.unreachable_since = now
        since = wait.unreachable_since
        if since is not None and now - since >= self._rules.unreachable_seconds:
            return FailureKind.LOST
        if wait.late_at is not None and now >= wait.late_at:
            return FailureKind.SILENT
        return None

    def _others_can_serve(self, wait: Wait, now: float) -> bool:
        return any(
            view.info.state is EngineState.READY
            and view.info.id != wait.engine
            and view.info.id not in wait.tried
            and not self._suspects.is_suspect(view.info.id, view.info.incarnation, now)
            for view in wait.views
        )
