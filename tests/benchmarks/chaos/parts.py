"""Parts as processes that can be killed, stopped, slowed and started again on their port."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.benchmarks.chaos.plan import Harm, Trouble

_ROOT = Path(__file__).resolve().parents[3]
_START_SECONDS = 60.0
_SLOW_STOP_SECONDS, _SLOW_GO_SECONDS = 0.08, 0.02


@dataclass(slots=True)
class Part:
    """One program; ``arguments`` make its command line from the port it shall listen on."""

    name: str
    module: str
    arguments: Callable[[int], list[str]]
    log: Path
    port: int = 0
    hurt_at: float = float("-inf")
    """When it was last in trouble; in the future as long as it is."""
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Base URL of its HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        """Start it and wait until it answers."""
        offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as stream:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self.module, *self.arguments(self.port)),
                cwd=_ROOT,
                stdout=stream,
                stderr=stream,
                env={**os.environ, "NEARKV_LOG_LEVEL": "info"},
            )
        async with asyncio.timeout(_START_SECONDS):
            while (port := self._port_said(offset)) is None:
                assert self.process.returncode is None, f"{self.name} ended; see {self.log}"
                await asyncio.sleep(0.05)
        self.port = port

    def _port_said(self, offset: int) -> int | None:
        with self.log.open("rb") as stream:
            stream.seek(offset)
            for line in stream:
                with contextlib.suppress(ValueError):
                    said = json.loads(line)
                    if said.get("event", "listening") == "listening" and "url" in said:
                        return int(said["url"].rpartition(":")[2])
        return None

    async def ready(self, path: str) -> None:
        """Wait until a path is answered with 200."""
        async with asyncio.timeout(_START_SECONDS), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with session.get(self.url + path) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)

    async def suffer(self, trouble: Trouble) -> None:
        """Go through one fault; it is well again at the end."""
        self.hurt_at = float("inf")
        if trouble.harm is Harm.KILL:
            await self.kill()
            await asyncio.sleep(trouble.seconds)
            await self.start()
        elif trouble.harm is Harm.STOP:
            await self._stopped(trouble.seconds)
        else:
            end = time.monotonic() + trouble.seconds
            while time.monotonic() < end:
                await self._stopped(_SLOW_STOP_SECONDS)
                await asyncio.sleep(_SLOW_GO_SECONDS)
        self.hurt_at = time.monotonic()

    async def _stopped(self, seconds: float) -> None:
        self._signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """End it at once, as the system would for lack of memory."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def resident_bytes(self) -> int:
        """Return its resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def engine_part(name: str, folder: Path) -> Part:
    """Return an engine double that takes a few dozen milliseconds for a request."""
    options = {
        "num-blocks": 400,
        "max-model-len": 6000,
        "prefill-tokens-per-second": 20_000,
        "decode-seconds-per-token": 0.004,
        "requests-kept": 1,
    }
    fixed = [str(part) for key, value in options.items() for part in (f"--{key}", value)]
    return Part(
        name,
        "tests.doubles.engine",
        lambda port: [*fixed, "--port", str(port)],
        folder / f"{name}.log",
    )


def service_part(name: str, component: str, folder: Path, config: dict[str, Any]) -> Part:
    """Return an agent or an ingress with this configuration."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(config))
    return Part(
        name,
        f"nearkv.{component}",
        lambda port: ["--config", str(file), "--listen", f"127.0.0.1:{port}"],
        folder / f"{name}.log",
    )
