"""Settings about engines that fail: retries, circuit breakers, hedging."""

from pydantic import Field

from nearkv.ingress.breaker import BreakerRules
from nearkv.ingress.retry_budget import BudgetRules
from nearkv.settings import SettingsGroup


class RetrySettings(SettingsGroup):
    """How many requests may be sent again, by model; see also ``retries``."""

    budget_ratio: float = Field(
        0.2, ge=0, le=1, description="Retries as a share of the recent requests ..."
    )
    floor_per_second: float = Field(
        3.0, ge=0, description="... and this many per second beyond that."
    )
    window_seconds: float = Field(10.0, gt=0, description="What counts as recent.")
    pause_seconds: float = Field(
        0.1,
        ge=0,
        description="Wait, half to one and a half times as long, before the same engine is asked "
        "again, where there is no other.",
    )

    @property
    def budget(self) -> BudgetRules:
        """The rules of the budget."""
        return BudgetRules(self.budget_ratio, self.floor_per_second, self.window_seconds)


class BreakerSettings(SettingsGroup):
    """When an engine that fails gets no more requests, by incarnation."""

    failures: int = Field(
        3, ge=1, description="Requests failed in a row; not being reached at all counts at once."
    )
    failure_ratio: float = Field(
        0.5, gt=0, le=1, description="Or this share of requests failed within the window ..."
    )
    window_requests: int = Field(10, ge=1, description="... of at least so many.")
    window_seconds: float = Field(10.0, gt=0, description="The window.")
    open_seconds: float = Field(
        2.0, gt=0, description="The first pause; it doubles each time in a row."
    )
    longest_seconds: float = Field(30.0, gt=0, description="The longest pause.")

    @property
    def rules(self) -> BreakerRules:
        """The rules of a breaker."""
        return BreakerRules(
            failures=self.failures,
            failure_ratio=self.failure_ratio,
            window_seconds=self.window_seconds,
            window_requests=self.window_requests,
            open_seconds=self.open_seconds,
            longest_seconds=self.longest_seconds,
        )


class HedgeSettings(SettingsGroup):
    """A second engine is asked when the first is late; whoever answers first serves."""

    after_ms: float = Field(0.0, ge=0, description="How late the first byte has to be; 0: off.")
    predicted_factor: float = Field(
        3.0, ge=0, description="At least so many times what was predicted (policy cost)."
    )
    streamed_only: bool = Field(
        default=True, description="Others have their first byte when the whole answer is there."
    )
    budget_ratio: float = Field(
        0.05, ge=0, le=1, description="Most second requests, as a share of the recent ones."
    )

    @property
    def budget(self) -> BudgetRules:
        """The rules of the budget."""
        return BudgetRules(self.budget_ratio, floor_per_second=0.0)
