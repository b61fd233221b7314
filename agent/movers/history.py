"""How movers of each engine rank fared, and when the next may start (pure)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from nearkv.agent.movers.purposes import Purpose

_NO_WAIT_CRASHES = 1
"""One crash may be bad luck: the next pull starts a mover at once."""


@dataclass(slots=True)
class Fate:
    """What became of the movers for one purpose; ``not_before`` in monotonic seconds."""

    restarts: int = 0
    crashes_in_a_row: int = 0
    not_before: float = 0.0
    last_failure: str = ""


@dataclass(slots=True)
class History:
    """Fates by purpose. The pause doubles from ``pause_seconds`` up to ``limit_seconds``.

    ``jitter`` gives a factor, so that movers that crash together do not restart together.
    """

    pause_seconds: float
    limit_seconds: float
    jitter: Callable[[], float]
    fates: dict[Purpose, Fate] = field(default_factory=dict)

    def failed(self, purpose: Purpose, why: str, *, now: float) -> None:
        """Note that a mover failed without having done anything of use."""
        fate = self.fates.setdefault(purpose, Fate())
        fate.restarts += 1
        fate.crashes_in_a_row += 1
        fate.last_failure = why
        doublings = fate.crashes_in_a_row - _NO_WAIT_CRASHES - 1
        if doublings >= 0:
            # 2 ** 30 pauses are beyond any limit, and more could not be counted for ever.
            pause = min(self.limit_seconds, self.pause_seconds * 2 ** min(doublings, 30))
            fate.not_before = now + pause * self.jitter()

    def succeeded(self, purpose: Purpose) -> None:
        """Note that a mover did what it is for."""
        fate = self.fates.get(purpose)
        if fate is not None:
            fate.crashes_in_a_row = 0
            fate.not_before = 0.0

    def wait_seconds(self, purpose: Purpose, *, now: float) -> float:
        """Return how long no mover may be started; 0 when one may."""
        fate = self.fates.get(purpose)
        return 0.0 if fate is None else max(0.0, fate.not_before - now)

    def drop(self, key: str) -> None:
        """Forget an engine rank that is gone."""
        for purpose in [purpose for purpose in self.fates if purpose.key == key]:
            del self.fates[purpose]
