"""Pulls inside a mover: a few threads, each running one pull at a time.

Every running pull arms the kernel's timer beforehand and is taken off it before its end is
told (``guarding``). A pull that waits for a thread is not on it: it writes nothing yet.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from nearkv.agent.movers.backends import Backends
from nearkv.agent.movers.guarding import KillTimer
from nearkv.agent.movers.links import LinkShelf, Way, closed_on_error
from nearkv.agent.movers.memories import SourceMemory, TargetMemory
from nearkv.agent.movers.messages import (
    AddSource,
    AddTarget,
    Forget,
    Forgotten,
    Pull,
    PullFinished,
    Trouble,
)
from nearkv.transfer.backends.contract import Link, PullReport, Region, Stop
from nearkv.transfer.errors import PullError, Reason, TransferError
from nearkv.transfer.messages import MOVER_GRACE_MS

Send = Callable[[msgspec.Struct], None]


@dataclass(slots=True, eq=False)
class _Source:
    """A source, and whether its engine is gone (``forget`` is then to be answered)."""

    key: str
    memory: SourceMemory
    jobs: set["_Job"] = field(default_factory=set)
    forget: Forget | None = None


@dataclass(slots=True, eq=False)
class _Job:
    pull: Pull
    stop: Stop
    source: _Source | None

    @property
    def way(self) -> Way:
        return (self.pull.backend, self.pull.source_key, self.pull.offer)


class Puller:
    """Takes pulls, runs them on ``threads`` threads, and answers with ``send``."""

    def __init__(
        self, backends: Backends, timer: KillTimer, send: Send, *, threads: int, max_links: int
    ) -> None:
        self._backends = backends
        self._timer = timer
        self._send = send
        self._target: TargetMemory | None = None
        self._sources: dict[str, _Source] = {}
        self._shelf = LinkShelf(max_links)
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: set[_Job] = set()
        for number in range(threads):
            # Daemons: a mover never waits for its threads, its exit ends them.
            threading.Thread(target=self._work, name=f"pull-{number}", daemon=True).start()

    def add_target(self, message: AddTarget, fds: list[int]) -> None:
        """Take the memory to pull into."""
        self._target = TargetMemory(fds[0], message.layout, message.form)

    def add_source(self, message: AddSource, fds: list[int]) -> None:
        """Take memory to pull from."""
        memory = SourceMemory(fds[0], fds[1], message.layout, message.slots, message.form)
        self._sources[message.key] = _Source(message.key, memory)

    def pull(self, message: Pull) -> None:
        """Put a pull in the queue."""
        source = self._sources.get(message.source_key)
        if message.source_key and source is None:
            self._send(_refusal(message.id, Reason.NO_SOURCE, "the source is not known here"))
            return
        job = _Job(message, Stop(message.deadline_ms), source)
        with self._changed:
            if source is not None:
                source.jobs.add(job)
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, pull_id: int) -> None:
        """End a pull; one that has ended already was answered already."""
        with self._changed:
            jobs = [job for job in (*self._waiting, *self._running) if job.pull.id == pull_id]
        self._cancel(jobs)

    def forget(self, message: Forget) -> None:
        """End the pulls from a source and unmap it; answers once both are done."""
        source = self._sources.pop(message.key, None)
        if source is None:
            self._send(Forgotten(id=message.id, unmapped=True))
            return
        with self._changed:
            source.forget = message
            jobs = list(source.jobs)
        self._cancel(jobs)
        if not jobs:
            self._unmap(source, message)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._shelf.close()

    def _cancel(self, jobs: list[_Job]) -> None:
        """Stop the jobs that run and answer for those that wait."""
        for job in jobs:
            job.stop.cancel()
            with self._changed:
                waited = job in self._waiting
                if waited:
                    self._waiting.remove(job)
            if waited:
                self._finish(job, self._run(job))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                job = self._waiting.popleft()
                self._running.add(job)
            self._finish(job, self._run(job))
            # The name would keep what the pull was about until the next one.
            del job

    def _run(self, job: _Job) -> PullFinished:
        try:
            # Before the timer: a pull that waited too long is no reason to die.
            job.stop.check()
            with self._changed:
                self._arm()
            job.stop.check()
            return PullFinished(id=job.pull.id, report=self._pull(job))
        except TransferError as error:
            return _refusal(job.pull.id, _reason(job, error), str(error))
        except Exception as error:  # noqa: BLE001 - whatever a transport throws, the mover answers
            self._send(Trouble(event="pull_failed", error=repr(error)))
            return _refusal(job.pull.id, Reason.INTERNAL, repr(error))

    def _finish(self, job: _Job, answer: PullFinished) -> None:
        source = job.source
        with self._changed:
            self._running.discard(job)
            self._arm()
            forget = None
            if source is not None:
                source.jobs.discard(job)
                forget = None if source.jobs else source.forget
        self._send(answer)
        if source is not None and forget is not None:
            self._unmap(source, forget)

    def _arm(self) -> None:
        if self._running:
            self._timer.arm(min(job.pull.deadline_ms for job in self._running) + MOVER_GRACE_MS)
        else:
            self._timer.disarm()

    def _unmap(self, source: _Source, message: Forget) -> None:
        self._shelf.drop(source.key)
        self._send(Forgotten(id=message.id, unmapped=source.memory.unmap()))

    def _pull(self, job: _Job) -> PullReport:
        if self._target is None:
            raise PullError(Reason.INTERNAL, "the mover was given no target")
        target = self._target.region()
        kept = self._shelf.take(job.way)
        if kept is not None:
            try:
                return self._pull_over(kept, job)
            except TransferError as error:
                # The peer may have closed an idle connection, which shows only in use.
                if error.reason != Reason.PEER_LOST:
                    raise
        return self._pull_over(self._connect(job, target), job)

    def _connect(self, job: _Job, target: Region) -> Link:
        if job.source is not None:
            source = job.source.memory.source()
            return self._backends.local(job.pull.backend).link(source, target)
        return self._backends.get(job.pull.backend).connect(job.pull.offer, target, job.stop)

    def _pull_over(self, link: Link, job: _Job) -> PullReport:
        with closed_on_error(link):
            report = link.pull(job.pull.request, job.stop)
        self._shelf.put(job.way, link)
        return report


def _refusal(pull_id: int, reason: Reason, message: str) -> PullFinished:
    return PullFinished(id=pull_id, reason=reason, message=message)


def _reason(job: _Job, error: TransferError) -> Reason:
    """Return why a pull ended; whoever cancelled it may have done so for the source's end."""
    forgotten = job.source is not None and job.source.forget is not None
    if forgotten and error.reason == Reason.CANCELLED:
        return Reason.PEER_LOST
    return error.reason
