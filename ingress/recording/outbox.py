"""A bounded queue with a thread behind it, for what must never hold up a request.

The thread looks at the queue a few times a second: being woken for each item would have it
compete with the event loop for the interpreter, request by request.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

T = TypeVar("T")

_LOOK_SECONDS = 0.2

log = structlog.get_logger(__name__)


class Outbox(Generic[T]):
    """Hands items to ``deliver``, some at a time, on a thread of its own.

    Items beyond ``limit`` are dropped and counted by ``count("dropped", n)``; items whose
    delivery raised by ``count("failed", n)``, and the others by ``count("delivered", n)``.
    ``deliver`` is never called again before it returned; ``abandon`` is called last, and should
    make it return if it still runs.
    """

    def __init__(
        self,
        deliver: Callable[[list[T]], None],
        *,
        name: str,
        limit: int,
        batch: int,
        count: Callable[[str, int], None],
        abandon: Callable[[], None] | None = None,
    ) -> None:
        self._deliver = deliver
        self._abandon = abandon
        self._name = name
        self._limit = limit
        self._batch = batch
        self._count = count
        self._waiting: deque[T] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def put(self, item: T) -> None:
        """Queue an item, or drop it."""
        if len(self._waiting) >= self._limit:
            self._count("dropped", 1)
            return
        self._waiting.append(item)

    def close(self, *, deadline_seconds: float) -> None:
        """Deliver what waits, for so long at most."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(deadline_seconds)
        if self._abandon is not None:
            self._abandon()
        if self._waiting:
            self._count("dropped", len(self._waiting))

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._waiting:
            items = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            try:
                self._deliver(items)
            except Exception as error:  # noqa: BLE001 (whatever it is, the thread goes on)
                self._count("failed", len(items))
                log.warning("not_delivered", to=self._name, items=len(items), error=repr(error))
            else:
                self._count("delivered", len(items))
