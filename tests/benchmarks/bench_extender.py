"""The extender by itself: latency by number of nodes, whole nodes, growth, beside a naive one.

Server and client have a core each. Server-side time is from a request's head to the last byte of
its answer, its body's arrival included; the times that the client saw are shown, too. Requests
are those of one kube-scheduler: one connection, one request at a time, another pod and another
first node each time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.extender_load import (
    Connection,
    connection,
    names_body,
    nodes_body,
    uid_of,
)
from tests.benchmarks.reporting import median, percentile, report
from tests.extender.snapshots import make_cluster

_ROOT = Path(__file__).resolve().parents[2]
_CALLS = {750: 1500, 5_000: 800, 15_000: 400}
_NAIVE_CALLS = {750: 30, 5_000: 15, 15_000: 8}
_WHOLE_NODES = 5_000
_WHOLE_CALLS = 8
_BODIES = 40
_GROWTH_NODES = 64
_GROWTH_WARM_UP = 20_000
_GROWTH_CALLS = 100_000
_SERVER_CORE, _CLIENT_CORE = 0, 1


def main() -> int:
    """Measure everything, report."""
    _pin(_CLIENT_CORE)
    figures: dict[str, float] = {}
    naive: dict[str, float] = {}
    for count in _CALLS:
        with (
            _started("extender_server", count) as server,
            _started("peer_naive_extender", count) as peer,
        ):
            figures |= _names(server, count)
            if count == _WHOLE_NODES:
                figures |= _whole_nodes(server, count)
            own, other = _side_by_side(server, peer, count)
            figures |= own
            naive |= other
    figures["growth_per_node_ratio"] = _growth_per_node(figures)
    with _started("extender_server", _GROWTH_NODES) as server:
        figures |= _growth(server, _GROWTH_NODES)
    return report("extender", figures, {"naive": naive})


@dataclass(frozen=True, slots=True)
class _Server:
    url: str
    pid: int

    def resident_bytes(self, what: str = "VmRSS") -> int:
        """Return its resident memory, or with ``VmHWM`` the most since the last mark."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

    def mark(self) -> None:
        """Begin to note the most memory anew (proc(5), clear_refs)."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


def _pin(core: int) -> None:
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {core})


@contextmanager
def _started(module: str, count: int) -> Iterator[_Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.benchmarks.{module}", str(count)],
        cwd=_ROOT, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: _pin(_SERVER_CORE),  # noqa: PLW1509 (single-threaded parent)
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield _Server(process.stdout.readline().strip(), process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _bodies(count: int) -> list[bytes]:
    names = make_cluster(count).names
    return [names_body(names, number) for number in range(_BODIES)]


def _names(server: _Server, count: int) -> dict[str, float]:
    """Measure names mode: both verbs, as the scheduler calls them one after the other."""
    bodies = _bodies(count)
    figures = {}
    with connection(server.url) as client:
        for verb in ("filter", "prioritize"):
            _call(client, verb, bodies, _BODIES)
            _server_times(client)
            seen = _call(client, verb, bodies, _CALLS[count])
            times = _server_times(client)
            assert len(times) == len(seen)
            name = f"{verb}_{count}"
            figures[f"{name}_p50_milliseconds"] = 1e3 * median(times)
            figures[f"{name}_p99_milliseconds"] = 1e3 * percentile(times, 0.99)
            figures[f"{name}_client_p50_milliseconds"] = 1e3 * median(seen)
            figures[f"{name}_client_p99_milliseconds"] = 1e3 * percentile(seen, 0.99)
    return figures


def _call(client: Connection, verb: str, bodies: Sequence[bytes], calls: int) -> list[float]:
    seen = []
    for number in range(calls):
        answer = client.post(f"/v1/{verb}", bodies[number % len(bodies)])
        assert answer.status == 200, answer.start
        seen.append(answer.seconds)
    return seen


def _server_times(client: Connection) -> list[float]:
    answer = client.post("/bench/timings", b"", keep=True)
    times: list[float] = json.loads(answer.start.partition(b"\r\n\r\n")[2])
    return times


def _whole_nodes(server: _Server, count: int) -> dict[str, float]:
    """Measure whole nodes: time, and the most memory over what was there before."""
    body = nodes_body(make_cluster(count).names, 1)
    figures = {"whole_nodes_body_megabytes": len(body) / 1e6}
    memory = []
    with connection(server.url) as client:
        for verb in ("filter", "prioritize"):
            _call(client, verb, [body], 1)
            _server_times(client)
            before = server.resident_bytes()
            server.mark()
            seen = _call(client, verb, [body], _WHOLE_CALLS)
            memory.append((server.resident_bytes("VmHWM") - before) / len(body))
            name = f"whole_nodes_{verb}"
            figures[f"{name}_milliseconds"] = 1e3 * median(_server_times(client))
            figures[f"{name}_client_milliseconds"] = 1e3 * median(seen)
    # Over what was there before, and all of it: earlier requests may have left memory behind.
    figures["whole_nodes_memory_of_body_ratio"] = max(memory)
    figures["whole_nodes_resident_of_body_ratio"] = server.resident_bytes("VmHWM") / len(body)
    return figures


def _side_by_side(
    server: _Server, peer: _Server, count: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Compare with the naive one, turn about, so that a busy moment of the machine hits both."""
    bodies = _bodies(count)
    whole = [nodes_body(make_cluster(count).names, 1)] if count == _WHOLE_NODES else []
    with connection(server.url) as ours, connection(peer.url) as theirs:
        own, other = _turn_about(ours, theirs, bodies, _NAIVE_CALLS[count])
        figures = {f"naive_over_ours_{count}_ratio": other / own}
        naive = {f"prioritize_{count}_client_p50_milliseconds": 1e3 * other}
        if whole:
            own, other = _turn_about(ours, theirs, whole, 2)
            figures["naive_over_ours_whole_nodes_ratio"] = other / own
            naive["whole_nodes_prioritize_client_milliseconds"] = 1e3 * other
    return figures, naive


def _turn_about(
    ours: Connection, theirs: Connection, bodies: Sequence[bytes], rounds: int
) -> tuple[float, float]:
    """Return both medians of what the client saw; ours gets more calls in each round."""
    own, other = [], []
    for _ in range(rounds):
        other += _call(theirs, "prioritize", bodies, 1)
        own += _call(ours, "prioritize", bodies, min(len(bodies), 10))
    return median(own), median(other)


def _growth_per_node(figures: dict[str, float]) -> float:
    """Compare the cost per node at three times the nodes with that at one time."""
    large, small = (figures[f"prioritize_{count}_p50_milliseconds"] for count in (15_000, 5_000))
    return large / small / 3


def _growth(server: _Server, count: int) -> dict[str, float]:
    """Measure what 100,000 calls, each for another pod, add to memory once all bounds are met."""
    template = names_body(make_cluster(count).names, 0)
    uid = uid_of(0).encode()
    with connection(server.url) as client:
        before = 0
        for number in range(_GROWTH_WARM_UP + _GROWTH_CALLS):
            if number == _GROWTH_WARM_UP:
                _server_times(client)
                before = server.resident_bytes()
            body = template.replace(uid, uid_of(number).encode())
            answer = client.post("/v1/prioritize", body)
            assert answer.status == 200, answer.start
            if number % 1000 == 0:
                _server_times(client)
    after = server.resident_bytes()
    return {"memory_after_100000_calls_ratio": after / before}


if __name__ == "__main__":
    sys.exit(main())
