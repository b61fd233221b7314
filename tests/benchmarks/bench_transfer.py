"""Moving KV blocks between processes, as ratios within one interleaved run (host memory).

This process is the two engines: it makes their pools and hands the descriptors to movers. Peers
run in ``.venv-bench``. All methods take turns, so that whatever else the machine does hits all
of them. Shared memory needs pools made by us, while NIXL moves any registered memory; and
non-temporal stores leave the target out of the cache, where memcpy leaves its end in it.
"""

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.memory import create_memory, create_slots
from tests.benchmarks.reporting import median, report
from tests.benchmarks.transfer_handover import HOUR_MS, receive, send
from tests.benchmarks.transfer_workload import CASES, POOL_BYTES

_ROOT = Path(__file__).resolve().parents[2]
_BENCH_PYTHON = _ROOT / ".venv-bench" / "bin" / "python"
_PASSES = 9
_SMALL_PULLS = 300
_START_SECONDS = 120.0
_ANSWER_SECONDS = 60.0

Samples = dict[tuple[str, str], list[float]]


class Driver:
    """A program that measures on demand, a line in and a line out."""

    def __init__(
        self,
        command: Sequence[str],
        fds: Sequence[int] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if os.environ.get("QUIET", "1") == "1" else None,
            pass_fds=fds, env={**os.environ, **(settings or {})},
        )  # fmt: skip
        self._buffer = b""

    def wait_ready(self) -> None:
        """Wait until it can measure."""
        self._answer(_START_SECONDS)

    def measure(self, method: str, case: str) -> float:
        """Return the seconds of a batch."""
        if self._process.stdin is None:
            raise RuntimeError("the program has no input")
        self._process.stdin.write(f"{method} {case}\n".encode())
        self._process.stdin.flush()
        return float(json.loads(self._answer(_ANSWER_SECONDS)))

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.communicate()

    def _answer(self, seconds: float) -> bytes:
        output = self._process.stdout
        if output is None:
            raise RuntimeError("the program has no output")
        end = time.monotonic() + seconds
        while True:
            line, separator, rest = self._buffer.partition(b"\n")
            if separator:
                self._buffer = rest
                if line.startswith(b"="):
                    return line[1:]
                continue
            left = max(0.0, end - time.monotonic())
            if not select.select([output], [], [], left)[0]:
                raise RuntimeError("the program does not answer")
            data = os.read(output.fileno(), 1 << 16)
            if not data:
                raise RuntimeError("the program ended")
            self._buffer += data


def main() -> int:
    """Run everything turn about and report."""
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(movers())
        drivers = {"nearkv": reader, **stack.enter_context(peers())}
        samples = measure_all(drivers)
        small = {
            method: [reader.measure(method, "32k") for _ in range(_SMALL_PULLS)]
            for method in ("small_memcpy", "small")
        }
    figures = figures_of(samples)
    figures["small_pull_p50_milliseconds"] = median(small["small"]) * 1e3
    figures["small_pull_added_p50_milliseconds"] = (
        median(small["small"]) - median(small["small_memcpy"])
    ) * 1e3
    return report("transfer", figures, peer_figures(samples))


@contextlib.contextmanager
def movers() -> Iterator[Driver]:
    """Make the engines' pools and start a mover on either side."""
    source, target, slots = create_memory(POOL_BYTES), create_memory(POOL_BYTES), create_slots(1)
    fill(source.view)
    sys.stdout.write(f"pools on huge pages: {source.huge_bytes >> 20} of {POOL_BYTES >> 20} MiB\n")
    generation = SlotTable(slots.view).open(0, expiry_ms=monotonic_ms() + HOUR_MS)
    with contextlib.ExitStack() as stack:
        programs = []
        ours = []
        for name in ("transfer_source", "transfer_reader"):
            end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(end)
            with theirs:
                command = [
                    sys.executable, "-m", f"tests.benchmarks.{name}", str(theirs.fileno())
                ]  # fmt: skip
                programs.append(Driver(command, [theirs.fileno()]))
            stack.callback(programs[-1].close)
            ours.append(end)
        send(ours[0], {"generation": generation}, [source.fd, slots.fd])
        message, _ = receive(ours[0], 0)
        send(ours[1], {"generation": generation, **message}, [source.fd, slots.fd, target.fd])
        programs[1].wait_ready()
        yield programs[1]


def fill(view: memoryview) -> None:
    """Fill a pool with bytes that tell blocks apart: each begins with its number."""
    numbers = np.frombuffer(view, np.int64).reshape(POOL_BYTES // (32 << 10), -1)
    numbers[:] = np.frombuffer(secrets.token_bytes(32 << 10), np.int64)
    numbers[:, 0] = np.arange(len(numbers))


# UCX would advertise every interface.
_UCX = {"UCX_NET_DEVICES": "lo", "UCX_WARN_UNUSED_ENV_VARS": "n"}
_PEERS = {
    "nixl": ("peer_nixl.py", _UCX),
    # Larger segments double what UCX reaches over TCP.
    "nixl_tcp": (
        "peer_nixl.py",
        {**_UCX, "UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"},
    ),
    # With its own limits of 1,024, a batch of 4,096 blocks fails ("TCP lane queue-full").
    "mooncake": (
        "peer_mooncake.py",
        {
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
            "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "16384",
        },
    ),
}


@contextlib.contextmanager
def peers() -> Iterator[dict[str, Driver]]:
    """Start the peers that are installed; the others are named."""
    with contextlib.ExitStack() as stack:
        running = {}
        for name, (program, settings) in _PEERS.items():
            script = str(Path(__file__).with_name(program))
            try:
                driver = Driver([str(_BENCH_PYTHON), script], settings=settings)
                stack.callback(driver.close)
                driver.wait_ready()
                running[name] = driver
            except (OSError, RuntimeError) as error:
                sys.stdout.write(f"missing: {name}, {error} (QUIET=0 shows what it says)\n")
        yield running


_METHODS = {
    "nearkv": ("memcpy", "shm", "memmove", "tcp", "bare"),
    "nixl": ("read",),
    "nixl_tcp": ("read", "write"),
    "mooncake": ("read",),
}


def measure_all(drivers: dict[str, Driver]) -> Samples:
    """Return bytes per second of every method, case and pass; the first pass only warms up."""
    samples: Samples = {}
    for turn in range(_PASSES + 1):
        for case, (block_bytes, count) in CASES.items():
            for name, driver in drivers.items():
                for method in _METHODS[name]:
                    seconds = driver.measure(method, case)
                    key = (method if name == "nearkv" else f"{name}_{method}", case)
                    if turn:
                        samples.setdefault(key, []).append(block_bytes * count / seconds)
    return samples


def figures_of(samples: Samples) -> dict[str, float]:
    """Return our speeds, and their ratios to what they are held to."""
    figures = {}
    for case in CASES:
        speed = {method: median(rates) for (method, of), rates in samples.items() if of == case}
        nixl_tcp = [speed[key] for key in ("nixl_tcp_read", "nixl_tcp_write") if key in speed]
        figures[f"memcpy_{case}_gigabytes_per_second"] = speed["memcpy"] / 1e9
        for ours, name, reference in (
            ("shm", "memcpy", speed["memcpy"]),
            ("memmove", "memcpy", speed["memcpy"]),
            ("shm", "nixl", speed.get("nixl_read")),
            ("tcp", "mooncake", speed.get("mooncake_read")),
            ("tcp", "nixl", max(nixl_tcp, default=None)),
            ("tcp", "bare_sockets", speed["bare"]),
        ):
            if reference is not None:
                figures[f"{ours}_{case}_over_{name}"] = speed[ours] / reference
        for ours in ("shm", "memmove", "tcp"):
            figures[f"{ours}_{case}_gigabytes_per_second"] = speed[ours] / 1e9
    return figures


def peer_figures(samples: Samples) -> dict[str, dict[str, float]]:
    """Return the peers' speeds, under the names of ours."""
    kept: dict[str, dict[str, float]] = {}
    for peer, method, ours in (
        ("nixl", "nixl_read", "shm"),
        ("nixl read", "nixl_tcp_read", "tcp"),
        ("nixl write", "nixl_tcp_write", "tcp"),
        ("mooncake", "mooncake_read", "tcp"),
        ("bare sockets", "bare", "tcp"),
    ):
        for case in CASES:
            if (method, case) in samples:
                figure = f"{ours}_{case}_gigabytes_per_second"
                kept.setdefault(peer, {})[figure] = median(samples[method, case]) / 1e9
    return kept


if __name__ == "__main__":
    sys.exit(main())
