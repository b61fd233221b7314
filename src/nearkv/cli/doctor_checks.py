"""Checks of one host for moving KV: each looks at one thing and says what to do.

What the kernel tells in files is read below an injected root.
"""

import resource
import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from nearkv.cli.doctor_affinity import (
    list_gpus,
    list_nics,
    list_rdma_ports,
    pair_devices,
    read_text,
)
from nearkv.transfer.copying import native_copy
from nearkv.transfer.errors import TransferError
from nearkv.transfer.memory import HUGE_PAGE_BYTES, Memory, check_sealed, create_memory

_CONNECT_SECONDS = 2.0
_SHMEM_ENABLED = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Verdict(Enum):
    """How a check ended; ``INFO`` judges nothing."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row: what was looked at, how it is, and what to do (empty: nothing)."""

    check: str
    verdict: Verdict
    finding: str
    advice: str = ""


def check_memory(root: Path) -> list[Finding]:
    """Create 2 MiB as an engine does; says whether seals and huge pages work."""
    try:
        memory = create_memory(HUGE_PAGE_BYTES, name="nearkv-doctor")
    except TransferError as error:
        advice = "allow memfd_create and raise the memory limit of the container"
        return [Finding(check="memfd", verdict=Verdict.FAIL, finding=str(error), advice=advice)]
    try:
        return [_seals(memory), _huge_pages(memory, root)]
    finally:
        memory.close()


def _seals(memory: Memory) -> Finding:
    try:
        check_sealed(memory.fd, HUGE_PAGE_BYTES)
    except TransferError as error:
        advice = "memfd seals are needed: use another kernel or sandbox (gVisor lacks some)"
        return Finding(check="memfd", verdict=Verdict.FAIL, finding=str(error), advice=advice)
    return Finding(check="memfd", verdict=Verdict.OK, finding="created, populated and sealed")


def _huge_pages(memory: Memory, root: Path) -> Finding:
    enabled = read_text(root / _SHMEM_ENABLED) or "unknown"
    works = memory.huge_bytes > 0
    return Finding(
        check="huge pages",
        verdict=Verdict.OK if works else Verdict.WARN,
        finding=f"{memory.huge_bytes} of {HUGE_PAGE_BYTES} bytes on huge pages; "
        f"shmem_enabled: {enabled}",
        advice=""
        if works
        else "copies are slower; Linux 6.1 or later collapses by itself, "
        "before that set shmem_enabled to advise",
    )


def check_copying() -> Finding:
    """Say whether the extension that copies was built."""
    if native_copy() is not None:
        return Finding(check="copying", verdict=Verdict.OK, finding="native extension")
    return Finding(
        check="copying",
        verdict=Verdict.WARN,
        finding="fallback (memmove); the native extension was not built",
        advice="install a C compiler and install nearkv again",
    )


def check_memlock(*, require_rdma: bool) -> Finding:
    """Say whether RDMA may pin memory."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding(check="memlock", verdict=Verdict.OK, finding="unlimited")
    return Finding(
        check="memlock",
        verdict=Verdict.FAIL if require_rdma else Verdict.WARN,
        finding=f"{limit} bytes",
        advice="RDMA needs it unlimited: ulimit -l unlimited, LimitMEMLOCK=infinity, or "
        "the capability IPC_LOCK",
    )


def check_rdma(root: Path, *, require_rdma: bool) -> Finding:
    """Say which RDMA ports are there and whether one is active."""
    bad = Verdict.FAIL if require_rdma else Verdict.WARN
    ports = list_rdma_ports(root)
    if not ports:
        advice = "without RDMA, KV goes between nodes over TCP; containers need /dev/infiniband"
        return Finding(check="rdma", verdict=bad, finding="no RDMA device", advice=advice)
    listed = ", ".join(f"{port.device}/{port.port} {port.state}" for port in ports)
    active = sum(port.active for port in ports)
    if active == len(ports):
        return Finding(check="rdma", verdict=Verdict.OK, finding=listed)
    return Finding(
        check="rdma",
        verdict=Verdict.WARN if active else bad,
        finding=listed,
        advice="look at cable, switch and subnet manager of ports that are not ACTIVE",
    )


def check_affinity(root: Path) -> list[Finding]:
    """Return one row per GPU with its nearest adapter; one row where there are none."""
    gpus, nics = list_gpus(root), list_nics(root)
    pairs = pair_devices(gpus, nics)
    if not pairs:
        finding = f"{len(gpus)} GPUs, {len(nics)} RDMA adapters: nothing to pair"
        return [Finding(check="affinity", verdict=Verdict.INFO, finding=finding)]
    rows = []
    for pair in pairs:
        near = pair.shared_bridges > 0 or pair.same_numa_node
        why = (
            f"{pair.shared_bridges} PCIe steps in common"
            if pair.shared_bridges
            else ("same NUMA node" if pair.same_numa_node else "nothing in common")
        )
        rows.append(
            Finding(
                check="affinity",
                verdict=Verdict.OK if near else Verdict.WARN,
                finding=f"{pair.gpu} -> {pair.nic} ({why})",
                advice="" if near else "traffic crosses sockets, or the NUMA nodes are unknown",
            )
        )
    return rows


def check_agent_socket(folder: Path) -> Finding:
    """Say whether the agent's socket is there and somebody listens."""
    path = folder / "agent.sock"
    advice = "start nearkv-agent with transfer.socket_dir, or give --socket-dir"
    try:
        _connect(path)
    except FileNotFoundError:
        finding = f"{path} does not exist"
        return Finding(check="agent", verdict=Verdict.WARN, finding=finding, advice=advice)
    except OSError as error:
        finding = f"{path}: {error.strerror or error}"
        return Finding(check="agent", verdict=Verdict.FAIL, finding=finding, advice=advice)
    return Finding(check="agent", verdict=Verdict.OK, finding=f"{path} accepts connections")


def check_namespaces(root: Path) -> Finding:
    """Return the namespaces of this process: to compare them between containers."""
    found = []
    for name in ("pid", "net"):
        try:
            found.append(str((root / "proc/self/ns" / name).readlink()))
        except OSError:
            found.append(f"{name}: unknown")
    return Finding(check="namespaces", verdict=Verdict.INFO, finding=", ".join(found))


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_SECONDS)
        sock.connect(str(path))
