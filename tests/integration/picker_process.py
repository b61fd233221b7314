"""The ingress as a process of its own, as endpoint picker or as sidecar."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

_START_SECONDS = 20.0
_STOP_SECONDS = 15.0


@dataclass(slots=True)
class Program:
    """A running ``nearkv-ingress`` and the addresses that it told."""

    process: asyncio.subprocess.Process
    told: dict[str, str] = field(default_factory=dict)
    said: list[bytes] = field(default_factory=list)

    def kill(self) -> None:
        """Kill it, with no chance to say goodbye."""
        self.process.kill()

    def stop(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Return its exit status once it has ended."""
        return await asyncio.wait_for(self.process.wait(), _STOP_SECONDS)


@asynccontextmanager
async def ingress_program(*flags: str, listening: tuple[str, ...]) -> AsyncIterator[Program]:
    """Run it until all events named in ``listening`` told their addresses; kill it at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nearkv.ingress", *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    program = Program(process)
    draining = None
    try:
        async with asyncio.timeout(_START_SECONDS):
            while missing := set(listening) - program.told.keys():
                line = await _line(process)
                assert line, f"ended without {missing}: {program.said}"
                _note(program, line)
        draining = asyncio.create_task(_drain(process))
        yield program
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if draining is not None:
            await draining


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stderr is not None
    return await process.stderr.readline()


async def _drain(process: asyncio.subprocess.Process) -> None:
    while await _line(process):
        pass


def _note(program: Program, line: bytes) -> None:
    program.said.append(line)
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return
    if "address" in event:
        program.told[event["event"]] = event["address"]
