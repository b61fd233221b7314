"""Bounds and deadlines of movers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverLimits:
    """Bounds of a pool and of each of its movers.

    ``threads`` pull at once in a mover and ``max_queued`` pulls run or wait in it, over
    ``max_links`` connections kept for the next pull. A mover with nothing to do ends after
    ``idle_seconds``. One that dies again and again without a pull done between is started
    again only after ``backoff_seconds``, twice as long each time, up to
    ``backoff_limit_seconds``. The other times say how long something is waited for before
    the mover is killed. ``start_seconds`` is longer than pulls wait by default: each pull has
    its own deadline, and on a busy node a mover that was killed for a slow start would only
    begin anew.
    """

    threads: int = 2
    max_queued: int = 64
    max_movers: int = 64
    max_links: int = 8
    idle_seconds: float = 60.0
    start_seconds: float = 20.0
    cancel_seconds: float = 0.5
    forget_seconds: float = 0.3
    quit_seconds: float = 0.5
    offer_seconds: float = 5.0
    probe_seconds: float = 10.0
    hanging_seconds: float = 6.0
    reap_seconds: float = 5.0
    backoff_seconds: float = 0.2
    backoff_limit_seconds: float = 10.0


DEFAULT_LIMITS = MoverLimits()
