"""Transfers between pods of a node, and between nodes, made of real namespaces.

A "pod" has its own PID and network namespace and shares only the socket's folder; a "host" has
a network namespace of its own, joined with the other's by a veth pair. All programs are real
processes.
"""

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POD = ("unshare", "--pid", "--net", "--fork", "--mount-proc", "--kill-child")
WITH_LOOPBACK = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # for documentation: routed nowhere
PEER_PORT = 9471


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def why_not():
    if not (shutil.which("unshare") and shutil.which("ip")):
        return "needs unshare and ip"
    try:
        run(*POD, "true")
        name = f"nk{secrets.token_hex(3)}"
        run("ip", "netns", "add", name)
        run("ip", "netns", "delete", name)
    except subprocess.SubprocessError as error:
        return f"no namespaces here: {error}"
    return ""


WHY_NOT = why_not()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.timeout(90)]


class Program:
    """A process that talks in lines of JSON."""

    def __init__(self, command, **options):
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            **options,
        )

    def hear(self):
        line = self.process.stdout.readline()
        assert line, "the program ended"
        return json.loads(line)

    def ask(self, content):
        self.process.stdin.write(json.dumps(content) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def engine(role, socket, *, within=()):
    program = Program(
        [*within, sys.executable, "-m", "tests.integration.isolated_engine", role, str(socket)]
    )
    try:
        assert program.hear() == {"ready": True}
        yield program
    finally:
        program.end()


@contextmanager
def agent(folder, node, *, within=(), env=None, **transfer):
    """Run a real agent; ready when its socket is there and it says so."""
    config = {
        "node": node,
        "listen": "127.0.0.1:0",
        "engines": [],
        "transfer": {"socket_dir": str(folder), **transfer},
    }
    path = folder / f"{node}.json"
    path.write_text(json.dumps(config))
    process = subprocess.Popen(
        [*within, sys.executable, "-m", "nearkv.agent", "--config", str(path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        for line in process.stderr:
            if '"listening"' in line:
                break
        else:
            raise AssertionError("the agent ended")
        yield process
    finally:
        process.terminate()
        process.stderr.close()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="nk-") as path:
        yield Path(path)


@pytest.fixture
def hosts():
    """Two network namespaces joined by a cable; yields their names and devices."""
    mark = secrets.token_hex(3)
    names, devices = [f"nk{mark}{i}" for i in "ab"], [f"v{mark}{i}" for i in "ab"]
    with ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "delete", name)
        run("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for name, device, address in zip(names, devices, ADDRESSES, strict=True):
            run("ip", "link", "set", device, "netns", name)
            within = ("ip", "netns", "exec", name, "ip")
            run(*within, "address", "add", f"{address}/24", "dev", device)
            run(*within, "link", "set", device, "up")
            run(*within, "link", "set", "lo", "up")
        yield names, devices


def test_pods_of_a_node_use_shared_memory(folder):
    """Neither PIDs nor any network are shared: a library in the engines would find no way."""
    socket = folder / "agent.sock"
    with (
        agent(folder, "n1", within=(*POD, *WITH_LOOPBACK), peer_listen="127.0.0.1:0"),
        engine("source", socket, within=POD) as source,
        engine("target", socket, within=POD) as target,
    ):
        assert target.ask(source.ask({})) == {
            "reason": "",
            "path": "shm",
            "equal": True,
            "message": "",
        }
        assert target.ask(source.ask({})) == {
            "reason": "",
            "path": "shm",
            "equal": True,
            "message": "",
        }


def missing(path):
    module = {"ucx": "ucxx", "nixl": "nixl_cu12"}.get(path)
    return module is not None and importlib.util.find_spec(module) is None


@contextmanager
def two_nodes(folder, hosts, path):
    """Run an agent and an engine on each host; yields source and target."""
    names, devices = hosts
    with ExitStack() as stack:
        engines = []
        for i, role in enumerate(("source", "target")):
            within = ("ip", "netns", "exec", names[i])
            home = folder / role
            home.mkdir()
            stack.enter_context(
                agent(
                    home,
                    f"n{i}",
                    within=within,
                    # On one kernel, UCX would look for shared memory between the two.
                    env={"UCX_NET_DEVICES": devices[i], "UCX_TLS": "tcp,self"},
                    paths=[path],
                    peer_listen=f"{ADDRESSES[i]}:{PEER_PORT}",
                    peer_token="between-agents",  # noqa: S106 - no secret
                )
            )
            engines.append(stack.enter_context(engine(role, home / "agent.sock", within=within)))
        yield engines


@pytest.mark.parametrize("path", ["tcp", "ucx", "nixl"])
def test_nodes_pull_over_their_network_and_survive_a_cut(folder, hosts, path):
    if missing(path):
        pytest.skip(f"{path} is not installed")
    names, devices = hosts
    with two_nodes(folder, hosts, path) as (source, target):
        assert target.ask(source.ask({})) == {
            "reason": "",
            "path": path,
            "equal": True,
            "message": "",
        }

        lease = source.ask({})
        run("ip", "netns", "exec", names[0], "ip", "link", "set", devices[0], "down")
        cut = target.ask(lease)
        assert cut["reason"] in {"peer_lost", "deadline", "no_path"}, cut

        run("ip", "netns", "exec", names[0], "ip", "link", "set", devices[0], "up")
        assert target.ask(source.ask({})) == {
            "reason": "",
            "path": path,
            "equal": True,
            "message": "",
        }
