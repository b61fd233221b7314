"""Both ends in one process, for tests of what lies above: grants, fences and copies are real."""

import secrets

from nearkv.transfer.backends.contract import Grant, Link, Path, Probe, Region, Source, Stop
from nearkv.transfer.backends.contract import PullRequest as Request
from nearkv.transfer.backends.grants import Grants, granted_blocks
from nearkv.transfer.backends.mapped import CHUNK_BYTES, MappedLink
from nearkv.transfer.copying import Copier
from nearkv.transfer.errors import PullError, Reason

_NAME = "inproc"
_PATH = Path(name=_NAME, detail="both ends are in one process")


class InprocServer:
    """The source's end. Its offers are good for links made from the same ``sources``."""

    def __init__(self, source: Source, servers: dict[bytes, "InprocServer"]) -> None:
        self.source = source
        self.grants = Grants()
        self._servers = servers
        self._id = secrets.token_bytes(16)
        servers[self._id] = self

    def offer(self, grant: Grant) -> bytes:
        """Admit a reader; returns this server's id."""
        if self._id not in self._servers:
            raise PullError(Reason.NO_PATH, "the server is closed")
        self.grants.add(grant)
        return self._id

    def withdraw(self, ticket: bytes) -> None:
        """End a grant."""
        self.grants.withdraw(ticket)

    def close(self) -> None:
        """Stop serving; may be called twice."""
        self._servers.pop(self._id, None)
        self.grants.clear()

    def admit(self, request: Request) -> None:
        """Make sure that a request is granted; raises :class:`PullError`."""
        grant = self.grants.find(request.ticket)
        blocks = granted_blocks(grant, request.first_block, len(request.source_blocks))
        if blocks != request.source_blocks or grant.fence != request.fence:
            raise PullError(Reason.RANGE, "the request names other blocks than the grant")


class InprocBackend:
    """Serves and links within one process; ``servers`` is where the two find each other."""

    def __init__(
        self,
        servers: dict[bytes, InprocServer],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        native: bool | None = None,
    ) -> None:
        self._servers = servers
        self._chunk_bytes = chunk_bytes
        self._native = native

    @property
    def name(self) -> str:
        """The name in settings and metrics."""
        return _NAME

    def probe(self) -> Probe:
        """Say that it works."""
        return Probe(name=_NAME, usable=True, detail=_PATH.detail)

    def serve(self, source: Source) -> InprocServer:
        """Start serving a memory."""
        return InprocServer(source, self._servers)

    def connect(self, offer: bytes, target: Region, stop: Stop) -> Link:
        """Make a link to a server of this process; raises :class:`PullError`."""
        stop.check()
        server = self._servers.get(offer)
        if server is None:
            raise PullError(Reason.NO_SOURCE, "no server of this process made the offer")
        return MappedLink(
            server.source,
            target,
            path=_PATH,
            copier=Copier(server.source.region.view, target.view, native=self._native),
            chunk_bytes=self._chunk_bytes,
            admit=server.admit,
        )
