"""The backends that the contract suite runs against: one :class:`Kind` per way to make one.

To add a backend, write a function that makes it and put a ``Kind`` into ``KINDS``. Make it with
small chunks and buffers, so that a pull of a few MiB takes many steps.
"""

import importlib.util
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from nearkv.transfer.backends.contract import Backend
from nearkv.transfer.backends.inproc import InprocBackend
from nearkv.transfer.backends.nixl import NixlBackend
from nearkv.transfer.backends.shm import ShmBackend
from nearkv.transfer.backends.tcp import TcpBackend
from nearkv.transfer.backends.ucx import UcxBackend
from tests.transfer.backends.tls import contexts, missing_openssl

CHUNK_BYTES = 64 << 10
SLOW_PULL_BYTES = 24 << 20
"""So many bytes that no buffer of a backend in the suite holds a large part of them."""


def never_missing() -> str:
    """Return why a backend cannot be tested here; nothing says that it can."""
    return ""


def missing_ipv6() -> str:
    """Return why there is no loopback over IPv6, where there is none."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return ""
    except OSError as error:
        return f"no IPv6: {error}"


def make_tls() -> Backend:
    """Return tcp with certificates on both ends."""
    server, client = contexts()
    return TcpBackend(
        lanes=2,
        chunk_bytes=CHUNK_BYTES,
        buffer_bytes=CHUNK_BYTES,
        server_tls=server,
        client_tls=client,
    )


def missing(module: str, package: str) -> Callable[[], str]:
    """Return what says whether a module is not installed; it is not loaded."""
    return lambda: "" if importlib.util.find_spec(module) else f"{package} is not installed"


@dataclass(frozen=True)
class Kind:
    """A backend under test. ``handed_over`` backends have no server: links come from ``link``.

    ``missing`` says why it cannot run here; the tests are skipped then. ``path_name`` is what
    ``Path.name`` must be in the test's surroundings.
    """

    name: str
    make: Callable[[], Backend]
    path_name: str
    handed_over: bool = False
    rdma: bool = False
    missing: Callable[[], str] = never_missing


KINDS = [
    Kind("inproc", lambda: InprocBackend({}, chunk_bytes=CHUNK_BYTES), "inproc"),
    Kind("shm", lambda: ShmBackend(chunk_bytes=CHUNK_BYTES), "shm", handed_over=True),
    Kind(
        "shm-memmove",
        lambda: ShmBackend(chunk_bytes=CHUNK_BYTES, native=False),
        "shm",
        handed_over=True,
    ),
    Kind(
        "tcp", lambda: TcpBackend(lanes=3, chunk_bytes=CHUNK_BYTES, buffer_bytes=CHUNK_BYTES), "tcp"
    ),
    Kind(
        "tcp-one-lane",
        lambda: TcpBackend(
            host="::1", lanes=1, checksums=False, chunk_bytes=1000, buffer_bytes=CHUNK_BYTES
        ),
        "tcp",
        missing=missing_ipv6,
    ),
    Kind("tcp-tls", make_tls, "tcp", missing=missing_openssl),
]


def make_ucx() -> Backend:
    """Return ucx with small messages, so that a pull takes many."""
    return UcxBackend(chunk_bytes=CHUNK_BYTES)


def make_nixl() -> Backend:
    """Return nixl with small reads."""
    return NixlBackend(chunk_bytes=CHUNK_BYTES)


NATIVE_KINDS = {
    "ucx": Kind("ucx", make_ucx, "ucx", missing=missing("ucxx", "ucxx-cu12")),
    "nixl": Kind("nixl", make_nixl, "nixl", missing=missing("nixl_cu12", "nixl-cu12")),
}
"""Each needs a process of its own: ``test_native_contract.py`` starts it."""

if NATIVE := os.environ.get("NEARKV_TEST_NATIVE"):
    KINDS = [NATIVE_KINDS[NATIVE]]
