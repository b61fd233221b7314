"""Routers to compare: ours, and others as their packages install them, each on loopback."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.benchmarks.bench_ingress import Service, agent_config, started_service
from tests.benchmarks.conversations import TOKENIZER
from tests.integration.envoy_site import endpoint, envoy_program, example

_ROOT = Path(__file__).resolve().parents[2]
_PEERS = _ROOT / ".venv-bench" / "bin" / "python"
_START_SECONDS = 60.0
T = TypeVar("T")
StartRouter = Callable[[Sequence[str], Path], AbstractContextManager[Service]]
"""Starts a router in front of engines' URLs, with a folder for its files."""


@contextmanager
def nearkv(urls: Sequence[str], folder: Path) -> Iterator[Service]:
    """Run an agent and the ingress with its own proxy, policy ``cost``."""
    with (
        started_service("agent", folder, agent_config(urls), core=None) as agent,
        started_service(
            "ingress", folder, {"agents": [agent.url], "policy": "cost"}, core=None
        ) as ingress,
    ):
        yield ingress


def vllm_router(policy: str) -> StartRouter:
    """Return what starts PyPI's ``vllm-router``."""
    return _rust_router("vllm_router.launch_router", policy)


def sglang_router(policy: str) -> StartRouter:
    """Return what starts PyPI's ``sglang-router``."""
    return _rust_router("sglang_router.launch_router", policy)


def _rust_router(module: str, policy: str) -> StartRouter:
    @contextmanager
    def start(urls: Sequence[str], folder: Path) -> Iterator[Service]:
        port, metrics_port = free_port(), free_port()
        flags = ("--host", "127.0.0.1", "--port", str(port), "--policy", policy)
        more = ("--prometheus-port", str(metrics_port), "--worker-urls", *urls)
        url = f"http://127.0.0.1:{port}"
        command = [str(_PEERS), "-m", module, *flags, *more]
        with _running(command, folder) as process:
            _answers(url, process)
            yield Service(url, process.pid)

    return start


def dynamo_selector(block_tokens: int) -> StartRouter:
    """Return what starts a proxy around Dynamo's selector, in its best setting for this work."""

    @contextmanager
    def start(urls: Sequence[str], folder: Path) -> Iterator[Service]:
        program = str(Path(__file__).with_name("peer_dynamo_router.py"))
        command = [str(_PEERS), program, str(TOKENIZER), str(block_tokens), *urls]
        environment = {**os.environ, "DYN_ROUTER_PREFILL_LOAD_SCALE": "8", "DYN_LOG": "error"}
        told = folder / "router.log"
        with _running(command, folder, environment) as process:
            port = _until(lambda: _port_in(told), process)
            url = f"http://127.0.0.1:{port}"
            _answers(url, process)
            yield Service(url, process.pid)

    return start


def _port_in(log: Path) -> str:
    """Return the port in a program's output, empty as long as there is none."""
    lines = log.read_text().splitlines() if log.exists() else []
    return next((line for line in lines if line.isdigit()), "")


@contextmanager
def envoy_ring_hash(urls: Sequence[str], folder: Path) -> Iterator[Service]:
    """Run Envoy with a ring hash over the session's header."""
    with _envoy(_ring_hash(urls), folder) as service:
        yield service


@contextmanager
def envoy_with_picker(urls: Sequence[str], folder: Path) -> Iterator[Service]:
    """Run Envoy that asks our endpoint picker; the processor time told is Envoy's."""
    settings = {"mode": "ext-proc", "policy": "cost", "ext_proc": {"listen": "127.0.0.1:0"}}
    with (
        started_service("agent", folder, agent_config(urls), core=None) as agent,
        started_service("ingress", folder, {"agents": [agent.url], **settings}, core=None),
    ):
        picker = _told(folder / "ingress.log", "ext_proc_listening")
        config = example("envoy-original-dst.yaml", picker=picker)
        with _envoy(config, folder) as service:
            yield service


@contextmanager
def _envoy(config: dict[str, Any], folder: Path) -> Iterator[Service]:
    path, told = folder / "envoy.json", folder / "admin-address"
    path.write_text(json.dumps(config))
    flags = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")
    command = [str(envoy_program()), "-c", str(path), "--admin-address-path", str(told), *flags]
    with _running(command, folder) as process:
        _until(lambda: told.exists() and told.read_text().strip(), process)
        admin = f"http://{told.read_text().strip()}"
        url = f"http://{_until(lambda: _listener(admin), process)}"
        _answers(url, process)
        yield Service(url, process.pid)


def _listener(admin: str) -> str:
    with urllib.request.urlopen(f"{admin}/listeners?format=json") as answer:  # noqa: S310 (loopback)
        for status in json.load(answer).get("listener_statuses", []):
            address = status["local_address"]["socket_address"]
            return f"{address['address']}:{address['port_value']}"
    return ""


@contextmanager
def _running(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program; what it says goes to a file beside its others."""
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
    try:
        yield process
    except BaseException:
        sys.stderr.write((folder / "router.log").read_text()[-2000:])
        raise
    finally:
        process.terminate()
        process.wait(_START_SECONDS)


def _ring_hash(urls: Sequence[str]) -> dict[str, Any]:
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network."
        "http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {
                                "cluster": "engines",
                                "timeout": "0s",
                                "hash_policy": [{"header": {"header_name": "x-session-id"}}],
                            },
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            {
                "name": "router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    listener = {
        "name": "in",
        "address": _place("127.0.0.1:0"),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "lb_policy": "RING_HASH",
        "load_assignment": {
            "cluster_name": "engines",
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": _place(endpoint(u))}} for u in urls]}
            ],
        },
    }
    return {
        "admin": {"address": _place("127.0.0.1:0")},
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


def _place(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def free_port() -> int:
    """Return a port that nobody has now: these programs cannot be told to take any."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _told(log: Path, event: str) -> str:
    """Return the address that a component's log tells with an event."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return next(str(line["address"]) for line in lines if line["event"] == event)


def _answers(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until a router has an engine for a request."""
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}

    def asked() -> bool:
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)  # noqa: S310 (as above)
        try:
            with urllib.request.urlopen(request) as answer:  # noqa: S310 (as above)
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    _until(asked, process)


def _until(condition: Callable[[], T], process: "subprocess.Popen[bytes]") -> T:
    """Wait for a program; raises where it ends, or takes too long."""
    give_up_at = time.monotonic() + _START_SECONDS
    while True:
        found = condition()
        if found:
            return found
        if process.poll() is not None:
            raise RuntimeError(f"the router ended with status {process.returncode}")
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"the router did not start within {_START_SECONDS:g} s")
        time.sleep(0.1)


@contextmanager
def engines(count: int, **settings: Any) -> Iterator[list[str]]:
    """Run engine doubles with these settings in one process of their own; yields their URLs."""
    module = "tests.benchmarks.bench_engines"
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(count), json.dumps(settings)],
        cwd=_ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(_START_SECONDS)
