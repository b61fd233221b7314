"""Keeping progress lines readable: many per second come in, few are worth a line."""

import re
from dataclasses import dataclass, field

# "ready after 31 s" is the end of something, not the age of what still goes on.
AGED_LINE = re.compile(r"(?P<what>.*)(?<! after) (?P<seconds>\d+) s", re.DOTALL)
REPEAT_SECONDS = 15


@dataclass(slots=True)
class ProgressBoard:
    """Knows what each speaker is doing; the speaker is the text before the first colon.

    A line that ends in an age, such as ``12 s``, tells of something that goes on; any other
    line ends it.
    """

    _current: dict[str, str] = field(default_factory=dict)
    _told: dict[str, tuple[str, int]] = field(default_factory=dict)

    def update(self, line: str) -> bool:
        """Take in a line; return whether it is worth printing.

        A line that differs from the last one only in its age is, every 15 seconds.
        """
        speaker = line.partition(":")[0]
        match = AGED_LINE.fullmatch(line)
        if match is None:
            self._current.pop(speaker, None)
            self._told.pop(speaker, None)
            return True
        self._current[speaker] = line
        what, seconds = match["what"], int(match["seconds"])
        told_what, told_seconds = self._told.get(speaker, ("", 0))
        if what == told_what and seconds < told_seconds + REPEAT_SECONDS:
            return False
        self._told[speaker] = (what, seconds)
        return True

    def is_busy(self, line: str) -> bool:
        """Tell whether the speaker of a line is still at work."""
        return line.partition(":")[0] in self._current

    @property
    def summary(self) -> str:
        """What everybody is doing, in one line; empty when nobody is at work."""
        return " · ".join(self._current.values())
