"""Pods and hosts of real namespaces, with engines whose connectors are the real ones.

What a pull takes is looked at from outside: the bytes that went over the network's devices.
Cables are cut, throttled and made one-way in the middle of pulls. See also
``test_pods_and_hosts``, which shows that each kind of transport works at all.
"""

import importlib.util
import os
import secrets
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

from tests.integration.kv_programs import PATIENCE_SECONDS, children, wait_until
from tests.integration.kv_site import Place, Site

POD = ("unshare", "--pid", "--net", "--fork", "--mount-proc", "--kill-child", "--")
WITH_LOOPBACK = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")
ADDRESSES = {"n1": "10.47.0.1", "n2": "10.47.0.2"}
NOBODY = "02:00:00:00:00:99"
LARGE = {"layers": 2, "blocks": 24, "block_bytes": 1 << 20}
PULL_BYTES = 2 * 8 << 20
RATE = "80mbit"
"""With it, a pull takes the better part of two seconds."""
SHORT_SECONDS = 1.2
PACKAGES = {"ucx": "ucxx", "nixl": "nixl_cu12"}

GOODBYE_BYTES = 512


def run(*command):
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    ).stdout


def why_not():
    if not all(map(shutil.which, ("unshare", "ip", "tc"))):
        return "needs unshare, ip and tc"
    name = f"nk{secrets.token_hex(3)}"
    try:
        run(*POD, "true")
        run("ip", "netns", "add", name)
        run("ip", "netns", "delete", name)
    except subprocess.SubprocessError as error:
        return f"no namespaces here: {error.stderr or error}"
    return ""


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    reason = why_not()
    if reason:
        pytest.skip(reason)


class Cable:
    """Two network namespaces, one for each node, and the veth pair between them."""

    def __init__(self, stack):
        mark = secrets.token_hex(3)
        self.names = {node: f"nk{mark}{node}" for node in ADDRESSES}
        self.devices = {node: f"v{mark}{node}" for node in ADDRESSES}
        for name in self.names.values():
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "delete", name)
        one, other = self.devices.values()
        run("ip", "link", "add", one, "type", "veth", "peer", "name", other)
        for node, device in self.devices.items():
            run("ip", "link", "set", device, "netns", self.names[node])
            self.ip(node, "address", "add", f"{ADDRESSES[node]}/24", "dev", device)
            self.ip(node, "link", "set", device, "up")
            self.ip(node, "link", "set", "lo", "up")

    def within(self, node):
        return ("ip", "netns", "exec", self.names[node])

    def ip(self, node, *command):
        run(*self.within(node), "ip", *command)

    def throttle(self):
        """Let little through from P to D."""
        run(*self._qdisc("replace"), "tbf", "rate", RATE, "burst", "64kb", "latency", "50ms")

    def cut(self):
        self.ip("n1", "link", "set", self.devices["n1"], "down")

    def make_one_way(self):
        """Lose all that P sends to D, without a word."""
        where = (ADDRESSES["n2"], "dev", self.devices["n1"])
        self.ip("n1", "neigh", "replace", *where, "lladdr", NOBODY, "nud", "permanent")

    def mend(self):
        """Undo all of these."""
        device = self.devices["n1"]
        self.ip("n1", "link", "set", device, "up")
        self.ip("n1", "neigh", "flush", "dev", device, "nud", "permanent")
        subprocess.run(self._qdisc("delete"), capture_output=True, check=False, timeout=20)

    def _qdisc(self, what):
        return (*self.within("n1"), "tc", "qdisc", what, "dev", self.devices["n1"], "root")


def received_bytes(pid, device):
    """Return what a device of a process's network has received."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[0])
    raise AssertionError(f"no device {device}")


def devices(pid):
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    return [line.partition(":")[0].strip() for line in lines]


# -- Pods ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pods():
    """An agent and two engines, each with PIDs and a network of its own."""
    site = Site(places={"n1": Place(within=POD, prepare=WITH_LOOPBACK)}, lookup_seconds=5.0)
    yield site
    site.close()


def test_pods_move_kv_without_any_network(pods):
    with pods.case():
        pids = [program.pid for program in (*pods.agents.values(), *pods.engines.values())]
        assert [devices(pid) for pid in pids] == [["lo"]] * 3
        for kind in ("pid", "net"):
            assert len({Path(f"/proc/{pid}/ns/{kind}").readlink() for pid in pids}) == 3
        earlier = pods.p_agent.transfer["pairs"]  # other tests use the same pods
        failures = earlier[0]["failures"] if earlier else {}
        before = [received_bytes(pid, "lo") for pid in pids]
        assert pods.pull_once()
        moved = [received_bytes(pid, "lo") - was for pid, was in zip(pids, before, strict=True)]
        # No KV; the connection that asked for the status may say goodbye late.
        assert moved[0] < GOODBYE_BYTES
        assert moved[1:] == [0, 0]
        (pair,) = pods.p_agent.transfer["pairs"]
        assert (pair["path"], pair["failures"]) == ("shm", failures)


@pytest.mark.parametrize(
    "victim", ["agent", *(pytest.param(name, marks=pytest.mark.slow) for name in ("p", "d"))]
)
def test_a_pod_that_is_killed_during_a_pull_leaves_nothing(pods, victim):
    with pods.case(), pods.held() as gate:
        request = pods.d.ask(
            "decode", tokens=pods.tokens, params=pods.prefill(), pull_seconds=PATIENCE_SECONDS
        )
        gate.next()
        program = {"agent": pods.p_agent}.get(victim) or pods.engines[victim]
        inodes = () if victim == "agent" else program.status.inodes
        program.strike(SIGKILL)
        pods.assert_let_go(inodes)
        if victim != "d":
            outcome = request.result(PATIENCE_SECONDS)
            assert (outcome.right, outcome.refused) == (True, pods.blocks)
        if victim == "agent":
            assert pods.p.get("expire") == 1


# -- Hosts -----------------------------------------------------------------------------------


class Hosts:
    """A site over two hosts, and the cable between them."""

    def __init__(self, path, stack):
        self.cable = Cable(stack)
        self.site = Site(
            nodes=2,
            shape=LARGE,
            places={node: self._place(node, path) for node in ADDRESSES},
            lookup_seconds=5.0,
        )
        stack.callback(self.site.close)

    def _place(self, node, path):
        return Place(
            within=self.cable.within(node),
            # On one kernel, UCX would look for shared memory between the two.
            env={"UCX_NET_DEVICES": self.cable.devices[node], "UCX_TLS": "tcp,self"},
            transfer={"paths": [path], "peer_listen": f"{ADDRESSES[node]}:9471"},
        )

    def received(self):
        """Return what has come to D's host over the cable."""
        return received_bytes(self.site.d.pid, self.cable.devices["n2"])

    def begin(self):
        """Begin a pull over a slow cable; returns it when the first bytes have come."""
        params = self.site.prefill()
        self.cable.throttle()
        before = self.received()
        request = self.site.d.ask(
            "decode", tokens=self.site.tokens, params=params, pull_seconds=SHORT_SECONDS
        )
        wait_until(lambda: self.received() - before > PULL_BYTES // 16, "bytes come")
        return request

    def end(self, request):
        """Make sure that the pull failed, for a reason that fits."""
        outcome = request.result(PATIENCE_SECONDS)
        assert (outcome.right, outcome.refused) == (True, self.site.blocks)
        why = {key for key in self.site.d.status.tally if key.startswith("load/")}
        assert why <= {"load/done", "load/deadline", "load/peer_lost"}


@pytest.fixture(scope="module")
def hosts_of():
    """Make hosts for a path, once for all tests of this module."""
    made = {}
    with ExitStack() as stack:

        def make(path):
            if path not in made:
                made[path] = Hosts(path, stack)
            return made[path]

        yield make


@pytest.fixture(params=["tcp", *(pytest.param(path, marks=pytest.mark.slow) for path in PACKAGES)])
def hosts(request, hosts_of):
    package = PACKAGES.get(request.param)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    hosts = hosts_of(request.param)
    hosts.path = request.param
    with hosts.site.case():
        try:
            yield hosts
        finally:
            hosts.cable.mend()


def test_hosts_pull_over_their_cable_and_say_so(hosts):
    before = hosts.received()
    assert hosts.site.pull_once()
    assert PULL_BYTES <= hosts.received() - before < 2 * PULL_BYTES
    pairs = {pair["source"]: pair for pair in hosts.site.d_agent.transfer["pairs"]}
    assert pairs["n1"]["path"] == hosts.path
    there = (ADDRESSES["n1"], *hosts.cable.devices.values())
    assert any(word in pairs["n1"]["detail"] for word in there)


def test_a_cable_that_is_cut_during_a_pull_costs_the_pull(hosts):
    request = hosts.begin()
    hosts.cable.cut()
    hosts.end(request)


def test_a_cable_that_only_works_one_way_costs_the_pull(hosts):
    request = hosts.begin()
    hosts.cable.make_one_way()
    hosts.end(request)


def test_a_peer_that_is_stopped_during_a_pull_costs_the_pull(hosts):
    request = hosts.begin()
    agent = hosts.site.p_agent.pid
    stopped = [agent, *children(agent)]
    for pid in stopped:
        os.kill(pid, SIGSTOP)
    hosts.end(request)
    for pid in stopped:
        os.kill(pid, SIGCONT)


def test_a_peer_that_was_restarted_while_the_cable_was_out_is_found_again(hosts):
    """D's mover keeps connections to the old server, which nobody has told it is gone."""
    hosts.cable.cut()
    hosts.site.p_agent.strike(SIGKILL)
    hosts.site.p.strike(SIGKILL)
