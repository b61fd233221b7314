"""Agents and engines as processes that can be killed, stopped and looked into.

Movers can be held in the middle of a copy by a :class:`Gate` (see
``tests.doubles.held_programs``).
"""

import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tests.doubles.connector_engine import EngineSetup, EngineStatus, Outcome

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 40.0
_CLONE_NEWNET = 0x40000000


class ProgramEnded(Exception):  # noqa: N818 (in tests it is what was wanted)
    """A program ended before it answered."""


def wait_until(condition, what, *, seconds=PATIENCE_SECONDS):
    """Return what a condition becomes once it holds; fails with ``what`` when it does not."""
    give_up_at = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < give_up_at, f"never came true: {what}"
        time.sleep(0.005)


# -- Looking at processes --------------------------------------------------------------------


def children(pid):
    """Return the processes that a process has started, zombies left out."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return [child for child in found if state(child) not in ("Z", "")]


def state(pid):
    """Return a process's state letter, or nothing when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def holds(pid, inodes):
    """Tell whether a process maps, or has descriptors of, any of these memfds."""
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        if any(f" {inode} " in line for line in maps.splitlines() for inode in inodes):
            return "memfd:nearkv" in maps
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if "memfd:nearkv" in str(fd.readlink()) and fd.stat().st_ino in inodes:
                    return True
    return False


def descriptors(pid):
    """Count a process's descriptors, those of TCP left out: HTTP keeps its connections."""
    tcp = set()
    for name in ("tcp", "tcp6"):
        lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        tcp |= {f"socket:[{line.split()[9]}]" for line in lines}
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(str(fd.readlink()))
    return sum(link not in tcp for link in links)


def inner_pid(pid):
    """Return the id that a process has in its own namespace, or 0 when it is gone."""
    with suppress(OSError):
        return int(re.search(r"NSpid:.*?(\d+)\n", Path(f"/proc/{pid}/status").read_text())[1])
    return 0


def connected_within(pid, address):
    """Return a connection to an address of the network that a process lives in."""

    def connect():
        # Of this thread only, which ends.
        with Path(f"/proc/{pid}/ns/net").open() as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return socket.create_connection((address.hostname, address.port), PATIENCE_SECONDS)

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(connect).result()


# -- Programs --------------------------------------------------------------------------------


class Program:
    """A process of a site. ``within`` is a command that runs it somewhere else."""

    def __init__(self, arguments, *, within=(), env=None, **options):
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", *arguments],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            **options,
        )
        self._nested = bool(within)

    @property
    def pid(self):
        """Return the id of the program itself, not of what it runs within."""
        pid = self.process.pid
        while self._nested and (inside := children(pid)) and not _is_python(pid):
            (pid,) = inside
        return pid

    @property
    def is_alive(self):
        return self.process.poll() is None

    def strike(self, how):
        """Send a signal; after SIGKILL it is gone and reaped."""
        os.kill(self.pid, how)
        if how == signal.SIGKILL:
            self.process.wait(PATIENCE_SECONDS)
        if how == signal.SIGSTOP:
            wait_until(lambda: state(self.pid) == "T", "it is stopped")

    def end(self):
        """End it, in whatever state it is."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.process.kill()
        self.process.wait(PATIENCE_SECONDS)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def _is_python(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/exe").resolve() == Path(sys.executable).resolve()
    return False


class EngineProgram(Program):
    """A :class:`~tests.doubles.connector_engine.ConnectorEngine` in a process."""

    def __init__(self, name, folder, sock, *, shape=None, within=(), env=None, **extra):
        setup = EngineSetup(extra={"engine": name, "socket": str(sock), **extra}, shape=shape or {})
        path = folder / f"{name}.json"
        path.write_bytes(msgspec.json.encode(setup))
        super().__init__(
            ["tests.doubles.connector_engine", str(path)],
            within=within,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.name = name
        self._answers = {0: Future()}
        self._lock = threading.Lock()
        self._started = self._answers[0]
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def ask(self, call, **arguments):
        """Ask; the answer is a future."""
        answer = Future()
        with self._lock:
            number = len(self._answers)
            self._answers[number] = answer
        line = json.dumps({"id": number, "call": call, **arguments})
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            answer.set_exception(ProgramEnded(self.name))
        return answer

    def get(self, call, **arguments):
        """Ask, and wait for the answer."""
        return self.ask(call, **arguments).result(PATIENCE_SECONDS)

    def wait_started(self):
        self._started.result(PATIENCE_SECONDS)

    def wait_registered(self):
        self.wait_started()
        wait_until(lambda: self.status.registered, f"{self.name} registers")

    @contextmanager
    def running(self):
        """Have it registered within the block, and ended afterwards."""
        try:
            self.wait_registered()
            yield self
        finally:
            self.end()

    @property
    def status(self):
        return self.get("status")

    def end(self):
        super().end()
        self._thread.join(PATIENCE_SECONDS)

    def _listen(self):
        with suppress(OSError, ValueError):
            for line in self.process.stdout:
                self._take(json.loads(line))
        with self._lock:
            left = [answer for answer in self._answers.values() if not answer.done()]
        for answer in left:
            with suppress(Exception):
                answer.set_exception(ProgramEnded(self.name))

    def _take(self, message):
        answer = self._answers[message["id"]]
        if "error" in message:
            answer.set_exception(AssertionError(message["error"]))
            return
        result = message["result"]
        if isinstance(result, dict):
            result = msgspec.convert(result, EngineStatus if "free" in result else Outcome)
        answer.set_result(result)


class AgentProgram(Program):
    """``python -m nearkv.agent`` with a settings file."""

    def __init__(self, node, folder, *, within=(), env=None, log=subprocess.PIPE, **transfer):
        self.socket = folder / "agent.sock"
        settings = {
            "node": node,
            "listen": "127.0.0.1:0",
            "engines": [],
            "transfer": {"socket_dir": str(folder), "peer_listen": "127.0.0.1:0", **transfer},
        }
        path = folder / f"{node}.json"
        path.write_text(json.dumps(settings))
        super().__init__(
            ["nearkv.agent", "--config", str(path)], within=within, env=env, stderr=log
        )
        self.url = ""
        self.log = deque(maxlen=40)
        self.errors = []
        self._ready = threading.Event()
        if log is subprocess.PIPE:
            self._thread = threading.Thread(target=self._listen, daemon=True)
            self._thread.start()

    def wait_started(self):
        """Wait until it serves."""
        wait_until(lambda: self._ready.is_set() or not self.is_alive, "the agent serves")
        assert self.is_alive, "\n".join(self.log)

    @property
    def transfer(self):
        """Return what its status says about transfers."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_SECONDS)
        if self._nested:
            connection.sock = connected_within(self.pid, urlsplit(self.url))
        with closing(connection):
            connection.request("GET", "/v1/status")
            return json.load(connection.getresponse())["transfer"]

    def movers(self, kind=None, transfer=None):
        """Return the ids of its movers' processes."""
        found = (transfer or self.transfer)["movers"]
        return {m["pid"] for m in found if m["pid"] and kind in (None, m["kind"])}

    def end(self):
        movers = children(self.pid) if self.is_alive else []
        super().end()
        if self.log is not None and hasattr(self, "_thread"):
            self._thread.join(PATIENCE_SECONDS)
        wait_until(lambda: not any(map(state, movers)), "movers end with their agent")

    def _listen(self):
        with suppress(OSError, ValueError):
            for line in self.process.stderr:
                text = line.decode(errors="replace").rstrip()
                self.log.append(text)
                if '"level":"error"' in text or "Traceback" in text:
                    self.errors.append(text)
                if '"listening"' in text:
                    self.url = json.loads(text)["url"]
                    self._ready.set()


# -- The gate --------------------------------------------------------------------------------


class Gate:
    """Where movers wait in the middle of a copy until the gate is opened."""

    def __init__(self, path):
        self._path = path
        self._waiting = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()

    def next(self):
        """Wait for a mover to come; returns its id and where it is."""
        self._listener.settimeout(PATIENCE_SECONDS)
        conn, _ = self._listener.accept()
        self._waiting.append(conn)
        with conn.makefile("rb") as lines:
            return json.loads(lines.readline())

    def open(self):
        """Let all go that wait, and those that come later; may be called twice."""
        self._path.unlink(missing_ok=True)
        self._listener.close()
        while self._waiting:
            self._waiting.pop().close()
