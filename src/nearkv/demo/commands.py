"""Running a set-up command to its end, with its output in a log and its age as progress."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nearkv.demo.errors import SetUpError
from nearkv.demo.log_tail import log_tail
from nearkv.demo.workspace import Progress

POLL_SECONDS = 0.5
TERMINATE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRunner:
    """Runs commands one after another, all appending to one log.

    ``explain`` may turn the end of the log of a failed command into advice.
    """

    log_path: Path
    progress: Progress
    env: Mapping[str, str] | None = None
    explain: Callable[[str], str] = lambda _log: ""

    def run(self, what: str, command: Sequence[str], *, deadline_seconds: float) -> None:
        """Run one command; raise ``SetUpError`` when it fails or takes too long."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with self.log_path.open("ab") as log:
            log.write(f"\n# {what}\n".encode())
            log.flush()
            process = subprocess.Popen(  # noqa: S603 - our own commands, no shell
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env
            )
        try:
            while (status := _poll(process)) is None:
                elapsed_seconds = time.monotonic() - start
                if elapsed_seconds > deadline_seconds:
                    raise self._failure(what, f"took more than {deadline_seconds:.0f} s")
                self.progress(f"{what} {elapsed_seconds:.0f} s")
        finally:
            _end(process)
        if status != 0:
            raise self._failure(what, f"failed with status {status}")

    def _failure(self, what: str, how: str) -> SetUpError:
        tail = log_tail(self.log_path, lines=20)
        advice = self.explain(log_tail(self.log_path, lines=200))
        return SetUpError(f"{what}: {how}. The end of {self.log_path}:\n{tail}\n{advice}".rstrip())


def _poll(process: subprocess.Popen[bytes]) -> int | None:
    """Wait a moment; return the exit status, or None if the process still runs."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(POLL_SECONDS)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, after a failure or Ctrl-C."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
