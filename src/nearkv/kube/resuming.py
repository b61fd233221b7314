"""What a watch does next: resume, list anew, and after which pause (pure).

Resuming is cheap for the API server, listing is not; and after its restart every client comes
back at once. So a broken connection is resumed from the last resource version, for as long as it
takes, and a list is asked for only where resuming cannot work: the version is too old (410), went
back, was answered with errors several times in a row, or nothing at all came in several watches
in a row. The last is how a store that was restored from a backup looks: a version from its future
is waited for without a word. A collection that is merely quiet looks the same; it is small, or it
would not be.
"""

from dataclasses import dataclass

from nearkv.kube.errors import ApiError, Trouble

_DOUBTFUL = frozenset(
    {
        *(Trouble.SERVER_ERROR, Trouble.REFUSED, Trouble.NOT_FOUND, Trouble.GARBAGE),
        *(Trouble.TRUNCATED, Trouble.CLOSED_EARLY, Trouble.TOO_LARGE),
    }
)
_OUTDATED = frozenset({Trouble.EXPIRED, Trouble.REGRESSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseLimits:
    """Pauses in seconds, and how often in a row resuming is tried in vain before a new list."""

    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 30.0
    longest_retry_after_seconds: float = 120.0
    relist_jitter_seconds: float = 5.0
    doubts_in_a_row: int = 5
    quiet_watches_in_a_row: int = 4
    short_watch_seconds: float = 1.0


class Course:
    """Where a watch is: the version to resume from, and what went wrong since it last moved.

    ``version`` is ``None`` where a list is needed. ``draw`` arguments are random numbers from
    0 to 1.
    """

    def __init__(self, limits: PauseLimits) -> None:
        self._limits = limits
        self.version: str | None = None
        self._failures = 0
        self._doubts = 0
        self._quiet = 0

    def listed(self, version: str) -> None:
        """Take the version of a complete list."""
        self.version = version
        self._doubts = self._quiet = 0

    def moved(self, version: str) -> None:
        """Take the version of an event or a bookmark.

        Raises :class:`ApiError` when it is before the last one. Versions are compared only where
        both are numbers, as Kubernetes defines since 1.35.
        """
        if self.version is not None and _is_before(version, self.version):
            raise ApiError(
                Trouble.REGRESSED, f"resource version {version} came after {self.version}"
            )
        self.version = version
        self._failures = self._doubts = self._quiet = 0

    def ended(self, *, open_seconds: float, heard: bool) -> None:
        """Take it that the server closed a watch in good order.

        Raises :class:`ApiError` when that came too soon to be its timeout.
        """
        if open_seconds < self._limits.short_watch_seconds:
            raise ApiError(Trouble.CLOSED_EARLY, f"the watch ended after {open_seconds:.2f} s")
        if not heard:
            self._failures = self._doubts = 0
            self._count_quiet()

    def failed(self, error: ApiError, draw: float) -> float:
        """Take a failure; return how many seconds to wait."""
        self._failures += 1
        if error.trouble in _OUTDATED:
            self.version = None
        elif error.trouble in _DOUBTFUL:
            self._doubts += 1
            if self._doubts >= self._limits.doubts_in_a_row:
                self.version = None
        elif error.trouble is Trouble.SILENT:
            self._count_quiet()
        return self._pause_seconds(error, draw)

    def _count_quiet(self) -> None:
        self._quiet += 1
        if self._quiet >= self._limits.quiet_watches_in_a_row:
            self.version = None

    def _pause_seconds(self, error: ApiError, draw: float) -> float:
        limits = self._limits
        doublings = min(self._failures - 1, 16)
        pause = min(limits.first_pause_seconds * 2.0**doublings, limits.longest_pause_seconds)
        pause *= 0.5 + draw / 2
        if error.trouble in _OUTDATED:
            # Versions grow old for all clients at once.
            pause = max(pause, draw * limits.relist_jitter_seconds)
        if error.retry_after_seconds is not None:
            asked = min(error.retry_after_seconds, limits.longest_retry_after_seconds)
            pause = max(pause, asked * (1 + draw / 5))
        return pause


def _is_before(version: str, other: str) -> bool:
    if not (_is_number(version) and _is_number(other)):
        return False
    return (len(version), version) < (len(other), other)


def _is_number(version: str) -> bool:
    return version.isascii() and version.isdigit() and not version.startswith("0")
