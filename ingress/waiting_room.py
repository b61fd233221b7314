"""The waiting room: requests for which no engine has room now.

Bounded, with a deadline, one line for each model: whoever has the higher priority and came
first is first. Only the head of a line tries again, whenever a request ends or a little time
has passed, so a crowd costs no more than one request.
"""

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from nearkv.ingress.errors import NoRoomError, QueueFullError

T = TypeVar("T")
_RETRY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RoomLimits:
    """How many may wait, and how long; ``retry_after_seconds`` is for those turned away."""

    most: int
    seconds: float
    retry_after_seconds: int


@dataclass(order=True, slots=True)
class _Ticket:
    rank: int
    number: int
    turn: asyncio.Event = field(default_factory=asyncio.Event, compare=False)


class WaitingRoom:
    """Lines of waiting requests, by model."""

    def __init__(self, limits: RoomLimits) -> None:
        self._limits = limits
        self._lines: dict[str, list[_Ticket]] = {}
        self._numbers = count()
        self.count = 0

    def must_queue(self, model: str, priority: int) -> bool:
        """Tell whether others wait for this model who come before a request of this priority."""
        line = self._lines.get(model)
        return line is not None and line[0].rank <= -priority

    def waiting_for(self, model: str) -> int:
        """Return how many wait for a model."""
        return len(self._lines.get(model, ()))

    def wake(self) -> None:
        """Let the heads of all lines try again: something ended."""
        for line in self._lines.values():
            line[0].turn.set()

    async def wait(self, model: str, priority: int, attempt: Callable[[], T]) -> T:
        """Return what ``attempt`` does once it finds room, in turn.

        Raises :class:`QueueFullError`, and the last ``NoRoomError`` when the time is up.
        """
        limits = self._limits
        if self.count >= limits.most:
            raise QueueFullError(
                f"no engine has room, and {limits.most} requests wait already",
                retry_after_seconds=limits.retry_after_seconds,
            )
        line = self._lines.setdefault(model, [])
        ticket = _Ticket(-priority, next(self._numbers))
        insort(line, ticket)
        self.count += 1
        try:
            return await self._wait_in(line, ticket, attempt)
        finally:
            self.count -= 1
            line.remove(ticket)
            if line:
                line[0].turn.set()
            else:
                del self._lines[model]

    async def _wait_in(self, line: list[_Ticket], ticket: _Ticket, attempt: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._limits.seconds
        while True:
            is_head = line[0] is ticket
            left_seconds = give_up_at - loop.time()
            if is_head or left_seconds <= 0:
                try:
                    return attempt()
                except NoRoomError:
                    if left_seconds <= 0:
                        raise
            ticket.turn.clear()
            pause = min(_RETRY_SECONDS, left_seconds) if is_head else left_seconds
            try:
                async with asyncio.timeout(pause):
                    await ticket.turn.wait()
            except TimeoutError:
                pass
