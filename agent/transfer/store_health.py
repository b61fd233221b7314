"""Whether a shared store is worth asking: one that fails is left alone for a while (pure).

A store that does not answer costs each request its whole deadline. After a failure no request
asks it any more; the agent itself tries it, after pauses that grow, until it works again.
``now`` is in monotonic seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nearkv.transfer.errors import PullError, Reason

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_SAYS_NOTHING = frozenset(
    {
        *(Reason.NOT_STORED, Reason.STORE_FULL, Reason.TOO_LARGE, Reason.BUSY, Reason.CANCELLED),
        *(Reason.STALE, Reason.EXPIRED, Reason.NO_SOURCE, Reason.MEMORY, Reason.RANGE),
        *(Reason.CORRUPT, Reason.TRUNCATED, Reason.MALFORMED, Reason.VERSION, Reason.PREFIX),
        *(Reason.MOVER_LOST, Reason.AGENT_LOST, Reason.UNKNOWN_LEASE, Reason.TENANT),
        *(Reason.MODEL, Reason.DTYPE, Reason.TOPOLOGY, Reason.LAYOUT, Reason.AUTH),
    }
)
"""Reasons that are about one entry, engine or mover: the store itself may be well."""


def is_stores_fault(reason: Reason) -> bool:
    """Tell whether a failure says that others will fail, too."""
    return reason not in _SAYS_NOTHING


@dataclass(slots=True)
class StoreHealth:
    """How the store has been; ``usable`` is ``None`` until it was tried.

    ``jitter`` gives a factor, so that agents do not come back all at once.
    """

    jitter: Callable[[], float]
    usable: bool | None = None
    why: str = ""
    _pause_seconds: float = 0.0
    _not_before: float = 0.0

    def check(self) -> None:
        """Raise :class:`PullError` (``NO_PATH``) while requests are to leave the store alone."""
        if self.usable is False:
            raise PullError(Reason.NO_PATH, f"left alone for a while: {self.why}")

    def is_due(self, now: float) -> bool:
        """Tell whether it is time to try the store."""
        return self.usable is not True and now >= self._not_before

    def worked(self, *, moved: bool = False) -> None:
        """Note that it did what it was asked.

        Only one that has ``moved`` KV begins with a short pause again: a store may answer
        quickly what it has, and yet be too slow to bring it.
        """
        self.usable, self.why = True, ""
        if moved:
            self._pause_seconds = 0.0

    def failed(self, reason: Reason, text: str, *, now: float) -> None:
        """Note a failure that is the store's; others' are passed over."""
        if not is_stores_fault(reason):
            return
        # Those that asked before the first of them failed are the same failure.
        is_news = self.usable is not False or now >= self._not_before
        self.usable, self.why = False, f"{reason}: {text}"
        if is_news:
            longer = max(_FIRST_PAUSE_SECONDS, 2 * self._pause_seconds)
            self._pause_seconds = min(_LONGEST_PAUSE_SECONDS, longer)
            self._not_before = now + self._pause_seconds * self.jitter()
