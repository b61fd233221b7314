"""What kind of memory an engine registers, and whether it can be what it says.

The agent's main process maps nothing: whether device memory can really be opened shows in the
mover that opens it. A descriptor of it is a file of the driver's, of which no more can be said
here than that it is none of another kind.
"""

import os
import stat
from collections.abc import Sequence

from nearkv.agent.movers.messages import MemoryForm
from nearkv.transfer.errors import PullError, Reason, TransferError
from nearkv.transfer.memory import check_sealed
from nearkv.transfer.messages import CUDA_IPC, MEMFD, MEMORY_KINDS, RegisterWorker

IPC_HANDLE_BYTES = 64
SHM, CUDA = "shm", "cuda"
WITHIN_NODE = frozenset({SHM, CUDA})
"""The paths within a node."""

_REACH_DEVICES = frozenset({"tcp"})
"""Backends to other nodes that bring device memory through the host."""

_MAX_DEVICE_LENGTH = 128
_NO_DEVICE = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFSOCK})


def read_form(message: RegisterWorker) -> MemoryForm:
    """Return the form of a worker's memory; raises :class:`TransferError` for an unknown one."""
    kind, handle = message.memory_kind, message.handle
    if kind not in MEMORY_KINDS:
        raise TransferError(
            Reason.MEMORY, f"memory_kind: {kind[:40]!r} is none of {', '.join(MEMORY_KINDS)}"
        )
    expected = IPC_HANDLE_BYTES if kind == CUDA_IPC else 0
    if len(handle) != expected:
        raise TransferError(
            Reason.MEMORY, f"handle: {kind} has {expected} bytes of it, not {len(handle)}"
        )
    if not message.device and kind != MEMFD:
        raise TransferError(Reason.MEMORY, f"device: {kind} memory must say where it is")
    if len(message.device) > _MAX_DEVICE_LENGTH:
        raise TransferError(Reason.MALFORMED, f"device: at most {_MAX_DEVICE_LENGTH} characters")
    return MemoryForm(kind=kind, device=message.device, handle=handle)


def check_memory(message: RegisterWorker, fds: list[int]) -> None:
    """Make sure that a worker's descriptor can be what it says; raises :class:`TransferError`.

    Memory that has a handle in its place gets an empty one, so that every memory has one
    descriptor to be handed on and closed.
    """
    form = read_form(message)
    if form.kind == CUDA_IPC and not fds:
        fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    if len(fds) != 1:
        raise TransferError(Reason.MALFORMED, "fds: a registration brings one descriptor")
    if form.kind == MEMFD:
        check_sealed(fds[0], message.memory.size)
    elif stat.S_IFMT(os.fstat(fds[0]).st_mode) in _NO_DEVICE:
        raise TransferError(Reason.MEMORY, f"the descriptor is none of {form.kind} memory")


def paths_beyond_node(form: MemoryForm, backends: Sequence[str]) -> list[str]:
    """Return which backends reach a memory from other nodes; raises :class:`PullError`."""
    if form.kind == MEMFD:
        return list(backends)
    able = [name for name in backends if name in _REACH_DEVICES]
    if not able:
        raise PullError(
            Reason.NO_PATH, f"{form.kind} memory: none of {', '.join(backends)} moves it"
        )
    return able


def path_within_node(source: MemoryForm, target: MemoryForm) -> str:
    """Return the backend between two memories of one node; raises :class:`PullError`."""
    on_host = {source.kind == MEMFD, target.kind == MEMFD}
    if len(on_host) > 1:
        raise PullError(
            Reason.NO_PATH, f"no way from {source.kind} memory to {target.kind} memory in a node"
        )
    return SHM if on_host.pop() else CUDA
