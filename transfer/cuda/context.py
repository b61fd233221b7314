"""A device of this process and its primary context.

Memory that other processes import, and memory that torch uses, must belong to the device's
*primary* context; any other context would have addresses of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nearkv.transfer.cuda.driver import Driver
from nearkv.transfer.errors import PullError, Reason


class DeviceContext:
    """Holds a device's primary context until :meth:`close`.

    ``device`` is the driver's number for it, ``uuid`` its name everywhere.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.device = driver.device(ordinal)
        self.uuid = driver.device_uuid(self.device)
        self._context = driver.retain_primary(self.device)
        self._open = True

    @contextmanager
    def use(self) -> Iterator[Driver]:
        """Have the context be this thread's current one within the block."""
        if not self._open:
            raise PullError(Reason.NO_PATH, "the device's context was let go")
        self.driver.push_context(self._context)
        try:
            yield self.driver
        finally:
            self.driver.pop_context()

    def run(self, call: Callable[..., None], *arguments: int) -> None:
        """Make one call with the context current; a way to undo things."""
        with self.use():
            call(*arguments)

    def close(self) -> None:
        """Let go of the context; may be called twice."""
        if self._open:
            self._open = False
            self.driver.release_primary(self.device)


def find_device(driver: Driver, uuid: str) -> int:
    """Return the ordinal of a device; raises :class:`PullError` (``NO_PATH``) without it."""
    seen = [driver.device_uuid(driver.device(n)) for n in range(driver.device_count())]
    if uuid not in seen:
        raise PullError(
            Reason.NO_PATH, f"device {uuid or 'of no name'} is not among the {len(seen)} seen here"
        )
    return seen.index(uuid)
