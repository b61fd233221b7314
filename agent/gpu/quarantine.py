"""Calls that did not come back, and for how long they are left out (pure)."""

from dataclasses import dataclass

from nearkv.agent.gpu.calling import EVERY_CALL
from nearkv.agent.gpu.messages import LeftOut
from nearkv.agent.gpu.reasons import Reason

FIRST_SECONDS = 600.0
LONGEST_SECONDS = 6 * 3600.0
_TOO_MANY = 3
"""A device with so many calls that do not come back is not asked anything."""
_LIMIT = 256


@dataclass(slots=True)
class _Entry:
    reason: Reason
    until: float
    seconds: float


class Quarantine:
    """Which calls are not made. Each is tried again later, and less often each time it fails.

    Times are in seconds of any steady clock.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, str], _Entry] = {}

    def add(self, device_index: int, call: str, reason: Reason, now: float) -> None:
        """Leave a call out from now on."""
        key = (device_index, call)
        known = self._entries.pop(key, None)
        seconds = FIRST_SECONDS if known is None else min(2 * known.seconds, LONGEST_SECONDS)
        if len(self._entries) >= _LIMIT:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = _Entry(reason, now + seconds, seconds)

    def left_out(self, now: float) -> tuple[LeftOut, ...]:
        """Return what is left out now."""
        valid = {key: entry for key, entry in self._entries.items() if now < entry.until}
        found = [LeftOut(index, call, entry.reason) for (index, call), entry in valid.items()]
        per_device: dict[int, list[_Entry]] = {}
        for (index, _), entry in valid.items():
            per_device.setdefault(index, []).append(entry)
        found += [
            LeftOut(index, EVERY_CALL, entries[0].reason)
            for index, entries in per_device.items()
            if len(entries) >= _TOO_MANY
        ]
        return tuple(found)

    def is_due(self, since: float, now: float) -> bool:
        """Tell whether a call that was left out at ``since`` may be tried again."""
        return any(since < entry.until <= now for entry in self._entries.values())

    def clear(self) -> None:
        """Forget everything: another driver may do better."""
        self._entries.clear()
