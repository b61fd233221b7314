"""A control plane of real binaries on loopback: etcd, kube-apiserver, kube-schedulers.

As in the observations that the scheduler double follows: no controllers and no kubelets, all is
allowed, and without the admission plugin that would taint every new node.
"""

import asyncio
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.cluster.binaries import Binaries
from tests.doubles.scheduler import ExtenderConfig, SchedulerConfig
from tests.integration.scheduling_site import ControlPlane

ADMIN_TOKEN = "test-token"  # noqa: S105 (of a server on loopback that lives for one test)
ISSUER = "https://kubernetes.default.svc"
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_PAUSE_SECONDS = 0.05


class PlaneError(Exception):
    """A binary ended, or was not ready in time; the end of its log is in the message."""


@dataclass(slots=True)
class _Program:
    """A running binary and its log."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def check(self) -> None:
        """Raise :class:`PlaneError` when it has ended."""
        if self.process.returncode is not None:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise PlaneError(f"{self.name} ended with {self.process.returncode}:\n{tail}")

    async def stop(self) -> None:
        """End it."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), _STOP_SECONDS)
            except TimeoutError:
                self.process.kill()
        await self.process.wait()


async def _start(stack: AsyncExitStack, folder: Path, path: str, *arguments: str) -> _Program:
    name = Path(path).name
    log = folder / f"{name}.log"
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            path, *arguments, cwd=folder, stdout=sink, stderr=subprocess.STDOUT
        )
    program = _Program(name, process, log)
    stack.push_async_callback(program.stop)
    return program


async def _ready(program: _Program, url: str, headers: dict[str, str] | None = None) -> None:
    """Wait until a URL answers 200."""
    give_up_at = time.monotonic() + _START_SECONDS
    async with aiohttp.ClientSession(headers=headers) as session:
        while time.monotonic() < give_up_at:
            program.check()
            try:
                async with session.get(url, ssl=False) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(_PAUSE_SECONDS)
    raise PlaneError(f"{program.name} was not ready in {_START_SECONDS:g} s: {url}")


@asynccontextmanager
async def real_plane(binaries: Binaries) -> AsyncIterator[ControlPlane]:
    """Run etcd and kube-apiserver inside the block, and kube-schedulers as they are asked for."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nearkv-cluster-")))
        url = await start_servers(stack, folder, binaries)
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        kubeconfig = write_kubeconfig(folder, url)

        @asynccontextmanager
        async def scheduling(config: SchedulerConfig) -> AsyncIterator[None]:
            async with _scheduling(folder, binaries, kubeconfig, config):
                yield

        yield ControlPlane(url, kubeconfig, headers, scheduling)


async def start_servers(
    stack: AsyncExitStack,
    folder: Path,
    binaries: Binaries,
    *,
    authorization: str = "AlwaysAllow",
) -> str:
    """Start etcd and kube-apiserver for as long as the stack; return the latter's URL.

    It takes one token, of an administrator, and those of service accounts.
    """
    etcd_url = await _start_etcd(stack, folder, binaries)
    return await _start_api_server(stack, folder, binaries, etcd_url, authorization)


async def _start_etcd(stack: AsyncExitStack, folder: Path, binaries: Binaries) -> str:
    client, peer = (f"http://127.0.0.1:{port}" for port in _free_ports(2))
    program = await _start(
        stack,
        folder,
        binaries.path("etcd"),
        *("--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"default={peer}"),
    )
    await _ready(program, f"{client}/health")
    return client


async def _start_api_server(
    stack: AsyncExitStack, folder: Path, binaries: Binaries, etcd_url: str, authorization: str
) -> str:
    (port,) = _free_ports(1)
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
    key = folder / "service-accounts.key"
    await _make_key(key)
    program = await _start(
        stack,
        folder,
        binaries.path("kube-apiserver"),
        *("--etcd-servers", etcd_url, "--bind-address", "127.0.0.1"),
        *("--secure-port", str(port), "--cert-dir", str(folder / "certificates")),
        *("--token-auth-file", str(tokens), "--authorization-mode", authorization),
        *("--service-account-issuer", ISSUER),
        *("--service-account-signing-key-file", str(key), "--service-account-key-file", str(key)),
        *("--service-cluster-ip-range", "10.0.0.0/24"),
        *("--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition"),
    )
    url = f"https://127.0.0.1:{port}"
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    # Pods can be made once their namespace is there, a moment after all else.
    await _ready(program, f"{url}/api/v1/namespaces/default", headers)
    return url


async def _make_key(path: Path) -> None:
    """Make the key that service accounts' tokens would be signed with."""
    openssl = await asyncio.create_subprocess_exec(
        *("openssl", "genrsa", "-out", str(path), "2048"), stderr=asyncio.subprocess.DEVNULL
    )
    if await asyncio.wait_for(openssl.wait(), _START_SECONDS):
        raise PlaneError("openssl made no key")


@asynccontextmanager
async def _scheduling(
    folder: Path, binaries: Binaries, kubeconfig: Path, config: SchedulerConfig
) -> AsyncIterator[None]:
    async with running_scheduler(folder, binaries, scheduler_document(config, kubeconfig)):
        yield


@asynccontextmanager
async def running_scheduler(
    folder: Path, binaries: Binaries, document: dict[str, Any]
) -> AsyncIterator[None]:
    """Run a kube-scheduler with a configuration inside the block."""
    async with AsyncExitStack() as stack:
        (port,) = _free_ports(1)
        file = folder / f"scheduler-{port}.json"
        file.write_text(json.dumps(document, indent=1))
        program = await _start(
            stack,
            folder,
            binaries.path("kube-scheduler"),
            *("--config", str(file), "--secure-port", str(port)),
            *("--bind-address", "127.0.0.1", "--cert-dir", str(folder / "scheduler")),
        )
        await _ready(program, f"https://127.0.0.1:{port}/healthz")
        yield
        program.check()


def scheduler_document(config: SchedulerConfig, kubeconfig: Path) -> dict[str, Any]:
    """Return a KubeSchedulerConfiguration for what the double is configured with."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "profiles": [
            {
                "schedulerName": config.scheduler_name,
                "percentageOfNodesToScore": config.percentage_of_nodes_to_score,
            }
        ],
        "extenders": [_entry(one) for one in config.extenders],
    }


def _entry(extender: ExtenderConfig) -> dict[str, Any]:
    entry = {
        "urlPrefix": extender.url_prefix,
        "filterVerb": extender.filter_verb,
        "prioritizeVerb": extender.prioritize_verb,
        "preemptVerb": extender.preempt_verb,
        "weight": extender.weight,
        "httpTimeout": f"{round(extender.timeout * 1000)}ms",
        "nodeCacheCapable": extender.node_cache_capable,
        "ignorable": extender.ignorable,
        "managedResources": [
            {"name": name, "ignoredByScheduler": name in extender.ignored_resources}
            for name in sorted(extender.managed_resources)
        ],
    }
    return {key: value for key, value in entry.items() if value not in ("", [])}


def write_kubeconfig(
    folder: Path, url: str, *, name: str = "kubeconfig", token: str = ADMIN_TOKEN
) -> Path:
    """Write a kubeconfig that shows a token."""
    path = folder / name
    cluster = {"server": url, "insecure-skip-tls-verify": True}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path.write_text(json.dumps(document))
    return path


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago: these programs cannot choose by themselves."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
