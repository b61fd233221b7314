"""Copies under way on a device: a stream, and an event behind each batch of copies.

A device writes on its own. Whoever started a copy must not say that nobody writes any more
before the event behind it has happened, whatever went wrong meanwhile. Where that cannot be
found out (the context broke), the process ends: a mover's end is the end of its copies.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn

from nearkv.transfer.cuda.context import DeviceContext
from nearkv.transfer.cuda.driver import Driver
from nearkv.transfer.errors import PullError, Reason, TransferError

DEPTH = 2
"""Batches under way: the next one is queued while one runs, and no more can be left behind."""

_SPINS = 64
_PAUSE_SECONDS = 50e-6
_EXIT_BROKEN = 71

Copies = Callable[[Driver, int], None]
"""Queues copies on a stream."""


def end_process(error: TransferError) -> NoReturn:
    """End this process at once; its device memory is let go of by the driver."""
    print(f"nearkv mover: copies got out of hand: {error}", file=sys.stderr, flush=True)  # noqa: T201 - there is no other way left to say it
    os._exit(_EXIT_BROKEN)


class CopyQueue:
    """Queues batches of copies, and waits for them. One thread at a time.

    ``broken`` is called when nobody can tell any more whether copies are under way, and must
    not return.
    """

    def __init__(
        self,
        context: DeviceContext,
        *,
        depth: int = DEPTH,
        pause: Callable[[float], None] = time.sleep,
        broken: Callable[[TransferError], NoReturn] = end_process,
    ) -> None:
        self._context = context
        self._pause = pause
        self._broken = broken
        self._pending: deque[int] = deque()
        with ExitStack() as undo, context.use() as driver:
            self._stream = driver.create_stream()
            undo.callback(context.run, driver.destroy_stream, self._stream)
            self._free = deque[int]()
            for _ in range(depth):
                self._free.append(driver.create_event())
                undo.callback(context.run, driver.destroy_event, self._free[-1])
            self._undo = undo.pop_all()
        self._closed = False

    def __len__(self) -> int:
        """Return how many batches are under way."""
        return len(self._pending)

    def submit(self, copies: Copies) -> None:
        """Queue a batch; waits for the oldest one while there are too many.

        Raises what ``copies`` raises; what it had queued until then is under way all the same.
        """
        if self._closed:
            raise PullError(Reason.NO_PATH, "the queue is closed")
        while not self._free:
            self.wait_oldest()
        with self._context.use() as driver:
            try:
                copies(driver, self._stream)
            finally:
                self._mark(driver)

    def wait_oldest(self) -> None:
        """Wait until the oldest batch is done."""
        if not self._pending:
            return
        event, polls = self._pending[0], 0
        with self._context.use() as driver:
            while not self._has_happened(driver, event):
                polls += 1
                if polls > _SPINS:
                    self._pause(_PAUSE_SECONDS)
        self._free.append(self._pending.popleft())

    def wait_all(self) -> None:
        """Wait until nothing is under way."""
        while self._pending:
            self.wait_oldest()

    def close(self) -> None:
        """Wait for what is under way, and let go of stream and events; may be called twice."""
        if not self._closed:
            self._closed = True
            self.wait_all()
            self._undo.close()

    def _mark(self, driver: Driver) -> None:
        event = self._free.popleft()
        try:
            driver.record(event, self._stream)
        except TransferError as error:
            self._broken(error)
        self._pending.append(event)

    def _has_happened(self, driver: Driver, event: int) -> bool:
        try:
            return driver.has_happened(event)
        except TransferError as error:
            self._broken(error)
