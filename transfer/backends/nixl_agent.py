"""NIXL's agent, as far as it is used here: memory, peers, reads. Loads NIXL when first made.

NIXL 1.5 declares torch and does not need it for host memory: it is installed with ``--no-deps``
(docs/transports.md). Descriptors are made here from numbers that were checked; NIXL's pickled
ones are never read.
"""

import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nearkv.transfer.backends.native_transport import check_alone, is_rdma, set_defaults
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.memory import address_of

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_DEFAULTS = {"UCX_WARN_UNUSED_ENV_VARS": "n", "NIXL_LOG_LEVEL": "ERROR"}
_INFINIBAND = Path("/sys/class/infiniband")
_DRAM = "DRAM"
_Native = Any
"""An object of NIXL's, which has no types."""

Spans = npt.NDArray[np.uint64]
"""Rows of address, length and device, as NIXL takes them."""


def load_nixl() -> _Native:
    """Return NIXL's module; raises :class:`PullError` (``NO_PATH``) where there is none."""
    check_alone("nixl")
    set_defaults(_DEFAULTS)
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise PullError(Reason.NO_PATH, f"nixl cannot be loaded: {error}") from error
    raise PullError(Reason.NO_PATH, "nixl is not installed (pip install --no-deps nixl-cu12)")


class NixlAgent:
    """One agent with the UCX backend; used by one thread at a time.

    Raises :class:`PullError` (``NO_PATH``) when it cannot be made. Without a progress thread
    bytes move only while somebody polls, and on the CPU's transports are then written by the
    polling thread itself.
    """

    def __init__(self, name: str, *, progress_thread: bool) -> None:
        api = load_nixl()
        self.name = name
        try:
            self._agent: _Native = api.nixl_agent(
                name,
                api.nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"]),
            )
        except Exception as error:  # whatever its bindings throw
            raise PullError(Reason.NO_PATH, f"nixl: no agent: {error}") from error
        if "UCX" not in self._agent.backends:
            raise PullError(Reason.NO_PATH, "nixl: it has no UCX plugin")
        self._registered: list[_Native] = []

    def register(self, view: memoryview) -> None:
        """Register memory; raises :class:`PullError` (``MEMORY``)."""
        try:
            self._registered.append(
                self._agent.register_memory([(address_of(view), len(view), 0, "")], _DRAM)
            )
        except Exception as error:  # whatever its bindings throw
            raise PullError(Reason.MEMORY, f"nixl: the memory is not taken: {error}") from error

    def metadata(self) -> bytes:
        """Return what peers need to reach this agent's memory."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes, *, expected: str) -> str:
        """Take a peer's metadata; returns its name, which must be the one expected.

        Raises :class:`PullError` (``PEER_REFUSED``).
        """
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:  # whatever its bindings throw
            raise PullError(Reason.PEER_REFUSED, f"nixl: no way to the peer: {error}") from error
        found = name.decode() if isinstance(name, bytes) else str(name)
        if found != expected:
            self.drop_peer(found)
            raise PullError(Reason.PEER_REFUSED, "nixl: the metadata is another agent's")
        return found

    def drop_peer(self, name: str) -> None:
        """Forget a peer, so that one of its name that starts anew is not taken for it."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception:  # noqa: BLE001 (whatever its bindings throw; it was gone already)
            return

    def start_read(self, local: Spans, remote: Spans, peer: str) -> "Read":
        """Start reading from a peer; raises :class:`PullError` (``PEER_LOST``)."""
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, _DRAM),
                agent.get_xfer_descs(remote, _DRAM),
                peer,
            )
            read = Read(agent, handle)
            read.state = agent.transfer(handle)
        except Exception as error:  # whatever its bindings throw
            raise PullError(Reason.PEER_LOST, f"nixl: the read did not start: {error}") from error
        return read

    def close(self) -> None:
        """End the agent: nothing reads or writes through it any more. May be called twice."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for registered in self._registered:
            with suppress(Exception):  # whatever its bindings throw: the agent ends with this
                agent.deregister_memory(registered)
        self._registered.clear()


class Read:
    """A read under way; ``state`` is NIXL's word: PROC, DONE or ERR."""

    def __init__(self, agent: _Native, handle: _Native) -> None:
        self._agent = agent
        self._handle = handle
        self.state = "PROC"

    def poll(self) -> bool:
        """Make progress; tell whether it is done. Raises :class:`PullError` (``PEER_LOST``)."""
        if self.state == "PROC":
            try:
                self.state = self._agent.check_xfer_state(self._handle)
            except Exception as error:  # whatever its bindings throw
                self.state = "ERR"
                raise PullError(Reason.PEER_LOST, f"nixl: the read failed: {error}") from error
        if self.state == "ERR":
            raise PullError(Reason.PEER_LOST, "nixl: the read failed")
        return self.state == "DONE"

    def release(self) -> None:
        """Let go of the handle; a read under way is aborted."""
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception:  # noqa: BLE001 (whatever its bindings throw: the agent ends next)
            return


def active_rdma_devices(folder: Path = _INFINIBAND) -> list[str]:
    """Return the RDMA adapters of which a port is active."""
    states = folder.glob("*/ports/*/state")
    return sorted({path.parts[-4] for path in states if "ACTIVE" in path.read_text()})


def rdma_is_allowed() -> bool:
    """Tell whether UCX_TLS lets UCX use RDMA at all."""
    named = os.environ.get("UCX_TLS", "all")
    if named.startswith("^"):
        return True
    return any(name == "all" or is_rdma(name) for name in named.split(","))
