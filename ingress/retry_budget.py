"""How many extra requests a model's engines are asked to bear (pure).

Retries turn an outage into a bigger one when every failing request is sent twice. So they
may be a share of the recent requests, and a few per second beyond that, so that a model with
little traffic has some.
"""

from dataclasses import dataclass

_MODELS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """``ratio`` of the requests of the last ``window_seconds``, and ``floor_per_second``."""

    ratio: float = 0.2
    floor_per_second: float = 3.0
    window_seconds: float = 10.0


@dataclass(slots=True)
class RecentCount:
    """Counts over about the last window: the window before fades while the present one fills."""

    window_seconds: float
    began_at: float
    present: float = 0.0
    before: float = 0.0

    def add(self, now: float) -> None:
        """Count one."""
        if now - self.began_at >= self.window_seconds:
            self._turn(now)
        self.present += 1

    def at(self, now: float) -> float:
        """Return the count."""
        self._turn(now)
        share = min(1.0, max(0.0, now - self.began_at) / self.window_seconds)
        return self.present + self.before * (1.0 - share)

    def _turn(self, now: float) -> None:
        past = now - self.began_at
        if past < self.window_seconds:
            return
        self.before = self.present if past < 2 * self.window_seconds else 0.0
        self.present = 0.0
        self.began_at += self.window_seconds * (past // self.window_seconds)


@dataclass(frozen=True, slots=True)
class _Account:
    requests: RecentCount
    extra: RecentCount


class RetryBudget:
    """Accounts by model; ``now`` is seconds of any one clock."""

    def __init__(self, rules: BudgetRules) -> None:
        self._rules = rules
        self._of: dict[str, _Account] = {}

    def count(self, model: str, now: float) -> None:
        """Count a request that came in."""
        self._account(model, now).requests.add(now)

    def take(self, model: str, now: float) -> bool:
        """Take one extra request, if there is one left."""
        rules, account = self._rules, self._account(model, now)
        allowed = rules.ratio * account.requests.at(now)
        allowed += rules.floor_per_second * rules.window_seconds
        if account.extra.at(now) + 1 > allowed:
            return False
        account.extra.add(now)
        return True

    def _account(self, model: str, now: float) -> _Account:
        account = self._of.get(model)
        if account is None:
            if len(self._of) >= _MODELS_KEPT:
                # Static engines answer to any name, so clients can make names up.
                del self._of[next(iter(self._of))]
            seconds = self._rules.window_seconds
            account = self._of[model] = _Account(
                RecentCount(seconds, now), RecentCount(seconds, now)
            )
        return account
