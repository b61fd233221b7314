"""The file of tenants: read at the start, and again whenever it changes."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from nearkv.ingress.tenants import TenantFileError, Tenants, read_tenants

_MOST_BYTES = 4 << 20

log = structlog.get_logger(__name__)


class KeyFile:
    """Keeps tenants in step with a file.

    A Secret's file changes by a link to another folder, so contents are compared, not times.
    A file that cannot be used leaves the tenants as they are, and is counted.
    """

    def __init__(
        self, path: Path, tenants: Tenants, *, seconds: float, count: Callable[[str], None]
    ) -> None:
        self._path = path
        self.tenants = tenants
        self._seconds = seconds
        self._count = count
        self._seen: bytes | None = None

    def load(self) -> None:
        """Read the file; raises :class:`TenantFileError`."""
        data = self._read()
        self._seen = data
        self.tenants.replace(read_tenants(data))
        self._count("loaded")

    async def follow(self) -> None:
        """Look at the file again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                data = await asyncio.to_thread(self._read)
                if data != self._seen:
                    self._seen = data
                    self.tenants.replace(read_tenants(data))
                    self._count("loaded")
                    log.info("tenants_loaded", path=str(self._path))
            except TenantFileError as error:
                self._count("failed")
                log.warning("tenants_not_loaded", path=str(self._path), error=str(error))

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as stream:
                data = stream.read(_MOST_BYTES + 1)
        except OSError as error:
            raise TenantFileError(f"{self._path}: {error.strerror}") from error
        if len(data) > _MOST_BYTES:
            raise TenantFileError(f"{self._path}: is over {_MOST_BYTES} bytes")
        return data
