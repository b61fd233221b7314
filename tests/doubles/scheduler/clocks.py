"""Time for the double: a monotonic clock, real or moved by hand."""

import asyncio
import time
from collections.abc import Callable

Now = Callable[[], float]

real_now: Now = time.monotonic


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start: float = 1000.0) -> None:
        self.seconds = start

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.seconds += seconds


class ShiftedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can jump: timers of servers and clients in it fall due at once.

    Sockets stay real, so that a close caused by a timer reaches its peer through the kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shift_seconds = 0.0

    def time(self) -> float:
        """Return the loop's time: real time and all jumps so far."""
        return super().time() + self._shift_seconds

    async def jump(self, seconds: float) -> None:
        """Let ``seconds`` pass at once, and everything that is due by then happen."""
        self._shift_seconds += seconds
        # One turn runs the timers, one closes what they closed, one lets the kernel's events in;
        # more cost nothing.
        for _ in range(20):
            await asyncio.sleep(0)
