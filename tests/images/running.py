"""A container without a container runtime: mounts, user and rights as a pod's template says.

Namespaces of its own for mounts, processes and IPC, the image's files as a read-only root, no
capabilities and no way to new ones. The network is this host's, so that it can be asked.
"""

import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 90.0
_PAUSE_SECONDS = 0.1
_SHM = "/dev/shm"  # noqa: S108 (made anew in each container)
_DEVICES = {"null": 3, "zero": 5, "random": 8, "urandom": 9}


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of this host, and where it is in the container."""

    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What is run. ``command`` is the image's entry point and its arguments."""

    root: Path
    command: list[str]
    environment: dict[str, str]
    user: int
    group: int
    mounts: list[Mount] = field(default_factory=list)
    folder: str = "/"

    def script(self, root: Path) -> str:
        """Return the shell script that becomes the container's first process."""
        lines = ["set -e", f"mount --bind {self.root} {root}"]
        lines += [f"mkdir -p {root}{each.target}" for each in self.mounts]
        lines += [f"mount -o remount,bind,ro {root}", f"mount -t proc proc {root}/proc"]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {root}/dev", f"mkdir -m 1777 {root}{_SHM}"]
        lines += [f"mknod -m 666 {root}/dev/{name} c 1 {n}" for name, n in _DEVICES.items()]
        for each in self.mounts:
            lines.append(f"mount --rbind {each.source} {root}{each.target}")
            if each.read_only:
                lines.append(f"mount -o remount,bind,ro {root}{each.target}")
        lines.append(f"exec {shlex.join(self.inside(['chroot', str(root)], self.command))}")
        return "\n".join(lines)

    def inside(self, enter: list[str], command: list[str]) -> list[str]:
        """Return a command as the container's user runs it, given how to get in there."""
        rights = (
            *(f"--reuid={self.user}", f"--regid={self.group}", "--clear-groups"),
            *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
        )
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        there = ["sh", "-c", f'cd {self.folder} && exec "$@"', "sh"]
        return ["env", "-i", *variables, *enter, "setpriv", *rights, *there, *command]


class Running:
    """A container that runs: asked over HTTP, and looked into."""

    def __init__(self, container: Container, process: subprocess.Popen[bytes], log: Path) -> None:
        self._container = container
        self._process = process
        self._log = log

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(encoding="utf-8")

    def _first(self) -> int:
        pid = self._process.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return int(first)

    def status(self) -> dict[str, str]:
        """Return what the kernel says of its first process."""
        text = Path(f"/proc/{self._first()}/status").read_text(encoding="utf-8")
        return {
            name: value.strip() for name, _, value in (x.partition(":") for x in text.split("\n"))
        }

    def python(self, code: str) -> str:
        """Run code in it, as its user; return what that printed, errors included."""
        enter = ["nsenter", "-t", str(self._first()), "-m", "-i", "-p", "-r", "-w"]
        command = self._container.inside(enter, ["python", "-c", code])
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return (done.stdout + done.stderr).strip()

    def ask(self, url: str, token: str = "") -> int:
        """Return the status of an answer, once there is one."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 (the test's own)
        give_up_at = time.monotonic() + DEADLINE_SECONDS
        while True:
            assert self._process.poll() is None, self.log
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 (as above)
                    return answer.status
            except urllib.error.HTTPError as refusal:
                return refusal.code
            except OSError:
                assert time.monotonic() < give_up_at, self.log
                time.sleep(_PAUSE_SECONDS)

    def stop(self) -> int:
        """Ask it to stop as the kubelet would; return its exit status."""
        os.kill(self._first(), signal.SIGTERM)
        return self._process.wait(DEADLINE_SECONDS)


@contextmanager
def running(container: Container, scratch: Path):
    """Run a container for the length of a block."""
    root, script, log = scratch / "root", scratch / "start.sh", scratch / "log"
    root.mkdir()
    script.write_text(container.script(root), encoding="utf-8")
    alone = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
    with log.open("wb") as file:
        process: Any = subprocess.Popen(
            [*alone, "sh", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Running(container, process, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
