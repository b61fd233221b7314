"""Pulling between two memories that are both mapped here (``shm`` and ``inproc``)."""

import time
from collections.abc import Callable

from nearkv.transfer.backends.contract import Path, PullReport, PullRequest, Region, Source, Stop
from nearkv.transfer.copying import Copier
from nearkv.transfer.errors import LayoutError
from nearkv.transfer.layout import cut_runs, plan_runs

CHUNK_BYTES = 4 << 20
"""Copied between two looks at ``stop``: well under a millisecond."""

Admit = Callable[[PullRequest], None]


def admit_all(request: PullRequest) -> None:
    """Admit a reader that was handed the memory itself: there is nothing left to refuse."""


class MappedLink:
    """A link that copies. ``admit`` raises when a request must not be served, before or after."""

    def __init__(
        self,
        source: Source,
        target: Region,
        *,
        path: Path,
        copier: Copier,
        chunk_bytes: int = CHUNK_BYTES,
        admit: Admit = admit_all,
    ) -> None:
        self._source = source
        self._target = target
        self._path = path
        self._copier = copier
        self._chunk_bytes = chunk_bytes
        self._admit = admit

    @property
    def path(self) -> Path:
        """What the bytes go over."""
        return self._path

    def pull(self, request: PullRequest, stop: Stop) -> PullReport:
        """Copy blocks; the fence is checked before, after, and between chunks."""
        started = time.monotonic()
        self._admit(request)
        if request.source_layout != self._source.region.layout:
            raise LayoutError("the request's layout is not the source's")
        runs = plan_runs(
            self._source.region.layout,
            self._target.layout,
            request.source_blocks,
            request.target_blocks,
        )
        for chunk in cut_runs(runs, chunk_bytes=self._chunk_bytes):
            stop.check()
            request.fence.check(self._source.slots)
            self._copier.copy(chunk)
        request.fence.check(self._source.slots)
        self._admit(request)
        return PullReport(
            size_bytes=runs.total_bytes,
            seconds=time.monotonic() - started,
            path=self._path,
            pieces=len(runs),
        )

    def close(self) -> None:
        """Let go of both memories (their views stay the caller's)."""
        self._copier.close()
