"""Same node: the reader maps the source's memory and copies for itself.

Descriptors cannot travel in an offer, so there is no ``connect``: whoever holds the mapped
source makes the link. The reader is trusted with all of the source's memory, as it is the
agent's own mover.
"""

from nearkv.transfer.backends.contract import Link, Path, Probe, Region, Server, Source, Stop
from nearkv.transfer.backends.mapped import CHUNK_BYTES, MappedLink
from nearkv.transfer.copying import Copier, native_copy
from nearkv.transfer.errors import PullError, Reason


class ShmBackend:
    """Copies between mapped memories; ``native=False`` does without the extension."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES, native: bool | None = None) -> None:
        self._chunk_bytes = chunk_bytes
        self._native = native

    @property
    def name(self) -> str:
        """The name in settings and metrics."""
        return "shm"

    def probe(self) -> Probe:
        """Say how it would copy; it works wherever memfds can be mapped."""
        native = self._native is not False and native_copy() is not None
        how = "non-temporal copies" if native else "memmove: the extension was not built"
        return Probe(name=self.name, usable=True, detail=how)

    def link(self, source: Source, target: Region) -> Link:
        """Make a link between memories that are mapped here; raises :class:`PullError`."""
        copier = Copier(source.region.view, target.view, native=self._native)
        return MappedLink(
            source,
            target,
            path=Path(name=self.name, detail=copier.how),
            copier=copier,
            chunk_bytes=self._chunk_bytes,
        )

    def serve(self, source: Source) -> Server:  # noqa: ARG002 (the contract's form)
        """Refuse: shared memory is handed over, not served."""
        raise PullError(Reason.NO_PATH, "shared memory is handed over as a descriptor")

    def connect(self, offer: bytes, target: Region, stop: Stop) -> Link:  # noqa: ARG002 (as above)
        """Refuse: see :meth:`link`."""
        raise PullError(Reason.NO_PATH, "shared memory is handed over as a descriptor")
