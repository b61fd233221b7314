"""The file of tenants: read at the start, and again whenever it changes."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from nearkv.ingress.tenants import TenantFileError, Tenants, read_tenants

_MOST_BYTES = 4 << 20
_SETTLED_SECONDS = 0.5
"""A file that stays the same for so long is written whole."""

log = structlog.get_logger(__name__)


class KeyFile:
    """Keeps tenants in step with a file.

    A Secret's file changes by a link to another folder, so contents are compared, not times.
    Elsewhere somebody may be writing it: the beginning of such a file can be one by itself, with
    tenants missing and a key cut short. So a new one counts once it was seen twice.
    A file that cannot be used leaves the tenants as they are. It is counted for as long as it
    is there, and logged once.
    """

    def __init__(
        self, path: Path, tenants: Tenants, *, seconds: float, count: Callable[[str], None]
    ) -> None:
        self._path = path
        self.tenants = tenants
        self._seconds = seconds
        self._count = count
        self._seen: bytes | None = None
        self._new: bytes | None = None
        self._said = ""

    def load(self) -> None:
        """Read the file; raises :class:`TenantFileError`."""
        self._take(self._read())

    async def follow(self) -> None:
        """Look at the file again and again, until cancelled."""
        while True:
            is_new = self._new is not None
            await asyncio.sleep(min(_SETTLED_SECONDS, self._seconds) if is_new else self._seconds)
            try:
                data = await asyncio.to_thread(self._read)
                if data == self._seen:
                    self._new = None
                elif data != self._new:
                    self._new = data
                else:
                    self._new = None
                    self._take(data)
                    self._said = ""
                    log.info("tenants_loaded", path=str(self._path))
            except TenantFileError as error:
                self._new = None
                self._count("failed")
                level = log.debug if str(error) == self._said else log.warning
                level("tenants_not_loaded", path=str(self._path), error=str(error))
                self._said = str(error)

    def _take(self, data: bytes) -> None:
        self.tenants.replace(read_tenants(data))
        self._seen = data
        self._count("loaded")

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as stream:
                data = stream.read(_MOST_BYTES + 1)
        except OSError as error:
            raise TenantFileError(f"{self._path}: {error.strerror}") from error
        if len(data) > _MOST_BYTES:
            raise TenantFileError(f"{self._path}: is over {_MOST_BYTES} bytes")
        return data
