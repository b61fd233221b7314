"""Misbehaviour a test can switch on while the double runs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults in force; the default is none. Replacing the whole set is how one is cleared.

    Those of requests hit requests with one of ``verbs`` (``list``, ``watch``, ``get``, ``patch``,
    ... ; none for all) on one of ``resources`` (plurals; none for all), after letting ``skip`` of
    them pass, and ``times`` at most when given:

    - ``status`` answers with that status (and ``retry_after_seconds``, ``reason``, and
      ``location`` to redirect to), ``body`` answers 200 with those bytes, ``hang`` reads the
      request and never answers, ``cut_after_bytes`` breaks the connection after so much of the
      body.
    - ``error_event`` (code, reason) is the first event of a watch, which then ends;
      ``close_at_once`` ends a watch without any event.

    Those of watches hit every watch that is open or gets opened, by ``resources`` too:

    - ``stall`` keeps it open and sends nothing more; ``without_bookmarks`` sends none;
    - ``truncate_event`` breaks off within the next event and closes, ``garbage_line`` sends a line
      that is no JSON instead of the next event, ``unknown_type`` sends the next event with another
      type before it. These three happen once in all.
    """

    verbs: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    skip: int = 0
    times: int | None = None
    status: int | None = None
    reason: str = ""
    retry_after_seconds: int | None = None
    location: str = ""
    body: bytes | None = None
    hang: bool = False
    cut_after_bytes: int | None = None
    error_event: tuple[int, str] | None = None
    close_at_once: bool = False
    stall: bool = False
    without_bookmarks: bool = False
    truncate_event: bool = False
    garbage_line: bool = False
    unknown_type: bool = False


NO_FAULTS = Faults()


class FaultState:
    """The faults in force, and how many requests they may still hit."""

    def __init__(self) -> None:
        self.replace(NO_FAULTS)

    def replace(self, faults: Faults) -> None:
        """Put ``faults`` in force instead of the present ones."""
        self._faults = faults
        self._skip = faults.skip
        self._left = faults.times
        self._once = True

    def for_request(self, verb: str, resource: str) -> Faults:
        """Return the faults that hit a request, counting it."""
        faults = self._faults
        if faults.verbs and verb not in faults.verbs:
            return NO_FAULTS
        if (faults.resources and resource not in faults.resources) or self._left == 0:
            return NO_FAULTS
        if self._skip > 0:
            self._skip -= 1
            return NO_FAULTS
        if self._left is not None:
            self._left -= 1
        return faults

    def for_watch(self, resource: str) -> Faults:
        """Return the faults that hit open watches."""
        faults = self._faults
        return NO_FAULTS if faults.resources and resource not in faults.resources else faults

    def take_once(self) -> bool:
        """Return True for the first caller only, since these faults were put in force."""
        was, self._once = self._once, False
        return was
