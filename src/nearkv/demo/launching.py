"""Starting processes, waiting until they are ready, and ending them with all they started.

Each process leads a session of its own, so that a signal reaches its children too (vLLM
runs its engine core in a child) and so that Ctrl-C in a terminal reaches only us: the
order of stopping is ours to decide. Output goes to a file, never to a pipe that could
fill up. Waiting has a deadline, and ending has two: SIGTERM first, SIGKILL when it was not
enough.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from nearkv.demo.errors import LaunchError
from nearkv.demo.log_tail import log_tail
from nearkv.demo.workspace import Progress, silent

POLL_SECONDS = 0.1
PROBE_TIMEOUT_SECONDS = 2.0
STOP_DEADLINE_SECONDS = 10.0
KILL_DEADLINE_SECONDS = 5.0

Probe = Callable[[], Awaitable[bool]]
"""Answers whether a process is ready."""
StageReader = Callable[[str], str]
"""Turns the end of a log into what the process is doing, such as ``loading weights``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start. ``env`` is added to our own environment.

    Output goes to ``log_path``; with ``stdout_path``, standard output goes there instead.
    """

    name: str
    command: tuple[str, ...]
    log_path: Path
    env: Mapping[str, str]
    cwd: Path | None = None
    stdout_path: Path | None = None


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago.

    Another program may take it before it is used; the process then fails to bind, and its
    log says so.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class LaunchedProcess:
    """A running process and its group."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self._process = process

    @property
    def name(self) -> str:
        """The name given in the spec."""
        return self.spec.name

    @property
    def pid(self) -> int:
        """Process id, which is the id of the group as well."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status (negative: signal number), or None while it runs."""
        return self._process.returncode

    def kill(self) -> None:
        """End the process and its group at once, as a crash would."""
        self._signal_group(signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for the process to end; return its exit status."""
        return await self._process.wait()

    async def stop(self, *, deadline_seconds: float = STOP_DEADLINE_SECONDS) -> None:
        """Ask the group to end, and end it by force after the deadline."""
        self._signal_group(signal.SIGTERM)
        if not await self._gone(deadline_seconds):
            self._signal_group(signal.SIGKILL)
            if not await self._gone(KILL_DEADLINE_SECONDS):
                raise LaunchError(f"{self.name}: process group {self.pid} cannot be ended")
        await self._process.wait()

    async def _gone(self, deadline_seconds: float) -> bool:
        """Wait until no member of the group is left; return whether that came true."""
        end = time.monotonic() + deadline_seconds
        while self._group_exists():
            if time.monotonic() > end:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    def _group_exists(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.pid, number)


async def launch(spec: ProcessSpec) -> LaunchedProcess:
    """Start a process; its log is begun anew.

    Raises ``LaunchError`` when the program cannot be started.
    """
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    stdout_path = spec.stdout_path or spec.log_path
    with spec.log_path.open("wb") as log, stdout_path.open("ab") as stdout:
        if spec.stdout_path is not None:
            stdout.truncate(0)
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=log if spec.stdout_path is not None else stdout,
                env={**os.environ, **spec.env},
                cwd=spec.cwd,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{spec.name}: cannot start {spec.command[0]}: {error}") from error
    return LaunchedProcess(spec, process)


async def wait_until_ready(
    process: LaunchedProcess,
    probe: Probe,
    *,
    deadline_seconds: float,
    stage_of: StageReader = lambda _log: "starting",
    progress: Progress = silent,
) -> None:
    """Wait until the probe answers yes; raise ``LaunchError`` on death or at the deadline."""
    start = time.monotonic()
    while not await probe():
        elapsed_seconds = time.monotonic() - start
        if process.exit_status is not None:
            raise LaunchError(_failure(process, f"ended with status {process.exit_status}"))
        if elapsed_seconds > deadline_seconds:
            raise LaunchError(_failure(process, f"not ready after {deadline_seconds:.0f} s"))
        stage = stage_of(log_tail(process.spec.log_path, lines=60))
        progress(f"{process.name}: {stage} {elapsed_seconds:.0f} s")
        await asyncio.sleep(POLL_SECONDS)
    progress(f"{process.name}: ready after {time.monotonic() - start:.0f} s")


def _failure(process: LaunchedProcess, what: str) -> str:
    tail = log_tail(process.spec.log_path)
    return f"{process.name}: {what}. The end of {process.spec.log_path}:\n{tail}"


@asynccontextmanager
async def running(spec: ProcessSpec) -> AsyncIterator[LaunchedProcess]:
    """Run a process for the length of a block; its whole group is ended afterwards."""
    process = await launch(spec)
    try:
        yield process
    finally:
        await process.stop()


def http_probe(session: aiohttp.ClientSession, url: str) -> Probe:
    """Make a probe that is content with status 200 at ``url``."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_SECONDS)

    async def answers_ok() -> bool:
        try:
            async with session.get(url, timeout=timeout) as response:
                return response.status == 200  # noqa: PLR2004 - the HTTP status "OK"
        except (aiohttp.ClientError, TimeoutError):
            return False

    return answers_ok
