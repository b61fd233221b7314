"""A lock between processes, for work that must be done once per workspace."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nearkv.demo.errors import SetUpError
from nearkv.demo.workspace import Progress, silent

POLL_SECONDS = 0.2


@contextmanager
def exclusive(
    path: Path, *, deadline_seconds: float, progress: Progress = silent
) -> Iterator[None]:
    """Hold the lock file ``path``; raise ``SetUpError`` if others hold it beyond the deadline.

    The lock ends with the process that holds it, however that process ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with path.open("ab") as lock:
        while not _try_lock(lock.fileno()):
            waited_seconds = time.monotonic() - start
            if waited_seconds > deadline_seconds:
                raise SetUpError(f"another process has held {path} for {deadline_seconds:.0f} s")
            progress(f"{path.stem}: another process is at it, waiting {waited_seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
