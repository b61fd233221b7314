"""One mover as the pool sees it: what it was given, what it was asked, how it ended."""

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import structlog

from nearkv.agent.movers.limits import MoverLimits
from nearkv.agent.movers.messages import FromMover, Quit, Ready, Setup, Trouble
from nearkv.agent.movers.process import MoverProcess
from nearkv.agent.movers.purposes import Purpose
from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.messages import MOVER_GRACE_MS

log = structlog.get_logger(__name__)


class Cause(StrEnum):
    """Why a mover ended; a metric label."""

    IDLE = "idle"
    DONE = "done"
    """A probe's mover that has answered."""
    KILLED = "killed"
    """It did not do in time what it was asked: start, acknowledge a cancel, make an offer."""
    OVERDUE = "overdue"
    """A pull was not over at its deadline and grace; the kernel or the pool killed it."""
    CRASHED = "crashed"
    ENGINE_GONE = "engine_gone"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class MoverPlan:
    """How to start a mover."""

    command: Sequence[str]
    setup: Setup
    limits: MoverLimits


class Mover:
    """A mover, from its start until it is reaped; made on the event loop's thread.

    ``users`` counts calls that depend on it; ``sources`` and ``grants`` (ticket to expiry in
    milliseconds) are what it was given; ``idle_checks`` are the looks whether it is of use
    still. Raises ``OSError`` when it cannot be started.
    """

    def __init__(
        self, purpose: Purpose, plan: MoverPlan, *, on_exit: Callable[["Mover"], None]
    ) -> None:
        self.purpose = purpose
        self.kind = purpose.kind
        self.key = purpose.key
        self.users = 0
        self.has_target = False
        self.sources: set[str] = set()
        self.grants: dict[bytes, int] = {}
        self.idle_checks = 0
        self.started_at = time.monotonic()
        self.cause: Cause | None = None
        self.exit_text = ""
        loop = asyncio.get_running_loop()
        self._limits = plan.limits
        self._on_exit = on_exit
        self._started = loop.create_future()
        self._ended = asyncio.Event()
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[FromMover | None]] = {}
        self._deadlines_ms: dict[int, int] = {}
        self._quit_timer: asyncio.TimerHandle | None = None
        self._process = MoverProcess(
            plan.command, on_message=self._on_message, on_exit=self._on_process_exit
        )
        self._start_timer = loop.call_later(plan.limits.start_seconds, self._give_up_start)
        self._log = log.bind(mover=self.pid, **purpose.labels)
        self._process.send(plan.setup)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Whether it has started and is not about to end."""
        return self._started.done() and self.cause is None

    @property
    def in_flight(self) -> int:
        """How many pulls it was asked for that have not ended."""
        return len(self._deadlines_ms)

    def idle(self, now_ms: int) -> bool:
        """Whether nobody needs it; grants that have expired are dropped."""
        for ticket, expires_at_ms in list(self.grants.items()):
            if now_ms >= expires_at_ms:
                del self.grants[ticket]
        return not (self.users or self.grants or self.purpose.stays)

    async def started(self, *, timeout_seconds: float) -> bool:
        """Wait until it takes messages; False when it ended instead, or not in this time."""
        await asyncio.wait({self._started}, timeout=max(0.0, timeout_seconds))
        return self.ready

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message that has no answer; see ``Channel.send``."""
        self._process.send(message, fds)

    def ask(
        self, make: Callable[[int], msgspec.Struct], *, deadline_ms: int | None = None
    ) -> tuple[int, asyncio.Future[FromMover | None]]:
        """Send the message that ``make`` makes of an id; returns the id and the answer to come.

        The answer is ``None`` when the mover ends without one. ``deadline_ms`` marks a pull.
        """
        number = next(self._ids)
        answer: asyncio.Future[FromMover | None] = asyncio.get_running_loop().create_future()
        self._process.send(make(number))
        if self._ended.is_set():
            answer.set_result(None)
            return number, answer
        self._answers[number] = answer
        if deadline_ms is not None:
            self._deadlines_ms[number] = deadline_ms
        return number, answer

    def end(self, cause: Cause) -> None:
        """Kill it; the first cause is kept. See :meth:`ended`."""
        self.cause = self.cause or cause
        self._process.kill()

    def quit(self, cause: Cause) -> None:
        """Have it close its connections and exit, and kill it when that takes too long."""
        if self.cause is not None or not self._started.done():
            self.end(cause)
            return
        self.cause = cause
        seconds = self._limits.quit_seconds
        self._process.send(Quit(within_ms=int(seconds * 1000)))
        loop = asyncio.get_running_loop()
        self._quit_timer = loop.call_later(seconds, self._process.kill)

    async def ended(self) -> None:
        """Wait until it is gone: nobody writes or maps anything any more.

        A process that the kernel does not let go of (it waits for a device) is given up after
        ``reap_seconds``: it was killed, so it runs no more instructions of its own.
        """
        try:
            async with asyncio.timeout(self._limits.reap_seconds):
                await self._ended.wait()
        except TimeoutError:
            self._log.error("mover_not_reaped", after_seconds=self._limits.reap_seconds)

    def _on_message(self, message: FromMover) -> None:
        match message:
            case Ready():
                self._start_timer.cancel()
                if not self._started.done():
                    self._started.set_result(None)
            case Trouble():
                self._log.error(message.event, error=message.error)
            case _:
                self._deadlines_ms.pop(message.id, None)
                answer = self._answers.pop(message.id, None)
                if answer is not None:
                    answer.set_result(message)

    def _give_up_start(self) -> None:
        self.end(Cause.KILLED)

    def _on_process_exit(self, returncode: int) -> None:
        self._start_timer.cancel()
        if self._quit_timer is not None:
            self._quit_timer.cancel()
        self.exit_text = _exit_text(returncode)
        if self.cause is None:
            self.cause = self._unexpected(returncode)
        self._ended.set()
        if not self._started.done():
            self._started.set_result(None)
        # The pool learns of it before those who asked do: they may ask again at once.
        self._on_exit(self)
        for answer in self._answers.values():
            answer.set_result(None)
        self._answers.clear()
        self._deadlines_ms.clear()

    def _unexpected(self, returncode: int) -> Cause:
        """Return why it ended when nobody here ended it."""
        overdue_ms = monotonic_ms() - MOVER_GRACE_MS
        overdue = any(deadline_ms <= overdue_ms for deadline_ms in self._deadlines_ms.values())
        return Cause.OVERDUE if overdue and returncode == -signal.SIGKILL else Cause.CRASHED


def _exit_text(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"
