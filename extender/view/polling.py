"""How often agents are asked, and what to do when one fails (pure)."""

from dataclasses import dataclass, replace

_LONGEST_PAUSE_OF_FEW_SECONDS = 10.0
_DESCRIPTORS_FOR_OTHERS = 256
"""For those who call, watches and files: without any left nobody could connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectLimits:
    """Bounds of collecting; times are in seconds.

    ``wait_seconds`` is how long an agent holds a question back while it has no news: longer
    where there are so many agents that ``polls_per_second`` would be exceeded, shorter where
    they have to take turns on ``max_connections``. ``fetching`` bounds questions that are
    answered at once.
    """

    wait_seconds: float = 30.0
    polls_per_second: float = 100.0
    max_connections: int = 4096
    fetching: int = 256
    connect_seconds: float = 2.0
    answer_seconds: float = 5.0
    least_pause_seconds: float = 0.5
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class PollPlan:
    """How long a question waits, how soon each agent is asked again, and the pauses."""

    wait_seconds: float
    cycle_seconds: float
    pause_seconds: float
    longest_pause_seconds: float


def plan_polls(agents: int, limits: CollectLimits) -> PollPlan:
    """Return the plan for so many agents."""
    cycle_seconds = max(limits.wait_seconds, agents / limits.polls_per_second)
    share = min(1.0, limits.max_connections / max(agents, 1))
    # Even if all have news all the time, it is five times the usual rate at most.
    pause_seconds = max(limits.least_pause_seconds, agents / limits.polls_per_second / 5)
    return PollPlan(
        wait_seconds=cycle_seconds * share,
        cycle_seconds=cycle_seconds,
        pause_seconds=pause_seconds,
        # A few agents that are away may be asked often; thousands must not be.
        longest_pause_seconds=min(
            limits.longest_pause_seconds,
            max(_LONGEST_PAUSE_OF_FEW_SECONDS, agents / limits.polls_per_second),
        ),
    )


def within_descriptors(limits: CollectLimits, descriptors: int) -> CollectLimits:
    """Return limits with which questions leave enough of the process's descriptors to others."""
    most = max(descriptors - _DESCRIPTORS_FOR_OTHERS, 2)
    fetching = min(limits.fetching, max(most // 4, 1))
    return replace(
        limits, fetching=fetching, max_connections=min(limits.max_connections, most - fetching)
    )


def pause_after(failures: int, plan: PollPlan, limits: CollectLimits, draw: float) -> float:
    """Return how long to leave an agent alone that failed so often in a row.

    ``draw`` is a random number from 0 to 1; it spreads agents that failed at the same time.
    """
    doubled = limits.first_pause_seconds * 2.0 ** min(failures - 1, 16)
    return min(doubled, plan.longest_pause_seconds) * (0.5 + draw / 2)
