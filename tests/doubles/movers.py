"""Movers that move nothing: a pool whose pulls a test scripts, and that says what it was asked."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from nearkv.agent.movers.jobs import EngineMemory, MoverCounts, MoverStatus, PullJob
from nearkv.agent.movers.pool import MoverPool
from nearkv.agent.movers.purposes import Kind
from nearkv.transfer.backends.contract import Grant, Path, Probe, PullReport
from nearkv.transfer.errors import PullError, Reason

Script = Callable[[PullJob], Awaitable[PullReport]]


def report(job: PullJob, *, rdma: bool = False) -> PullReport:
    """Return how a pull went that went well."""
    layout = job.target.layout
    size_bytes = len(job.request.target_blocks) * layout.layers * layout.block_bytes
    path = Path(name=job.backend, rdma=rdma)
    return PullReport(size_bytes=size_bytes, seconds=0.001, path=path, pieces=1)


class FakeMovers(MoverPool):
    """Keeps the pool's promises without processes.

    ``script`` is what a pull does; while ``slow`` is set, an end is not acknowledged.
    """

    def __init__(self, *probes: Probe) -> None:
        super().__init__()
        self.probes = {probe.name: probe for probe in probes}
        self.script: Script = self._succeed
        self.jobs: list[PullJob] = []
        self.writing: Counter[str] = Counter()
        self.acknowledged = asyncio.Event()
        self.acknowledged.set()
        self.grants: dict[bytes, tuple[str, str, Grant]] = {}
        self.dropped: list[str] = []
        self.unserved: dict[str, Reason] = {}
        self.closed = False
        self._gone: dict[str, asyncio.Event] = {}

    @property
    def counts(self) -> MoverCounts:
        """Nothing was ever started."""
        return MoverCounts(Counter({Kind.PULL: 0}))

    async def pull(self, job: PullJob) -> PullReport:
        """Do what the script says; ends early when a memory is dropped."""
        self.jobs.append(job)
        self.writing[job.target.key] += 1
        try:
            return await self._run(job)
        finally:
            await self._until_acknowledged()
            self.writing[job.target.key] -= 1

    async def _run(self, job: PullJob) -> PullReport:
        keys = [job.target.key] + ([job.source.key] if job.source else [])
        gone = [asyncio.create_task(self._event(key).wait()) for key in keys]
        task: asyncio.Task[PullReport] = asyncio.create_task(_awaited(self.script(job)))
        try:
            await asyncio.wait([task, *gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise PullError(Reason.PEER_LOST, "the engine is gone")
            return task.result()
        finally:
            for other in (task, *gone):
                other.cancel()
            await asyncio.gather(task, *gone, return_exceptions=True)

    async def _until_acknowledged(self) -> None:
        # Cancelled twice, a real pool would be disturbed in the same place.
        await self.acknowledged.wait()

    async def offer(self, source: EngineMemory, backend: str, grant: Grant) -> bytes:
        """Note the grant."""
        if backend in self.unserved:
            raise PullError(self.unserved[backend], f"{backend} is not served")
        self.grants[grant.ticket] = (source.key, backend, grant)
        return b"offer"

    async def withdraw(self, source_key: str, ticket: bytes) -> None:
        """Forget the grant."""
        assert self.grants.pop(ticket)[0] == source_key

    async def drop(self, key: str) -> None:
        """End what depends on a memory."""
        self._event(key).set()
        self.dropped.append(key)

    async def close(self) -> None:
        """Note that it is over."""
        self.closed = True

    def describe(self) -> list[MoverStatus]:
        """There are none."""
        return []

    async def probe(self, backend: str) -> Probe:
        """Say what the test said."""
        return self.probes.get(backend) or Probe(name=backend, usable=False, detail="not here")

    async def _succeed(self, job: PullJob) -> PullReport:
        return report(job)

    def _event(self, key: str) -> asyncio.Event:
        return self._gone.setdefault(key, asyncio.Event())


async def _awaited(result: Awaitable[PullReport]) -> PullReport:
    return await result
