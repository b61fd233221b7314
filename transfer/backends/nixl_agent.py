"""NIXL's agent, as far as it is used here: memory, peers, reads. Loads NIXL when first made.

NIXL 1.5 declares torch and does not need it for host memory: it is installed with ``--no-deps``
(docs/transports.md). Descriptors are made here from numbers that were checked; NIXL's pickled
ones are never read.
"""

import gc
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from nearkv.transfer.backends.native_transport import check_alone, is_rdma, set_defaults
from nearkv.transfer.backends.ucx_log import arrange_log, read_log, reads_of
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.memory import address_of

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_DEFAULTS = {
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "NIXL_LOG_LEVEL": "ERROR",
    # Without these, reads over TCP take half the speed.
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
}
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
    arrange_log()
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise PullError(Reason.NO_PATH, f"nixl cannot be loaded: {error}") from error
    raise PullError(Reason.NO_PATH, "nixl is not installed (pip install --no-deps nixl-cu12)")


class NixlAgent:
    """One agent with the UCX backend; all but :meth:`progress` are for one thread at a time.

    Raises :class:`PullError` (``NO_PATH``) when it cannot be made. There is no progress thread,
    which would keep a core busy even when nothing is to be done (seen with NIXL 1.5): bytes
    move only while somebody polls, and on the CPU's transports they are then written by the
    polling thread itself.
    """

    def __init__(self, name: str) -> None:
        api = load_nixl()
        self.name = name
        self._lock = threading.Lock()
        try:
            self._agent: _Native = api.nixl_agent(
                name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            )
        except Exception as error:  # whatever its bindings throw
            raise PullError(Reason.NO_PATH, f"nixl: no agent: {error}") from error
        if "UCX" not in self._agent.backends:
            raise PullError(Reason.NO_PATH, "nixl: it has no UCX plugin")
        self._registered: list[_Native] = []
        self._reads: list[Read] = []

    def register(self, view: memoryview) -> None:
        """Register memory; raises :class:`PullError` (``MEMORY``)."""
        span = (address_of(view), len(view), 0, "")
        taken, why = _tried(lambda: self._agent.register_memory([span], _DRAM))
        if why:
            raise PullError(Reason.MEMORY, f"nixl: the memory is not taken: {why}")
        self._registered.append(taken)

    def metadata(self) -> bytes:
        """Return what peers need to reach this agent's memory."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes, *, expected: str) -> str:
        """Take a peer's metadata; returns its name, which must be the one expected.

        Raises :class:`PullError` (``PEER_REFUSED``).
        """
        name, why = _tried(lambda: self._agent.add_remote_agent(metadata))
        if why:
            raise PullError(Reason.PEER_REFUSED, f"nixl: no way to the peer: {why}")
        found = name.decode() if isinstance(name, bytes) else str(name)
        if found != expected:
            self.drop_peer(found)
            raise PullError(Reason.PEER_REFUSED, "nixl: the metadata is another agent's")
        return found

    def drop_peer(self, name: str) -> None:
        """Forget a peer, so that one of its name that starts anew is not taken for it."""
        _tried(lambda: self._agent.remove_remote_agent(name))  # it may have gone by itself

    def start_read(self, local: Spans, remote: Spans, peer: str) -> "Read":
        """Start reading from a peer; raises :class:`PullError` (``PEER_LOST``)."""
        read = Read(self._agent)
        self._reads = [held for held in self._reads if not held.released]
        self._reads.append(read)
        read.start(local, remote, peer)
        return read

    def progress(self) -> None:
        """Do the target's part of reads; from any thread."""
        with self._lock:
            if self._agent is not None:
                self._agent.get_new_notifs()

    def reads_by(self) -> tuple[str, str] | None:
        """Return (transport, how) of this agent's reads, where UCX has said so."""
        return reads_of(self.name, read_log())

    def close(self) -> None:
        """End the agent: when this returns, nothing reads or writes through it any more.

        Releasing reads under way is not enough. NIXL calls them gone, and yet they write when
        the agent makes progress later (seen with NIXL 1.5 over TCP: 150 MB after the release,
        even with the peer removed). Only the end of the agent, and with it of its UCX worker,
        ends them; so nothing may keep it. May be called twice.
        """
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is None:
            return
        unfinished = any(read.state != "DONE" for read in self._reads)
        for read in self._reads:
            read.release()
        self._reads.clear()
        while self._registered:
            with suppress(Exception):  # whatever its bindings throw: the agent ends with this
                agent.deregister_memory(self._registered.pop())
        native = weakref.ref(agent.agent)
        del agent
        if native() is not None:
            gc.collect()
        if unfinished and native() is not None:
            end_process("nixl: an agent with reads under way does not end")


def _tried(call: Callable[[], _Native]) -> tuple[_Native, str]:
    """Return what a call of NIXL's returned, and what it threw, as text.

    The exception itself must not live on: its traceback holds the agent (see ``close``).
    """
    try:
        return call(), ""
    except Exception as error:  # noqa: BLE001 (whatever its bindings throw)
        return None, f"{type(error).__name__}: {error}"


def end_process(why: str) -> NoReturn:
    """End this process at once: the last means when something might still write.

    A mover can be ended at any time, and its end is what unmaps the memory.
    """
    sys.stderr.write(f"nearkv: {why}; ending the process\n")
    sys.stderr.flush()
    os._exit(70)


class Read:
    """A read; ``state`` is NIXL's word: PROC (under way), DONE or ERR."""

    def __init__(self, agent: _Native) -> None:
        self._agent = agent
        self._handle: _Native = None
        self.state = "PROC"

    @property
    def released(self) -> bool:
        """Whether there is nothing left of it."""
        return self._agent is None

    def start(self, local: Spans, remote: Spans, peer: str) -> None:
        """Begin; raises :class:`PullError` (``PEER_LOST``)."""

        def begin() -> str:
            descs = self._agent.get_xfer_descs
            self._handle = self._agent.initialize_xfer(
                "READ", descs(local, _DRAM), descs(remote, _DRAM), peer
            )
            return str(self._agent.transfer(self._handle))

        self._take(begin, "the read did not start")

    def poll(self) -> bool:
        """Make progress; tell whether it is done. Raises :class:`PullError` (``PEER_LOST``)."""
        if self.state == "PROC":
            self._take(lambda: self._agent.check_xfer_state(self._handle), "the read failed")
        if self.state == "ERR":
            raise PullError(Reason.PEER_LOST, "nixl: the read failed")
        return self.state == "DONE"

    def _take(self, call: Callable[[], _Native], what: str) -> None:
        state, why = _tried(call)
        self.state = "ERR" if why else str(state)
        if why:
            raise PullError(Reason.PEER_LOST, f"nixl: {what}: {why}")

    def release(self) -> None:
        """Let go of the handle, and of the agent; see :meth:`NixlAgent.close`."""
        if self._handle is not None:
            # It may not go while under way: the agent ends next.
            _tried(lambda: self._agent.release_xfer_handle(self._handle))
        self._agent = self._handle = None


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
