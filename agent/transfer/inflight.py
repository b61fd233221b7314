"""Bounds on what is pulled at once: bytes for each peer, pulls for each engine.

Who comes first goes first. A pull that is larger than the limit goes alone.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from nearkv.transfer.errors import PullError, Reason

_MAX_WAITING = 256


@dataclass(slots=True)
class _Queue:
    """One resource: how much of it is taken, and who waits for how much."""

    taken: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    @property
    def is_idle(self) -> bool:
        return not self.taken and not self.waiting


class InflightLimit:
    """Bounds one kind of thing by key; keys without use take no memory."""

    def __init__(self, limit: int, *, what: str) -> None:
        self._limit = limit
        self._what = what
        self._queues: dict[str, _Queue] = {}

    def taken(self, key: str) -> int:
        """Return how much is in use."""
        queue = self._queues.get(key)
        return 0 if queue is None else queue.taken

    @property
    def total(self) -> int:
        """How much is in use over all keys."""
        return sum(queue.taken for queue in self._queues.values())

    @asynccontextmanager
    async def hold(self, key: str, amount: int, *, seconds: float) -> AsyncIterator[None]:
        """Hold an amount within the block, waiting for it at most ``seconds``.

        Raises :class:`PullError` (``BUSY``) when it does not come, or too many wait already.
        """
        queue = self._queues.setdefault(key, _Queue())
        try:
            await self._take(queue, amount, seconds)
            try:
                yield
            finally:
                queue.taken -= amount
                self._admit(queue)
        finally:
            if queue.is_idle and self._queues.get(key) is queue:
                del self._queues[key]

    async def _take(self, queue: _Queue, amount: int, seconds: float) -> None:
        if not queue.waiting and self._fits(queue, amount):
            queue.taken += amount
            return
        if len(queue.waiting) >= _MAX_WAITING:
            raise PullError(Reason.BUSY, f"{_MAX_WAITING} pulls wait already: {self._what}")
        place = asyncio.get_running_loop().create_future()
        queue.waiting.append((amount, place))
        try:
            async with asyncio.timeout(seconds):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                queue.taken -= amount
            else:
                with suppress(ValueError):  # it was passed over already
                    queue.waiting.remove((amount, place))
            self._admit(queue)
            if isinstance(error, TimeoutError):
                raise PullError(Reason.BUSY, f"no room until the deadline: {self._what}") from None
            raise

    def _fits(self, queue: _Queue, amount: int) -> bool:
        return not queue.taken or queue.taken + amount <= self._limit

    def _admit(self, queue: _Queue) -> None:
        while queue.waiting and self._fits(queue, queue.waiting[0][0]):
            amount, place = queue.waiting.popleft()
            if not place.done():  # else it has been given up
                queue.taken += amount
                place.set_result(None)
